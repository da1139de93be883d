"""Measures a drafter against one-token decoding, on prompts that were held out from its training.

    python -m train.measure runs/pair/measure.toml

Each runs at its own best settings: a trial on two prompts picks dtype and attention of one-token decoding, and dtype and
nodes of the draft trees. Then both answer every prompt, batch 1, in one process and in turns. Prints medians and writes all
of it as JSON. Compilation is never counted.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import treeflash_jax as tf
from train import config, data, progress, respond
from treeflash_jax import devices, files
from treeflash_jax.checks import bounded
from treeflash_jax.trees.shape import MOST_NODES

TRIAL_PROMPTS = 2
# What is tried, by backend; elsewhere the library's defaults. Kernels for accelerators were never run, so none is tried.
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
    nodes: tuple[int, ...] = bounded((8, 16, 32), least=1, most=MOST_NODES)
    temperatures: tuple[float, ...] = bounded((0.0, 0.7), least=0)
    seconds: float = bounded(0.0, least=0)
    seed: int = bounded(0, least=0)

    def __post_init__(self) -> None:
        for name in ("nodes", "temperatures"):
            if not getattr(self, name):
                raise ValueError(f"got no {name}, expected at least one")


@dataclass(frozen=True)
class System:
    """A way to decode: a dtype, and settings that `generate` is given."""

    dtype: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return ", ".join([self.dtype, *(f"{key} {value}" for key, value in self.settings if key != "builder")])


def main(settings: MeasureStage) -> None:
    files.check_output(settings.out, files.json_with("settings", "machine", "systems", "temperatures"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tau is")  # a drafter that accepts little is a result here
        measured = measure(settings)
    files.write(settings.out, json.dumps(measured, indent=1) + "\n")
    progress.table(f"{measured['prompts']} held-out prompts, {measured['machine']}", rows_of(measured))


def measure(settings: MeasureStage) -> dict[str, Any]:
    """Everything that is reported; see `rows_of` for its summary.

    Raises:
      ValueError: no held-out prompt, or a pair that cannot be loaded.
    """
    began = time.perf_counter()
    model = tf.load(verifier=settings.verifier, drafter=settings.drafter)
    own = str(model.dtype)
    models = {own: model}
    for dtype in DTYPES.get(devices.here().backend, ()):
        if dtype not in models:
            models[dtype] = tf.load(verifier=settings.verifier, drafter=settings.drafter, dtype=jnp.dtype(dtype))
    asked = config.load(respond.RespondConfig, settings.respond)
    found = [prompt.ids for prompt in respond.collect_prompts(asked, model, held_out=True)]
    prompts = [found[i] for i in data.spread(min(settings.prompts, len(found)), len(found))]
    tried = prompts[:: max(1, len(prompts) // TRIAL_PROMPTS)][:TRIAL_PROMPTS]
    plain, drafted, speeds = _trial(models, tried, settings, began + settings.seconds / 2)
    if settings.seconds:
        left = settings.seconds - (time.perf_counter() - began)
        both = settings.new_tokens * (1 / speeds[plain] + 1 / speeds[drafted]) * len(settings.temperatures)
        count = min(len(prompts), max(TRIAL_PROMPTS, int(left / both)))
        prompts = [prompts[i] for i in data.spread(count, len(prompts))]
    return {
        "settings": config.to_dict(settings),
        "machine": f"{devices.here().kind}, {os.cpu_count()} cores",
        "prompts": len(prompts),
        "trial": {f"{_kind(system)}: {system.name}": speed for system, speed in speeds.items()},
        "systems": {"one token": plain.name, "drafted": drafted.name},
        "options": {"nodes": dict(drafted.settings)["nodes"]} | ({} if drafted.dtype == own else {"dtype": drafted.dtype}),
        "comparable": plain.dtype == drafted.dtype,
        "temperatures": [_compare(models, plain, drafted, prompts, t, settings) for t in settings.temperatures],
    }


def rows_of(measured: dict[str, Any]) -> dict[str, str]:
    """Names and values of the closing table."""
    rows = {f"{name}, its best settings": system for name, system in measured["systems"].items()}
    for found in measured["temperatures"]:
        at = "greedy" if found["temperature"] == 0 else f"T = {found['temperature']:g}"
        same = f", {found['same']} of {measured['prompts']} answers the same" if measured["comparable"] else ""
        one, ours = found["tokens_per_second"]["one token"], found["tokens_per_second"]["drafted"]
        rows[at] = f"tau {found['tau']:.2f}, {ours:.1f} against {one:.1f} tokens/s: {found['speedup']:.2f} x{same}"
    return rows


def _trial(
    models: dict[str, tf.TreeFlash], prompts: Sequence[list[int]], settings: MeasureStage, deadline: float
) -> tuple[System, System, dict[System, float]]:
    """The fastest one-token and drafted system, and the tokens/s of all that were tried: with a limit, until `deadline`."""
    plain = [
        System(dtype, (("builder", "none"), ("attention", attention)))
        for dtype in models
        for attention in ATTENTION.get(devices.here().backend, ("xla",))
    ]
    speeds: dict[System, float] = {}
    with progress.Bar("trial", len(plain) + len(models) + len(settings.nodes) - 1) as bar:

        def fastest(systems: Sequence[System]) -> System:
            for system in systems:
                is_late = settings.seconds and time.perf_counter() > deadline and any(s in speeds for s in systems)
                if system not in speeds and not is_late:
                    answers = [_answer(models, system, ids, settings, temperature=0.0) for ids in prompts]
                    speeds[system] = statistics.median(answer.tokens_per_second for answer in answers)
                    bar.update(len(speeds), system.name)
            return max((system for system in systems if system in speeds), key=speeds.__getitem__)

        best = fastest(plain)
        middle = settings.nodes[len(settings.nodes) // 2]
        dtype = fastest([_tree(dtype, middle) for dtype in models]).dtype
        return best, fastest([_tree(dtype, nodes) for nodes in settings.nodes]), speeds


def _tree(dtype: str, nodes: int) -> System:
    return System(dtype, (("nodes", nodes),))


def _kind(system: System) -> str:
    return "one token" if ("builder", "none") in system.settings else "drafted"


def _compare(
    models: dict[str, tf.TreeFlash],
    plain: System,
    drafted: System,
    prompts: Sequence[list[int]],
    temperature: float,
    settings: MeasureStage,
) -> dict[str, Any]:
    """Both systems on every prompt, in turns, each first in half of them."""
    answers: dict[str, list[tf.Result]] = {"one token": [], "drafted": []}
    systems = {"one token": plain, "drafted": drafted}
    with progress.Bar(f"prompts at T = {temperature:g}", len(prompts)) as bar:
        for number, ids in enumerate(prompts):
            for name in list(systems)[:: 1 if number % 2 else -1]:
                answers[name].append(_answer(models, systems[name], ids, settings, temperature))
            bar.update(number + 1)
    speeds = {name: [result.tokens_per_second for result in results] for name, results in answers.items()}
    lengths = [length for result in answers["drafted"] for length in result.accept_lengths]
    return {
        "temperature": temperature,
        "tau": sum(lengths) / max(1, len(lengths)),
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "speedup": statistics.median(b / a for a, b in zip(speeds["one token"], speeds["drafted"], strict=True)),
        "same": sum(a.ids == b.ids for a, b in zip(answers["one token"], answers["drafted"], strict=True)),
        "by_prompt": speeds,
    }


def _answer(
    models: dict[str, tf.TreeFlash], system: System, ids: list[int], settings: MeasureStage, temperature: float
) -> tf.Result:
    """One answer; asked again where the first call had to compile."""
    own = dict(system.settings) | dict(temperature=temperature, seed=settings.seed)
    for _ in range(2):
        [result] = models[system.dtype].generate([ids], max_new_tokens=settings.new_tokens, batch_size=1, **own)
        if result.finished == "interrupted":
            raise SystemExit("interrupted; the same command measures again")
        if not result.compile_seconds:
            break
    return result


if __name__ == "__main__":
    config.run(main, MeasureStage, __doc__)
