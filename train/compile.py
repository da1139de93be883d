"""Compiles a training step for TPUs or GPUs that are not here, and says what it needs: bytes per chip, FLOPs, collectives.

    python -m train.compile --shape qwen3-4b --topology v5e:4x4 configs/qwen3-4b/head.toml mesh.fsdp=16 loop.batch=16
    python -m train.compile --shape qwen3-4b --steps 10 configs/qwen3-4b/head.toml loop.batch=4
    python -m train.compile --shape qwen3-4b --topology h200:8 configs/qwen3-4b/head.toml mesh.fsdp=8

Needs the compiler that `pip install "jax[tpu]"` or `"jax[cuda12]"` brings, and nothing else: neither chips nor weights nor
data. Without --topology the step is compiled for the devices at hand, and --steps also runs it there, on random weights and
rows full of random tokens. Sizes are those of --shape, whatever verifier the settings name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from train import hosts
from train.data import Rows
from train.drafting import DraftingStage, make_stage
from train.stages import read_stage
from train.state import Stage, TrainState, abstract_rows, abstract_state, initial_state, make_optimizer, make_update
from treeflash_jax import devices as chips
from treeflash_jax import files
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax.arguments import Parser
from treeflash_jax.bench import shapes
from treeflash_jax.bench.programs import collectives, topology_devices
from treeflash_jax.checks import read_json

WARM_UP = 2  # steps before the clock runs


def compile_step(settings: DraftingStage, shape: str, devices: list[Any], *, steps: int = 0) -> dict[str, Any]:
    """What one training step of these settings needs on these devices, and takes where `steps` of them are run.

    Raises:
      ValueError: no such shape, a batch or mesh that does not divide, or a loss that is not finite.
    """
    model = shapes.named(shape)
    drafter = settings.shaped_config(model)
    stage = make_stage(settings, model, drafter)
    mesh = hosts.make_mesh(settings.mesh, devices)
    hosts.check_batch(settings.loop.batch, settings.loop.accumulate, mesh)
    with meshes.ambient(mesh):
        rows = abstract_rows(settings.loop.batch, settings.data.row_tokens, mesh)
        transform = make_optimizer(settings.optimizer, 1000, stage.specs)
        state = abstract_state(stage, transform, rows, mesh)
        frozen = parameters.abstract(stage.frozen_specs, stage.compute_dtype, mesh)
        update = jax.jit(
            make_update(stage, transform, accumulate=settings.loop.accumulate, seed=0, log_every=10),
            donate_argnums=0,
            out_shardings=_shardings(state),
        )
        compiled = update.lower(state, frozen, rows).compile()
        measured = {}
        if steps:
            arrays = random_arrays(stage, transform, state, frozen, rows, model.vocab_size)
            seconds = run_steps(compiled, *arrays, steps=steps)
            peak = chips.peak_flops(mesh.size, stage.compute_dtype)
            measured = {
                "steps": steps,
                "seconds_per_step": seconds,
                "tokens_per_second": rows.tokens_rt.size / seconds,
                "mfu": stage.flops / seconds / peak if peak else None,
            }
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "shape": shape,
        "trains": list(settings.trains),
        "mesh": dict(mesh.shape),
        "batch": settings.loop.batch,
        "accumulate": settings.loop.accumulate,
        "row_tokens": settings.data.row_tokens,
        **settings.sizes,
        "bytes_per_chip": {
            "state_and_weights": held,
            "temporary": memory.temp_size_in_bytes,
            "total": held + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        },
        "flops_per_step": stage.flops,
        "flops_per_chip": stage.flops / mesh.size,
        "collectives": collectives(compiled.as_text()),
        "jax": jax.__version__,
    } | measured


def random_arrays(
    stage: Stage, transform: Any, state: TrainState, frozen: Any, rows: Rows, vocab_size: int
) -> tuple[TrainState, Any, Rows]:
    """Fresh weights, and rows that one document of random tokens fills, laid out as these shapes are."""
    keys, shape = jax.random.split(jax.random.key(0), 3), rows.tokens_rt.shape
    position_rt = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    full = Rows(
        tokens_rt=jax.random.randint(keys[0], shape, 0, vocab_size, jnp.int32),
        segments_rt=jnp.ones(shape, jnp.int32),
        positions_rt=position_rt,
        weights_rt=(position_rt > 0).astype(jnp.float32),
    )
    params = jax.device_put(parameters.initialize(stage.specs, keys[1]), _shardings(state.params))
    held = jax.device_put(parameters.initialize(stage.frozen_specs, keys[2], stage.compute_dtype), _shardings(frozen))
    start = jax.jit(lambda params: initial_state(stage, transform, params, rows), out_shardings=_shardings(state))
    return start(params), held, jax.device_put(full, _shardings(rows))


def run_steps(compiled: Any, state: TrainState, frozen: Any, rows: Rows, *, steps: int) -> float:
    """Median seconds of a step. Raises ValueError where loss or gradient is not finite."""
    seconds = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(state, frozen, rows))
        seconds.append(time.perf_counter() - began)
    if int(meshes.to_host(state.bad_step)) >= 0:
        raise ValueError(f"the loss or its gradient was not finite at step {int(state.bad_step)} of random weights")
    return statistics.median(seconds[WARM_UP:])


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m train.compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="+", metavar="FILE.toml | key=value", help="of a stage that trains a drafter")
    parser.add_argument("--shape", required=True, help=f"one of {', '.join(shapes.VERIFIERS)}")
    parser.add_argument("--topology", help="devices that are not here, such as v5e:4x4 or h200:8")
    parser.add_argument("--steps", type=int, default=0, help="also run so many steps on the devices at hand, and time them")
    parser.add_argument("--out", type=Path, help="JSON file; results of other programs in it are kept")
    args = parser.parse_args(argv)
    try:
        names = [word for word in args.settings if "=" not in word]
        if len(names) != 1:
            raise ValueError(f"got {len(names)} files, expected one TOML file of a stage that trains a drafter")
        if args.steps < 0:
            raise ValueError(f"got --steps {args.steps}, expected 0 (compile only) or more")
        if args.steps and args.topology:
            raise ValueError(
                f"got --steps {args.steps} and --topology {args.topology}, expected one of them: it has no devices"
            )
        if args.out:
            files.check_output(args.out, files.json_with("bytes_per_chip", inside=True))
        settings = read_stage(names[0], [word for word in args.settings if "=" in word])
        if args.topology:
            jax.config.update("jax_platforms", "cpu")  # devices at hand stay free
        devices = topology_devices(args.topology) if args.topology else jax.devices()
        result = {"topology": args.topology or chips.of(devices[0]).kind}
        result |= compile_step(settings, args.shape, devices, steps=args.steps)
        key = f"{args.shape} {'+'.join(result['trains'])} {result['topology']}"
        if args.out:
            earlier = read_json(args.out) if args.out.exists() and args.out.stat().st_size else {}
            files.write(args.out, json.dumps(earlier | {key: result}, indent=1) + "\n")
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:  # the last where memory runs out
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    chip = result["bytes_per_chip"]
    print(f"{key}, mesh {result['mesh']}, {result['batch']} rows of {result['row_tokens']} tokens")
    print(f"bytes per chip: {chip['total'] / 2**30:.2f} GiB ({chip['temporary'] / 2**30:.2f} GiB temporary)")
    print(f"FLOPs: {result['flops_per_step']:.3g} a step, {result['flops_per_chip']:.3g} a chip")
    for name, one in result["collectives"].items():
        print(f"{name}: {one['count']} a step, {one['bytes'] / 2**30:.2f} GiB of results on a chip")
    if args.steps:
        mfu = "unknown" if result["mfu"] is None else f"{result['mfu']:.1%}"
        print(f"{result['seconds_per_step']:.4g} s a step (median of {args.steps}), MFU {mfu}, ", end="")
        print(f"{result['tokens_per_second']:,.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
