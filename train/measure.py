"""Measures a drafter against one-token decoding, on prompts that were held out from its training.

    python -m train.measure runs/pair/measure.toml

Each runs at its own best settings: a trial on two prompts picks dtype and attention of one-token decoding, and dtype and
nodes of the draft trees. Then both answer every prompt, batch 1, in one process and in turns. Prints a table and writes a
summary as JSON. Compilation is never counted.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import treeflash_jax as tf
from train import respond
from train.data import packing
from train.runtime import hosts, run_config, watch
from treeflash_jax.bench import harness, report
from treeflash_jax.bench.harness import System
from treeflash_jax.bench.prompt_sets import BenchPrompt
from treeflash_jax.core import devices, files
from treeflash_jax.core.checks import NonNegative, bounded
from treeflash_jax.trees.shape import Nodes

TRIAL_PROMPTS = 2
# Tried on each backend; on others the library's defaults. Kernels for accelerators have never been run, so none is tried.
DTYPES = {"cpu": ("float32", "bfloat16")}
ATTENTION = {"cpu": ("xla", "streamed")}


@dataclass(frozen=True, kw_only=True)
class MeasureStage:
    """Settings of this stage.

    Attributes:
      verifier: name of a pair, folder, GGUF file or Hub id.
      drafter: name of a pair, folder or Hub id.
      respond: settings file of `train.respond`; the prompts that it holds out are answered.
      out: JSON file of results.
      prompts: largest number of prompts.
      new_tokens: tokens generated per answer.
      nodes: numbers of nodes tried for the draft trees, root included.
      temperatures: sampling temperatures measured.
      seconds: time of the whole measurement; 0 sets no limit. Trials stop after half of it, and as many prompts are used as
        fit into the rest, at least two.
      seed: random seed of the answers.
    """

    verifier: str
    drafter: str
    respond: str
    out: str
    prompts: int = bounded(16, least=1)
    new_tokens: int = bounded(96, least=1)
    nodes: tuple[Nodes, ...] = (8, 16, 32)
    temperatures: tuple[NonNegative, ...] = (0.0, 0.7)
    seconds: float = bounded(0.0, least=0)
    seed: int = bounded(0, least=0)

    def __post_init__(self) -> None:
        for name in ("nodes", "temperatures"):
            if not getattr(self, name):
                raise ValueError(f"got no {name}, expected at least one")


def main(settings: MeasureStage) -> None:
    files.check_output(settings.out, files.json_with("settings", "trial", "systems", "options"))
    measured = measure(settings)
    files.write(settings.out, json.dumps(measured, indent=1) + "\n")
    if hosts.is_first():
        report.show(measured)


def measure(settings: MeasureStage) -> dict[str, Any]:
    """Tries the systems, then compares the fastest one-token and the fastest drafted system.

    Returns:
      The summary of `report.summarise`, the tokens/s of all systems that were tried, and the options of the drafted one.

    Raises:
      ValueError: no held-out prompt, or a pair that cannot be loaded.
    """
    began = time.perf_counter()
    asked = run_config.load(respond.RespondConfig, settings.respond)
    pair = {"verifier": settings.verifier, "drafter": settings.drafter}
    pair |= {"thinking": asked.thinking, "template": asked.template}
    model = tf.load(**pair)
    models = {str(model.dtype): model}
    for dtype in DTYPES.get(devices.here().backend, ()):
        if dtype not in models:
            models[dtype] = tf.load(**pair, dtype=jnp.dtype(dtype))
    held_out = respond.collect_prompts(asked, model, held_out=True)
    prompts = _spread([BenchPrompt(id=str(i), ids=prompt.ids) for i, prompt in enumerate(held_out)], settings.prompts)
    trial = prompts[:: max(1, len(prompts) // TRIAL_PROMPTS)][:TRIAL_PROMPTS]
    plain, drafted, speeds = _try(models, trial, settings, began + settings.seconds / 2)
    if settings.seconds:
        seconds_left = settings.seconds - (time.perf_counter() - began)
        seconds = settings.new_tokens * (1 / speeds[plain.name] + 1 / speeds[drafted.name]) * len(settings.temperatures)
        prompts = _spread(prompts, max(TRIAL_PROMPTS, int(seconds_left / seconds)))
    with watch.Bar("answers", 2 * len(prompts) * len(settings.temperatures)) as bar:
        sampling = {"temperatures": settings.temperatures, "seeds": [settings.seed], "tell": lambda text: None}
        records = []
        for record in harness.measure([plain, drafted], prompts, **sampling):
            records.append(record)
            bar.show(len(records))
    summary, dtype = report.summarise(records), str(drafted.model.dtype)
    return summary | {
        "settings": summary["settings"] | run_config.to_dict(settings),
        "prompts": len(prompts),
        "trial": speeds,
        "options": {"nodes": drafted.config.nodes} | ({} if dtype == str(model.dtype) else {"dtype": dtype}),
    }


def _spread(prompts: list[BenchPrompt], count: int) -> list[BenchPrompt]:
    return [prompts[i] for i in packing.spread(min(count, len(prompts)), len(prompts))]


def _try(
    models: dict[str, tf.TreeFlash], prompts: list[BenchPrompt], settings: MeasureStage, deadline: float
) -> tuple[System, System, dict[str, float]]:
    """Returns the fastest one-token and the fastest drafted system, and the tokens/s of all that were tried in time."""
    speeds: dict[str, float] = {}

    def system(dtype: str, **options: Any) -> System:
        words = [f"{key} {value}" for key, value in options.items() if key != "builder"]
        name = ", ".join([f"one token: {dtype}" if "builder" in options else f"drafted: {dtype}", *words])
        config = tf.GenerateConfig(max_new_tokens=settings.new_tokens, batch_size=1, **options)
        return System(name=name, model=models[dtype], config=config, pair=(settings.verifier, settings.drafter))

    def fastest(systems: list[System]) -> System:
        for candidate in systems:
            is_late = settings.seconds and time.perf_counter() > deadline and any(s.name in speeds for s in systems)
            if candidate.name not in speeds and not is_late:
                records = harness.measure([candidate], prompts, seeds=[settings.seed], tell=lambda text: None)
                speeds[candidate.name] = statistics.median(record["tokens"] / record["seconds"] for record in records)
                bar.show(len(speeds), candidate.name)
        return max((s for s in systems if s.name in speeds), key=lambda s: speeds[s.name])

    attention = ATTENTION.get(devices.here().backend, ("xla",))
    plain = [system(dtype, builder="none", attention=kind) for dtype in models for kind in attention]
    middle = settings.nodes[len(settings.nodes) // 2]
    with watch.Bar("trial", len(plain) + len(models) + len(settings.nodes) - 1) as bar:
        best = fastest(plain)
        dtype = str(fastest([system(dtype, nodes=middle) for dtype in models]).model.dtype)
        return best, fastest([system(dtype, nodes=nodes) for nodes in settings.nodes]), speeds


if __name__ == "__main__":
    run_config.run(main, MeasureStage, __doc__)
