"""Compares delayed trees on prompts: fixed trunks, trunk="auto", and a selector that `train.selector` made.

    python -m train.delayed selector=runs/tiny/selector/selector.safetensors prompts=prompts.jsonl out=delayed.json

All systems answer every prompt, batch 1, in one process and in turns that rotate from prompt to prompt, beside one-token
decoding. Compilation is never counted. Errors are standard errors of a bootstrap over the prompts; `against auto` is the
ratio to trunk="auto" on the same prompts with a 95 % interval.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import treeflash_jax as tf
from train import config, progress
from treeflash_jax import devices, files
from treeflash_jax.bench.prompts import draw, read_prompts
from treeflash_jax.checks import bounded

RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class DelayedStage:
    """Settings of this command.

    Attributes:
      verifier, drafter: name of a pair, folder, GGUF file or Hub id.
      selector: file of a selector for them.
      prompts: JSONL file; the first turn of each is asked.
      out: JSON file of results.
      limit: number of prompts, spread over the file.
      new_tokens: tokens of each answer.
      nodes, branches, trunks: sizes of the fixed trees, and of trunk="auto".
      fewer: further numbers of nodes of trunk="auto".
      depths: deepest level drafted, of drafters that have the option; 0: the drafter's own.
      temperatures: sampling temperatures of the verifier that are measured.
      seed: random seed of the answers.
    """

    verifier: str = "tiny"
    drafter: str | None = None
    selector: str
    prompts: str
    out: str
    limit: int = bounded(48, least=2)
    new_tokens: int = bounded(96, least=2)
    nodes: int = bounded(16, least=2)
    branches: int = bounded(2, least=1)
    trunks: tuple[int, ...] = bounded((0, 1, 2, 3), least=0)
    fewer: tuple[int, ...] = bounded((), least=2)
    depths: int = bounded(0, least=0)
    temperatures: tuple[float, ...] = bounded((0.6, 1.0), above=0)
    seed: int = bounded(0, least=0)


def main(settings: DelayedStage) -> None:
    files.check_output(settings.out, files.json_with("settings", "machine", "rows"))
    model = tf.load(verifier=settings.verifier, drafter=settings.drafter)
    prompts = [prompt.opening + [{"role": "user", "content": prompt.turns[0]}] for prompt in asked(settings)]
    delayed: dict[str, Any] = {"builder": "delayed"} | ({"depths": settings.depths} if settings.depths else {})
    sized = delayed | {"nodes": settings.nodes, "branches": settings.branches}
    systems: dict[str, dict[str, Any]] = {"one token": {"builder": "none"}}
    systems |= {f"trunk {trunk}": sized | {"trunk": trunk} for trunk in settings.trunks}
    systems |= {f"trunk auto, {nodes} nodes": sized | {"trunk": "auto", "nodes": nodes} for nodes in settings.fewer}
    systems |= {"trunk auto": sized | {"trunk": "auto"}, "selector": delayed | {"selector": settings.selector}}
    rows = []
    for temperature in settings.temperatures:
        answers = answered(model, systems, prompts, settings, temperature)
        rows += [{"temperature": temperature, "system": name, **figures(answers, name)} for name in systems]
    device = devices.here()
    result = {
        "settings": config.to_dict(settings),
        "command": " ".join(["python -m train.delayed", *sys.argv[1:]]),
        "machine": f"{device.kind}, {os.cpu_count()} cores, {model.dtype.name}, jax {jax.__version__}",
        "prompts": len(prompts),
        "rows": rows,
    }
    files.write(settings.out, json.dumps(result, indent=1) + "\n")
    progress.table(result["machine"], {f"T {row['temperature']:g}, {row['system']}": shown(row) for row in rows})


def asked(settings: DelayedStage) -> list[Any]:
    return draw(read_prompts(settings.prompts), settings.limit)


def answered(
    model: tf.TreeFlash, systems: dict[str, dict[str, Any]], prompts: list[Any], settings: DelayedStage, temperature: float
) -> dict[str, np.ndarray]:
    """Per system, of every prompt: rounds, tokens that they committed, tokens of the answer, seconds, and CPU seconds of
    this process, which other programs on the machine disturb less; [prompts, 5]."""
    found: dict[str, list[list[float]]] = {name: [] for name in systems}
    names = list(systems)
    with progress.Bar(f"prompts at T = {temperature:g}", len(prompts)) as bar, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tau is")  # a drafter that accepts little is a result here
        for number, prompt in enumerate(prompts):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                own = dict(max_new_tokens=settings.new_tokens, temperature=temperature, seed=settings.seed, batch_size=1)
                for _ in range(2):
                    began, burnt = time.perf_counter(), time.process_time()
                    [one] = model.generate([prompt], indices=[number], **systems[name], **own)
                    seconds = time.perf_counter() - began, time.process_time() - burnt
                    if not one.compile_seconds:
                        break
                found[name].append([len(one.accept_lengths), sum(one.accept_lengths), len(one.ids), *seconds])
            bar.update(number + 1)
    return {name: np.array(values) for name, values in found.items()}


def figures(answers: dict[str, np.ndarray], name: str) -> dict[str, Any]:
    """Tau and tokens per second of a system with their errors, and against trunk="auto"."""
    picks = np.random.default_rng(0).integers(len(answers[name]), size=(RESAMPLES, len(answers[name])))
    found: dict[str, Any] = {}
    for what, top, bottom in (("tau", 1, 0), ("tokens_per_second", 2, 3), ("tokens_per_cpu_second", 2, 4)):

        def rates(who: str, top: int = top, bottom: int = bottom) -> np.ndarray:
            """On all prompts, and on every resample."""
            own = answers[who]
            resampled = own[picks].sum(1)
            return np.append(own[:, top].sum() / own[:, bottom].sum(), resampled[:, top] / resampled[:, bottom])

        ours = rates(name)
        ratio = ours / rates("trunk auto")
        low, high = np.percentile(ratio[1:], [2.5, 97.5])
        found[what] = {"value": round(ours[0], 3), "error": round(float(np.std(ours[1:])), 3)}
        found[what] |= {"against auto": round(ratio[0], 3), "low": round(low, 3), "high": round(high, 3)}
    return found


def shown(row: dict[str, Any]) -> str:
    def one(found: dict[str, float]) -> str:
        interval = f"[{found['low']:.3f}, {found['high']:.3f}]"
        return f"{found['value']:.2f} ± {found['error']:.2f} ({found['against auto']:.3f} of auto {interval})"

    return ", ".join(f"{what.replace('_', ' ')} {one(row[what])}" for what in ("tau", "tokens_per_second"))


if __name__ == "__main__":
    config.run(main, DelayedStage, __doc__)
