"""Systems side by side on the same prompts, one JSON line per answered prompt: `treeflash bench run --out results.jsonl`.

    python -m treeflash_jax.bench.run --pair VERIFIER DRAFTER --prompts gsm8k.jsonl --format math --limit 64 \\
        --systems ar chain marginal treeflash --nodes 16 64 --temperature 0 1 --seed 0 1 --out results.jsonl

Later turns of a prompt see the model's own answers. For every prompt, temperature and seed all systems take turns, in an
order that rotates from prompt to prompt. The first call of a system, and any call that had to compile, is warm-up: it is
made again and only the second counts. Every prompt draws from its own seed, made of the given one and its id, so prompts
are independent and all systems face the same noise.

The same command again continues a run that was stopped: what the file holds is not measured again. A file of other
settings, versions or hardware is refused and left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import jax

import treeflash_jax as tf
from treeflash_jax import devices, files
from treeflash_jax.acceptance import RULES
from treeflash_jax.arguments import ModelOptions, add_fields
from treeflash_jax.bench import report, standalone
from treeflash_jax.bench.prompts import BUNDLED, FORMATS, BenchPrompt, draw, empty_chat, format_turn, read_prompts
from treeflash_jax.bench.report import SCHEMA, Record
from treeflash_jax.checks import quoted
from treeflash_jax.planning import resolve
from treeflash_jax.settings import DraftConfig, GenerateConfig, TreeConfig
from treeflash_jax.trees import branching, draws

# Fields of GenerateConfig. Trees are measured once for every number of --nodes, or at their own: "treeflash-32", or what
# pays best by `treeflash calibrate`: "treeflash-auto"; with their own builder and acceptance rule where they name them:
# "treeflash-32+hybrid", "treeflash+paths+traversal"; all but "ar" at their own drafter temperature: "marginal-16@0.7".
SYSTEMS: dict[str, dict[str, Any]] = {
    "ar": {"builder": "none"},
    "chain": {"builder": "chain", "head": "marginal"},
    "marginal": {"head": "marginal"},
    "treeflash": {},
}


# Settings that all systems share: sizes of drafts, and where and how answers end.
CHOSEN = "head builder nodes acceptance".split()  # by the name of a system
SIZES = " ".join(one.name for group in (DraftConfig, TreeConfig) for one in fields(group) if one.name not in CHOSEN)
LIMITS = "top_k top_p max_new_tokens batch_size"
ONE_AT_A_TIME = {"temperature": [0.0], "seed": [0], "batch_size": 1}
RECORD_START = b'{"schema": '  # of every line of results


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured.

    Attributes:
      systems: settings of every system by name; one temperature and seed each, replaced while measuring.
      prompts: in the order of measurement.
      format: a key of FORMATS.
      temperatures, seeds: every combination is measured.
      pair: names of verifier and drafter, for the record.
    """

    systems: dict[str, tf.GenerateConfig]
    prompts: list[BenchPrompt]
    format: str = "chat"
    temperatures: Sequence[float] = (0.0,)
    seeds: Sequence[int] = (0,)
    pair: tuple[str, str] = ("tiny", "tiny")


def add_model_and_prompts(parser: argparse.ArgumentParser) -> None:
    """Options that all suites of a pair share."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--pair", nargs=2, metavar=("VERIFIER", "DRAFTER"), help="folders, Hub ids or names (default: tiny tiny)"
    )
    add_fields(model, ModelOptions, "dtype quantize")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts", default=BUNDLED, metavar="FILE", help="JSONL file of prompts (default: a bundled set)"
    )
    prompts.add_argument("--format", choices=FORMATS, default="chat", help="how prompts are worded (default: %(default)s)")
    prompts.add_argument("--limit", type=int, metavar="N", help="use N prompts, drawn as in the published benchmarks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_and_prompts(parser)
    systems = parser.add_argument_group("systems")
    systems.add_argument("--systems", nargs="+", default=list(SYSTEMS), metavar="NAME", help="of " + ", ".join(SYSTEMS))
    add_fields(systems, ModelOptions, "budget")
    add_fields(systems, GenerateConfig, f"nodes acceptance {SIZES}", several="nodes", nodes=[16])
    systems.add_argument("--builder", choices=branching(), help="builder of systems that name none")
    output = parser.add_argument_group("sampling and output")
    add_fields(output, GenerateConfig, f"temperature seed {LIMITS}", several="temperature seed", **ONE_AT_A_TIME)
    output.add_argument("--out", required=True, metavar="FILE", help="JSONL that results are appended to")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures what the output file lacks, then prints the summary of all it holds.

    Raises:
      ValueError: bad prompts, systems, settings or output; nothing that was measured before is lost.
    """
    systems = parse_systems(arguments.systems, arguments.nodes)
    prompts = draw(read_prompts(arguments.prompts), arguments.limit)
    earlier, _ = read_results(arguments.out)
    if arguments.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    verifier, drafter = arguments.pair or (None, None)
    name = None if arguments.pair else "tiny"
    sizes = {"dtype": arguments.dtype, "quantize": arguments.quantize, "budget": arguments.budget}
    model = tf.load(name, verifier=verifier, drafter=drafter, **sizes)
    shared = {name: getattr(arguments, name) for name in f"{SIZES} {LIMITS}".split()}
    trees = {"builder": arguments.builder or "best-first", "acceptance": arguments.acceptance}
    bench = Bench(
        systems={
            name: tf.GenerateConfig(**shared | ({} if "builder" in fields else trees) | fields)
            for name, fields in systems.items()
        },
        prompts=prompts,
        format=arguments.format,
        temperatures=list(dict.fromkeys(arguments.temperature)),
        seeds=list(dict.fromkeys(arguments.seed)),
        pair=tuple(arguments.pair or ("tiny", "tiny")),
    )
    check(model, bench, earlier, arguments.out)
    with open_results(arguments.out) as output:
        measure(model, bench, earlier, output)
    report.show(report.summarise(report.read_records(arguments.out)[0]))
    return 0


def parse_systems(names: Sequence[str], nodes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Fields of GenerateConfig by system name: "ar", "chain", and "marginal-16", "treeflash-64" for trees of so many rows,
    "treeflash-auto" for as many as pay best.

    "treeflash-64+hybrid+traversal@0.7" adds a builder, an acceptance rule and a drafter temperature.

    Raises:
      ValueError: an unknown system, or fewer rows than one.
    """
    systems: dict[str, dict[str, Any]] = {}
    for name in names:
        whole, at, sharpness = name.partition("@")
        sized, plus, sampled = whole.partition("+")
        base, dash, rows = sized.partition("-")
        builder, _, rule = sampled.partition("+")
        fields = SYSTEMS.get(base)
        is_known = fields is not None and (not (dash or plus) or "builder" not in fields)
        is_known &= (not dash or rows.isdecimal() or rows == "auto") and (not plus or builder in branching())
        is_known &= rule in ("", *RULES)
        if not is_known or (at and (base == "ar" or not _is_positive(sharpness))):
            raise ValueError(
                f"got unknown system {name!r}, expected one of {', '.join(SYSTEMS)}, or a tree like treeflash-32, "
                "or one with its own builder, rule and drafter temperature like treeflash-32+hybrid+traversal@0.7"
            )
        is_tree = "builder" not in fields
        if plus:
            fields = fields | {"builder": builder, "acceptance": rule or None}
        if at:
            fields = fields | {"drafter_temperature": float(sharpness)}
        if not is_tree:
            systems[base + at + sharpness] = fields
            continue
        for count in [node_count(rows)] if rows else nodes:
            if count != "auto" and count < 1:
                raise ValueError(f"got nodes {count}, expected at least 1 (the root counts)")
            systems[f"{base}-{count}{plus}{sampled}{at}{sharpness}"] = fields | {"nodes": count}
    return systems


def node_count(text: str) -> int | str:
    """A number of nodes, or "auto"."""
    if text != "auto" and not (text.lstrip("-").isdecimal() and len(text) < 20):
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected a whole number or auto")
    return text if text == "auto" else int(text)


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def read_results(path: str | Path) -> tuple[list[Record], int]:
    """Records of a results file, none where there is no file yet, and how many bytes of it they take. Writes nothing.

    Raises:
      ValueError: a path that cannot be written, or a file that holds anything but records of one run.
    """
    files.check_output(path)
    if not Path(path).exists():
        return [], 0
    records, size = report.read_records(path)
    tail = Path(path).read_bytes()[size:]
    if not tail.startswith(RECORD_START[: len(tail)]):
        raise ValueError(f"{path} holds something else than results of this command; write to another file")
    return records, size


def open_results(path: str | Path) -> BinaryIO:
    """The results file, open for appending. A last record that was cut off is removed; all before it stays.

    Raises:
      ValueError: as `read_results`.
    """
    _, size = read_results(path)
    try:
        file = open(path, "a+b")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    file.truncate(size)
    file.seek(max(size - 1, 0))
    if file.read(1) not in (b"", b"\n"):
        file.write(b"\n")
        file.flush()
    return file


def check(model: tf.TreeFlash, bench: Bench, earlier: Sequence[Record], path: str | Path) -> None:
    """Refuses, before any compute, what could not be measured or does not belong to the earlier records of the file.

    Raises:
      ValueError: settings that the pair cannot serve, prompts that are too long, other settings or texts than before.
    """
    for name, config in bench.systems.items():
        resolve(config, {"temperature": bench.temperatures, "seed": bench.seeds}, model.verifier, model.drafter)
        if config.builder in (None, *branching()) and config.head is None and model.drafter.head == "marginal":
            raise ValueError(f"got system {name!r}, expected 'marginal' trees alone: this drafter has no head")
        ours = {"schema": SCHEMA, "system": name, "settings": settings_of(model, bench, config), **environment(model)}
        for record in earlier:
            if change := report.difference(ours, record):
                raise ValueError(f"{path}: {change} in the file; write to another file")
    hashes = {record["prompt_id"]: record["prompt_hash"] for record in earlier}
    new_tokens = max(config.max_new_tokens for config in bench.systems.values())
    for prompt in bench.prompts:
        if hashes.get(prompt.id, prompt.hash) != prompt.hash:
            raise ValueError(f"{path}: got another text for prompt {prompt.id!r} than in the file; write to another file")
        if bench.format == "raw" and len(prompt.turns) > 1:
            raise ValueError(f"prompt {prompt.id!r}: got {len(prompt.turns)} turns, expected 1 with the format raw")
        if bench.format == "raw" and prompt.system is not None:
            raise ValueError(f"prompt {prompt.id!r}: got a system message, expected none with the format raw")
        length = len(model.encode(empty_chat(prompt, bench.format))) + len(prompt.turns) * new_tokens
        if length > model.verifier.max_positions:
            raise ValueError(
                f"prompt {prompt.id!r}: got {length} tokens, {new_tokens} new ones a turn included, "
                f"expected at most {model.verifier.max_positions} (the verifier's context)"
            )


def measure(model: tf.TreeFlash, bench: Bench, earlier: Sequence[Record], output: BinaryIO) -> None:
    """Appends a record for every prompt, temperature, seed and system that `earlier` lacks, each as soon as it is known."""
    done = {report.key_of(record) for record in earlier}
    warm: set[str] = set()
    names = list(bench.systems)
    size = bench.systems[names[0]].batch_size
    batches = [bench.prompts[at : at + size] for at in range(0, len(bench.prompts), size)]
    rounds = [(t, seed) for t in bench.temperatures for seed in bench.seeds]
    for number, batch in enumerate(batches):
        turn = number % len(names)
        for temperature, seed in rounds:
            for name in names[turn:] + names[:turn]:
                missing = [p for p in batch if (p.id, name, temperature, seed) not in done]
                if not missing:
                    continue
                config = replace(bench.systems[name], temperature=temperature, seed=seed)
                answers = converse(model, batch, config, bench.format)
                compiled = max(sum(result.compile_seconds for result in results) for results in answers)
                if name not in warm or compiled:
                    answers = converse(model, batch, config, bench.format)
                    warm.add(name)
                for prompt, results in zip(batch, answers, strict=True):
                    if prompt in missing:
                        record = record_of(model, bench, name, config, prompt, results)
                        output.write(json.dumps(record | {"compile_seconds": compiled}).encode() + b"\n")
                        output.flush()
                print(f"{number + 1}/{len(batches)} {name} at T {temperature:g}, seed {seed}", file=sys.stderr)


def converse(
    model: tf.TreeFlash, prompts: Sequence[BenchPrompt], config: tf.GenerateConfig, format: str
) -> list[list[tf.Result]]:
    """Answers all turns of a batch of prompts, one call a turn; own answers are fed back.

    Returns:
      Per prompt, a Result per turn. Seconds are the row's share: those of the call over its rows.

    Raises:
      KeyboardInterrupt: Ctrl-C while decoding; half an answer is no measurement.
    """
    chats = [prompt.opening for prompt in prompts]
    answers: list[list[tf.Result]] = [[] for _ in prompts]
    seeds = [zlib.crc32(f"{config.seed} {prompt.id}".encode()) for prompt in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        rows = [i for i, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        for i in rows:
            chats[i].append({"role": "user", "content": format_turn(prompts[i].turns[turn], format)})
        inputs = [chats[i][0]["content"] if format == "raw" else chats[i] for i in rows]
        for i, result in zip(rows, model.generate(inputs, config, seed=[seeds[i] for i in rows]), strict=True):
            if result.finished == "interrupted":
                raise KeyboardInterrupt
            answers[i].append(replace(result, seconds=result.seconds / len(rows)))
            chats[i].append({"role": "assistant", "content": result.text})
    return answers


def record_of(
    model: tf.TreeFlash,
    bench: Bench,
    name: str,
    config: tf.GenerateConfig,
    prompt: BenchPrompt,
    results: Sequence[tf.Result],
) -> Record:
    """One line of the results: what was asked, under which settings, what came out. Lists of lists are by turn.

    `accept_lengths` and their sum `committed` count what rounds added to the answers, and `cut` what the last round of each
    turn accepted beyond its end; `tokens` includes the token of every turn's prefill.
    `accepted_by_depth[i]` counts the rounds that accepted more than i draft tokens.
    """
    lengths = [length for result in results for length in result.accept_lengths]
    return {
        "schema": SCHEMA,
        "prompt_id": prompt.id,
        "prompt_hash": prompt.hash,
        "system": name,
        "settings": settings_of(model, bench, config),
        "rounds": len(lengths),
        "committed": sum(lengths),
        "accept_lengths": [result.accept_lengths for result in results],
        "cut": [result.cut for result in results],
        "accepted_by_depth": [sum(length > depth for length in lengths) for depth in range(1, max(lengths, default=1))],
        "ids": [result.ids for result in results],
        "nodes": [result.nodes for result in results],
        "tokens": sum(len(result.ids) for result in results),
        "seconds": sum(result.seconds for result in results),
        "finished": [result.finished for result in results],
        "thinking": False,  # chat templates are asked for no thinking
        **environment(model),
    }


def settings_of(model: tf.TreeFlash, bench: Bench, config: tf.GenerateConfig) -> dict[str, Any]:
    """The settings of a system as they take effect; those of drafting are None where nothing is drafted."""
    plan = model.plan(config)
    drafts = asdict(config.group(DraftConfig)) | asdict(config.group(TreeConfig)) | {"drafter_temperature_rule": None}
    if plan.drafts:
        fixed = config.drafter_temperature
        drafts |= asdict(plan.draft) | {
            "acceptance": plan.rule,
            "nodes": "auto" if config.nodes == "auto" else plan.num_nodes,
        }
        drafts |= {"drafter_temperature": fixed or model.drafter.drafter_temperature}
        drafts |= {"drafter_temperature_rule": "fixed" if fixed else "max(it, min(T, 1))"}
        drafts |= {} if draws(plan.builder) else dict.fromkeys("branches trunk skeleton leaves".split())
    else:
        drafts = dict.fromkeys(drafts)
    names = "max_new_tokens batch_size temperature top_k top_p seed".split()
    return {name: getattr(config, name) for name in names} | {
        "verifier": bench.pair[0],
        "drafter": bench.pair[1],
        "dtype": str(model.dtype),
        "quantize": model.quantize,
        "format": bench.format,
        **drafts,
        "builder": plan.builder,
    }


def environment(model: tf.TreeFlash) -> dict[str, dict[str, Any]]:
    """Versions and hardware: records that differ here are never put side by side."""
    return {
        "versions": {"jax": jax.__version__, "treeflash_jax": tf.__version__, "python": platform.python_version()},
        "hardware": {
            "backend": devices.here().backend,
            "device": jax.devices()[0].device_kind,
            "devices": 1 if model.mesh is None else model.mesh.size,
            "cores": os.cpu_count(),
        },
    }


def main(argv: list[str] | None = None) -> int:
    return standalone(__doc__, add_arguments, argv)


if __name__ == "__main__":
    sys.exit(main())
