"""Measures a drafter against one-token decoding, on prompts that were held out from its training.

    python -m train.measure runs/pair/measure.toml

Each runs at its own best settings: a trial on two prompts picks dtype and attention of one-token decoding, and dtype and
nodes of the draft trees. Then both answer every prompt, batch 1, in one process and in turns. Prints a table and writes a
summary as JSON. Compilation is never counted.
"""

import json
import statistics
import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax.numpy as jnp

import treeflash_jax as tf
from train import respond
from train.data import packing
from train.runtime import hosts, run_config, watch
from treeflash_jax.bench import harness, report
from treeflash_jax.bench.bench_records import read_kept
from treeflash_jax.bench.harness import System
from treeflash_jax.bench.prompt_sets import BenchPrompt
from treeflash_jax.core import devices, files
from treeflash_jax.core.settings import setting
from treeflash_jax.trees.shape import MAX_NODES

TRIAL_PROMPTS = 2
# Tried on each backend; on others the library's defaults. Kernels for accelerators have never been run, so none is tried.
DTYPES = {"cpu": ("float32", "bfloat16")}
ATTENTION = {"cpu": ("xla", "streamed")}


@dataclass(frozen=True, kw_only=True)
class MeasureStage:
    """Settings of this stage."""

    verifier: str = setting(help="name of a pair, folder, GGUF file or Hub id")
    drafter: str = setting(help="name of a pair, folder or Hub id")
    respond: str = setting(help="settings file of `train.respond`; the prompts that it holds out are answered")
    out: str = setting(help="JSON file of results")
    prompts: int = setting(16, "largest number of prompts", least=1)
    new_tokens: int = setting(96, "tokens generated per answer", least=1)
    nodes: tuple[int, ...] = setting(
        (8, 16, 32), "numbers of nodes tried for the draft trees, root included", min_length=1, least=1, most=MAX_NODES
    )
    temperatures: tuple[float, ...] = setting((0.0, 0.7), "sampling temperatures measured", min_length=1, least=0)
    seconds: float = setting(
        0.0,
        "time of the whole measurement; 0 sets no limit. Trials stop after half of it, and as many prompts are used as "
        "fit into the rest, at least two",
        least=0,
    )
    seed: int = setting(0, "random seed of the answers", least=0)


def main(settings: MeasureStage) -> None:
    read_kept(settings.out, "settings", "trial", "systems", "options")  # refuses to replace another file
    measured = measure(settings)
    files.write(settings.out, json.dumps(measured, indent=1) + "\n")
    if hosts.is_first():
        report.show(measured)


def measure(settings: MeasureStage) -> dict[str, Any]:
    """Tries the systems on few prompts, then compares the fastest one-token and the fastest drafted system.

    Returns the summary of `report.summarise`, tokens/s of all systems that were tried, and the options of the drafted one.
    """
    began = time.perf_counter()
    responded = run_config.load(respond.RespondConfig, settings.respond)
    pair = {"verifier": settings.verifier, "drafter": settings.drafter}
    pair |= {"thinking": responded.thinking, "template": responded.template}
    model = tf.load(**pair)
    models = {str(model.dtype): model}
    for dtype in DTYPES.get(devices.here().backend, ()):
        if dtype not in models:
            models[dtype] = tf.load(**pair, dtype=jnp.dtype(dtype))
    held_out = respond.collect_prompts(responded, model, held_out=True)
    prompts = [BenchPrompt(id=str(i), ids=prompt.ids) for i, prompt in enumerate(held_out)]
    prompts = packing.pick_spread(prompts, settings.prompts)
    trial = packing.pick_spread(prompts, TRIAL_PROMPTS)
    systems = make_systems(models, settings)
    speeds: dict[str, list[float]] = {}
    with watch.Bar("trial", len(trial) * len(systems)) as bar:
        for count, record in enumerate(harness.measure(systems, trial, seeds=[settings.seed], notify=lambda text: None), 1):
            speeds.setdefault(record["system"], []).append(record["tokens"] / record["seconds"])
            bar.show(count, record["system"])
            if settings.seconds and len(speeds) > 1 and time.perf_counter() > began + settings.seconds / 2:
                break
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    fastest = sorted((system for system in systems if system.name in speeds), key=lambda system: -medians[system.name])
    plain, drafted = (next(s for s in fastest if (s.config.builder == "none") == is_plain) for is_plain in (True, False))
    if settings.seconds:
        seconds_left = settings.seconds - (time.perf_counter() - began)
        seconds = settings.new_tokens * (1 / medians[plain.name] + 1 / medians[drafted.name]) * len(settings.temperatures)
        prompts = packing.pick_spread(prompts, max(TRIAL_PROMPTS, int(seconds_left / seconds)))
    with watch.Bar("answers", 2 * len(prompts) * len(settings.temperatures)) as bar:
        sampling = {"temperatures": settings.temperatures, "seeds": [settings.seed], "notify": lambda text: None}
        records = list(bar.track(harness.measure([plain, drafted], prompts, **sampling), task_id=bar.task))
    summary, dtype = report.summarise(records), str(drafted.model.dtype)
    return summary | {
        "settings": summary["settings"] | run_config.to_dict(settings),
        "prompts": len(prompts),
        "trial": medians,
        "options": {"nodes": drafted.config.nodes} | ({} if dtype == str(model.dtype) else {"dtype": dtype}),
    }


def make_systems(models: dict[str, tf.TreeFlash], settings: MeasureStage) -> list[System]:
    """Makes one-token systems by dtype and attention, and drafted ones by dtype and nodes; one of each kind comes first."""
    attention = ATTENTION.get(devices.here().backend, ("xla",))
    plain = [(dtype, {"attention": kind, "builder": "none"}) for dtype, kind in product(models, attention)]
    drafted = [(dtype, {"nodes": nodes}) for dtype, nodes in product(models, settings.nodes)]
    systems = []
    for dtype, options in [plain[0], *drafted, *plain[1:]]:
        words = [dtype, *(f"{key} {value}" for key, value in options.items() if key != "builder")]
        name = f"{'one token' if 'builder' in options else 'drafted'}: {', '.join(words)}"
        config = tf.GenerateConfig(max_new_tokens=settings.new_tokens, batch_size=1, **options)
        pair = settings.verifier, settings.drafter
        systems.append(System(name=name, model=models[dtype], config=config, pair=pair))
    return systems


if __name__ == "__main__":
    run_config.run(main, MeasureStage, __doc__)
