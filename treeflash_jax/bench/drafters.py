"""Compares drafters of one verifier, chains and trees at equal nodes: `treeflash bench drafters --drafter tiny ngram`.

    treeflash bench drafters --verifier tiny --drafter tiny EAGLE-3=runs/eagle3/model ngram --out x.json

Every drafter decodes as a greedy chain and as best-first trees; a block drafter with a head also without it. All answer
the same prompts, taking turns, in one process. Of each: tokens per round, tokens per second beside one-token decoding, how
often a drafted token at depth i is accepted where the one above it was, the total variation distance of drafter and
verifier by depth (at temperature 1), and the device time of each stage of a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import treeflash_jax as tf
from treeflash_jax import drafters, files
from treeflash_jax.arguments import ModelOptions, add_fields
from treeflash_jax.bench import plots, standalone
from treeflash_jax.bench.depths import by_depth
from treeflash_jax.bench.progress import Progress
from treeflash_jax.bench.prompts import PromptSet, chosen_prompts, empty_chat
from treeflash_jax.bench.run import converse, environment
from treeflash_jax.bench.stages import Bench
from treeflash_jax.decoding.state import Weights
from treeflash_jax.devices import measure_ceilings
from treeflash_jax.settings import RuntimeConfig, SamplingConfig

SCHEMA = 1
SPARE_PROMPTS = 12  # answers of this many prompts are enough for the distances
LISTED = 256  # children of a row that the distances list


@dataclass
class Arm:
    """A drafter in one way of drafting, and what was measured of it so far.

    Attributes:
      way: "chain", "tree", or with the head of a block drafter left out "chain, no head" and "tree, no head".
      nodes: verified per round; None of one-token decoding.
    """

    drafter: str
    way: str
    model: tf.TreeFlash
    config: tf.GenerateConfig
    nodes: int | None = None
    lengths: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def add(self, results: Sequence[tf.Result]) -> None:
        for result in results:
            self.lengths += result.accept_lengths
            self.whole += result.accepted_before_cut
            self.ids.append(result.ids)
            self.tokens += len(result.ids)
            self.seconds += result.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("models")
    model.add_argument("--verifier", default="tiny", help="name, folder, GGUF file or Hub id (default: tiny)")
    model.add_argument(
        "--drafter", nargs="+", default=["tiny"], metavar="[LABEL=]NAME", help="names, folders or Hub ids (default: tiny)"
    )
    add_fields(model, ModelOptions, "dtype")
    add_fields(parser.add_argument_group("prompts"), PromptSet)
    sizes = parser.add_argument_group("sizes and sampling")
    sizes.add_argument("--nodes", nargs="+", type=int, default=[16, 64], help="sizes of trees (default: 16 64)")
    add_fields(sizes, SamplingConfig, "max_new_tokens temperature seed")
    add_fields(sizes, RuntimeConfig, "batch_size", batch_size=1)
    sizes.add_argument("--context", type=int, default=256, help="tokens in the cache of the timed stages (default: 256)")
    sizes.add_argument("--repeats", type=int, default=9, help="timed samples of a stage (default: 9)")
    output = parser.add_argument_group("output")
    output.add_argument("--out", required=True, metavar="FILE", help="JSON file")
    output.add_argument("--plot", metavar="FILE", help="picture (needs matplotlib)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures all arms, prints a table, writes the file and draws the picture.

    The file is written after every batch of prompts, with what was measured by then: a run that is stopped leaves it.

    Raises:
      ValueError: drafters that do not fit the verifier, sizes or outputs that cannot be.
    """
    if min(arguments.nodes) < 2:
        raise ValueError(f"got --nodes {min(arguments.nodes)}, expected at least 2: one-token decoding is always measured")
    for name in ("context", "repeats"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"got --{name} {getattr(arguments, name)}, expected at least 1")
    files.check_output(arguments.out, files.json_with("arms", inside=False))
    if arguments.plot:
        plots.check(arguments.plot)
    prompts = chosen_prompts(arguments)
    models = load_all(arguments)
    base = tf.GenerateConfig(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
    )
    arms = arms_of(models, base, arguments.nodes)
    first = next(iter(models.values()))
    names = "verifier max_new_tokens temperature seed batch_size context".split()
    settings = {name: getattr(arguments, name) for name in names}
    settings |= {"drafters": list(models), "dtype": str(first.dtype)}
    about = {"schema": SCHEMA, "settings": settings, **environment(first)}

    def save(answered: int, depths: dict[Any, Any], times: dict[Any, Any]) -> list[dict[str, Any]]:
        settings["prompts"] = answered
        rows = [row_of(arm, arms[0], depths.get((arm.drafter, arm.way)), times) for arm in arms]
        files.write(arguments.out, json.dumps(about | {"arms": rows}, indent=1) + "\n")
        return rows

    with Progress(3) as progress:
        progress.step("answering the prompts")
        for answered in answer_in_turn(arms, prompts, arguments, progress):
            save(answered, {}, {})
        progress.step("measuring distances by depth")
        chats = [empty_chat(replace(p, turns=p.turns[:1]), arguments.format) for p in prompts[:SPARE_PROMPTS]]
        depths = {
            (arm.drafter, arm.way): by_depth(arm.model, chats, hot(arm))
            for arm in arms
            if arm.nodes == max(arguments.nodes) and arm.way.startswith("tree")
        }
        progress.step("timing the stages")
        save(len(prompts), depths, {})
        rows = save(len(prompts), depths, times_of(arms, arguments))
    show(rows)
    if arguments.plot:
        draw(rows, arguments.plot)
    return 0


def load_all(arguments: argparse.Namespace) -> dict[str, tf.TreeFlash]:
    """The models by label, all of one verifier in memory. Raises ValueError for labels that occur twice."""
    models: dict[str, tf.TreeFlash] = {}
    for word in arguments.drafter:
        label, _, name = word.rpartition("=")
        label = label or name
        if label in models:
            raise ValueError(f"got two drafters called {label!r}, expected different labels: LABEL=NAME")
        model = tf.load(verifier=arguments.verifier, drafter=name, dtype=arguments.dtype)
        if models:
            model.weights = Weights(next(iter(models.values())).weights.verifier, model.weights.drafter)
        models[label] = model
    return models


def arms_of(models: dict[str, tf.TreeFlash], base: tf.GenerateConfig, nodes: Sequence[int]) -> list[Arm]:
    """One-token decoding, then of every drafter a chain and its trees; without its head too, where it has one."""
    arms = [Arm("none", "one token", next(iter(models.values())), replace(base, builder="none"))]
    for label, model in models.items():
        config = model.drafter
        heads = [(None, "")]
        if "head" in drafters.of(config).OPTIONS and config.head != "marginal":
            heads = [("marginal", ", no head"), (None, "")]
        for head, note in heads:
            chain = replace(base, builder="walk", head=head)
            arms.append(Arm(label, f"chain{note}", model, chain, model.plan(chain).num_nodes))
            trees = [replace(base, builder="best-first", head=head, nodes=count) for count in nodes]
            arms += [Arm(label, f"tree{note}", model, tree, tree.nodes) for tree in trees]
    return arms


def hot(arm: Arm) -> tf.GenerateConfig:
    """The laws of drafter and verifier as they are, and so many children that little of the drafter's is not listed."""
    own, size = drafters.of(arm.model.drafter), arm.model.verifier.vocab_size
    listed = {"children": min(LISTED, size)} if "children" in own.OPTIONS else {}
    return replace(arm.config, temperature=1.0, drafter_temperature=1.0, **listed)


def answer_in_turn(
    arms: Sequence[Arm], prompts: Sequence[Any], arguments: argparse.Namespace, progress: Progress
) -> Iterator[int]:
    """Every prompt by every arm, in an order that rotates; calls that compiled are made once more and not counted.

    Yields:
      how many prompts all arms have answered, after every batch.
    """
    size = arguments.batch_size
    batches = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    for number, batch in enumerate(batches):
        turn = number % len(arms)
        for arm in [*arms[turn:], *arms[:turn]]:
            progress.detail(f"prompt {number * size + 1} of {len(prompts)}: {arm.drafter}, {arm.way}")
            answers = converse(arm.model, batch, arm.config, arguments.format)
            if any(result.compile_seconds for results in answers for result in results):
                answers = converse(arm.model, batch, arm.config, arguments.format)
            for results in answers:
                arm.add(results)
        yield min(len(prompts), (number + 1) * size)


def times_of(arms: Sequence[Arm], arguments: argparse.Namespace) -> dict[tuple[str, str, int | None], dict[str, float]]:
    """Milliseconds of the stages of every arm that drafts, by drafter, way and nodes; and of a one-token step."""
    found: dict[tuple[str, str, int | None], dict[str, float]] = {}
    ceilings = measure_ceilings(arms[0].model.dtype)
    for arm in arms[1:]:
        plan = arm.model.plan(arm.config)
        sizes = {"batch": arguments.batch_size, "context": arguments.context}
        rows = Bench(arm.model, [plan], temperature=arguments.temperature, **sizes).measure(ceilings, arguments.repeats)
        found[arm.drafter, arm.way, arm.nodes] = {row["stage"]: row["ms"] for row in rows if row["stage"] != "prefill"}
    return found


def row_of(arm: Arm, plain: Arm, depths: dict[str, Any] | None, times: dict[Any, dict[str, float]]) -> dict[str, Any]:
    """What is written of an arm."""
    most = max(arm.whole, default=1)
    reached = [sum(length > depth for length in arm.whole) for depth in range(most + 1)]
    return {
        "drafter": arm.drafter,
        "way": arm.way,
        "kind": getattr(arm.model.drafter, "kind", None) if arm is not plain else None,
        "nodes": arm.nodes,
        "rounds": len(arm.lengths),
        "tau": round(sum(arm.lengths) / len(arm.lengths), 3) if arm is not plain and arm.lengths else None,
        "tokens_per_second": round(arm.tokens / arm.seconds, 2),
        "speedup": round(arm.tokens / arm.seconds / (plain.tokens / plain.seconds), 3),
        "identical": arm.ids == plain.ids,
        # of the rounds that accepted i - 1 drafted tokens, how many accepted one more
        "accepted_by_depth": [round(reached[i] / reached[i - 1], 4) for i in range(1, most) if reached[i - 1]],
        "distance_by_depth": depths,
        "stages_ms": times.get((arm.drafter, arm.way, arm.nodes)),
        "drafter_stages": None if arm is plain else list(drafters.of(arm.model.drafter).stages(arm.model.drafter)),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("drafter", "way", "nodes", "tau", "tokens/s", "speedup", "identical", "accepted at depth 1, 2, ..."):
        table.add_column(name, justify="left" if name in ("drafter", "way") else "right")
    table.add_column("draft + tree, ms", justify="right")
    table.add_column("round / step", justify="right")
    for row in rows:
        times = row["stages_ms"] or {}
        drafting = sum(times[name] for name in (*(row["drafter_stages"] or ()), "tree") if name in times)
        values = [row["drafter"], row["way"], row["nodes"], row["tau"], row["tokens_per_second"], row["speedup"]]
        values += ["yes" if row["identical"] else "no", " ".join(f"{x:.2f}" for x in row["accepted_by_depth"][:6])]
        values += [f"{drafting:.2f}" if times else None, f"{times['round'] / times['step']:.2f}" if times else None]
        table.add_row(*("" if value is None else str(value) for value in values))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Three panels: tokens per round over nodes, time of a round by stage, and distance from the verifier by depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    drafted = [row for row in rows if row["nodes"]]
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row["drafter"] for row in drafted))}

    def line(drafter: str, way: str) -> dict[str, str]:
        style, marker = (":" if "no head" in way else "-"), ("x" if "chain" in way else "o")
        return {"label": f"{drafter}, {way}", "color": colours[drafter], "linestyle": style, "marker": marker}

    for name in dict.fromkeys((row["drafter"], row["way"]) for row in drafted):
        own = sorted((row["nodes"], row["tau"]) for row in drafted if (row["drafter"], row["way"]) == name)
        left.plot(*zip(*own, strict=True), **line(*name))
    left.set(xlabel="nodes verified per round", ylabel="tokens per round (tau)")
    figure.legend(*left.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=7)
    stages = list(dict.fromkeys(s for row in drafted for s in row["stages_ms"] if s not in ("round", "step")))
    labels = [f"{row['drafter']}, {row['way']} {row['nodes']}" for row in drafted]
    bottom = np.zeros(len(drafted))
    for stage in stages:
        width = np.asarray([row["stages_ms"].get(stage, 0.0) for row in drafted])
        middle.barh(labels, width, left=bottom, label=stage)
        bottom += width
    middle.invert_yaxis()
    middle.tick_params(axis="y", labelsize=7)
    middle.set(xlabel="ms of a round, by stage")
    middle.legend(fontsize=7)
    for row in {(row["drafter"], row["way"]): row for row in drafted}.values():
        if row["distance_by_depth"]:
            distance = row["distance_by_depth"]["distance"]
            right.plot(range(1, len(distance) + 1), distance, **line(row["drafter"], row["way"]))
    right.set(xlabel="depth", ylabel="total variation distance", ylim=(0, 1))
    plots.save(figure, path)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    return standalone(__doc__, add_arguments, argv)


if __name__ == "__main__":
    sys.exit(main())
