"""Times every phase of a round on the device, beside a floor: `treeflash bench latency --shape qwen3-4b --nodes 16 64`.

    treeflash bench latency --shape qwen3-4b --batch 1 8 --context 1024 4096 --nodes 16 64 256 --out latency.json

Every combination of batch, context and nodes is measured. Times are medians in milliseconds, with quartiles; that of
prefill is per prompt token, all sequences counted. A floor is the bytes and FLOPs of a phase over the copy and matmul rates
that are measured on the device (see floors.py). The output file is written after every batch and context,
and keeps results of other settings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import treeflash_jax as tf
from treeflash_jax.bench import harness, plots, shapes, timings
from treeflash_jax.bench.bars import Progress
from treeflash_jax.bench.phases import Bench, check_sizes, slots_for, trace
from treeflash_jax.cli.arguments import ModelOptions, add_fields, option_values
from treeflash_jax.core import devices, files, sharding
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.drafters import DrafterSizes
from treeflash_jax.engine.pairs import locate
from treeflash_jax.engine.planning import make_plan, resolve
from treeflash_jax.engine.settings import SamplingConfig, settings_class
from treeflash_jax.formats import models
from treeflash_jax.models.ceilings import measure_ceilings
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import draws


@dataclass(frozen=True)
class Pair:
    """Sizes of a verifier and its drafter, and how to get their weights.

    Attributes:
      name: for the record; never a path.
      weights: "random" or "real".
      load: `dtype`, `mesh`, `quantize` -> the pair with its weights in place.
    """

    name: str
    weights: str
    verifier: ModelConfig
    drafter: DrafterSizes
    load: Callable[..., tf.TreeFlash]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    shapes.add_arguments(model)
    model.add_argument("--pair", nargs=2, metavar=("VERIFIER", "DRAFTER"), help="measure this pair with its weights")
    model.add_argument("--random", action="store_true", help="use random weights also for tiny and --pair")
    model.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), help="default: bfloat16, float32 on a CPU")
    add_fields(model, ModelOptions, "quantize mesh")
    sizes = parser.add_argument_group("sizes (lists are measured in all combinations)")
    names = "batch context nodes"
    add_fields(sizes, shapes.MeasuredSizes, names, several=names, batch=[1], context=[256])
    shapes.add_tree_arguments(sizes)
    add_fields(sizes, SamplingConfig, "temperature")
    output = parser.add_argument_group("measurement and output")
    add_fields(output, shapes.MeasuredSizes, "repeats")
    output.add_argument("--out", metavar="FILE", help="JSON file; results of other settings in it are kept")
    output.add_argument("--plot", metavar="FILE", help="plot of round / step over nodes (needs matplotlib)")
    output.add_argument(
        "--profile", metavar="DIR", help="write profiler traces of a few rounds, a folder per batch and context"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures every combination, and prints, writes and draws the results.

    Raises:
      ValueError: invalid shapes, sizes or outputs, before anything is measured; devices with too little memory.
    """
    if arguments.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    mesh = None if arguments.mesh is None else tf.make_mesh(**sharding.parse_sizes(arguments.mesh))
    pair = find_pair(arguments)
    dtype = jnp.dtype(arguments.dtype or devices.here().dtype)
    plans = make_plans(pair, arguments, dtype)
    check_sizes(pair.verifier, plans, arguments.batch, arguments.context, mesh)
    results = timings.read_results(arguments.out) if arguments.out else []
    if arguments.plot:
        plots.check(arguments.plot)
    if arguments.profile:
        Path(arguments.profile).mkdir(parents=True, exist_ok=True)

    cells = list(product(dict.fromkeys(arguments.batch), dict.fromkeys(arguments.context)))
    with Progress(2 + 2 * len(cells)) as progress:
        progress.step("measuring the machine's copy and matmul rates")
        ceilings = measure_ceilings(dtype)
        progress.step(f"{'loading' if pair.weights == 'real' else 'drawing'} the weights of {pair.name}")
        model = pair.load(dtype=dtype, mesh=mesh, quantize=arguments.quantize)
        for batch, context in cells:
            progress.step(f"compiling the phases at batch {batch}, context {context}")
            sizes = {"batch": batch, "context": context, "temperature": arguments.temperature}
            bench = Bench(model, plans, tell=progress.detail, **sizes)
            progress.step(f"timing them at batch {batch}, context {context}")
            times = bench.measure(ceilings, arguments.repeats)
            settings = {
                "shape": pair.name,
                "weights": pair.weights,
                **shapes.describe_tree(plans[0]),
                "dtype": dtype.name,
                "mesh": None if mesh is None else dict(mesh.shape),
                **sizes,
                "slots": slots_for(context, plans)[1],
                "nodes": [plan.num_nodes for plan in plans],
                "drawn": asdict(plans[0].shape) if draws(plans[0].builder) else None,
                "prefill_chunk": plans[0].prefill_chunk,
                **({"quantize": arguments.quantize} if arguments.quantize else {}),
            }
            result = timings.make_result(settings, harness.environment(model), ceilings, times, bench.compile_seconds)
            if bench.experts:
                result["experts"] = [
                    {"tokens": tokens, "of": pair.verifier.num_experts, "by_layer": counts, "at_random": at_random}
                    for tokens, (counts, at_random) in bench.experts.items()
                ]
            timings.show(result)
            results = timings.merge(results, result)
            if arguments.out:
                files.write(arguments.out, json.dumps({"schema": timings.SCHEMA, "results": results}, indent=1) + "\n")
            if arguments.profile:
                trace(bench, str(Path(arguments.profile) / f"batch-{batch}-context-{context}"))
            del bench
    if arguments.plot:
        timings.plot([other for other in results if timings.is_same_sweep(other, result)], arguments.plot)
    return 0


def find_pair(arguments: argparse.Namespace) -> Pair:
    """Returns the sizes of the requested pair; no weight is read.

    Raises:
      ValueError: an unknown shape, files that are missing or not implemented, or a drafter that does not fit.
    """
    shape, drafter_shape = arguments.shape or "tiny", arguments.drafter_shape
    if arguments.pair:
        if arguments.shape or drafter_shape:
            raise ValueError("got --pair and a shape, expected one of them")
        folders = [str(locate(name, part)) for name, part in zip(arguments.pair, ("verifier", "drafter"), strict=True)]
        name, is_real = " + ".join(map(shapes.short_name, arguments.pair)), True
        model = models.read_verifier_config(folders[0])
        drafter = models.read_drafter_config(folders[1]).fitted(model)
        load = partial(tf.load, verifier=folders[0], drafter=folders[1])
    else:
        name, is_real = shapes.short_name(shape), shape == "tiny" and drafter_shape is None
        model, drafter = shapes.find_pair(shape, drafter_shape)
        load = partial(tf.load, "tiny")
    if is_real and not arguments.random:
        return Pair(name, "real", model, drafter, load)
    if arguments.head and hasattr(drafter, "head"):
        drafter = replace(drafter, head=arguments.head)
    return Pair(name, "random", model, drafter, partial(shapes.random_pair, model, drafter))


def make_plans(pair: Pair, arguments: argparse.Namespace, dtype: Any) -> list[DecodePlan]:
    """Makes the plans that `generate` would run, by increasing number of nodes.

    Raises:
      ValueError: settings that the pair cannot serve.
    """
    fields, plans = option_values(arguments, settings_class()), {}
    for nodes in arguments.nodes or [None]:
        config = resolve(None, fields | {"nodes": nodes}, pair.verifier, pair.drafter)
        plan = make_plan(config, pair.verifier, pair.drafter, dtype)
        if not plan.drafts:
            raise ValueError("got builder 'none', expected one that drafts: one-token steps are always timed")
        if nodes not in (None, plan.num_nodes):
            raise ValueError(
                f"got --nodes {nodes}, expected at most {plan.num_nodes} with --builder {plan.builder} "
                "(the drafter's block)"
            )
        plans[plan.num_nodes] = plan
    return [plans[nodes] for nodes in sorted(plans)]
