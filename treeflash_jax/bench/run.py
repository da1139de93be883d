"""Systems side by side on the same prompts, one JSON line per answered prompt: `treeflash bench run --out results.jsonl`.

    python -m treeflash_jax.bench.run --pair VERIFIER DRAFTER --prompts gsm8k.jsonl --format math --limit 64 \\
        --systems ar chain marginal treeflash --nodes 16 64 --temperature 0 1 --seed 0 1 --out results.jsonl
    python -m treeflash_jax.bench.run --preset rules --limit 64 --out rules.jsonl --plot rules.png
    python -m treeflash_jax.bench.run --preset rules --limit 64 --nodes 16 64 --out rules.jsonl --plot rules.png

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import jax

import treeflash_jax as tf
from treeflash_jax import devices
from treeflash_jax.acceptance import RULES
from treeflash_jax.arguments import ModelOptions, add_fields, values_of
from treeflash_jax.bench import plots, records, report, standalone, systems, verdicts
from treeflash_jax.bench.prompts import BenchPrompt, PromptSet, chosen_prompts, empty_chat, format_turn
from treeflash_jax.bench.records import SCHEMA, Record
from treeflash_jax.clock import slow
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.planning import Row, drafting, resolve
from treeflash_jax.settings import DraftConfig, RuntimeConfig, SamplingConfig, TreeConfig, without_method
from treeflash_jax.trees import branching, draws


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--pair", nargs=2, metavar=("VERIFIER", "DRAFTER"), help="folders, Hub ids or names (default: tiny tiny)"
    )
    add_fields(model, ModelOptions, "dtype quantize budget")
    add_fields(parser.add_argument_group("prompts"), PromptSet)
    chosen = parser.add_argument_group("systems")
    chosen.add_argument(
        "--systems", nargs="+", default=list(systems.SYSTEMS), metavar="NAME", help="of " + ", ".join(systems.SYSTEMS)
    )
    chosen.add_argument(
        "--preset", choices=systems.PRESETS, action=systems.Preset,
        help="rules: all lossless combinations of tree builder and acceptance rule, by default at temperature 1",
    )  # fmt: skip
    add_fields(chosen, TreeConfig, several="nodes", nodes=[16])
    add_fields(chosen, DraftConfig, without="head block_size")
    sampling = parser.add_argument_group("sampling and output")
    taken = "max_new_tokens temperature top_k top_p seed"
    add_fields(sampling, SamplingConfig, taken, several="temperature seed", temperature=[0.0], seed=[0])
    add_fields(sampling, RuntimeConfig, "batch_size expected_lengths", batch_size=1)
    sampling.add_argument("--out", required=True, metavar="FILE", help="JSONL that results are appended to")
    sampling.add_argument("--plot", metavar="FILE", help="picture of tokens per round over nodes (needs matplotlib)")
    parser.set_defaults(run=run)


def add_rules_arguments(parser: argparse.ArgumentParser) -> None:
    """`bench rules`, what `bench run --preset rules` was called in the first edition."""
    add_arguments(parser)
    parser.set_defaults(**systems.PRESETS["rules"], run=_rules)
    parser.add_argument("--builders", nargs="+", choices=systems.builders())
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--heads", nargs="+", choices=HEADS)


def _rules(arguments: argparse.Namespace) -> int:
    heads = {"marginal" if head == "marginal" else "treeflash" for head in arguments.heads or ("marginal", "mlp")}
    names = systems.lawful(arguments.builders, arguments.rules)
    arguments.systems = [name for name in names if name.partition("+")[0] in heads]
    status, new = run(arguments), "treeflash bench run --preset rules"
    print(f"treeflash bench rules is now {new}; the old name ends with the next release", file=sys.stderr)
    return status


def run(arguments: argparse.Namespace) -> int:
    """Measures what the output file lacks, then prints the summary of all it holds.

    Raises:
      ValueError: bad prompts, systems, settings or output; nothing that was measured before is lost.
    """
    chosen = systems.parse_systems(arguments.systems, arguments.nodes)
    prompts = chosen_prompts(arguments)
    earlier, _ = records.read_results(arguments.out)
    if arguments.plot:
        plots.check(arguments.plot)
    if arguments.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    verifier, drafter = arguments.pair or (None, None)
    name = None if arguments.pair else "tiny"
    with slow(f"loading {' and '.join(arguments.pair or ['the shipped pair'])}"):
        model = tf.load(name, verifier=verifier, drafter=drafter, **values_of(arguments, ModelOptions))
    if arguments.systems == systems.PRESETS["rules"]["systems"] and getattr(model.drafter, "head", None) == "marginal":
        chosen = {name: fields for name, fields in chosen.items() if "head" in fields}
    shared = without_method(values_of(arguments, tf.GenerateConfig))
    for name in ("nodes", "temperature", "seed"):
        del shared[name]
    shared["builder"] = shared["builder"] or "best-first"
    bench = Bench(
        systems={
            name: tf.GenerateConfig(**shared | ({"acceptance": None} if "builder" in fields else {}) | fields)
            for name, fields in chosen.items()
        },
        prompts=prompts,
        format=arguments.format,
        temperatures=list(dict.fromkeys(arguments.temperature)),
        seeds=list(dict.fromkeys(arguments.seed)),
        pair=tuple(arguments.pair or ("tiny", "tiny")),
    )
    check(model, bench, earlier, arguments.out)
    with records.open_results(arguments.out) as output:
        measure(model, bench, earlier, output)
    summary = report.summarise(records.read_records(arguments.out)[0])
    report.show(summary)
    if arguments.plot:
        plots.draw_trees(summary["rows"], arguments.plot)
    return 0


def check(model: tf.TreeFlash, bench: Bench, earlier: Sequence[Record], path: str | Path) -> None:
    """Refuses, before any compute, what could not be measured or does not belong to the earlier records of the file.

    Raises:
      ValueError: settings that the pair cannot serve, prompts that are too long, other settings or texts than before.
    """
    has_head = getattr(model.drafter, "head", None) != "marginal"
    for name, config in bench.systems.items():
        resolve(config, {"temperature": bench.temperatures, "seed": bench.seeds}, model.verifier, model.drafter)
        if config.builder in (None, *branching()) and config.head is None and not has_head:
            raise ValueError(f"got system {name!r}, expected 'marginal' trees alone: this drafter has no head")
        ours = {"schema": SCHEMA, "system": name, "settings": settings_of(model, bench, config), **environment(model)}
        for record in earlier:
            if change := records.difference(ours, record):
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
    done = {records.key_of(record): record for record in earlier}
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
                for place, (prompt, results) in enumerate(zip(batch, answers, strict=True)):
                    if prompt in missing:
                        record = record_of(model, bench, name, config, prompt, results) | {"compile_seconds": compiled}
                        places = [sum(turn < len(p.turns) for p in batch[:place]) for turn in range(len(results))]
                        rows = [
                            Row(at, result.prompt_ids, temperature, 0, 1.0, prompt.seed(seed))
                            for at, result in zip(places, results, strict=True)
                        ]
                        others = [done.get((prompt.id, other, temperature, seed)) for other in names]
                        record["differences"] = verdicts.differences(model, record, filter(None, others), rows)
                        done[records.key_of(record)] = record
                        output.write(json.dumps(record).encode() + b"\n")
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
    seeds = [prompt.seed(config.seed) for prompt in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        rows = [i for i, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        for i in rows:
            chats[i].append({"role": "user", "content": format_turn(prompts[i].turns[turn], format)})
        inputs = [tf.Text(chats[i][0]["content"]) if format == "raw" else chats[i] for i in rows]
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
    `expected` sums what rounds were expected to commit, cut ones in full. `accepted_by_depth[i]` counts the rounds that
    accepted more than i draft tokens.
    """
    lengths = [length for result in results for length in result.accept_lengths]
    lists = [result.expected_lengths or [] for result in results]
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
        **({"expected": float(sum(map(sum, lists)))} if config.expected_lengths else {}),
        "thinking": False,  # chat templates are asked for no thinking
        **environment(model),
    }


def settings_of(model: tf.TreeFlash, bench: Bench, config: tf.GenerateConfig) -> dict[str, Any]:
    """The settings of a system as they take effect; those of drafting are None where nothing is drafted."""
    plan = model.plan(config)
    shape = asdict(drafting(config)[2])
    if not draws(plan.builder):
        shape = dict.fromkeys(shape) | ({"lanes": plan.shape.lanes} if plan.builder == "best-first" else {})
    fixed = config.drafter_temperature
    sharpness = fixed or model.drafter.drafter_temperature
    names = "max_new_tokens batch_size temperature top_k top_p seed".split()
    return {name: getattr(config, name) for name in names} | {
        "verifier": bench.pair[0],
        "drafter": bench.pair[1],
        "dtype": str(model.dtype),
        "quantize": model.quantize,
        "format": bench.format,
        "nodes": ("auto" if config.nodes == "auto" else plan.num_nodes) if plan.drafts else None,
        **{name: getattr(plan.draft, name, None) for name in ("head", "candidates", "children", "shortlist", "depths")},
        "builder": plan.builder,
        "acceptance": plan.rule if plan.drafts else None,
        **shape,
        "selector": config.selector,
        "drafter_temperature": sharpness if plan.drafts else None,
        "drafter_temperature_rule": ("fixed" if fixed else "max(it, min(T, 1))") if plan.drafts else None,
    }


def environment(model: tf.TreeFlash) -> dict[str, dict[str, Any]]:
    """Versions and hardware: records that differ here are never put side by side."""
    device = devices.here()
    return {
        "versions": {"jax": jax.__version__, "treeflash_jax": tf.__version__, "python": platform.python_version()},
        "hardware": {
            "backend": device.backend,
            "device": device.kind,
            "devices": 1 if model.mesh is None else model.mesh.size,
            "cores": os.cpu_count(),
        },
    }


def main(argv: list[str] | None = None) -> int:
    return standalone(__doc__, add_arguments, argv)


if __name__ == "__main__":
    sys.exit(main())
