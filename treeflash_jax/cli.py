"""The command line: `treeflash generate`, `treeflash demo`. `python -m treeflash_jax` is the same."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

METHODS = ("tree", "walk", "chain", "ar")
HEADS = ("mlp", "linear", "marginal")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage text."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status. Bad input ends with one line on stderr and status 2."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"treeflash: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="treeflash", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Parser)
    _add_generate(commands.add_parser("generate", help="answer prompts", description="Answers prompts."))
    demo = commands.add_parser(
        "demo",
        help="watch the shipped pair draft text, offline",
        description="Answers a few prompts with the shipped pair, drafted in four ways, and compares them.",
    )
    demo.add_argument("--max-new-tokens", type=int, default=96, help="per prompt (default: %(default)s)")
    demo.add_argument("--nodes", type=int, default=16, help="verified rows a round, root included (default: %(default)s)")
    demo.add_argument("--repeats", type=int, default=3, help="timed runs of each system (default: %(default)s)")
    demo.set_defaults(run=_demo)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model (the shipped pair where none is given)")
    model.add_argument("--verifier", help="Hugging Face folder of a Qwen3 or Llama model")
    model.add_argument("--drafter", help="folder of a DFlash or TreeFlash drafter")
    model.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), help="of weights, caches and activations")
    model.add_argument("--mesh", metavar="DxM", help="shard over D x M devices: rows over D, weights and vocabulary over M")
    prompts = parser.add_argument_group("prompts (repeat an option for several)")
    prompts.add_argument("--prompt", action="append", default=[], help="text, taken as it is")
    prompts.add_argument("--chat", action="append", default=[], help="a user's message, put through the chat template")
    prompts.add_argument("--prompt-ids", action="append", default=[], metavar="IDS", help='token ids, like "3 4 5"')
    draft = parser.add_argument_group("drafting: never changes the output, only the speed")
    draft.add_argument(
        "--method", choices=METHODS, default="tree", help="chain: the published rank-0 chain; ar: no drafting"
    )
    draft.add_argument("--head", choices=HEADS, help="default: the drafter's own")
    draft.add_argument("--nodes", type=int, help="verified rows a round, root included")
    draft.add_argument("--candidates", type=int, default=16, metavar="M", help="previous tokens per depth")
    draft.add_argument("--children", type=int, default=16, metavar="K", help="children per transition row")
    draft.add_argument("--drafter-temperature", type=float, help="of the drafted distribution")
    output = parser.add_argument_group("output")
    output.add_argument("--max-new-tokens", type=int, default=128)
    output.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    output.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens (default)")
    output.add_argument("--top-p", type=float, default=1.0, help="1 keeps all tokens (default)")
    output.add_argument("--seed", type=int, default=0)
    output.add_argument("--stop-ids", metavar="IDS", help='ids that end an answer, like "2 7"; default: the model\'s own')
    output.add_argument("--batch-size", type=int, help="prompts decoded together")
    output.add_argument("--log-probs", action="store_true", help="the verifier's log-probability of every token (--json)")
    output.add_argument("--json", action="store_true", help="one JSON object per prompt")
    for name in ("repetition-penalty", "presence-penalty", "frequency-penalty", "num-beams", "grammar", "min-p"):
        parser.add_argument(f"--{name}", dest=name.replace("-", "_"), help=argparse.SUPPRESS)
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
    import treeflash_jax as tf
    from treeflash_jax.options import REFUSED

    for name, reason in REFUSED.items():
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not supported: {reason}")
    prompts: list[Any] = list(arguments.prompt)
    prompts += [[{"role": "user", "content": message}] for message in arguments.chat]
    prompts += [_ids(text, "--prompt-ids") for text in arguments.prompt_ids]
    if not prompts:
        raise ValueError("got no prompt, expected --prompt, --chat or --prompt-ids")

    own_pair = arguments.verifier is None and arguments.drafter is None
    paths = {} if own_pair else {"verifier": arguments.verifier, "drafter": arguments.drafter}
    model = tf.load("tiny" if own_pair else None, **paths, dtype=arguments.dtype, mesh=_mesh(arguments.mesh))
    names = (
        "max_new_tokens method nodes candidates children head temperature top_k top_p drafter_temperature seed batch_size "
        "log_probs"
    ).split()
    settings = {name: getattr(arguments, name) for name in names}
    stop_ids = None if arguments.stop_ids is None else _ids(arguments.stop_ids, "--stop-ids")
    for result in model.generate(prompts, stop_ids=stop_ids, **settings):
        if arguments.json:
            print(json.dumps(_record(result)))
            continue
        print(result.text if result.text is not None else " ".join(map(str, result.ids)))
        print(
            f"[{len(result.ids)} tokens in {len(result.accept_lengths)} rounds, tau {result.tau:.2f}, "
            f"{result.tokens_per_second:.0f} tokens/s, compiled in {result.compile_seconds:.1f} s]",
            file=sys.stderr,
        )
    return 0


def _record(result: Any) -> dict[str, Any]:
    record: dict[str, Any] = {} if result.text is None else {"text": result.text}
    record |= {
        "ids": result.ids,
        "accept_lengths": result.accept_lengths,
        "tau": result.tau,
        "tokens_per_second": result.tokens_per_second,
        "compile_seconds": result.compile_seconds,
        "finished": result.finished,
    }
    return record if result.log_probs is None else record | {"log_probs": result.log_probs}


def _mesh(text: str | None) -> Any:
    if text is None:
        return None
    import treeflash_jax as tf

    words = text.split("x")
    if len(words) != 2 or not all(word.isdigit() for word in words):
        raise ValueError(f"got --mesh {text!r}, expected two numbers like 4x2")
    return tf.make_mesh(int(words[0]), int(words[1]))


def _ids(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"got {option} {text!r}, expected whole numbers like '3 4 5'") from None


def _demo(arguments: argparse.Namespace) -> int:
    from treeflash_jax.demo import run

    run(max_new_tokens=arguments.max_new_tokens, nodes=arguments.nodes, repeats=arguments.repeats)
    return 0
