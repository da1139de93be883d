"""Compiled programs as evidence: devices that are not here, and what a program runs on them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from treeflash_jax.devices import GPU_MEMORY

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier")
CONTROL = ("while", "conditional", "call")

# What XLA compiles for: multiprocessors, compute capability, bytes/s, L2 cache, shared memory of a multiprocessor.
# Source: NVIDIA's data sheets.
GPUS = {
    "a100": (108, 8, 2.04e12, 40 * 2**20, 167_936),
    "h100": (132, 9, 3.35e12, 50 * 2**20, 233_472),
    "h200": (132, 9, 4.8e12, 50 * 2**20, 233_472),
}
_GPU_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {block}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  clock_rate_ghz: 1.755
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class Operation:
    """One operation of a program's text that a run reaches.

    Attributes:
      kind: such as fusion, sort or all-reduce-start.
      result: its result's type, as written.
      trips: how often it runs in one run of the program; loops that do not count to a constant make one trip.
      in_loop: whether it lies in a loop.
      in_branch: whether it lies in a branch, which a run may not take.
    """

    kind: str
    result: str
    line: str
    trips: int
    in_loop: bool
    in_branch: bool


@dataclass(frozen=True)
class Collective:
    """One collective of a program's text.

    Attributes:
      kind: one of COLLECTIVES.
      bytes: of its result on one device.
      shapes: of its result's arrays.
      trips, in_loop, in_branch: as of an Operation.
    """

    kind: str
    bytes: int
    shapes: tuple[tuple[int, ...], ...]
    trips: int
    in_loop: bool
    in_branch: bool


def topology_devices(name: str) -> list[Any]:
    """Devices of a TPU topology such as v5e:4x4 or v5p:2x2x2, or so many GPUs of one machine: h200, h200:8.

    Raises:
      ValueError: no compiler for them here, or no such topology.
    """
    return _gpus(name) if name.partition(":")[0] in GPUS else _tpus(name)


def _gpus(name: str) -> list[Any]:
    from jax.experimental import topologies

    family, _, count = name.partition(":")
    cores, major, bandwidth, cache, shared = GPUS[family]
    target = _GPU_TARGET.format(
        shared=shared, block=shared - 1024, cores=cores, fpus=64 if major == 8 else 128, bandwidth=int(bandwidth),
        cache=cache, memory=GPU_MEMORY[family], major=major, name=f"NVIDIA {family.upper()}",
    )  # fmt: skip
    if not re.fullmatch(r"[1-9]\d*", count or "1"):
        raise ValueError(f"got topology {name!r}, expected one like h200 or h200:8")
    try:
        return list(
            topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{count or 1}").devices
        )
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f'topology {name} needs the GPU compiler; pip install "jax[cuda12]" ({reason})') from None


def _tpus(name: str) -> list[Any]:
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


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Totals of a whole program, branches included."""
    return totals(find_collectives(text))


def totals(found: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """Collectives by kind: how many run, and the bytes of their results on one device. Every trip of a loop counts."""
    found = list(found)
    sums: dict[str, dict[str, int]] = {}
    for kind in COLLECTIVES:
        same = [one for one in found if one.kind == kind]
        if same:
            sums[kind] = {"count": sum(one.trips for one in same), "bytes": sum(one.trips * one.bytes for one in same)}
    return sums


def find_collectives(text: str) -> list[Collective]:
    """Every collective that the text of a compiled program reaches from its entry, branches included.

    TPUs run a collective beside other work: the text names it where it starts, in fusions that move it on (also those of a
    loop: one collective lasts all its trips) and where it is done. Only the start counts.
    """
    found = []
    for op in operations(text, into_fusions=True):
        kind = op.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            arrays = _arrays(op.result, op.kind != kind)
            shapes = tuple(shape for _, shape in arrays)
            size = sum(size for size, _ in arrays)
            found.append(Collective(kind, size, shapes, op.trips, op.in_loop, op.in_branch))
    return found


def launches(text: str, stages: Sequence[str]) -> dict[str, int]:
    """Operations that one round of `decode` runs one after another, by stage: on a GPU one kernel each, large sorts a few.

    Branches (top-k and top-p, sampling) are left out. What has no name counts with the stage that it follows.
    """
    counts, stage = dict.fromkeys((*stages, "rest"), 0), "rest"
    for op in operations(text):
        if not op.in_loop or op.in_branch or op.kind in (*FREE, *CONTROL):
            continue
        name = re.search(r'op_name="([^"]*)"', op.line)
        if name:
            stage = next((word for word in name.group(1).split("/") if word in stages), "rest")
        counts[stage] += op.trips
    return {stage: count for stage, count in counts.items() if count}


def float32_rows(text: str, size: int) -> list[tuple[int, ...]]:
    """Shapes of float32 arrays that rounds write and that hold two rows of `size` numbers or more.

    Those of branches too (sampling, top-k and top-p), but no Gumbel noise, nothing that is made of a constant alone, nor
    what stays in a TPU's vector memory (memory space 1).
    """
    written = [op for op in operations(text) if op.in_loop and op.kind not in (*FREE, *CONTROL)]
    written = [op for op in written if not re.search(rf"/noise/| {op.kind}\((%constant[\w.\-]*)?\)", op.line)]
    results = (re.sub(r"\w+\[[\d,]*\]\{[^}]*S\(1\)[^}]*\}", "", op.result) for op in written)
    shapes = [shape for result in results for kind, shape in _types(result) if kind == "f32"]
    return [shape for shape in shapes if math.prod(shape) >= 2 * size and math.prod(shape) % size == 0]


def operations(text: str, *, into_fusions: bool = False) -> Iterator[Operation]:
    """What the text of a compiled program reaches from its entry, in the order in which it is written.

    Args:
      into_fusions: also what fusions, reductions and the like are made of.
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

    def visit(name: str, trips: int, in_loop: bool, in_branch: bool) -> Iterator[Operation]:
        for line in bodies.get(name, ()):
            found = re.search(r"= (.+?) ([a-z\-]+)\(", line)
            if not found:
                continue
            kind = found.group(2)
            yield Operation(kind, found.group(1), line, trips, in_loop, in_branch)
            times, loop = trips, in_loop
            if kind == "while":
                times, loop = trips * _trips(line, bodies), True
            is_done = line.strip().removeprefix("ROOT ").startswith("%async-collective-done")
            if (into_fusions and not is_done) or kind in (*CONTROL, "async-start"):
                for called in re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", line):
                    if not called.startswith("async_collective_fusion"):
                        yield from visit(called, times, loop, in_branch)
            branches = re.findall(r"(?:true_computation|false_computation)=%?([\w.\-]+)", line)
            for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                branches += re.findall(r"%?([\w.\-]+)", group)
            for called in branches:
                yield from visit(called, times, loop, True)

    return visit(entry.group(1), 1, False, False) if entry else iter(())


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """Trips of a loop: as the compiler notes them or, where it does not (TPUs), the constant that a counter stays below."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known.group(1))
    condition = "\n".join(bodies.get(re.search(r"condition=%?([\w.\-]+)", line).group(1), ()))
    last = re.search(r"ROOT \S+ = pred\[\]\S* compare\(.*%([\w.\-]+)\), direction=LT", condition)
    bound = last and re.search(rf"%{re.escape(last.group(1))} = s32\[\]\S* constant\((\d+)\)", condition)
    return int(bound.group(1)) if bound else 1


def _arrays(result: str, is_pair: bool) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes and shape of each array of a result; of an asynchronous start's operands and results, the largest alone."""
    arrays = [(WIDTHS.get(kind, 4) * math.prod(shape), shape) for kind, shape in _types(result)]
    return [max(arrays)] if is_pair and arrays else arrays


def _types(result: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each array of a result."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", result)
    return [(kind, tuple(int(size) for size in dims.split(",") if size)) for kind, dims in found]
