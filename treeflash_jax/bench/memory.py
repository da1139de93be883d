"""Computes the memory a request needs on each device, without loading: `treeflash bench memory --shape qwen3-8b`.

    treeflash bench memory --shape qwen3-8b --topology v5e:4x4 --mesh 2x8 --batch 8 --context 4096 --nodes 64

Weights and caches are sums of sizes. Temporaries (activations, and weights that the compiler lays out anew) and the
collectives of a round are read from the compiled programs. They are compiled from shapes alone, for the devices at hand or,
with --topology, for TPUs or GPUs that this machine lacks (which needs `pip install "jax[tpu]"` or `"jax[cuda12]"`). For
GPUs, the operations that each stage of a round launches are counted too. The exit status is 1 if a device is too small.

Shape suffixes: b batch, s token slots, x stop ids.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax import drafters, files
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax.arguments import ModelOptions, add_fields, values_of
from treeflash_jax.batching import capacity_bucket
from treeflash_jax.bench import programs, shapes
from treeflash_jax.bench.floors import stages_of
from treeflash_jax.bench.programs import Collective
from treeflash_jax.bench.progress import Progress, Tell, nobody
from treeflash_jax.checks import read_json
from treeflash_jax.clock import slow
from treeflash_jax.costs import Counter, distinct_experts
from treeflash_jax.decoding import loops as core
from treeflash_jax.decoding.loops import DecodePlan, Sampling, Weights
from treeflash_jax.devices import GPU_MEMORY, TPU_MEMORY, Device, here
from treeflash_jax.drafters import DrafterSizes
from treeflash_jax.inputs import STOP_SLOTS
from treeflash_jax.memory import Footprint, footprint, in_units, memory_limit
from treeflash_jax.planning import plan_of, resolve
from treeflash_jax.settings import DraftConfig, GenerateConfig, RuntimeConfig, TreeConfig
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    shape = f"one of {', '.join(shapes.VERIFIERS)}, or a verifier's config.json or its folder"
    model.add_argument("--shape", required=True, help=shape)
    model.add_argument(
        "--drafter-shape",
        metavar="FILE",
        help="a drafter's config.json, the name of a language model, or ngram (default: the published sizes)",
    )
    request = parser.add_argument_group("request")
    request.add_argument("--batch", type=int, default=1, help="sequences decoded together (default: %(default)s)")
    request.add_argument("--context", type=int, default=4096, help="cache positions per sequence (default: %(default)s)")
    request.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: %(default)s")
    add_fields(request, ModelOptions, "quantize")
    request.add_argument("--nodes", type=int, help="tree nodes per round, root included (default: the drafter's)")
    add_fields(request, DraftConfig, without="block_size drafter_temperature")
    add_fields(request, TreeConfig, without="nodes selector")
    add_fields(request, RuntimeConfig, "attention")
    devices = parser.add_argument_group("devices")
    devices.add_argument(
        "--mesh",
        metavar="DxM",
        help="split the batch D ways, weights and vocabulary M ways (default: 1 x all devices); with DxMxE, "
        "experts E ways and each of them M ways",
    )
    devices.add_argument("--topology", help="compile for devices that this machine lacks, such as v5e:4x4, h200 or h200:8")
    devices.add_argument("--no-compile", action="store_true", help="count weights and caches only, for a mesh of any size")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file; results of other requests in it are kept")
    parser.set_defaults(run=report)


def report(arguments: argparse.Namespace) -> int:
    """Prints what the request needs; returns 1 where a device cannot hold it.

    Raises:
      ValueError: an unknown shape, folder, topology or setting, or a mesh larger than the devices.
    """
    mesh, limit, device = _devices(arguments)
    model, drafter, name, drafter_name = _pair(arguments)
    config = resolve(None, values_of(arguments, GenerateConfig), model, drafter)
    if min(arguments.batch, arguments.context) < 1:
        raise ValueError(f"got batch {arguments.batch} and context {arguments.context}, expected at least 1 of each")
    dtype, batch, capacity = jnp.dtype(arguments.dtype), arguments.batch, capacity_bucket(arguments.context)
    plan = plan_of(config, model, drafter, dtype, device)
    sizes = dict(mesh.shape)
    if batch % sizes["data"]:
        raise ValueError(f"got a batch of {batch} on a mesh with a data axis of {sizes['data']}, expected a multiple of it")
    out = arguments.out
    if out:
        files.check_output(out, files.json_with("bytes_per_device", inside=True))
    earlier = read_json(out) if out and out.exists() and out.stat().st_size else {}
    request = {"dtype": dtype, "mesh": mesh, "batch": batch, "capacity": capacity, "quantize": arguments.quantize}
    needs = footprint(model, plan.drafter, **request)
    result = {
        "shape": name,
        "drafter": drafter_name if plan.drafts else None,
        "topology": device.kind,
        "mesh": sizes,
        "batch": batch,
        "context": capacity,
        "dtype": dtype.name,
        "quantize": arguments.quantize,
        "nodes": plan.num_nodes,
        **{name: getattr(plan.draft, name, None) for name in ("head", "candidates", "children", "shortlist", "depths")},
        "builder": plan.builder,
        "acceptance": plan.rule,
        "attention": plan.attention,
        "bytes_per_device": asdict(needs),
        "bytes_limit": limit,
    }
    if model.num_experts:
        result["experts_read"] = _experts_read(model, mesh, batch, plan.num_nodes, dtype, arguments.quantize)
    if not arguments.no_compile and (limit is None or needs.total <= limit):
        result = _compiled(result, plan, mesh, dtype, needs)
    memory = result["bytes_per_device"]
    memory["total"] = memory["resident"] + max(memory["round"], memory["prefill"]) if "round" in memory else needs.total
    result["fits"] = None if limit is None else memory["total"] <= limit
    key = f"{name} {device.kind} {'x'.join(map(str, sizes.values()))} batch {batch}"
    words = (
        result["drafter"] and f"drafted by {result['drafter']}",
        arguments.quantize,
        None if plan.builder == "best-first" else plan.builder,
    )
    key += "".join(f" {word}" for word in words if word)
    if out:
        files.write(out, json.dumps(earlier | {key: result}, indent=1) + "\n")
    print("\n".join(lines(key, result)))
    return int(result["fits"] is False)


def compile_programs(
    plan: DecodePlan, mesh: Any, batch: int, capacity: int, dtype: Any, quantize: str | None = None, tell: Tell = nobody
) -> tuple[Any, Any]:
    """The shipped prefill and decode programs of a plan, compiled for the mesh's devices from shapes alone.

    Raises:
      ValueError: the compiler finds no room for them.
    """

    def rows(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        axes = ("batch",) + (None,) * (len(shape) - 1)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=meshes.sharding(axes, shape, mesh))

    weights = Weights(parameters.abstract(verifier.specs(plan.verifier, quantize), dtype, mesh))
    if plan.drafts:
        weights = weights.replace(drafter=parameters.abstract(drafters.of(plan.drafter).specs(plan.drafter), dtype, mesh))
    wide = jnp.promote_types(dtype, jnp.float32)
    sampling = Sampling(
        key_b=rows((batch,), jax.eval_shape(lambda: jax.random.key(0)).dtype),
        temperature_b=rows((batch,), wide),
        top_k_b=rows((batch,), jnp.int32),
        top_p_b=rows((batch,), wide),
        limit_b=rows((batch,), jnp.int32),
        stop_ids_bx=rows((batch, STOP_SLOTS), jnp.int32),
        drafter_temperature_b=rows((batch,), wide),
    )
    prompts = weights, rows((batch, capacity), jnp.int32), rows((batch,), jnp.int32), sampling
    try:
        with meshes.ambient(mesh):
            tell("compiling the prefill")
            lowered = core.prefill.lower(*prompts, plan=plan.for_prefill())
            prefill = lowered.compile()
            state = jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                lowered.out_info,
                prefill.output_shardings,
            )
            tell("compiling the rounds")
            decode = core.decode.lower(weights, state, jax.ShapeDtypeStruct((), jnp.int32), plan=plan).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"weights and caches fit, but the compiler finds no room for the rest: {str(error).splitlines()[0]}"
        ) from None
    return prefill, decode


def lines(key: str, result: dict[str, Any]) -> list[str]:
    """A result as people read it."""
    memory, limit = result["bytes_per_device"], result["bytes_limit"]
    names = {"verifier_cache": "verifier's cache", "drafter_cache": "drafter's cache", "rest": "state and padding"}
    names |= {"programs": "compiled programs", "round": "temporary in a round", "prefill": "temporary in a prefill"}
    text = [f"{key}: caches of {result['context']} positions, {result['nodes']} nodes, {result['dtype']}; on each device"]
    text += [f"  {names.get(part, part):24}{in_units(size):>12}" for part, size in memory.items() if part != "resident"]
    if limit is not None:
        text.append(f"  of {in_units(limit)}: {'fits' if result['fits'] else 'does not fit'}")
    for tokens, read in result.get("experts_read", {}).items():
        text.append(
            f"  a pass over {tokens} tokens a sequence, routed at random, reads {in_units(read['bytes'])} of layers and "
            f"vocabulary: {read['distinct']:.1f} experts a layer"
        )
    if "collectives" not in result:
        return [*text, "weights and caches only: nothing was compiled"]
    for name, found in (("a round", "collectives"), ("its branches (top-k, top-p)", "collectives_in_branches")):
        shown = ", ".join(f"{one['count']} {kind} ({in_units(one['bytes'])})" for kind, one in result[found].items())
        text.append(f"collectives of {name}: {shown or 'none'}")
    text.append(
        f"largest all-gather: {in_units(result['largest_all_gather_bytes'])}; collectives with a whole row of logits: "
        f"{result['logits_moved']}, with a layer's cache: {result['caches_moved']}"
    )
    text.append(f"float32 arrays with rows of logits that a round writes: {result['float32_logits']}")
    if result["launches"]:
        shown = ", ".join(f"{stage} {count}" for stage, count in result["launches"].items())
        text.append(f"operations that a round launches: {sum(result['launches'].values())} ({shown})")
    return text


def _experts_read(
    model: ModelConfig, mesh: Any, batch: int, nodes: int, dtype: Any, quantize: str | None
) -> dict[int, dict[str, float]]:
    """Distinct experts a layer, and bytes of weights that one device reads, of a one-token step and of a round."""
    count, read = Counter(dtype=dtype, batch=batch, mesh=mesh), {}
    for tokens in dict.fromkeys((1, nodes)):
        work = count.layers(model, tokens, 0, quantize) + count.vocabulary(model, tokens, quantize)
        rows = count.sequences * tokens
        distinct = distinct_experts(model.num_experts, model.experts_per_token, rows)
        read[tokens] = {"distinct": distinct, "bytes": round(work.bytes)}
    return read


def _compiled(result: dict[str, Any], plan: DecodePlan, mesh: Any, dtype: Any, needs: Footprint) -> dict[str, Any]:
    """`result` with what the compiled programs add to it."""
    batch, capacity = result["batch"], result["context"]
    with Progress(2) as progress:
        prefill, decode = compile_programs(plan, mesh, batch, capacity, dtype, result["quantize"], progress.step)
    ahead, round_ = prefill.memory_analysis(), decode.memory_analysis()
    held = round_.argument_size_in_bytes + round_.output_size_in_bytes - round_.alias_size_in_bytes
    resident = max(held, needs.total)
    code = ahead.generated_code_size_in_bytes + round_.generated_code_size_in_bytes
    memory = asdict(needs) | {"rest": resident - needs.total, "programs": code, "resident": resident + code}
    memory |= {"round": round_.temp_size_in_bytes, "prefill": ahead.temp_size_in_bytes}
    text = decode.as_text()
    per_round = [one for one in programs.find_collectives(text) if one.in_loop]
    found = per_round + programs.find_collectives(prefill.as_text())
    rows, ways, config = batch // dict(mesh.shape)["data"], dict(mesh.shape)["model"], plan.verifier
    gathers = [one.bytes for one in found if one.kind == "all-gather"]
    shard = config.vocab_size // (1 if config.vocab_size % ways else ways)
    return result | {
        "bytes_per_device": memory,
        "collectives": programs.totals(one for one in per_round if not one.in_branch),
        "collectives_in_branches": programs.totals(one for one in per_round if one.in_branch),
        "largest_all_gather_bytes": max(gathers, default=0),
        "logits_moved": count_moved(found, rows, config.vocab_size),
        "caches_moved": count_moved(found, rows * config.num_kv_heads, capacity * config.head_dim),
        "float32_logits": len(programs.float32_rows(text, shard)),
        "launches": programs.launches(text, stages_of(plan)) if mesh.devices.flat[0].platform == "gpu" else None,
        "jax": jax.__version__,
    }


def count_moved(found: Sequence[Collective], rows: int, size: int) -> int:
    """Collectives whose result holds `rows` or more whole rows of `size` numbers, in whatever layout."""
    moved = [shape for one in found for shape in one.shapes]
    return sum(math.prod(shape) >= rows * size and math.prod(shape) % size == 0 for shape in moved)


def _pair(arguments: argparse.Namespace) -> tuple[ModelConfig, DrafterSizes, str, str | None]:
    """Sizes of verifier and drafter, and what they are called; None: the drafter of the published sizes."""
    model, own = shapes.named(arguments.shape), arguments.drafter_shape
    drafter = shapes.drafter_of(model) if own is None else shapes.named_drafter(own)
    return model, drafter.fitted(model), shapes.called(arguments.shape), own and shapes.called(own)


def _devices(arguments: argparse.Namespace) -> tuple[Any, int | None, Device]:
    """The mesh, the bytes a device has, and what the devices are; those of a topology are named after it."""
    topology, limit = arguments.topology, None
    if topology:
        family, _, dims = topology.partition(":")
        limit = (TPU_MEMORY | GPU_MEMORY).get(family)
        if limit is None or not re.fullmatch(r"\d+(x\d+)+" if family in TPU_MEMORY else r"\d*", dims):
            raise ValueError(f"got topology {topology!r}, expected one like v5e:4x4, v5p:2x2x2, h200 or h200:8")
        jax.config.update("jax_platforms", "cpu")  # devices that are here stay untouched
    device = Device("tpu" if family in TPU_MEMORY else "gpu", topology) if topology else here()
    if arguments.no_compile:
        count = math.prod(map(int, (dims or "1").split("x"))) if topology else jax.device_count()
        sizes = meshes.sizes_of(arguments.mesh or f"1x{count}")
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        return mesh, limit or memory_limit(), device
    with slow(f"starting the compiler for {topology}"):
        found = programs.topology_devices(topology) if topology else jax.devices()
    mesh = meshes.make_mesh(**meshes.sizes_of(arguments.mesh or f"1x{len(found)}"), devices=found)
    if not topology:
        return mesh, memory_limit(mesh), device
    chips = len({tuple(one.coords) for one in found}) if family in TPU_MEMORY else len(found)
    return mesh, limit * chips // len(found), device  # a chip of v4 is two devices
