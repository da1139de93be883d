"""Compiles a training step for TPUs or GPUs that this machine lacks, and reports memory and FLOPs.

    python -m train.compile --shape qwen3-4b --topology v5e:4x4 configs/qwen3-4b/head.toml mesh.fsdp=16 loop.batch=16
    python -m train.compile --shape qwen3-4b --topology h200:8 configs/qwen3-4b/head.toml mesh.fsdp=8

Needs the compiler that `pip install "jax[tpu]"` or `"jax[cuda12]"` brings, and nothing else: neither chips nor weights nor
data. Without --topology the step is compiled for the devices at hand. Sizes are those of --shape, whatever verifier the
settings name.
"""

import json
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import jax

from train.runtime import hosts, training_state
from train.stages.drafting import DraftingStage, make_task
from train.stages.registry import read_stage
from treeflash_jax.bench import shapes
from treeflash_jax.bench.bench_records import read_kept
from treeflash_jax.bench.memory import find_devices
from treeflash_jax.cli.arguments import Parser
from treeflash_jax.core import files, parameters, sharding, terminal
from treeflash_jax.core.checks import UnknownSetting, clipped
from treeflash_jax.engine.defaults import choose_training_attention


def compile_step(settings: DraftingStage, shape: str, chips: list[Any]) -> dict[str, Any]:
    """Compiles one training step of these settings for these chips."""
    model = shapes.find_verifier(shape)
    mesh = hosts.make_mesh(settings.mesh, chips)
    start = shapes.find_drafter(model) if settings.starts_from else None
    task = make_task(settings, model, settings.drafter_config(model, start), mesh)
    hosts.check_batch(settings.loop.batch, settings.loop.accumulate, mesh)
    with sharding.ambient(mesh):
        batch = training_state.abstract_batch(settings.loop.batch, settings.data.sequence_length, mesh)
        steps = 1000
        transform = training_state.make_optimizer(settings.optimizer, steps, task.specs)
        state = training_state.abstract_state(task, transform, batch, mesh)
        frozen = parameters.abstract(task.frozen_specs, task.compute_dtype, mesh)
        every = dict(accumulate=settings.loop.accumulate, log_every=10)
        update = training_state.make_update(task, transform, steps=steps, seed=0, **every)
        update = jax.jit(update, donate_argnums=0, out_shardings=jax.tree.map(lambda x: x.sharding, state))
        memory = update.lower(state, frozen, batch).compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "shape": shape,
        "trains": list(settings.trains),
        "mesh": dict(mesh.shape),
        "batch": settings.loop.batch,
        "accumulate": settings.loop.accumulate,
        "sequence_length": settings.data.sequence_length,
        "attention": choose_training_attention(sharding.device(mesh), settings.attention),
        "bytes_per_chip": {
            "state_and_weights": held,
            "temporary": memory.temp_size_in_bytes,
            "total": held + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        },
        "flops_per_step": task.flops,
        "flops_per_chip": task.flops / mesh.size,
        "jax": jax.__version__,
    }


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m train.compile", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", metavar="FILE.toml | key=value", help="of a stage that trains a drafter")
    parser.add_argument("--shape", required=True, help=f"one of {', '.join(shapes.VERIFIERS)}")
    parser.add_argument("--topology", help="devices that are not here, such as v5e:4x4 or h200:8")
    parser.add_argument("--out", type=Path, help="JSON file; results of other programs in it are kept")
    args = parser.parse_args(argv)
    try:
        names = [word for word in args.settings if "=" not in word]
        if len(names) != 1:
            raise ValueError(f"got {len(names)} files, expected one TOML file of a stage that trains a drafter")
        earlier = read_kept(args.out, "bytes_per_chip", inside=True)
        settings = read_stage(names[0], [word for word in args.settings if "=" in word])
        chips = find_devices(args.topology)
        result = {"topology": args.topology or sharding.device().kind}
        result |= compile_step(settings, args.shape, chips)
        trained = "+".join(result["trains"])
        key = f"{args.shape} {trained} {result['topology']} batch {result['batch']} {result['attention']}"
        if args.out:
            files.write(args.out, json.dumps(earlier | {key: result}, indent=1) + "\n")
    except (ValueError, UnknownSetting, OSError, jax.errors.JaxRuntimeError) as error:
        print(f"error: {clipped(error)}", file=sys.stderr)
        return 2
    chip = result["bytes_per_chip"]
    terminal.show(f"{key}, mesh {result['mesh']}, {result['batch']} sequences of {result['sequence_length']} tokens")
    print(f"bytes per chip: {chip['total'] / 2**30:.2f} GiB ({chip['temporary'] / 2**30:.2f} GiB temporary)")
    print(f"FLOPs: {result['flops_per_step']:.3g} a step, {result['flops_per_chip']:.3g} a chip")
    return 0


if __name__ == "__main__":
    sys.exit(main())
