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
from treeflash_jax.arguments import Parser, add_method, add_prompts, ids_of, prompts_of, spoken
from treeflash_jax.bench import calibrate, latency, memory, report, rules, run
from treeflash_jax.clock import slow
from treeflash_jax.pairs import DEFAULT, NO_DRAFTER, PAIRS
from treeflash_jax.quantized import SCHEMES
from treeflash_jax.trees.builders import BUILDERS
from treeflash_jax.verifiers.attention import IMPLEMENTATIONS

HEADS = ("mlp", "linear", "marginal")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status. Bad input ends with one line on stderr and status 2."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"treeflash: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; `parse_args(words).run` is the function that runs the chosen one."""
    top = Parser(prog="treeflash", description="Lossless speculative decoding with draft trees.")
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__} (jax {jax.__version__})")
    commands = top.add_subparsers(required=True, metavar="command", parser_class=Parser)

    generate = commands.add_parser(
        "generate",
        help="answer prompts",
        description="Answers prompts, by default with the small pair that ships with the package.",
    )
    _add_model(generate)
    add_prompts(generate)
    _add_drafting(generate)
    output = _add_output(generate)
    output.add_argument("--samples", type=int, default=1, help="number of answers per prompt (default: %(default)s)")
    output.add_argument("--batch-size", type=int, help="sequences decoded together (default: all, at most 8)")
    output.add_argument(
        "--log-probs", action="store_true", help="with --json, also print the verifier's log-probability of every token"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object per answer")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser(
        "chat", help="talk to a model", description="Holds a conversation; answers are printed as they are decoded."
    )
    _add_model(chat)
    _add_drafting(chat)
    _add_output(chat)
    chat.set_defaults(run=_chat)

    check = commands.add_parser(
        "check",
        help="check that drafting does not change the output",
        description="Decodes every prompt with and without drafting and compares the outputs. The exit status is 1 if they "
        "differ at a token where the verifier's two largest logits are not nearly equal.",
    )
    _add_model(check)
    add_prompts(check)
    _add_drafting(check)
    _add_output(check)
    check.add_argument(
        "--near-tie",
        type=float,
        default=1e-4,
        help="largest gap between two logits that counts as nearly equal (default: %(default)s)",
    )
    check.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    check.set_defaults(run=_check)

    convert = commands.add_parser(
        "convert",
        help="convert a GGUF file or a drafter to another format",
        description="Writes a GGUF file as a Hugging Face folder, or a drafter, its weights unchanged, in another layout.",
    )
    convert.add_argument("source", help="GGUF file, or folder of a DFlash or TreeFlash drafter")
    convert.add_argument("target", help="folder to write; it must not exist")
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the weights of a GGUF file (default: float32, which is exact)",
    )
    convert.add_argument("--to", choices=("dflash", "treeflash"), help="layout in which to write a drafter")
    convert.add_argument("--drop-head", action="store_true", help="do not write a trained head; the DFlash layout has none")
    convert.set_defaults(run=_convert)

    measure = commands.add_parser(
        "calibrate",
        help="measure round times for --nodes auto",
        description=calibrate.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(measure)
    calibrate.add_arguments(measure)
    measure.set_defaults(run=_calibrate)

    bench = commands.add_parser("bench", help="run benchmarks, and report their results")
    suites = bench.add_subparsers(required=True, metavar="suite", parser_class=Parser)
    run.add_arguments(suites.add_parser("run", help="compare tokens per round and per second of several systems"))
    report.add_arguments(suites.add_parser("report", help="print the tables of a results file"))
    latency.add_arguments(suites.add_parser("latency", help="time every stage of a round"))
    rules.add_arguments(suites.add_parser("rules", help="compare all combinations of tree builder and acceptance rule"))
    memory.add_arguments(suites.add_parser("memory", help="compute the memory that a request needs on each device"))

    demo = commands.add_parser(
        "demo",
        help="see the pair that ships with the package at work",
        description="Answers three questions with the pair that ships with the package, draws a draft tree, and compares "
        "four ways of decoding. Works offline.",
    )
    demo.add_argument("--max-new-tokens", type=int, default=96, help="most tokens per answer (default: %(default)s)")
    demo.add_argument(
        "--nodes", type=int, default=8, help="tree nodes verified per round, root included (default: %(default)s)"
    )
    demo.add_argument(
        "--candidates", type=int, default=4, metavar="M", help="candidate tokens per depth (default: %(default)s)"
    )
    demo.add_argument(
        "--block-size", type=int, default=8, help="length of the drafted block, at most 16 (default: %(default)s)"
    )
    demo.add_argument("--repeats", type=int, default=5, help="timed runs of each way of decoding (default: %(default)s)")
    demo.set_defaults(run=_demo)
    return top


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--verifier", default=DEFAULT, metavar="MODEL",
        help=f"language model to serve: a name ({', '.join(PAIRS)}), or the folder, GGUF file or Hub id of a Qwen3 or "
        "Llama model (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--drafter", metavar="MODEL",
        help="DFlash or TreeFlash drafter: a name, folder or Hub id, or 'none' to decode one token at a time (default: the "
        "drafter that ships for the named verifier, otherwise none)",
    )  # fmt: skip
    group.add_argument("--revision", metavar="REV", help="Hub revision of the verifier")
    group.add_argument("--drafter-revision", metavar="REV", help="Hub revision of the drafter")
    group.add_argument("--local-files-only", action="store_true", help="use the local cache of the Hub only")
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float64"),
        help="dtype of weights, caches and activations (default: bfloat16, but float32 on a CPU without bfloat16 "
        "instructions)",
    )  # fmt: skip
    group.add_argument("--quantize", choices=SCHEMES, help="quantize the verifier's matrices while loading")
    group.add_argument(
        "--mesh",
        metavar="DxM",
        help="use D x M devices: split the batch D ways, weights and vocabulary M ways (default: one)",
    )


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting (affects speed, never the distribution of the output)")
    group.add_argument(
        "--head", choices=HEADS, help="head of the drafter; marginal is no head (default: the drafter's own)"
    )
    group.add_argument(
        "--nodes", type=run.node_count, metavar="N|auto",
        help="tree nodes verified per round, root included; auto chooses the fastest number in every round and needs "
        "treeflash calibrate (default: the drafter's)",
    )  # fmt: skip
    group.add_argument(
        "--budget",
        metavar="FILE",
        help="calibration file for --nodes auto (default: the path treeflash calibrate writes to)",
    )
    group.add_argument(
        "--block-size", type=int, help="length of the drafted block, at most the drafter's (default: the drafter's)"
    )
    group.add_argument(
        "--candidates", type=int, default=16, metavar="M", help="candidate tokens per depth (default: %(default)s)"
    )
    group.add_argument(
        "--children", type=int, default=16, metavar="K", help="children per candidate (default: %(default)s)"
    )
    run.add_shortlist(group)
    group.add_argument(
        "--drafter-temperature",
        type=float,
        metavar="T",
        help="temperature of the draft (default: as measured for the drafter)",
    )
    group.add_argument(
        "--builder", choices=("none", *BUILDERS),
        help="what is drafted: a tree; one path (walk is greedy, chain is that of the DFlash paper); or nothing: one token "
        "at a time (none) (default: none without a drafter; best-first with one, or hybrid at temperatures where that "
        "was measured to be better)",
    )  # fmt: skip
    add_method(group)
    group.add_argument(
        "--acceptance", choices=RULES,
        help="acceptance rule (default: sample-and-match for best-first trees and chains, block for one sampled path, "
        "traversal for other sampled trees)",
    )  # fmt: skip
    group.add_argument(
        "--attention", choices=IMPLEMENTATIONS, help="attention implementation (default: chosen by the device)"
    )
    run.add_shape(group)


def _add_output(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="most tokens per answer (default: %(default)s)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: %(default)s)"
    )
    group.add_argument(
        "--top-k", type=int, default=0, help="sample from the K likeliest tokens; 0 keeps all (default: %(default)s)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens of this total probability (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    group.add_argument("--stop-ids", metavar="IDS", help='token ids that end an answer, like "2 7" (default: the model\'s)')
    group.add_argument("--stop", action="append", default=[], help="text that ends an answer; may be given several times")
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

    from treeflash_jax.settings import REFUSED, GenerateConfig

    for name, reason in REFUSED.items():
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not supported: {reason}")
    given = {
        field.name: getattr(arguments, field.name) for field in fields(GenerateConfig) if hasattr(arguments, field.name)
    }
    given |= {"method": arguments.method} if arguments.method else {}
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
    from treeflash_jax.formats import gguf, hf

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
        "builder": result.builder,
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
