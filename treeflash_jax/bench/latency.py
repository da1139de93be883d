"""Times every phase of a round on the device, beside a floor: `treeflash bench latency --shape qwen3-4b --nodes 16 64`.

    treeflash bench latency --shape qwen3-4b --batch 1 8 --context 1024 4096 --nodes 16 64 256 --out latency.json

Every combination of batch, context and nodes is measured. Times are median milliseconds, with quartiles; prefill's is per
prompt token of all sequences. Floors are explained in bench/phases.py. The output file is written after every batch
and context, and keeps results of other settings.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import jax.numpy as jnp

import treeflash_jax as tf
from treeflash_jax.bench import harness, report, shapes
from treeflash_jax.bench.bench_records import read_kept
from treeflash_jax.bench.phases import Bench, check_sizes, slots_for
from treeflash_jax.bench.timed import measure_copies, print_progress
from treeflash_jax.core import files, sharding, terminal
from treeflash_jax.core.settings import add_options, option_values, setting
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.drafters import DrafterConfig
from treeflash_jax.engine.defaults import choose_dtype
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.engine.model_options import ModelOptions, load_model
from treeflash_jax.engine.plan import resolve
from treeflash_jax.models.config import ModelConfig

SCHEMA = 3
SAME = ("settings", "versions", "hardware")  # of results that replace each other

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(shapes.Shapes):
    """Sizes to time; lists are measured in all combinations."""

    batch: int = setting(1, "sequences decoded together", least=1, unit="sequences")
    context: int = setting(256, "tokens in the cache", least=1, unit="tokens")
    repeats: int = setting(9, "timed samples of a phase", least=1, unit="samples")
    out: str | None = setting(None, "JSON file; results of other settings in it are kept", unit="file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several = ["batch", "context", "nodes"]
    add_options(parser, ModelOptions, ["verifier", "drafter", "dtype", "quantize", "mesh"])
    add_options(parser, LatencyOptions, several=several, batch=[1], context=[256])
    add_options(parser, GenerateConfig, [*shapes.TREE_OPTIONS, "nodes", "temperature"], several=several)


def run(arguments: argparse.Namespace) -> int:
    """Measures every combination, and prints and writes the results. All arguments are checked before."""
    is_random = arguments.shape is not None or arguments.drafter_shape is not None
    if is_random and (arguments.verifier is not None or arguments.drafter is not None):
        raise ValueError("got a shape and --verifier or --drafter, expected sizes or a pair with its weights")
    if is_random:
        shape = arguments.shape or "tiny"
        verifier, drafter = shapes.find_pair(shape, arguments.drafter_shape)
        if arguments.head and hasattr(drafter, "head"):
            drafter = replace(drafter, head=arguments.head)
        mesh = None if arguments.mesh is None else tf.make_mesh(**sharding.parse_sizes(arguments.mesh))
        dtype, names = jnp.dtype(arguments.dtype or choose_dtype(sharding.device(mesh))), [shape]
    else:
        model = load_model(arguments)
        verifier, drafter, mesh, dtype, names = model.verifier, model.drafter, model.mesh, model.dtype, model.names
    plans = make_plans(verifier, drafter, arguments, dtype)
    check_sizes(plans, arguments.batch, arguments.context, mesh)
    results = read_kept(arguments.out, "schema", "results").get("results", [])
    settings = {
        "shape": " + ".join(map(shapes.short_name, names)),
        "weights": "random" if is_random else "real",
        **shapes.describe_tree(plans[0]),
        "dtype": dtype.name,
        "mesh": None if mesh is None else dict(mesh.shape),
        "temperature": arguments.temperature,
        "nodes": [plan.num_nodes for plan in plans],
        "drawn": asdict(plans[0].shape),
        "quantize": arguments.quantize,
    }
    cells = list(product(dict.fromkeys(arguments.batch), dict.fromkeys(arguments.context)))
    print_progress("measuring the machine's copy rate")
    rate = measure_copies()
    if is_random:
        print_progress(f"drawing the weights of {settings['shape']}")
        model = shapes.random_pair(verifier, drafter, dtype, mesh, arguments.quantize)
    for batch, context in cells:
        print_progress(f"compiling and timing the phases at batch {batch}, context {context}")
        sizes = {"batch": batch, "context": context}
        bench = Bench(model, plans, temperature=arguments.temperature, **sizes)
        times = bench.measure(rate, arguments.repeats)
        result = make_result(model, bench, settings | sizes | {"slots": slots_for(context, plans)[1]}, rate, times)
        show(result)
        results = [r for r in results if any(r[key] != result[key] for key in SAME)] + [result]
        if arguments.out:
            files.write(arguments.out, json.dumps({"schema": SCHEMA, "results": results}, indent=1) + "\n")
        del bench
    return 0


def make_plans(
    verifier: ModelConfig, drafter: DrafterConfig, arguments: argparse.Namespace, dtype: Any
) -> list[DecodePlan]:
    """Makes the plans that `generate` would run, by increasing number of nodes."""
    fields, plans = option_values(arguments, GenerateConfig), {}
    fields["builder"] = fields["builder"] or "best-first"  # also if drafting does not pay
    for nodes in arguments.nodes or [None]:
        config = GenerateConfig(**fields | {"nodes": nodes})
        plan = resolve(config, verifier, drafter, dtype=dtype, device=sharding.device())
        if not plan.drafts:
            raise ValueError("got builder 'none', expected one that drafts: one-token steps are always timed")
        if nodes not in (None, plan.num_nodes):
            most = f"{plan.num_nodes} with --builder {plan.builder} (the drafter's block)"
            raise ValueError(f"got --nodes {nodes}, expected at most {most}")
        plans[plan.num_nodes] = plan
    return [plans[nodes] for nodes in sorted(plans)]


def make_result(
    model: tf.TreeFlash, bench: Bench, settings: dict[str, Any], rate: float, times: Sequence[dict[str, Any]]
) -> Result:
    """Makes the result of one batch and context: times of its phases, and rounds over one-token steps by nodes."""
    ms = {(time["phase"], time["nodes"]): time["ms"] for time in times}
    rounds = [{"nodes": nodes, "round_over_step": ms["round", nodes] / ms["step", None]} for nodes in settings["nodes"]]
    result = {"settings": settings, **harness.environment(model), "copy_bytes_per_second": rate}
    result |= {"phases": list(times), "rounds": rounds, "compile_seconds": bench.compile_seconds}
    return result


def show(result: Result) -> None:
    settings, hardware = result["settings"], result["hardware"]
    table = report.make_table("", ["*phase", "nodes", "ms", "quartiles", "floor ms", "ms / floor"])
    for time in result["phases"]:
        ratio = time["ms"] / time["floor_ms"] if time["floor_ms"] else math.inf
        median, low, high, floor = (f"{time[name]:.4f}" for name in ("ms", "low_ms", "high_ms", "floor_ms"))
        cells = median, f"{low} - {high}", floor, f"{ratio:.2f}" if ratio < 1000 else "> 1000"
        table.add_row(time["phase"], str(time["nodes"] or "-"), *cells)
    names = [name for name in settings if name not in ("shape", "weights", "nodes", "drawn")]
    terminal.show(
        f"{settings['shape']}, {settings['weights']} weights; "
        + ", ".join(f"{name} {settings[name]}" for name in names if settings[name] is not None)
        + "\n"
        + f"{hardware['device']} ({hardware['backend']}): copy {result['copy_bytes_per_second'] / 1e9:.4g} GB/s a device; "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    )
    report.table_console().print(table)
    for entry in result["rounds"]:
        print(f"  round / step at {entry['nodes']} nodes: {entry['round_over_step']:.2f}")
    print(f"  compiled and warmed up before, in {result['compile_seconds']:.0f} s", flush=True)
