"""Compiles a training step for TPUs or GPUs that this machine lacks: memory and its traffic, FLOPs, collectives.

    python -m train.compile --shape qwen3-4b --topology v5e:4x4 configs/qwen3-4b/head.toml mesh.fsdp=16 loop.batch=16
    python -m train.compile --shape qwen3-4b --steps 10 configs/qwen3-4b/head.toml loop.batch=4
    python -m train.compile --shape qwen3-4b --topology h200:8 configs/qwen3-4b/head.toml mesh.fsdp=8

Needs the compiler that `pip install "jax[tpu]"` or `"jax[cuda12]"` brings, and nothing else: neither chips nor weights nor
data. Without --topology the step is compiled for the devices at hand, and --steps also runs it there, on random weights and
sequences of random tokens. Sizes are those of --shape, whatever verifier the settings name.
"""

import json
import statistics
import sys
import time
from argparse import RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from train.data.packing import Batch
from train.runtime import hosts, training_state
from train.runtime.training_state import TrainState, TrainTask
from train.stages.drafting import DraftingStage, make_task
from train.stages.registry import read_stage
from treeflash_jax.bench import shapes
from treeflash_jax.bench.bench_records import read_kept
from treeflash_jax.bench.memory import find_devices
from treeflash_jax.bench.program_text import count_bytes, find_collectives, sum_collectives
from treeflash_jax.cli.arguments import Parser
from treeflash_jax.core import devices, files, parameters, sharding
from treeflash_jax.core.checks import fit
from treeflash_jax.models import costs

WARM_UP = 2  # steps before the clock runs


def compile_step(settings: DraftingStage, shape: str, chips: list[Any], *, steps: int = 0) -> dict[str, Any]:
    """Compiles one training step of these settings for these chips, and times `steps` of them on random arrays."""
    model = shapes.find_verifier(shape)
    drafter = settings.shaped_config(model)
    mesh = hosts.make_mesh(settings.mesh, chips)
    task = make_task(settings, model, drafter, mesh)
    hosts.check_batch(settings.loop.batch, settings.loop.accumulate, mesh)
    with sharding.ambient(mesh):
        batch = training_state.abstract_batch(settings.loop.batch, settings.data.sequence_length, mesh)
        transform = training_state.make_optimizer(settings.optimizer, 1000, task.specs)
        state = training_state.abstract_state(task, transform, batch, mesh)
        frozen = parameters.abstract(task.frozen_specs, task.compute_dtype, mesh)
        update = training_state.make_update(task, transform, accumulate=settings.loop.accumulate, seed=0, log_every=10)
        update = jax.jit(update, donate_argnums=0, out_shardings=_shardings(state))
        compiled = update.lower(state, frozen, batch).compile()
        measured = {}
        if steps:
            arrays = random_arrays(task, transform, state, frozen, batch, model.vocab_size)
            seconds = run_steps(compiled, *arrays, steps=steps)
            peak = costs.peak_flops(mesh.size, task.compute_dtype)
            measured = {"steps": steps, "seconds_per_step": seconds, "tokens_per_second": batch.tokens_bt.size / seconds}
            measured["mfu"] = task.flops / seconds / peak if peak else None
    memory, text = compiled.memory_analysis(), compiled.as_text()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "shape": shape,
        "trains": list(settings.trains),
        "mesh": dict(mesh.shape),
        "batch": settings.loop.batch,
        "accumulate": settings.loop.accumulate,
        "sequence_length": settings.data.sequence_length,
        **settings.sizes,
        "attention": devices.describe_mesh(mesh).training_attention(settings.attention),
        "bytes_per_chip": {
            "state_and_weights": held,
            "temporary": memory.temp_size_in_bytes,
            "total": held + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        },
        "flops_per_step": task.flops,
        "flops_per_chip": task.flops / mesh.size,
        "bytes_accessed_per_chip": count_bytes(text),
        "collectives": sum_collectives(find_collectives(text)),
        "jax": jax.__version__,
    } | measured


def random_arrays(
    task: TrainTask, transform: Any, state: TrainState, frozen: Any, batch: Batch, vocab_size: int
) -> tuple[TrainState, Any, Batch]:
    """Makes fresh weights, and sequences of one document of random tokens each, laid out as these shapes are."""
    keys, shape = jax.random.split(jax.random.key(0), 3), batch.tokens_bt.shape
    position_bt = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    full = Batch(
        tokens_bt=jax.random.randint(keys[0], shape, 0, vocab_size, jnp.int32),
        segments_bt=jnp.ones(shape, jnp.int32),
        positions_bt=position_bt,
        weights_bt=(position_bt > 0).astype(jnp.float32),
    )
    params = jax.device_put(parameters.initialize(task.specs, keys[1]), _shardings(state.params))
    held = jax.device_put(parameters.initialize(task.frozen_specs, keys[2], task.compute_dtype), _shardings(frozen))
    start = partial(training_state.initial_state, task, transform, batch=batch)
    return jax.jit(start, out_shardings=_shardings(state))(params), held, jax.device_put(full, _shardings(batch))


def run_steps(compiled: Any, state: TrainState, frozen: Any, batch: Batch, *, steps: int) -> float:
    """Returns the median seconds of a step. Raises ValueError if the loss or its gradient is not finite."""
    seconds = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(state, frozen, batch))
        seconds.append(time.perf_counter() - began)
    if int(sharding.to_host(state.bad_step)) >= 0:
        raise ValueError(f"the loss or its gradient was not finite at step {int(state.bad_step)} of random weights")
    return statistics.median(seconds[WARM_UP:])


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m train.compile", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", metavar="FILE.toml | key=value", help="of a stage that trains a drafter")
    parser.add_argument("--shape", required=True, help=f"one of {', '.join(shapes.VERIFIERS)}")
    parser.add_argument("--topology", help="devices that are not here, such as v5e:4x4 or h200:8")
    parser.add_argument("--steps", type=int, default=0, help="also time this number of steps on the devices at hand")
    parser.add_argument("--out", type=Path, help="JSON file; results of other programs in it are kept")
    args = parser.parse_args(argv)
    try:
        names = [word for word in args.settings if "=" not in word]
        if len(names) != 1:
            raise ValueError(f"got {len(names)} files, expected one TOML file of a stage that trains a drafter")
        if fit(int, args.steps, "--steps", least=0) and args.topology:
            raise ValueError(f"got --steps {args.steps} and --topology {args.topology}, expected one: it has no devices")
        earlier = read_kept(args.out, "bytes_per_chip", inside=True)
        settings = read_stage(names[0], [word for word in args.settings if "=" in word])
        chips = find_devices(args.topology)
        result = {"topology": args.topology or devices.describe(chips[0]).kind}
        result |= compile_step(settings, args.shape, chips, steps=args.steps)
        trained = "+".join(result["trains"])
        key = f"{args.shape} {trained} {result['topology']} batch {result['batch']} {result['attention']}"
        if args.out:
            files.write(args.out, json.dumps(earlier | {key: result}, indent=1) + "\n")
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:  # the last where memory runs out
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print("\n".join(describe(key, result)))
    return 0


def describe(key: str, result: dict[str, Any]) -> list[str]:
    chip = result["bytes_per_chip"]
    lines = [
        f"{key}, mesh {result['mesh']}, {result['batch']} sequences of {result['sequence_length']} tokens",
        f"bytes per chip: {chip['total'] / 2**30:.2f} GiB ({chip['temporary'] / 2**30:.2f} GiB temporary)",
        f"FLOPs: {result['flops_per_step']:.3g} a step, {result['flops_per_chip']:.3g} a chip",
        f"memory traffic: {result['bytes_accessed_per_chip'] / 2**30:.0f} GiB a step on a chip",
    ]
    for kind, total in result["collectives"].items():
        lines.append(f"{kind}: {total['count']} a step, {total['bytes'] / 2**30:.2f} GiB of results on a chip")
    if "steps" in result:
        mfu = "unknown" if result["mfu"] is None else f"{result['mfu']:.1%}"
        speed = f"{result['tokens_per_second']:,.0f} tokens/s"
        lines.append(f"{result['seconds_per_step']:.4g} s a step (median of {result['steps']}), MFU {mfu}, {speed}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
