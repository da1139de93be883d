"""Measures a drafter against one-token decoding, on prompts that were held out of its training.

    python -m train.measure runs/pair/measure.toml

At batch 1, every prompt is answered in turn with trees of `nodes` nodes, with trees of n-grams alone (which need no
drafter), and by one-token decoding, once with the device's default attention and once with another one. The faster of these
two is the baseline. Prints a table and writes a summary as JSON. Compilation is never counted.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import treeflash_jax as tf
from train import respond
from train.data import packing
from train.runtime import hosts, run_config, watch
from train.runtime.run_config import MeshConfig
from treeflash_jax.bench import harness, report
from treeflash_jax.bench.bench_records import read_kept
from treeflash_jax.bench.harness import System
from treeflash_jax.bench.prompt_sets import BenchPrompt
from treeflash_jax.core import files
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters.ngram_drafter import NgramDrafter
from treeflash_jax.trees.tree_inputs import MAX_NODES

NGRAMS = "n-grams alone"  # name of a system


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Settings of this stage."""

    verifier: str = setting(help="name of a pair, folder, GGUF file or Hub id")
    drafter: str = setting(help="name of a pair, folder or Hub id")
    respond: str = setting(help="settings file of `train.respond`; the prompts that it holds out are answered")
    out: str = setting(help="JSON file of results")
    prompts: int = setting(16, "largest number of prompts", least=1)
    new_tokens: int = setting(96, "tokens generated per answer", least=1)
    nodes: int | None = setting(
        None, "nodes of the draft trees, root included", unset="the default of this device", least=2, most=MAX_NODES
    )
    temperatures: tuple[float, ...] = setting((0.0, 0.7), "sampling temperatures measured", min_length=1, least=0)
    seconds: float = setting(
        0.0, "time after which no further prompt is begun, except for a second one; 0 sets no limit", least=0
    )
    seed: int = setting(0, "random seed of the answers", least=0, most=run_config.MAX_SEED)
    devices: int = setting(1, "devices that split the pair, if one does not hold it", least=1)


def main(settings: MeasureConfig) -> None:
    read_kept(settings.out, "settings", "systems")  # refuses to replace another file
    measured = measure(settings)
    files.write(settings.out, json.dumps(measured, indent=1) + "\n")
    if hosts.is_first():
        report.show(measured)


def measure(settings: MeasureConfig) -> dict[str, Any]:
    """Returns the summary of `report.summarise`, with the number of nodes of the trees among its settings.

    Entries of systems also have "over_ngrams", their speed relative to n-grams alone.
    """
    began = time.perf_counter()
    responded = run_config.load(respond.RespondConfig, settings.respond)
    mesh = hosts.make_mesh(MeshConfig(data=1, model=settings.devices))
    model = tf.load(
        verifier=settings.verifier,
        drafter=settings.drafter,
        mesh=None if mesh.size == 1 else mesh,
        thinking=responded.thinking,
        template=responded.template,
    )
    held_out = respond.collect_prompts(responded, model, held_out=True)
    prompts = [BenchPrompt(id=str(i), ids=prompt.ids) for i, prompt in enumerate(held_out)]
    prompts = packing.pick_spread(prompts, settings.prompts)
    systems = make_systems(model, settings)
    answers = len(systems) * len(settings.temperatures)
    records = []
    measured = harness.measure(
        systems, prompts, temperatures=settings.temperatures, seeds=[settings.seed], notify=lambda text: None
    )
    with watch.Bar("answers", answers * len(prompts)) as bar:
        for record in measured:
            records.append(record)
            bar.show(len(records))
            is_late = settings.seconds and time.perf_counter() - began > settings.seconds
            if is_late and len(records) % answers == 0 and len(records) > answers:
                break
    seconds = Counter[str]()
    for record in records:
        seconds[record["system"]] += record["seconds"] / record["tokens"]
    slower = max((system.name for system in systems if system.config.builder == "none"), key=seconds.get)
    summary = report.summarise([x for x in records if x["system"] != slower])
    nodes = systems[0].config.nodes
    for entry in summary["systems"]:
        drafted = _answers(records, entry["system"], entry["temperature"])
        ngrams = _answers(records, NGRAMS, entry["temperature"])
        entry["over_ngrams"] = report.paired_ratio(drafted, ngrams, "tokens", "seconds")
    options = summary["settings"] | run_config.to_dict(settings) | {"nodes": nodes}
    return summary | {"settings": options, "prompts": len(records) // answers}


def _answers(records: list[dict[str, Any]], system: str, temperature: float) -> report.Answers:
    chosen = [x for x in records if (x["system"], x["settings"]["temperature"]) == (system, temperature)]
    return {(x["prompt_id"], x["settings"]["seed"]): x for x in chosen}


def make_systems(model: tf.TreeFlash, settings: MeasureConfig) -> list[System]:
    """Returns the systems to compare: the drafter, n-grams alone, and one-token decoding with two kinds of attention."""
    limits: dict[str, Any] = {"max_new_tokens": settings.new_tokens, "batch_size": 1}
    nodes = settings.nodes or model.plan(tf.GenerateConfig(builder="best-first")).num_nodes
    plain = tf.GenerateConfig(builder="none", **limits)
    usual = model.plan(plain).attention
    other = "streamed" if usual == "xla" else "xla"
    ngrams = tf.TreeFlash(
        model.verifier,
        replace(model.weights, drafter={}),
        drafter=NgramDrafter(),
        tokenizer=model.tokenizer,
        stop_ids=model.stop_ids,
        mesh=model.mesh,
        names=(model.names[0], "ngram"),
        recommended=model.recommended,
    )
    systems = {
        f"drafted, {nodes} nodes": (model, tf.GenerateConfig(nodes=nodes, **limits)),
        NGRAMS: (ngrams, tf.GenerateConfig(builder="best-first", **limits)),
        f"one token, {usual} attention": (model, plain),
        f"one token, {other} attention": (model, replace(plain, attention=other)),
    }
    return [System(name=name, model=model, config=how) for name, (model, how) in systems.items()]


if __name__ == "__main__":
    run_config.run_command(main, MeasureConfig, __doc__)
