"""Times every stage of a round on the device, beside a floor: `treeflash bench latency --shape qwen3-4b --nodes 16 64`.

    treeflash bench latency --shape qwen3-4b --batch 1 8 --context 1024 4096 --nodes 16 64 256 --out latency.json

Every combination of batch, context and nodes is measured. Times are medians in milliseconds, with quartiles; that of
prefill is per prompt token, all sequences counted. A floor is the bytes and FLOPs of a stage over the copy and matmul rates
that are measured on the device (see devices.py and floors.py). The output file is written after every batch and context,
and keeps results of other settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import treeflash_jax as tf
from treeflash_jax import devices, drafters, files, params
from treeflash_jax import mesh as meshes
from treeflash_jax.arguments import ModelOptions, add_fields, values_of
from treeflash_jax.bench import plots, shapes, standalone, timings
from treeflash_jax.bench import run as side_by_side
from treeflash_jax.bench.progress import Progress
from treeflash_jax.bench.stages import Bench, slots_for, trace
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.devices import measure_ceilings
from treeflash_jax.drafters import DrafterSizes
from treeflash_jax.formats import models
from treeflash_jax.pairs import locate
from treeflash_jax.planning import plan_of, resolve
from treeflash_jax.settings import DraftConfig, GenerateConfig, RuntimeConfig, SamplingConfig, TreeConfig
from treeflash_jax.trees import draws
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig


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
    model.add_argument("--shape", help=f"one of {', '.join(shapes.VERIFIERS)}, or a verifier's config.json (default: tiny)")
    model.add_argument(
        "--drafter-shape",
        metavar="FILE",
        help="a drafter's config.json, the name of a language model, or ngram (default: the published sizes)",
    )
    model.add_argument("--pair", nargs=2, metavar=("VERIFIER", "DRAFTER"), help="measure this pair with its weights")
    model.add_argument("--random", action="store_true", help="use random weights also for tiny and --pair")
    model.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), help="default: bfloat16, float32 on a CPU")
    add_fields(model, ModelOptions, "quantize mesh")
    sizes = parser.add_argument_group("sizes (lists are measured in all combinations)")
    sizes.add_argument("--batch", nargs="+", type=int, default=[1], metavar="B", help="sequences decoded together")
    sizes.add_argument(
        "--context", nargs="+", type=int, default=[256], metavar="S", help="tokens in the cache (default: 256)"
    )
    sizes.add_argument("--nodes", nargs="+", type=int, metavar="N", help="tree nodes verified per round, root included")
    add_fields(sizes, DraftConfig, without="block_size drafter_temperature")
    add_fields(sizes, TreeConfig, without="nodes selector")
    add_fields(sizes, SamplingConfig, "temperature")
    add_fields(sizes, RuntimeConfig, "attention")
    output = parser.add_argument_group("measurement and output")
    output.add_argument("--repeats", type=int, default=9, help="timed samples of a stage (default: %(default)s)")
    output.add_argument("--out", metavar="FILE", help="JSON file; results of other settings in it are kept")
    output.add_argument("--plot", metavar="FILE", help="plot of round / step over nodes (needs matplotlib)")
    output.add_argument(
        "--profile", metavar="DIR", help="write profiler traces of a few rounds, a folder per batch and context"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures every combination, and prints, writes and draws what was asked for.

    Raises:
      ValueError: shapes, sizes or outputs that cannot be, before anything is measured; devices with too little memory.
    """
    for name in ("batch", "context", "repeats"):
        given = getattr(arguments, name)
        if (least := min(given if isinstance(given, list) else [given])) < 1:
            raise ValueError(f"got --{name} {least}, expected at least 1")
    if arguments.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    mesh = None if arguments.mesh is None else tf.make_mesh(**meshes.sizes_of(arguments.mesh))
    pair = find_pair(arguments)
    dtype = jnp.dtype(arguments.dtype or devices.here().dtype)
    plans = plans_of(pair, arguments, dtype)
    _check_sizes(pair, plans, arguments, mesh)
    results = timings.read_results(arguments.out) if arguments.out else []
    _check_outputs(arguments)

    cells = list(product(dict.fromkeys(arguments.batch), dict.fromkeys(arguments.context)))
    with Progress(2 + 2 * len(cells)) as progress:
        progress.step("measuring the machine's copy and matmul rates")
        ceilings = measure_ceilings(dtype)
        progress.step(f"{'loading' if pair.weights == 'real' else 'drawing'} the weights of {pair.name}")
        model = pair.load(dtype=dtype, mesh=mesh, quantize=arguments.quantize)
        for batch, context in cells:
            sizes = {"batch": batch, "context": context}
            progress.step(f"compiling the stages at batch {batch}, context {context}")
            bench = Bench(model, plans, temperature=arguments.temperature, tell=progress.detail, **sizes)
            progress.step(f"timing them at batch {batch}, context {context}")
            rows = bench.measure(ceilings, arguments.repeats)
            settings = settings_of(pair, plans, dtype, mesh, batch, context, arguments.temperature)
            settings |= {"quantize": arguments.quantize} if arguments.quantize else {}  # absent from older files
            result = timings.result_of(settings, side_by_side.environment(model), ceilings, rows, bench.compile_seconds)
            if bench.experts:
                result["experts"] = [
                    {"tokens": tokens, "of": pair.verifier.num_experts, "by_layer": counts, "at_random": at_random}
                    for tokens, (counts, at_random) in bench.experts.items()
                ]
            print("\n".join(timings.lines(result)), flush=True)
            results = timings.merge(results, result)
            if arguments.out:
                text = json.dumps({"schema": timings.SCHEMA, "results": results}, indent=1)
                files.write(arguments.out, text + "\n")
            if arguments.profile:
                trace(bench, str(Path(arguments.profile) / f"batch-{batch}-context-{context}"))
            del bench
    if arguments.plot:
        timings.plot([other for other in results if timings.of_one_sweep(other, result)], arguments.plot)
    return 0


def find_pair(arguments: argparse.Namespace) -> Pair:
    """The sizes that were asked for; no weight is read.

    Raises:
      ValueError: an unknown shape, files that are missing or not implemented, or a drafter that does not fit.
    """
    if arguments.pair:
        if arguments.shape or arguments.drafter_shape:
            raise ValueError("got --pair and a shape, expected one of them")
        folders = [locate(name, part) for name, part in zip(arguments.pair, ("verifier", "drafter"), strict=True)]
        name, is_real = " + ".join(shapes.called(name) for name in arguments.pair), True
        model, drafter = models.read_verifier_config(folders[0]), models.read_drafter_config(folders[1])
        load = partial(tf.load, verifier=folders[0], drafter=folders[1])
    else:
        shape, own = arguments.shape or "tiny", arguments.drafter_shape
        name, is_real = shape if shape in shapes.VERIFIERS else shapes.called(shape), shape == "tiny" and own is None
        model = shapes.named(shape)
        drafter = shapes.drafter_of(model) if own is None else shapes.named_drafter(own)
        load = partial(tf.load, "tiny")
    drafter = drafter.fitted(model)
    if is_real and not arguments.random:
        return Pair(name, "real", model, drafter, load)
    if arguments.head and hasattr(drafter, "head"):
        drafter = replace(drafter, head=arguments.head)
    return Pair(name, "random", model, drafter, partial(shapes.random_pair, model, drafter))


def plans_of(pair: Pair, arguments: argparse.Namespace, dtype: Any) -> list[DecodePlan]:
    """What `generate` would run, for every number of nodes in increasing order.

    Raises:
      ValueError: settings that the pair cannot serve.
    """
    fields, plans = values_of(arguments, GenerateConfig), {}
    for nodes in arguments.nodes or [None]:
        config = resolve(None, fields | {"nodes": nodes}, pair.verifier, pair.drafter)
        plan = plan_of(config, pair.verifier, pair.drafter, dtype)
        if not plan.drafts:
            raise ValueError("got builder 'none', expected one that drafts: one-token steps are always timed")
        if nodes not in (None, plan.num_nodes):
            raise ValueError(
                f"got --nodes {nodes}, expected at most {plan.num_nodes} with --builder {plan.builder} "
                "(the drafter's block)"
            )
        plans[plan.num_nodes] = plan
    return [plans[nodes] for nodes in sorted(plans)]


def settings_of(
    pair: Pair, plans: Sequence[DecodePlan], dtype: Any, mesh: Any, batch: int, context: int, temperature: float
) -> dict[str, Any]:
    plan = plans[0]
    return {
        "shape": pair.name,
        "weights": pair.weights,
        "verifier_parameters": _count(verifier.specs(plan.verifier)),
        "drafter_parameters": _count(drafters.of(plan.drafter).specs(plan.drafter)),
        "block_size": getattr(plan.drafter, "block_size", None),
        **{name: getattr(plan.draft, name, None) for name in ("head", "candidates", "children", "shortlist", "depths")},
        "dtype": dtype.name,
        "mesh": None if mesh is None else dict(mesh.shape),
        "batch": batch,
        "context": context,
        "slots": slots_for(context, plans)[1],
        "nodes": [plan.num_nodes for plan in plans],
        "builder": plan.builder,
        "acceptance": plan.rule,
        "drawn": asdict(plan.shape) if draws(plan.builder) else None,
        "temperature": temperature,
        "attention": plan.attention,
        "prefill_chunk": plan.prefill_chunk,
    }


def _check_sizes(pair: Pair, plans: Sequence[DecodePlan], arguments: argparse.Namespace, mesh: Any) -> None:
    ways = 1 if mesh is None else dict(mesh.shape)["data"]
    for batch in arguments.batch:
        if batch % ways:
            raise ValueError(f"got --batch {batch} on a mesh with a data axis of {ways}, expected a multiple of it")
    for context in arguments.context:
        positions, _ = slots_for(context, plans)
        if positions > pair.verifier.max_positions:
            raise ValueError(
                f"got --context {context}, expected at most {pair.verifier.max_positions - positions + context}: "
                f"the verifier's context is {pair.verifier.max_positions}, and timed rounds need room"
            )


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuses what could not be written in the end. Nothing is written yet but the folder of profiles."""
    if arguments.plot:
        plots.check(arguments.plot)
    if arguments.out:
        files.check_output(arguments.out)
    if arguments.profile:
        try:
            Path(arguments.profile).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot write {arguments.profile}: {error.strerror}") from None


def _count(specs: Any) -> int:
    return params.count(params.abstract(specs, jnp.float32))


def main(argv: list[str] | None = None) -> int:
    return standalone(__doc__, add_arguments, argv)


if __name__ == "__main__":
    sys.exit(main())
