"""Computes the memory that a request needs on each device, without loading a model.

    treeflash bench memory --shape qwen3-8b --topology v5e:4x4 --mesh 2x8 --batch 8 --context 4096 --nodes 64

Weights and caches are sums of sizes. `--quantize` counts wide weights after quantisation by a scheme, not the weights of a
quantised file. Temporaries (activations, and weights in another layout) are as the compiler reports them for the programs,
which are compiled from shapes alone. On accelerators, the output also has the number of operations that a round launches:
on a GPU, each takes over a microsecond, however little it does. For TPUs, it has the time of a round as the compiler
estimates it, which is not a measurement (`bench.cycles`). The exit status is 1 if a device is too small.

`python -m train.step_memory` does the same for a training step.
"""

import argparse
import json
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled, Wrapped
from jax.typing import DTypeLike

from treeflash_jax.bench import cycles, shapes
from treeflash_jax.bench.bench_records import print_progress, read_kept
from treeflash_jax.bench.phases import running
from treeflash_jax.core import files, parameters, programs, sharding, terminal
from treeflash_jax.core.clock import slow
from treeflash_jax.core.devices import GPU_MEMORY, PEAK_RATES, TPU_KINDS, TPU_MEMORY, Device
from treeflash_jax.core.dtypes import dtype_setting
from treeflash_jax.core.setting_options import add_options, option_values
from treeflash_jax.core.settings import setting
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.drafters import Drafter
from treeflash_jax.engine.device_memory import Footprint, footprint, in_units, usable_memory
from treeflash_jax.engine.schedule.batching import TOKEN_CLASSES, SamplingSizes, make_batch, round_capacity
from treeflash_jax.engine.settings.defaults import merges_weights
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.model_options import ModelOptions
from treeflash_jax.engine.settings.plan import resolve
from treeflash_jax.models import decoder
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.quantized import NO_SCHEME

# Targets of the compiler: multiprocessors, compute capability, L2 cache, shared memory per multiprocessor.
# Source: NVIDIA's data sheets.
GPUS = {"a100": (108, 8, 40 * 2**20, 167_936), "h100": (132, 9, 50 * 2**20, 233_472), "h200": (132, 9, 50 * 2**20, 233_472)}
_GPU_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {block}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: 1.755 cuda_compute_capability {{ major: {major} }}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} device_memory_size: {memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(shapes.Shapes):
    """A request, and the devices that are to serve it."""

    batch: int = setting(1, "sequences decoded together", least=1, unit="sequences")
    context: int = setting(4096, "positions of the caches of a sequence", least=1, unit="tokens")
    dtype: str = dtype_setting("bfloat16", "dtype of weights and caches", "float32", "bfloat16")
    mesh: str | None = setting(
        None,
        "split the batch D ways, weights M ways; with DxMxE, experts E ways",
        unset="1 x all devices",
        unit="DxM",
    )
    topology: str | None = setting(
        None, "compile for devices that this machine lacks, such as v5e:4x4, h200 or h200:8", unit="name"
    )
    constraint_states: int = setting(
        0, "room for schemas of this many states, as in `treeflash serve`; 0: no schemas", least=0, unit="states"
    )
    operations: int = setting(
        0, "operations of a TPU to show, those with the largest estimates", least=0, unit="operations"
    )
    no_compile: bool = setting(False, "count weights and caches only, for a mesh of any size")
    out: str | None = setting(None, "JSON file; results of other requests in it are kept", unit="file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, MemoryOptions, shape="tiny")
    add_options(parser, ModelOptions, ["quantize"])
    add_options(parser, GenerateConfig, [*shapes.TREE_OPTIONS, "nodes"])


def run(arguments: argparse.Namespace) -> int:
    """Prints the memory that a request needs; returns 1 if a device cannot hold it."""
    mesh, limit, device = _devices(arguments)
    verifier, drafter = shapes.find_pair(arguments.shape, arguments.drafter_shape)
    config = GenerateConfig(**option_values(arguments, GenerateConfig))
    dtype = jnp.dtype(arguments.dtype)
    quantize = None if arguments.quantize == NO_SCHEME else arguments.quantize
    batch, capacity = arguments.batch, round_capacity(arguments.context)
    sizes = dict(mesh.shape)
    if batch % sizes["data"]:
        raise ValueError(f"got a batch of {batch} on a mesh with a data axis of {sizes['data']}, expected a multiple of it")
    plan = resolve(config, verifier, drafter, dtype=dtype, device=device, sequences=batch // sizes["data"])
    earlier = read_kept(arguments.out, "bytes_per_device", inside=True)
    request = {"dtype": dtype, "mesh": mesh, "batch": batch, "capacity": capacity, "quantize": quantize}
    needs = footprint(verifier, plan.shared.loaded_drafter, **request)
    drafted = shapes.short_name(arguments.drafter_shape) if plan.drafts and arguments.drafter_shape else None
    result: dict[str, Any] = {"shape": shapes.short_name(arguments.shape), "drafter": drafted}
    result |= {"topology": arguments.topology or device.kind, "mesh": sizes, "batch": batch, "context": capacity}
    result |= {"dtype": dtype.name, "quantize": quantize}
    if arguments.constraint_states:
        if arguments.no_compile:
            raise ValueError("got --constraint-states with --no-compile, expected one: their tables are parts of programs")
        result["schema_states"] = arguments.constraint_states
    result |= {**shapes.describe_tree(plan), "bytes_per_device": asdict(needs), "bytes_limit": limit}
    if not arguments.no_compile and (limit is None or needs.total <= limit):
        states = arguments.constraint_states
        automaton = (states, TOKEN_CLASSES, verifier.vocab_size) if states else None
        sampling = SamplingSizes(automaton=automaton)
        compiled = compile_programs(plan, mesh, batch, capacity, dtype, quantize, sampling)
        result |= {"bytes_per_device": _read_programs(*compiled, needs), "jax": jax.__version__}
        if not device.is_cpu:
            text = compiled[1].as_text()
            result["launches"] = count_launches(text)
            if device.clock:
                read_drafter = plan.shared.loaded_drafter if plan.num_nodes > 1 else None
                read = bytes_read(verifier, read_drafter, batch * plan.num_nodes, **request)
                result["estimate"] = estimate_times(text, device, read, arguments.operations)
    memory = result["bytes_per_device"]
    memory["total"] = memory["resident"] + max(memory["round"], memory["prefill"]) if "round" in memory else needs.total
    result["fits"] = None if limit is None else memory["total"] <= limit
    if arguments.out:
        files.write(arguments.out, json.dumps(earlier | {request_name(result): result}, indent=1) + "\n")
    terminal.show("\n".join(describe(result)))
    return int(result["fits"] is False)


def request_name(result: dict[str, Any]) -> str:
    """Returns the name under which a file keeps a result: the requested sizes, without details of the tree."""
    words = [result["shape"], result["topology"], "x".join(map(str, result["mesh"].values())), f"batch {result['batch']}"]
    if result.get("drafter"):
        words.append(f"drafted by {result['drafter']}")
    if result.get("schema_states"):
        words.append(f"schemas of {result['schema_states']} states")
    words += [word for word in (result["quantize"], result["builder"]) if word not in (None, "best-first")]
    return f"{' '.join(words)}: caches of {result['context']} positions, {result['nodes']} nodes, {result['dtype']}"


def compile_programs(
    plan: DecodePlan,
    mesh: Mesh,
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    quantize: str | None = None,
    sizes: SamplingSizes | None = None,
) -> tuple[Compiled, Compiled]:
    """Compiles the prefill and decode programs of a plan for the mesh's devices. This needs shapes only, no arrays.

    Raises ValueError if the compiler reports that they do not fit.
    """

    def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
        place = sharding.sharding(("batch",) + (None,) * (x.ndim - 1), x.shape, mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    specs = decoder.specs(plan.shared.verifier, quantize, merges_weights(sharding.device(mesh)), mesh)
    weights = Weights(parameters.abstract(specs, dtype, mesh))
    if plan.drafts:
        weights = weights.replace(drafter=parameters.abstract(plan.shared.loaded_drafter.specs(), dtype, mesh))
    inputs = make_batch([None] * batch, sizes or SamplingSizes(), capacity=capacity, dtype=dtype)
    inputs = jax.tree.map(abstract, inputs)
    count = jax.ShapeDtypeStruct((), jnp.int32)

    def compile_program(function: Wrapped, *arguments: Any, **static: Any) -> tuple[Compiled, Any]:
        """Returns the program and its outputs, as shapes."""
        lowered = function.lower(*arguments, **static)
        program = programs.compile_lowered(lowered, mesh, function)
        places = program.output_shardings
        outputs = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), lowered.out_info, places)
        return program, outputs

    with running(mesh, "weights and caches fit, but not the rest"):
        print_progress("compiling the prefill")
        _, state = compile_program(loops.init_state, *inputs, plan=plan.shared, dtype=dtype)
        prefill, state = compile_program(loops.prefill_chunks, weights, state, inputs.length_b, count, plan=plan.shared)
        print_progress("compiling the rounds")
        return prefill, compile_program(loops.decode, weights, state, count, plan=plan)[0]


def count_launches(text: str) -> int:
    """Returns the number of operations that one iteration of a program's loop launches, from the program's compiled text.

    These are fusions, kernel calls, sorts and copies, each about one kernel. Conditionals and inner loops count as nothing.
    If the program has several loops, the largest counts.
    """
    computations = cycles.parse(text)
    bodies = [computations[name] for name in cycles.loop_bodies(computations)]
    return max(len(re.findall(r"[\])}] (?:copy|custom-call|fusion|sort)\(", body)) for body in bodies)


def bytes_read(verifier: ModelConfig, drafter: Drafter | None, tokens: int, **request: Any) -> int:
    """Returns the bytes that a pass over some tokens reads on each device: of experts, as many as the tokens can choose.

    `request` are arguments of `footprint`.
    """
    chosen = min(verifier.num_experts, tokens * verifier.experts_per_token)
    return footprint(replace(verifier, num_experts=chosen), drafter, **request).total


def estimate_times(text: str, device: Device, read: int, operations: int = 0) -> dict[str, Any]:
    """Returns the milliseconds of a round on a TPU, as its compiler estimates them, for a record.

    Args:
      text: text of the compiled rounds.
      read: number of bytes that the round reads (`bytes_read`).
      operations: number of operations to list.
    """
    times = in_milliseconds(cycles.estimate(text), device, operations)
    return times | {"reading": round(read / device.peak_rates[1] * 1e3, 3)}


def in_milliseconds(estimate: cycles.Estimate, device: Device, operations: int = 0) -> dict[str, Any]:
    """Returns an estimate for a record, with a number of the largest operations."""
    per_cycle = 1e3 / device.clock
    phases = {phase: round(count * per_cycle, 3) for phase, count in estimate.by_phase().items()}
    times = {"milliseconds": phases, "copying": round(estimate.copied / device.peak_rates[1] * 1e3, 3)}
    times["missing"] = {" ".join(place): count for place, count in sorted(estimate.missing.items())}
    largest = estimate.operations.most_common(operations)
    times["operations"] = [[*place, estimate.counts[place], round(count * per_cycle, 3)] for place, count in largest]
    return times


def describe(result: dict[str, Any]) -> list[str]:
    memory, limit = result["bytes_per_device"], result["bytes_limit"]
    names = {"verifier_cache": "verifier's cache", "drafter_cache": "drafter's cache", "rest": "state and padding"}
    names |= {"programs": "compiled programs", "round": "temporary in a round", "prefill": "temporary in a prefill"}
    lines = [f"{request_name(result)}; on each device"]
    lines += [f"  {names.get(part, part):24}{in_units(size):>12}" for part, size in memory.items() if part != "resident"]
    if limit is not None:
        lines.append(f"  of {in_units(limit)}: {'fits' if result['fits'] else 'does not fit'}")
    if "launches" in result:
        lines.append(f"  {result['launches']:,} operations launched in a round")
    if "estimate" in result:
        lines += describe_estimate(result["estimate"], "round" if result["nodes"] > 1 else "step")
    return lines if "round" in memory else [*lines, "weights and caches only: nothing was compiled"]


def describe_estimate(times: dict[str, Any], what: str) -> list[str]:
    total = sum(times["milliseconds"].values())
    lines = [f"the compiler's estimate, not a measurement: {total:.2f} ms for a {what}"]
    lines += [f"  {phase:24}{milliseconds:>9.2f} ms" for phase, milliseconds in times["milliseconds"].items()]
    if "reading" in times:
        lines.append(
            f"  {total / times['reading']:.2f} times the {times['reading']:.2f} ms of reading weights and caches once"
        )
    lines.append(f"  copies of {times['copying']:.2f} ms run beside the operations, and are not counted")
    if times["missing"]:
        lines.append(f"  left out: {', '.join(f'{count} x {name}' for name, count in times['missing'].items())}")
    for phase, name, count, milliseconds in times["operations"]:
        lines.append(f"  {milliseconds:>9.3f} ms  {count:>4} x {phase}: {name}")
    return lines


def _read_programs(prefill: Compiled, decode: Compiled, needs: Footprint) -> dict[str, int]:
    """Returns the bytes on each device by part, including what the compiler reports for both programs."""
    of_prefill, of_round = prefill.memory_analysis(), decode.memory_analysis()
    held = of_round.argument_size_in_bytes + of_round.output_size_in_bytes - of_round.alias_size_in_bytes
    resident = max(held, needs.total)
    code = of_prefill.generated_code_size_in_bytes + of_round.generated_code_size_in_bytes
    memory = asdict(needs) | {"rest": resident - needs.total, "programs": code, "resident": resident + code}
    return memory | {"round": of_round.temp_size_in_bytes, "prefill": of_prefill.temp_size_in_bytes}


def _devices(arguments: argparse.Namespace) -> tuple[Mesh | AbstractMesh, int | None, Device]:
    """Returns the mesh, the bytes of a device, and the kind of device whose defaults the programs use."""
    limit, device, count = describe_topology(arguments.topology)
    if arguments.no_compile:
        ways = sharding.parse_sizes(arguments.mesh or f"1x{count}")
        return AbstractMesh(tuple(ways.values()), tuple(ways)), limit or usable_memory(), device
    devices = find_devices(arguments.topology)
    mesh = sharding.make_mesh(**sharding.parse_sizes(arguments.mesh or f"1x{len(devices)}"), devices=devices)
    return mesh, limit or usable_memory(mesh), device


def describe_topology(topology: str | None) -> tuple[int | None, Device, int]:
    """Returns the bytes of a device if they are known, its kind, and the number of devices."""
    if topology is None:
        return None, sharding.device(), jax.device_count()
    family, _, sizes = topology.partition(":")
    limit = (TPU_MEMORY | GPU_MEMORY).get(family)
    if family in TPU_MEMORY:
        device = Device("tpu", next(kind for kind, name in TPU_KINDS.items() if name == family))
        form = r"\d+(x\d+)+"
    else:
        device = Device("gpu", f"NVIDIA {family.upper()}")
        form = r"\d*"
    if limit is None or not re.fullmatch(form, sizes):
        raise ValueError(f"got topology {topology!r}, expected one like v5e:4x4, v5p:2x2x2, h200 or h200:8")
    return limit, device, math.prod(map(int, (sizes or "1").split("x")))


def find_devices(topology: str | None) -> list[jax.Device]:
    """Returns the devices of this machine, or of a topology: TPUs (v5e:4x4), or GPUs of one machine (h200, h200:8).

    If a topology is given, the devices of this machine are not used. Raises ValueError if the topology is unknown, or if it
    has no compiler here.
    """
    if topology is None:
        return jax.devices()
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    family, _, count = topology.partition(":")
    if family in GPUS:
        cores, major, cache, shared = GPUS[family]
        chip = f"NVIDIA {family.upper()}"
        target = _GPU_TARGET.format(
            shared=shared, block=shared - 1024, cores=cores, fpus=64 if major == 8 else 128, major=major, cache=cache,
            bandwidth=int(PEAK_RATES[chip][1]), memory=GPU_MEMORY[family], name=chip,
        )  # fmt: skip
        described = {"platform": "cuda", "target_config": target, "topology": f"1x1x{count or 1}"}
        expected = f'topology {topology} needs the GPU compiler; pip install "jax[cuda12]"'
    else:
        try:
            import libtpu
        except ImportError:
            raise ValueError(f'topology {topology} needs the TPU compiler; pip install "jax[tpu]"') from None
        os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        described = {"platform": "tpu", "topology_name": topology}
        expected = f"got topology {topology!r}, expected one like v5e:4x4 or v5p:2x2x2"
    try:
        with slow(f"starting the compiler for {topology}"):
            return list(topologies.get_topology_desc(**described).devices)
    except Exception as error:
        raise ValueError(f"{expected} ({str(error).splitlines()[0]})") from None
