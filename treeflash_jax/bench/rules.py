"""Every lossless pair of tree builder and acceptance rule on the same prompts: `treeflash bench rules --out rules.json`.

    python -m treeflash_jax.bench.rules --pair VERIFIER DRAFTER --prompts gsm8k.jsonl --format math --limit 64 \\
        --nodes 16 64 --temperature 0.6 1 --out rules.json --plot rules.png

For every temperature, number of rows and head: block efficiency (tokens committed per round, bonus included), its interval,
its ratio over the deterministic tree of as many rows, and the block efficiency expected from the rules' `weights` in the
same rounds, which has no coin noise. Both count an answer's last round in full, also where a stop or the limit cut it: what
is expected of a round knows no cut. Intervals are those of `bench report`: 95 % paired bootstraps over prompts.

What is measured goes to OUT.partial at once, and a run that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.console import Console

import treeflash_jax as tf
from treeflash_jax import files
from treeflash_jax.acceptance import RULES
from treeflash_jax.bench import plots, report, run, standalone
from treeflash_jax.bench.progress import Progress, Tell
from treeflash_jax.bench.prompts import BenchPrompt, draw, read_prompts
from treeflash_jax.bench.report import RESAMPLES, paired_ratio
from treeflash_jax.checks import parse_json
from treeflash_jax.clock import slow
from treeflash_jax.planning import drafting, resolve
from treeflash_jax.trees import BUILDERS

BASELINE = "best-first", "sample-and-match"
# Builders as they are compared; other sizes come from the options.
KINDS: dict[str, dict[str, Any]] = {
    "best-first": {"builder": "best-first"},
    "one-path": {"builder": "paths", "branches": 1},
    **{name: {"builder": name} for name, builder in BUILDERS.items() if builder.draws},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run.add_model_and_prompts(parser)
    trees = parser.add_argument_group("trees and rules")
    trees.add_argument("--builders", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME", help=", ".join(KINDS))
    trees.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="NAME", help=", ".join(RULES))
    trees.add_argument("--heads", nargs="+", metavar="NAME", help="default: marginal and the drafter's own")
    trees.add_argument("--nodes", nargs="+", type=int, default=[16, 64], metavar="N", help="tree nodes, root included")
    trees.add_argument(
        "--candidates", type=int, default=16, metavar="M", help="candidate tokens per depth (default: %(default)s)"
    )
    trees.add_argument(
        "--children", type=int, default=16, metavar="K", help="children per candidate (default: %(default)s)"
    )
    trees.add_argument("--drafter-temperature", type=float, metavar="T", help="default: the drafter's own")
    run.add_shape(trees)
    output = parser.add_argument_group("sampling and output")
    output.add_argument("--temperature", nargs="+", type=float, default=[1.0], metavar="T", help="sampling temperatures")
    output.add_argument("--seed", nargs="+", type=int, default=[0], metavar="S", help="random seeds")
    output.add_argument("--max-new-tokens", type=int, default=128, help="most tokens per turn (default: %(default)s)")
    output.add_argument("--batch-size", type=int, default=8, help="prompts decoded together (default: %(default)s)")
    output.add_argument("--resamples", type=int, default=RESAMPLES, help="bootstrap resamples (default: %(default)s)")
    output.add_argument("--out", required=True, metavar="FILE", help="JSON file of the comparison")
    output.add_argument("--plot", metavar="FILE", help="plot of the comparison (needs matplotlib)")
    parser.set_defaults(run=compare)


def compare(arguments: argparse.Namespace) -> int:
    """Measures every lawful combination and writes the comparison.

    Raises:
      ValueError: bad prompts or settings, or an output that cannot be written.
    """
    prompts = draw(read_prompts(arguments.prompts), arguments.limit)
    files.check_output(arguments.out, files.json_with("settings", "rows", "versions", "hardware"))
    if arguments.plot:
        plots.check(arguments.plot)
    if arguments.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    verifier, drafter = arguments.pair or (None, None)
    name, sizes = None if arguments.pair else "tiny", {"dtype": arguments.dtype, "quantize": arguments.quantize}
    with slow(f"loading {' and '.join(arguments.pair or ['the shipped pair'])}"):
        model = tf.load(name, verifier=verifier, drafter=drafter, **sizes)
    names = "candidates children drafter_temperature branches trunk skeleton leaves max_new_tokens batch_size".split()
    shared = {name: getattr(arguments, name) for name in names}
    heads = arguments.heads or list(dict.fromkeys(("marginal", model.drafter.head)))
    configs = combinations(shared, arguments.builders, arguments.rules, arguments.nodes, heads)
    for config in configs:
        sampled = {"temperature": arguments.temperature, "seed": arguments.seed}
        resolve(config, sampled, model.verifier, model.drafter)
    bench = run.Bench(
        systems={str(i): config for i, config in enumerate(configs)},
        prompts=prompts,
        format=arguments.format,
        temperatures=list(dict.fromkeys(arguments.temperature)),
        seeds=list(dict.fromkeys(arguments.seed)),
        pair=tuple(arguments.pair or ("tiny", "tiny")),
    )
    run.check(model, bench, [], arguments.out)
    settings = shared | {
        "verifier": bench.pair[0],
        "drafter": bench.pair[1],
        "format": bench.format,
        "dtype": str(model.dtype),
        "quantize": model.quantize,
        "prompts": len(prompts),
        "seeds": list(bench.seeds),
    }
    about = {"settings": settings, **run.environment(model)}
    partial = files.regular(f"{arguments.out}.partial")
    with partial.open("a+", encoding="utf-8") as file:
        earlier = resume(file, about | {"texts": [prompt.hash for prompt in prompts]})
        answers = measure(model, bench, earlier, file)
    result = about | {"rows": rows_of(answers, arguments.resamples)}
    files.write(arguments.out, json.dumps(result, indent=1) + "\n")
    partial.unlink()
    show(result)
    if arguments.plot:
        plot(result, arguments.plot)
    return 0


def combinations(
    shared: dict[str, Any], kinds: Sequence[str], rules: Sequence[str], nodes: Sequence[int], heads: Sequence[str]
) -> list[tf.GenerateConfig]:
    """Settings of every lossless combination; the deterministic tree is always among them."""
    configs = []
    for head in heads:
        for rows in nodes:
            for kind in dict.fromkeys((BASELINE[0], *kinds)):
                for rule in RULES:
                    fields = shared | KINDS[kind] | {"head": head, "nodes": rows, "acceptance": rule}
                    config = tf.GenerateConfig(expected_lengths=True, **fields)
                    builder, _, shape = drafting(config)
                    lawful = BUILDERS[builder].law_of(shape) in RULES[rule].LAWS
                    if lawful and (rule in rules or (kind, rule) == BASELINE):
                        configs.append(config)
    return configs


def resume(file: TextIO, about: dict[str, Any]) -> dict[str, report.Answers]:
    """Answers that an interrupted run left in its file, by system. A last line that was cut off is removed.

    Raises:
      ValueError: answers of other settings, prompts, versions or hardware.
    """
    file.seek(0)
    content = file.read()
    lines = [line for line in content.splitlines(keepends=True) if line.endswith("\n")]
    first = json.dumps(about) + "\n"
    if not (content.startswith(first) or first.startswith(content)):
        raise ValueError(f"{file.name}: got results of another comparison, expected those of this one; remove the file")
    file.truncate(sum(len(line.encode()) for line in lines))
    if not lines:
        file.write(first)
        file.flush()
    kept = {}
    for one in map(parse_json, lines[1:]):
        kept[one["system"]] = {(prompt, seed): counts for prompt, seed, counts in one["answers"]}
    return kept


def measure(
    model: tf.TreeFlash, bench: run.Bench, earlier: dict[str, report.Answers], file: TextIO
) -> list[tuple[tf.GenerateConfig, report.Answers]]:
    """Answers of every system at every temperature: committed tokens, expected ones and rounds by (prompt, seed)."""
    measured = []
    with Progress(len(bench.systems) * len(bench.temperatures)) as progress:
        for config in bench.systems.values():
            for temperature in bench.temperatures:
                name = f"{_name(config)}, T = {temperature:g}"
                progress.step(name if name not in earlier else f"{name}: measured before")
                if name not in earlier:
                    earlier[name] = _answers(model, bench, replace(config, temperature=temperature), progress.detail)
                    line = {"system": name, "answers": [[*key, counts] for key, counts in earlier[name].items()]}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                measured.append((replace(config, temperature=temperature), earlier[name]))
    return measured


def _answers(model: tf.TreeFlash, bench: run.Bench, config: tf.GenerateConfig, tell: Tell) -> report.Answers:
    answers: report.Answers = {}
    for seed in bench.seeds:
        asked = replace(config, seed=seed)
        for at in range(0, len(bench.prompts), config.batch_size):
            tell(f"{len(answers)} of {len(bench.prompts) * len(bench.seeds)} answers")
            batch: list[BenchPrompt] = bench.prompts[at : at + config.batch_size]
            for prompt, results in zip(batch, run.converse(model, batch, asked, bench.format), strict=True):
                answers[prompt.id, seed] = {
                    "committed": sum(sum(result.accepted_before_cut) for result in results),
                    "expected": float(sum(sum(result.expected_lengths) for result in results)),
                    "rounds": sum(len(result.accept_lengths) for result in results),
                }
    return answers


def rows_of(measured: Sequence[tuple[tf.GenerateConfig, report.Answers]], resamples: int) -> list[dict[str, Any]]:
    """One row a combination: tau and expected tau with intervals, and their ratios over the deterministic tree.

    Intervals are None for one prompt.
    """
    plain = {_place(config): answers for config, answers in measured if kind_of(config) == BASELINE}
    rows = []
    for config, answers in measured:
        beside = plain[_place(config)]
        row = {"temperature": config.temperature, "nodes": config.nodes, "head": config.head}
        row |= dict(zip(("builder", "acceptance"), kind_of(config), strict=True))
        for top, name in (("committed", "tau"), ("expected", "expected_tau")):
            row[name] = _over_rounds(answers, top, resamples)
            row[f"{name}_ratio"] = paired_ratio(answers, beside, top, "rounds", resamples)
        rows.append(row | {"rounds": sum(answer["rounds"] for answer in answers.values())})
    return rows


def show(result: dict[str, Any], console: Console | None = None) -> None:
    """Prints the comparison: a table per temperature, head and number of nodes, of 80 columns."""
    console = console or report.table_console()
    places: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        place = f"T = {row['temperature']:g}, {row['head']} head, {row['nodes']} nodes"
        places.setdefault(place, []).append(row)
    for place, rows in places.items():
        table = report.table(place, ["*builder", "*acceptance", "tau", "ratio", "expected ratio"])
        for row in rows:
            ratios = report.interval(row["tau_ratio"]), report.interval(row["expected_tau_ratio"])
            table.add_row(row["builder"], row["acceptance"], f"{row['tau']['value']:.2f}" if row["tau"] else "-", *ratios)
        console.print(table)
    console.print(
        f"{result['settings']['prompts']} prompts; tau: tokens per round, bonus included; ratios over "
        f"{' with '.join(BASELINE)} of as many nodes, expected ones without the noise of coins; brackets: 95 % paired "
        "bootstrap over prompts."
    )


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Expected block efficiency over rows: a panel per temperature and head, a line per builder with its best rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    heads, temperatures = (list(dict.fromkeys(row[key] for row in rows)) for key in ("head", "temperature"))
    figure, axes = pyplot.subplots(
        len(heads), len(temperatures), squeeze=False, sharey=True, figsize=(4 * len(temperatures), 3.4 * len(heads))
    )
    for line, head in zip(axes, heads, strict=True):
        for axis, temperature in zip(line, temperatures, strict=True):
            here = [row for row in rows if row["head"] == head and row["temperature"] == temperature]
            for builder in dict.fromkeys(row["builder"] for row in here):
                best: dict[int, dict[str, Any]] = {}
                for row in here:
                    if row["builder"] == builder and row["expected_tau"]:
                        best[row["nodes"]] = max(row, best.get(row["nodes"], row), key=lambda r: r["expected_tau"]["value"])
                points = [best[nodes] for nodes in sorted(best)]
                label = f"{builder}, {points[-1]['acceptance']}" if points else builder
                axis.plot([p["nodes"] for p in points], [p["expected_tau"]["value"] for p in points], "o-", label=label)
            axis.set(title=f"{head}, T = {temperature:g}", xlabel="verified rows a round")
            axis.legend(fontsize="x-small")
        line[0].set_ylabel("tokens per round (expected)")
    figure.tight_layout()
    plots.save(figure, path)
    pyplot.close(figure)


def _over_rounds(answers: report.Answers, top: str, resamples: int) -> dict[str, Any] | None:
    """Sum of `top` over rounds with its bootstrap interval: a ratio over a system of one token a round."""
    beside = {key: {top: 1, "rounds": 1} for key in answers}
    return paired_ratio(answers, beside, top, "rounds", resamples)


def kind_of(config: tf.GenerateConfig) -> tuple[str, str]:
    builder, rule, shape = drafting(config)
    return ("one-path" if BUILDERS[builder].law_of(shape) == "one path" else builder), rule


def _place(config: tf.GenerateConfig) -> tuple[Any, ...]:
    return config.temperature, config.nodes, config.head


def _name(config: tf.GenerateConfig) -> str:
    return " ".join([*kind_of(config), str(config.head), f"{config.nodes} rows"])


def main(argv: list[str] | None = None) -> int:
    return standalone(__doc__, add_arguments, argv)


if __name__ == "__main__":
    sys.exit(main())
