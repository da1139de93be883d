"""Times every phase of a round on the device.

    treeflash bench latency --shape qwen3-4b --batch 1 8 --context 1024 4096 --nodes 16 64 256 --out latency.json

Every combination of batch, context, attention and nodes is measured. For each batch and context, the other combinations
take turns. Times are medians in milliseconds, with quartiles; prefill's is per prompt token of all sequences. The output
file is written after every batch and context, and keeps results of other settings.
"""

import argparse
import json
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import jax.numpy as jnp

import treeflash_jax as tf
from treeflash_jax.bench import report, shapes
from treeflash_jax.bench.bench_records import environment, print_progress, read_kept
from treeflash_jax.bench.phases import Bench, measure
from treeflash_jax.core import files, sharding, terminal
from treeflash_jax.core.checks import expect
from treeflash_jax.core.setting_options import add_options, option_values
from treeflash_jax.core.settings import setting
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.engine import loading
from treeflash_jax.engine.settings.defaults import choose_dtype
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.model_options import ModelOptions, load_arguments
from treeflash_jax.models.quantized import NO_SCHEME

SCHEMA = 4
SAME = ("settings", "versions", "hardware")  # results replace each other if these are equal


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(shapes.Shapes):
    """Sizes to time; lists are measured in all combinations."""

    batch: int = setting(1, "sequences decoded together", least=1, unit="sequences")
    context: int = setting(256, "tokens in the cache", least=1, unit="tokens")
    repeats: int = setting(9, "timed samples of a phase", least=1, unit="samples")
    out: str | None = setting(None, "JSON file; results of other settings in it are kept", unit="file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several = ["batch", "context", "attention", "nodes"]
    add_options(parser, ModelOptions, ["verifier", "drafter", "dtype", "quantize", "mesh"])
    add_options(parser, LatencyOptions, several=several, batch=[1], context=[256])
    add_options(parser, GenerateConfig, [*shapes.TREE_OPTIONS, "nodes", "temperature"], several=several)


def run(arguments: argparse.Namespace) -> int:
    """Measures every combination, and prints and writes the results."""
    results = read_kept(arguments.out, "schema", "results").get("results", [])
    is_random = arguments.shape is not None or arguments.drafter_shape is not None
    if is_random and (arguments.verifier is not None or arguments.drafter is not None):
        raise ValueError("got a shape and --verifier or --drafter, expected sizes or a pair with its weights")
    model = draw_pair(arguments) if is_random else loading.load(**load_arguments(arguments))
    plan_lists = [make_plans(model, arguments, attention) for attention in dict.fromkeys(arguments.attention or [None])]
    for batch in arguments.batch:
        expect(batch == sharding.pad_batch_size(batch, model.mesh), "--batch", batch, "a multiple of the mesh's data axis")
    settings = {
        "shape": " + ".join(shapes.short_name(name) for name in model.names if name),
        "weights": "random" if is_random else "real",
        "dtype": model.dtype.name,
        "mesh": None if model.mesh is None else dict(model.mesh.shape),
        "temperature": arguments.temperature,
        "quantize": model.quantize,
    }
    for batch, context in product(dict.fromkeys(arguments.batch), dict.fromkeys(arguments.context)):
        print_progress(f"compiling and timing the phases at batch {batch}, context {context}")
        sizes = {"batch": batch, "context": context}
        benches = [Bench(model, plans, **sizes, temperature=arguments.temperature) for plans in plan_lists]
        for plans, phases in zip(plan_lists, measure(benches, arguments.repeats), strict=True):
            tree = shapes.describe_tree(plans[-1]) | {"nodes": [plan.num_nodes for plan in plans]}
            result = {"settings": settings | tree | sizes, **environment(model), "phases": phases}
            show(result)
            results = [r for r in results if any(r[key] != result[key] for key in SAME)] + [result]
        if arguments.out:
            files.write(arguments.out, json.dumps({"schema": SCHEMA, "results": results}, indent=1) + "\n")
        del benches  # frees their memory
    return 0


def draw_pair(arguments: argparse.Namespace) -> tf.TreeFlash:
    """Returns a pair with random weights, of the requested sizes and head."""
    shape = arguments.shape or "tiny"
    verifier, drafter = shapes.find_pair(shape, arguments.drafter_shape)
    if arguments.head and "head" in drafter.settings and arguments.head != drafter.head:
        drafter = replace(drafter, head=arguments.head, head_sizes=None, candidates=HEADS[arguments.head].candidates)
    mesh = None if arguments.mesh is None else tf.make_mesh(**sharding.parse_sizes(arguments.mesh))
    dtype = jnp.dtype(arguments.dtype or choose_dtype(sharding.device(mesh)))
    print_progress(f"drawing the weights of {shape}")
    quantize = None if arguments.quantize == NO_SCHEME else arguments.quantize
    model = shapes.random_pair(verifier, drafter, dtype, mesh, quantize)
    model.names = (shape, "")
    return model


def make_plans(model: tf.TreeFlash, arguments: argparse.Namespace, attention: str | None) -> list[DecodePlan]:
    """Makes the plans that `generate` would run with this attention, in increasing order of nodes."""
    fields = option_values(arguments, GenerateConfig) | {"attention": attention}
    fields["builder"] = fields["builder"] or "best-first"  # drafts even if it does not pay
    plans: dict[int, DecodePlan] = {}
    for nodes in arguments.nodes or [None]:
        plan = model.plan(GenerateConfig(**fields | {"nodes": nodes}))
        if not plan.drafts:
            raise ValueError("got builder 'none', expected one that drafts: one-token steps are always timed")
        if nodes not in (None, plan.num_nodes):
            most = f"{plan.num_nodes} with --builder {plan.builder} (the drafter's block)"
            raise ValueError(f"got --nodes {nodes}, expected at most {most}")
        plans[plan.num_nodes] = plan
    return [plans[nodes] for nodes in sorted(plans)]


def show(result: dict[str, Any]) -> None:
    """Prints the settings, a table of the phases, and the ratios of round times to the time of a one-token step."""
    hardware, phases = result["hardware"], result["phases"]
    shown = {name: value for name, value in result["settings"].items() if value is not None} | result["versions"]
    terminal.show(", ".join(f"{name} {value}" for name, value in shown.items()))
    print(f"{hardware['device']} ({hardware['backend']})")
    table = report.make_table("", ["*phase", "nodes", "ms", "quartiles"])
    for phase in phases:
        quartiles = f"{phase['low_ms']:.4f} - {phase['high_ms']:.4f}"
        table.add_row(phase["phase"], str(phase["nodes"] or "-"), f"{phase['ms']:.4f}", quartiles)
    report.table_console().print(table)
    [step] = [phase["ms"] for phase in phases if phase["phase"] == "step"]
    for phase in phases:
        if phase["phase"] == "round":
            print(f"  round / step at {phase['nodes']} nodes: {phase['ms'] / step:.2f}", flush=True)
