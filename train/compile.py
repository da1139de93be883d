"""Compiles a training step for a TPU topology without a TPU, and says what it needs: bytes per chip, FLOPs, collectives.

    python -m train.compile --shape qwen3-4b --topology v5e:4x4 configs/qwen3-4b/head.toml mesh.fsdp=16 loop.batch=16

Needs the compiler that `pip install "jax[tpu]"` brings, and nothing else: neither chips nor weights nor data. Without
--topology the step is compiled for the devices at hand. Sizes are those of --shape, whatever verifier the settings name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from train import config, hosts, loop
from train.drafter import DrafterStage, drafter_config, make_stage
from train.head import HeadStage
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax.bench import shapes

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def topology_devices(name: str) -> list[Any]:
    """Devices of a named TPU topology such as v5e:4x4 or v5p:2x2x2.

    Raises:
      ValueError: no TPU compiler here, or no such topology.
    """
    try:
        import libtpu
    except ImportError:
        raise ValueError(f'topology {name} needs the TPU compiler; pip install "jax[tpu]"') from None
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"got topology {name!r}, expected one like v5e:4x4 or v5p:2x2x2 ({reason})") from None


def compile_step(settings: Any, shape: str, devices: list[Any]) -> dict[str, Any]:
    """What one training step of these settings needs on these devices; see the module for the terms."""
    model = shapes.named(shape)
    if isinstance(settings, HeadStage):
        trains = ("backbone", "head") if settings.train_backbone else ("head",)
        drafter = dataclasses.replace(shapes.drafter_of(model), head=settings.head)
    else:
        trains, drafter = ("backbone",), drafter_config(settings, model)
    stage = make_stage(settings, model, drafter, trains=trains)
    sizes = settings.mesh
    data = sizes.data or max(1, len(devices) // (sizes.fsdp * sizes.model))
    mesh = meshes.make_mesh(data, sizes.model, devices, fsdp=sizes.fsdp)
    hosts.check_batch(settings.loop.batch, settings.loop.accumulate, mesh)
    with meshes.ambient(mesh):
        rows = loop.abstract_rows(settings.loop.batch, settings.data.row_tokens, mesh)
        transform = loop.make_optimizer(settings.optimizer, 1000)
        state = loop.abstract_state(stage, transform, rows, mesh)
        frozen = parameters.abstract(stage.frozen_specs, stage.compute_dtype, mesh)
        update = jax.jit(
            loop.make_update(stage, transform, accumulate=settings.loop.accumulate, seed=0, log_every=10),
            donate_argnums=0,
            out_shardings=jax.tree.map(lambda x: x.sharding, state),
        )
        compiled = update.lower(state, frozen, rows).compile()
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "shape": shape,
        "trains": list(trains),
        "mesh": dict(mesh.shape),
        "batch": settings.loop.batch,
        "accumulate": settings.loop.accumulate,
        "row_tokens": settings.data.row_tokens,
        "anchors": settings.objective.anchors,
        "chunk": settings.objective.chunk,
        "bytes_per_chip": {
            "state_and_weights": held,
            "temporary": memory.temp_size_in_bytes,
            "total": held + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        },
        "flops_per_step": stage.flops,
        "flops_per_chip": stage.flops / mesh.size,
        "collectives": collectives(compiled.as_text()),
        "jax": jax.__version__,
    }


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Collectives of a compiled program by kind: how many run in a step, and the bytes of their results on one chip.

    Those inside loops count once per trip.
    """
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        opening = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line.strip())
        if opening and not line.startswith("  "):
            name = opening.group(1)
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    entry = re.search(r"ENTRY %?([\w.\-]+)", text)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()

    def visit(name: str, trips: int) -> None:
        for line in bodies.get(name, ()):
            found = re.search(r"= (.+?) ([a-z\-]+)\(", line)
            if not found:
                continue
            kind = found.group(2).removesuffix("-start")
            if kind in COLLECTIVES:
                counts[kind] += trips
                sizes[kind] += trips * _bytes(found.group(1), found.group(2).endswith("-start"))
            times = trips
            if kind == "while":
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                times = trips * (int(known.group(1)) if known else 1)
            for called in re.findall(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line):
                visit(called, times)
            for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                for called in re.findall(r"%?([\w.\-]+)", group):
                    visit(called, times)

    if entry:
        visit(entry.group(1), 1)
    return {kind: {"count": counts[kind], "bytes": sizes[kind]} for kind in COLLECTIVES if counts[kind]}


def _bytes(result: str, is_pair: bool) -> int:
    """Bytes of a result type; an asynchronous start names operand and result, of which the larger counts."""
    parts = [
        WIDTHS.get(kind, 4) * math.prod(int(size) for size in dims.split(",") if size)
        for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", result)
    ]
    return max(parts, default=0) if is_pair else sum(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", metavar="FILE.toml | key=value", help="of train.head or train.drafter")
    parser.add_argument("--shape", required=True, help=f"one of {', '.join(shapes.VERIFIERS)}")
    parser.add_argument("--topology", help="TPU topology, such as v5e:4x4")
    parser.add_argument("--out", type=Path, help="JSON file; results of other programs in it are kept")
    args = parser.parse_args(argv)
    try:
        files = [word for word in args.settings if "=" not in word]
        if len(files) != 1:
            raise ValueError(f"got {len(files)} files, expected one TOML file of train.head or train.drafter")
        kind = HeadStage if "\ndrafter" in "\n" + Path(files[0]).read_text(encoding="utf-8") else DrafterStage
        settings = config.load(kind, files[0], [word for word in args.settings if "=" in word])
        devices = topology_devices(args.topology) if args.topology else jax.devices()
        result = {"topology": args.topology or devices[0].device_kind} | compile_step(settings, args.shape, devices)
        key = f"{args.shape} {'+'.join(result['trains'])} {result['topology']}"
        if args.out:
            earlier = json.loads(args.out.read_text()) if args.out.exists() else {}
            args.out.write_text(json.dumps(earlier | {key: result}, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chip = result["bytes_per_chip"]
    print(f"{key}, mesh {result['mesh']}, {result['batch']} rows of {result['row_tokens']} tokens")
    print(f"bytes per chip: {chip['total'] / 2**30:.2f} GiB ({chip['temporary'] / 2**30:.2f} GiB temporary)")
    print(f"FLOPs: {result['flops_per_step']:.3g} a step, {result['flops_per_chip']:.3g} a chip")
    for name, one in result["collectives"].items():
        print(f"{name}: {one['count']} a step, {one['bytes'] / 2**30:.2f} GiB of results on a chip")
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
