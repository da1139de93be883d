"""Compares drafters of one verifier, chains and trees of equal nodes: `treeflash bench drafters --drafter tiny ngram`.

    treeflash bench drafters --verifier tiny --drafter tiny EAGLE-3=runs/eagle3/model ngram --out x.json

Every drafter decodes with a greedy chain and with best-first trees; a block drafter with a head also without it. All answer
the same prompts in turns, in one process. Of each: what `bench report` shows, the total variation distance of drafter and
verifier by depth (at temperature 1), and the device time of each phase of a round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import treeflash_jax as tf
from treeflash_jax import drafters
from treeflash_jax.bench import harness, plots, report
from treeflash_jax.bench.bars import Progress
from treeflash_jax.bench.bench_records import Record
from treeflash_jax.bench.depths import distances_by_depth
from treeflash_jax.bench.harness import System
from treeflash_jax.bench.phases import Bench
from treeflash_jax.bench.prompt_sets import PromptSet, chosen_prompts, empty_chat
from treeflash_jax.bench.shapes import MeasuredSizes
from treeflash_jax.cli.arguments import ModelOptions, add_fields, option_values
from treeflash_jax.core import files
from treeflash_jax.decoding.state import Weights
from treeflash_jax.engine.settings import RuntimeConfig, SamplingConfig
from treeflash_jax.models.ceilings import measure_ceilings

DISTANCE_PROMPTS = 12
LISTED = 256  # children of a node that the distances compare one by one
Key = tuple[str, str, int | None]  # drafter, "chain" or "tree" with or without the drafter's head, and nodes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("models")
    model.add_argument("--verifier", default="tiny", help="name, folder, GGUF file or Hub id (default: tiny)")
    model.add_argument(
        "--drafter", nargs="+", default=["tiny"], metavar="[LABEL=]NAME", help="names, folders or Hub ids (default: tiny)"
    )
    add_fields(model, ModelOptions, "dtype")
    add_fields(parser.add_argument_group("prompts"), PromptSet)
    sizes = parser.add_argument_group("sizes and sampling")
    names = "nodes context repeats"
    add_fields(sizes, MeasuredSizes, names, several="nodes", nodes=[16, 64])
    add_fields(sizes, SamplingConfig, "max_new_tokens temperature seed")
    add_fields(sizes, RuntimeConfig, "batch_size", batch_size=1)
    output = parser.add_argument_group("output")
    output.add_argument("--out", required=True, metavar="FILE", help="JSON file")
    output.add_argument("--plot", metavar="FILE", help="picture (needs matplotlib)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures all systems, prints tables, writes the file and draws the picture.

    The file is written after every batch of prompts with all results so far; a run that is stopped leaves it.

    Raises:
      ValueError: drafters that do not fit the verifier, invalid sizes or outputs.
    """
    if min(arguments.nodes) < 2:
        raise ValueError(f"got --nodes {min(arguments.nodes)}, expected at least 2: one-token decoding is always measured")
    files.check_output(arguments.out, files.json_with("systems", inside=False))
    plots.check(arguments.plot)
    prompts = chosen_prompts(arguments)
    base = tf.GenerateConfig(**option_values(arguments, SamplingConfig), batch_size=arguments.batch_size)
    systems = make_systems(load_all(arguments), base, arguments.nodes, arguments.verifier)
    records: list[Record] = []
    distances: dict[tuple[str, str], Any] = {}
    times: dict[str, dict[str, float]] = {}

    def save() -> dict[str, Any]:
        """Writes and returns the summary of the records, with the drafter, distances and times of every system."""
        summary = report.summarise(records)
        keys = {system.name: key for key, system in systems.items()}
        for entry in summary["systems"]:
            drafter, way, _ = keys[entry["system"]]
            entry |= {"drafter": drafter, "way": way, "distance_by_depth": distances.get((drafter, way))}
            entry["phases_ms"] = times.get(entry["system"])
        files.write(arguments.out, json.dumps(summary, indent=1) + "\n")
        return summary

    with Progress(3) as progress:
        progress.step("answering the prompts")
        sampling = {"temperatures": [arguments.temperature], "seeds": [arguments.seed]}
        for record in harness.measure(list(systems.values()), prompts, format=arguments.format, **sampling):
            records.append(record)
            if len(records) % (len(systems) * arguments.batch_size) == 0:
                save()
        save()
        progress.step("measuring distances by depth")
        chats = [empty_chat(replace(p, turns=p.turns[:1]), arguments.format) for p in prompts[:DISTANCE_PROMPTS]]
        for (drafter, way, nodes), system in systems.items():
            if nodes == max(arguments.nodes) and way.startswith("tree"):
                # Neither distribution is sharpened, and most of the drafter's is listed.
                config = replace(system.config, temperature=1.0, drafter_temperature=1.0)
                if hasattr(drafters.of(system.model.drafter).OPTIONS, "children"):
                    config = replace(config, children=min(LISTED, system.model.verifier.vocab_size))
                distances[drafter, way] = distances_by_depth(system.model, chats, config)
        save()
        progress.step("timing the phases")
        ceilings = measure_ceilings(systems["none", "one token", None].model.dtype)
        sizes = {"batch": arguments.batch_size, "context": arguments.context, "temperature": arguments.temperature}
        for system in list(systems.values())[1:]:
            phases = Bench(system.model, [system.model.plan(system.config)], **sizes).measure(ceilings, arguments.repeats)
            times[system.name] = {phase["phase"]: phase["ms"] for phase in phases if phase["phase"] != "prefill"}
        summary = save()
    report.show(summary)
    show_phases(summary["systems"])
    if arguments.plot:
        draw(summary["systems"], arguments.plot)
    return 0


def load_all(arguments: argparse.Namespace) -> dict[str, tf.TreeFlash]:
    """Loads the models by label, with one verifier in memory. Raises ValueError for labels that occur twice."""
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


def make_systems(
    models: dict[str, tf.TreeFlash], base: tf.GenerateConfig, nodes: Sequence[int], verifier: str = "tiny"
) -> dict[Key, System]:
    """Makes one-token decoding, and a chain and trees of every drafter, without its head too if it has one."""
    plain = System(name="one token", model=next(iter(models.values())), config=replace(base, builder="none"))
    systems: dict[Key, System] = {("none", "one token", None): plain}
    for label, model in models.items():
        heads = [(None, "")]
        if hasattr(drafters.of(model.drafter).OPTIONS, "head") and model.drafter.head != "marginal":
            heads = [("marginal", ", no head"), (None, "")]
        for head, note in heads:
            configs = [("chain", replace(base, builder="walk", head=head))]
            configs += [("tree", replace(base, builder="best-first", head=head, nodes=count)) for count in nodes]
            for way, config in configs:
                key = label, way + note, model.plan(config).num_nodes
                name = ", ".join(map(str, key))
                systems[key] = System(name=name, model=model, config=config, pair=(verifier, label))
    return systems


def show_phases(systems: Sequence[dict[str, Any]]) -> None:
    """Prints a table of the phases' times."""
    phases = list(dict.fromkeys(phase for system in systems for phase in system["phases_ms"] or ()))
    table = report.make_table("device time, ms", ["*system", *phases, "round / step"])
    for system in systems:
        if times := system["phases_ms"]:
            cells = [f"{times[phase]:.2f}" if phase in times else "-" for phase in phases]
            table.add_row(system["system"], *cells, f"{times['round'] / times['step']:.2f}")
    report.table_console().print(table)


def draw(systems: Sequence[dict[str, Any]], path: str) -> None:
    """Draws tokens per round over nodes, and distance from the verifier over depth."""
    tau: dict[str, dict[float, float]] = {}
    distances: dict[str, dict[float, float]] = {}
    for system in systems:
        label = f"{system['drafter']}, {system['way']}"
        if system["nodes"] and system["tau"]:
            tau.setdefault(label, {})[system["nodes"]] = system["tau"]
        if system["distance_by_depth"]:
            distances[label] = dict(enumerate(system["distance_by_depth"]["distance"], start=1))
    plots.draw({"tokens per round over nodes": tau, "total variation distance over depth": distances}, path)
