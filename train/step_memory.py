"""Compiles a training step, and prints its FLOPs, the memory that it needs on each device, and its time on TPUs.

    python -m train.step_memory configs/qwen3-4b/head.toml mesh.fsdp=16 loop.batch=16 --shape qwen3-4b --topology v5e:4x4

It needs no weights and no data and, with --topology, no devices. Sizes come from --shape, not from the verifier in the
settings. The exit status is 1 if a device is too small.

The time is the compiler's estimate, not a measurement (`bench.cycles`). It leaves out collectives and attention kernels.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from train.runtime import hosts, training_state
from train.stages import choices
from train.stages.drafting import DraftingStage, make_task
from train.stages.registry import read_stage
from treeflash_jax.bench import cycles, memory, shapes
from treeflash_jax.bench.bench_records import read_kept
from treeflash_jax.cli.arguments import Parser
from treeflash_jax.core import files, parameters, programs, sharding, terminal
from treeflash_jax.core.exit_status import exit_status
from treeflash_jax.core.setting_options import add_options
from treeflash_jax.engine.device_memory import in_units, usable_memory

# Named scopes of a block drafter's step: verifier, backbone, head and loss, optimiser. Others' have the first and the last.
PHASES = ("teach", "draft", "score", "update")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status. Bad input gives one line on stderr and status 2."""
    return exit_status(partial(_run, argv), "train.step_memory")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m train.step_memory", description=__doc__)
    parser.add_argument(
        "words", nargs="+", metavar="FILE.toml | key=value", help="settings of a stage that trains a drafter"
    )
    add_options(parser, memory.MemoryOptions, ["shape", "topology", "operations", "out"], shape="tiny")
    return parser.parse_args(argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = parse(argv)
    programs.keep_programs()
    return report(arguments)


def report(arguments: argparse.Namespace) -> int:
    """Compiles a training step, and prints its memory and FLOPs. Returns 1 if a device cannot hold it, else 0."""
    earlier = read_kept(arguments.out, "bytes_per_device", inside=True)
    settings = read_settings(arguments.words)
    limit, device, _ = memory.describe_topology(arguments.topology)
    devices = memory.find_devices(arguments.topology)
    result: dict[str, Any] = {"topology": arguments.topology or device.kind} | compile_step(
        settings, arguments.shape, devices, arguments.operations
    )
    sizes = result["bytes_per_device"]
    limit = limit or usable_memory()
    result |= {"bytes_limit": limit, "fits": None if limit is None else sizes["total"] <= limit}
    trains = "+".join(result["trains"])
    key = f"{result['shape']} {trains} {result['topology']} batch {result['batch']} {result['attention']}"
    if arguments.out:
        files.write(arguments.out, json.dumps(earlier | {key: result}, indent=1) + "\n")
    lines = [
        f"{key}, mesh {result['mesh']}, {result['batch']} sequences of {result['sequence_length']} tokens; on each device"
    ]
    names = {"state_and_weights": "state and weights"}
    lines += [f"  {names.get(part, part):24}{in_units(size):>12}" for part, size in sizes.items()]
    if limit is not None:
        lines.append(f"  of {in_units(limit)}: {'fits' if result['fits'] else 'does not fit'}")
    lines.append(f"FLOPs: {result['flops_per_step']:.3g} a step, {result['flops_per_device']:.3g} a device")
    if "estimate" in result:
        lines += memory.describe_estimate(result["estimate"], "step")
        share = result["estimate"]["utilisation"]
        lines.append(f"  at most {100 * share:.0f}% of the chip's peak FLOP/s: what is left out takes time, too")
    terminal.show("\n".join(lines))
    return int(result["fits"] is False)


def read_settings(words: Sequence[str]) -> DraftingStage:
    """Reads the settings of a stage that trains a drafter, from one TOML file and words key=value."""
    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise ValueError(f"got {len(names)} files, expected one TOML file of a stage that trains a drafter")
    return read_stage(names[0], [word for word in words if "=" in word])


def compile_step(settings: DraftingStage, shape: str, devices: Sequence[jax.Device], operations: int = 0) -> dict[str, Any]:
    """Compiles one training step with these settings for these devices, and returns a record of the results.

    `operations` is the number of operations of a TPU in the record.
    """
    verifier = shapes.find_verifier(shape)
    mesh = hosts.make_mesh(settings.mesh, devices)
    start = shapes.find_drafter(verifier) if settings.starts_from else None
    task = make_task(settings, verifier, settings.drafter_config(verifier, start), mesh)
    hosts.check_batch(settings.loop.batch, settings.loop.accumulate, mesh)
    with sharding.ambient(mesh):
        batch = training_state.abstract_batch(settings.loop.batch, settings.data.sequence_length, mesh)
        steps = 1000
        transform = training_state.make_optimizer(settings.optimizer, steps, task.specs)
        state = training_state.abstract_state(task, transform, batch, mesh)
        frozen = parameters.abstract(task.frozen_specs, task.compute_dtype, mesh)
        accumulate = settings.loop.accumulate
        update = training_state.make_update(task, transform, steps=steps, seed=0, accumulate=accumulate, log_every=10)
        update = jax.jit(update, donate_argnums=0, out_shardings=jax.tree.map(lambda x: x.sharding, state))
        program = update.lower(state, frozen, batch).compile()
    needs = program.memory_analysis()
    device = sharding.device(mesh)
    held = needs.argument_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
    result = {
        "shape": shapes.short_name(shape),
        "trains": list(settings.trains),
        "mesh": dict(mesh.shape),
        "batch": settings.loop.batch,
        "accumulate": accumulate,
        "sequence_length": settings.data.sequence_length,
        "attention": choices.attention(device, settings.attention),
        "bytes_per_device": {
            "state_and_weights": held,
            "temporary": needs.temp_size_in_bytes,
            "total": held + needs.temp_size_in_bytes + needs.generated_code_size_in_bytes,
        },
        "flops_per_step": task.flops,
        "flops_per_device": task.flops / mesh.size,
        "jax": jax.__version__,
    }
    if device.clock:
        estimate = cycles.estimate(program.as_text(), PHASES, is_loop=False)
        times = memory.in_milliseconds(estimate, device, operations)
        seconds = sum(times["milliseconds"].values()) / 1e3
        times["utilisation"] = round(result["flops_per_device"] / device.peak_rates[0] / seconds, 3)
        result["estimate"] = times
    return result


if __name__ == "__main__":
    sys.exit(main())
