"""The command line. `python -m treeflash_jax` is the same as `treeflash`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jax

from treeflash_jax import __version__
from treeflash_jax import mesh as meshes
from treeflash_jax.acceptance import RULES
from treeflash_jax.arguments import Parser, add_prompts, ids_of, prompts_of, spoken
from treeflash_jax.attention import IMPLEMENTATIONS
from treeflash_jax.bench import calibrate, latency, memory, report, rules, run
from treeflash_jax.builders import SAMPLED
from treeflash_jax.clock import slow
from treeflash_jax.pairs import DEFAULT, NO_DRAFTER, PAIRS
from treeflash_jax.quantized import SCHEMES

BUILDERS = ("best-first", *SAMPLED)
METHODS = ("tree", "walk", "chain", "ar")
HEADS = ("mlp", "linear", "marginal")


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
    parser = Parser(prog="treeflash", description="Lossless speculative decoding with draft trees.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__} (jax {jax.__version__})")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=Parser)

    generate = commands.add_parser("generate", help="answer prompts", description="Answers prompts.")
    _add_model(generate)
    add_prompts(generate)
    _add_drafting(generate)
    output = _add_output(generate)
    output.add_argument("--samples", type=int, default=1, help="answers per prompt (default: %(default)s)")
    output.add_argument("--batch-size", type=int, help="answers decoded together")
    output.add_argument("--log-probs", action="store_true", help="the verifier's log-probability of every token (--json)")
    output.add_argument("--json", action="store_true", help="one JSON object per answer")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model", description="A conversation, streamed as it is drafted.")
    _add_model(chat)
    _add_drafting(chat)
    _add_output(chat)
    chat.set_defaults(run=_chat)

    check = commands.add_parser(
        "check",
        help="compare drafted with one-token output",
        description="Decodes prompts with and without drafting. Exit status 1 where outputs differ beyond a near-tie.",
    )
    _add_model(check)
    add_prompts(check)
    _add_drafting(check)
    _add_output(check)
    check.add_argument(
        "--near-tie", type=float, default=1e-4, help="logit gap that excuses a difference (default: %(default)s)"
    )
    check.add_argument("--json", action="store_true", help="one JSON object per prompt")
    check.set_defaults(run=_check)

    convert = commands.add_parser(
        "convert",
        help="write a GGUF file as a Hugging Face folder, or a drafter in the other file dialect",
        description="Writes a GGUF file as a Hugging Face folder, or rewrites a drafter's files, bit for bit.",
    )
    convert.add_argument("source", help="GGUF file, or drafter folder in either dialect")
    convert.add_argument("target", help="new folder")
    convert.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of a GGUF file's weights (default: float32, exact)"
    )
    convert.add_argument("--to", choices=("dflash", "treeflash"), help="dialect to write a drafter in")
    convert.add_argument("--drop-head", action="store_true", help="leave a trained head behind (DFlash files hold none)")
    convert.set_defaults(run=_convert)

    measure = commands.add_parser(
        "calibrate",
        help="time rounds, so that --nodes auto can choose",
        description=calibrate.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(measure)
    calibrate.add_arguments(measure)
    measure.set_defaults(run=_calibrate)

    bench = commands.add_parser("bench", help="measure systems side by side, and report")
    suites = bench.add_subparsers(required=True, metavar="suite", parser_class=Parser)
    run.add_arguments(suites.add_parser("run", help="systems side by side on the same prompts"))
    report.add_arguments(suites.add_parser("report", help="the tables of a results file"))
    latency.add_arguments(suites.add_parser("latency", help="device time of every stage of a round, beside its floor"))
    rules.add_arguments(suites.add_parser("rules", help="every lossless pair of builder and acceptance rule"))
    memory.add_arguments(suites.add_parser("memory", help="bytes of a request on each device, before anything is loaded"))

    demo = commands.add_parser(
        "demo",
        help="watch the shipped pair draft text, offline",
        description="Answers a few prompts with the shipped pair, drafted in four ways, and compares them.",
    )
    demo.add_argument("--max-new-tokens", type=int, default=96, help="per prompt (default: %(default)s)")
    demo.add_argument("--nodes", type=int, default=8, help="verified rows a round, root included (default: %(default)s)")
    demo.add_argument(
        "--candidates", type=int, default=4, metavar="M", help="previous tokens per depth (default: %(default)s)"
    )
    demo.add_argument(
        "--block-size", type=int, default=8, help="drafted block, anchor included, at most 16 (default: %(default)s)"
    )
    demo.add_argument("--repeats", type=int, default=5, help="timed runs of each system (default: %(default)s)")
    demo.set_defaults(run=_demo)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--verifier", default=DEFAULT, metavar="MODEL",
        help=f"a pair ({', '.join(PAIRS)}), which brings its drafter; or a folder, GGUF file or Hub id of a Qwen3 or Llama "
        "model (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--drafter", metavar="MODEL",
        help="a pair's, or a folder or Hub id of a DFlash or TreeFlash drafter; none: decode plainly",
    )  # fmt: skip
    group.add_argument("--revision", help="of the verifier on the Hub")
    group.add_argument("--drafter-revision", help="of the drafter on the Hub")
    group.add_argument("--local-files-only", action="store_true", help="never ask the Hub")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), help="of weights, caches and activations")
    group.add_argument("--quantize", choices=SCHEMES, help="the verifier's matrices, as they are loaded")
    group.add_argument("--mesh", metavar="DxM", help="shard over D x M devices: rows over D, weights and vocabulary over M")


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "drafting: never changes the distribution of the output, only the speed (nor, with sample-and-match, the output)"
    )
    group.add_argument(
        "--method", choices=METHODS,
        help="default: tree, or ar without a drafter; chain: the published one; ar: one token at a time",
    )  # fmt: skip
    group.add_argument("--head", choices=HEADS, help="default: the drafter's own")
    group.add_argument(
        "--nodes", type=run.node_count, metavar="N|auto",
        help="verified rows a round, root included; auto: what pays best, round by round (see treeflash calibrate)",
    )  # fmt: skip
    group.add_argument("--budget", metavar="FILE", help="of treeflash calibrate; default: where that writes by default")
    group.add_argument("--block-size", type=int, help="drafted block, anchor included; default: the drafter's")
    group.add_argument("--candidates", type=int, default=16, metavar="M", help="previous tokens per depth")
    group.add_argument("--children", type=int, default=16, metavar="K", help="children per transition row")
    run.add_shortlist(group)
    group.add_argument("--drafter-temperature", type=float, help="of the drafted distribution")
    group.add_argument("--builder", choices=BUILDERS, help="how a tree is built; default: as measured for the drafter")
    group.add_argument("--acceptance", choices=RULES, help="default: sample-and-match, block or traversal, by the builder")
    group.add_argument("--attention", choices=IMPLEMENTATIONS, help="how caches are read; default: by the backend")
    run.add_shape(group)


def _add_output(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("output")
    group.add_argument("--max-new-tokens", type=int, default=128)
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens (default)")
    group.add_argument("--top-p", type=float, default=1.0, help="1 keeps all tokens (default)")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--stop-ids", metavar="IDS", help='ids that end an answer, like "2 7"; default: the model\'s own')
    group.add_argument("--stop", action="append", default=[], help="text that ends an answer; may be repeated")
    for name in ("repetition-penalty", "presence-penalty", "frequency-penalty", "num-beams", "grammar", "min-p"):
        parser.add_argument(f"--{name}", dest=name.replace("-", "_"), help=argparse.SUPPRESS)
    return group


def _load(arguments: argparse.Namespace) -> Any:
    """The pair that the options name."""
    if arguments.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    import treeflash_jax as tf

    fields = ("verifier", "drafter", "revision", "drafter_revision", "local_files_only")
    paths = {name: getattr(arguments, name) for name in fields} | {"budget": getattr(arguments, "budget", None)}
    sizes = {"dtype": arguments.dtype, "quantize": arguments.quantize, "mesh": _mesh(arguments.mesh)}
    names = [name for name in (arguments.verifier, arguments.drafter) if name not in (None, NO_DRAFTER)]
    with slow(f"loading {' and '.join(names)}"):
        return tf.load(**paths, **sizes)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of GenerateConfig that the options give."""
    from dataclasses import fields

    from treeflash_jax.options import REFUSED, GenerateConfig

    for name, reason in REFUSED.items():
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not supported: {reason}")
    given = {
        field.name: getattr(arguments, field.name) for field in fields(GenerateConfig) if hasattr(arguments, field.name)
    }
    return given | {"stop_ids": None if arguments.stop_ids is None else ids_of(arguments.stop_ids, "--stop-ids")}


def _generate(arguments: argparse.Namespace) -> int:
    settings, prompts = _settings(arguments), prompts_of(arguments)
    model = _load(arguments)
    for result in model.generate(spoken(model, prompts), **settings):
        if arguments.json:
            print(json.dumps(_record(result)))
            continue
        print(result.text if result.text is not None else " ".join(map(str, result.ids)))
        print(
            f"[{len(result.ids)} tokens in {len(result.accept_lengths)} rounds, tau {result.tau:.2f}, "
            f"{result.tokens_per_second:.0f} tokens/s in {model.dtype.name}, compiled in {result.compile_seconds:.1f} s]",
            file=sys.stderr,
        )
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from treeflash_jax.chat import converse

    settings = _settings(arguments)
    converse(_load(arguments), Console(highlight=False), **settings)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from treeflash_jax.check import check, meaning

    settings, prompts = _settings(arguments), prompts_of(arguments)
    excused = True
    model = _load(arguments)
    for index, case in enumerate(check(model, spoken(model, prompts), **settings)):
        apart = case.divergence
        excused &= apart is None or apart.gap <= arguments.near_tie
        if arguments.json:
            record = {"identical": apart is None, "tokens": len(case.plain.ids), "tau": case.drafted.tau}
            record |= {"quantize": case.quantize, "meaning": meaning(case.quantize)}
            print(json.dumps(record | {"divergence": asdict(apart) if apart else None}))
        elif apart is None:
            print(f"prompt {index}: identical, {len(case.plain.ids)} tokens, tau {case.drafted.tau:.2f}")
        else:
            print(
                f"prompt {index}: differs from token {apart.index} on (drafted {apart.drafted}, one by one {apart.plain}); "
                f"the verifier's two best logits are {apart.gap:.2g} apart there"
            )
    if case.quantize and not arguments.json:
        print(f"identical means: {meaning(case.quantize)}")
    return 0 if excused else 1


def _calibrate(arguments: argparse.Namespace) -> int:
    return calibrate.run(_load(arguments), arguments)


def _convert(arguments: argparse.Namespace) -> int:
    from treeflash_jax import hf
    from treeflash_jax.formats import gguf

    is_gguf = gguf.is_gguf(arguments.source)
    if is_gguf and (arguments.to or arguments.drop_head):
        raise ValueError("got --to or --drop-head with a GGUF file, expected them with a drafter folder only")
    if not is_gguf and (arguments.to is None or arguments.dtype):
        raise ValueError("got a drafter folder without --to, or with --dtype; expected --to dflash or --to treeflash alone")
    if is_gguf:
        hf.convert_gguf(arguments.source, arguments.target, arguments.dtype or "float32")
    else:
        hf.convert_drafter(arguments.source, arguments.target, arguments.to, drop_head=arguments.drop_head)
    print(f"wrote {arguments.target}")
    return 0


def _record(result: Any) -> dict[str, Any]:
    record: dict[str, Any] = {} if result.text is None else {"text": result.text}
    record |= {
        "ids": result.ids,
        "method": result.method,
        "accept_lengths": result.accept_lengths,
        "cut": result.cut,
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

    return tf.make_mesh(*meshes.sizes_of(text))


def _demo(arguments: argparse.Namespace) -> int:
    from treeflash_jax.demo import run

    names = ("max_new_tokens", "nodes", "block_size", "candidates", "repeats")
    run(**{name: getattr(arguments, name) for name in names})
    return 0
