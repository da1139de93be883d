"""Measures round times and acceptance for `--nodes auto`: `treeflash calibrate`.

    treeflash calibrate --batch 1 8 --context 256 1024 --nodes 8 16 32 64 --prompts prompts.jsonl

Rounds are timed in the program that `--nodes auto` runs, limited to one number of nodes at a time: the tree is built at the
largest number and cut. Rounds of every size and one-token rounds are timed in turns, and medians are stored. Acceptance is
measured by decoding the prompts with the largest tree. One pass is enough for all sizes, as the first nodes of a tree are
the smaller tree. Choose prompts like those you will serve, but none that you use for evaluation.

The file is written to the drafter's folder or, for named pairs and Hub ids, to ~/.cache/treeflash, unless --out gives a
path; `generate --budget FILE` and `tf.load(..., budget=FILE)` read it from there. Measurements of another device, dtype,
mesh, JAX version or pair, or with other draft settings, are kept in the same file and not used.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import treeflash_jax as tf
from treeflash_jax.bench.phases import TREE, Bench, check_sizes, slots_for
from treeflash_jax.bench.prompt_sets import PromptSet, chosen_prompts, empty_chat
from treeflash_jax.bench.shapes import MeasuredSizes
from treeflash_jax.bench.timed import Progress
from treeflash_jax.cli.arguments import ModelOptions, add_fields, load_model, option_values
from treeflash_jax.core import devices, files, sharding
from treeflash_jax.decoding import calibration, loops, rounds
from treeflash_jax.decoding.budget import BudgetPolicy, Measured
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.drafters import draft_options
from treeflash_jax.engine.batching import capacity_bucket
from treeflash_jax.engine.planning import Request, make_requests, resolve
from treeflash_jax.engine.settings import GenerateConfig, RuntimeConfig, SamplingConfig, settings_class
from treeflash_jax.models.attention import positions_read

SMALL = (2, 4, 8)  # trees whose tokens are routed to few experts
BATCH = 8  # prompts decoded together to measure acceptance
EXPANDER = devices.jit(rounds.draft_expander, static_argnames="plan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser.add_argument_group("model"), ModelOptions)
    sizes = parser.add_argument_group("sizes (times are measured in all combinations)")
    names = "batch context nodes"
    add_fields(sizes, MeasuredSizes, names, several=names, batch=[1, 8], context=[200])
    add_fields(sizes, draft_options())
    add_fields(sizes, RuntimeConfig, "attention")
    prompts = parser.add_argument_group("prompts (decoded to measure acceptance)")
    add_fields(prompts, PromptSet, several="prompts", limit=32)
    defaults = {"max_new_tokens": 96, "temperature": [0.0, 1.0]}
    add_fields(prompts, SamplingConfig, "max_new_tokens temperature", several="temperature", **defaults)
    output = parser.add_argument_group("measurement and output")
    add_fields(output, MeasuredSizes, "repeats", repeats=15)
    output.add_argument("--out", metavar="FILE", help="default: in the drafter's folder, or in ~/.cache/treeflash")


def run(arguments: argparse.Namespace) -> int:
    model = load_model(arguments)
    if model.drafter is None:
        raise ValueError("got no drafter, expected one: without it there is nothing to choose")
    given = arguments.batch, arguments.context, arguments.temperature
    batches, contexts, temperatures = (sorted(set(values)) for values in given)
    small = SMALL if model.verifier.num_experts else ()  # with a mixture of experts only small trees may pay
    nodes = sorted(set(arguments.nodes or (*small, *devices.here().nodes)))
    if nodes[0] < 2:
        raise ValueError("got --nodes 1, expected at least 2: one-token rounds are always timed")
    prompts = chosen_prompts(arguments)
    fields = option_values(arguments, settings_class()) | {"nodes": nodes[-1], "temperature": 0.0}
    config = resolve(settings_class()(builder="best-first", **fields), {}, model.verifier, model.drafter)
    plan = model.plan(config)
    check_sizes([plan], batches, contexts, model.mesh)
    chats = [model.encode(empty_chat(prompt, arguments.format)) for prompt in prompts]
    make_requests(chats, config, model.verifier)  # refuses prompts that are too long
    if arguments.out is not None:
        files.check_output(arguments.out)
    out = Path(arguments.out) if arguments.out else model.budget or calibration.default_path(None)
    if out.exists():
        calibration.read(out)

    at = {positions_read(plan.attention, slots_for(context, [plan])[1], context): context for context in contexts}
    positions = sorted(at)  # of contexts that read the same, the longest
    with Progress(len(temperatures) + 2 * len(batches) * len(positions)) as progress:
        configs = [replace(config, temperature=temperature) for temperature in temperatures]
        accepted = [measure_acceptance(model, config, chats, nodes, progress) for config in configs]
        plans, median = [replace(plan, num_nodes=n) for n in nodes], {}
        for batch, size in product(batches, positions):
            progress.step(f"compiling rounds at batch {batch}, context {at[size]}")
            bench = Rounds(model, plans, batch=batch, context=at[size], notify=progress.detail)
            progress.step(f"timing them at batch {batch}, context {at[size]}")
            median[batch, size] = bench.sample(arguments.repeats)
            del bench  # its caches, before the next ones are made
    grid = {"step_seconds": [[median[b, size]["step", None] for size in positions] for b in batches]}
    for phase in ("round", "tree"):
        grid[f"{phase}_seconds"] = [[[median[b, size][phase, n] for n in nodes] for size in positions] for b in batches]
    tau, reliability = map(list, zip(*accepted, strict=True))
    entry = calibration.Calibration(
        identity=calibration.make_identity(model.weights, plan, model.mesh),
        **dict(nodes=nodes, batch=batches, positions=positions, temperatures=temperatures, **grid),
        **dict(tau=tau, reliability=reliability, sparse=model.verifier.num_experts > 0),
    )
    calibration.write(out, entry)
    for batch, size in product(batches, positions):
        show(entry, batch, size)
    print(f"written to {out}")
    return 0


def show(entry: calibration.Calibration, batch: int, positions: int) -> None:
    """Prints the decisions of a call with this batch at these positions."""
    b, c = entry.batch.index(batch), entry.positions.index(positions)
    times = ", ".join(f"{n}: {1e3 * y:.3g}" for n, y in zip(entry.nodes, entry.round_seconds[b][c], strict=True))
    step = 1e3 * entry.step_seconds[b][c]
    print(f"batch {batch}, {positions} positions read: step {step:.3g} ms, rounds by nodes {times} ms")
    for t in entry.temperatures:
        decision = entry.decide(batch, positions, [t])
        does = f"chooses from {', '.join(map(str, decision.nodes))}" if decision.nodes else "never drafts"
        print(f"  T {t:g}: {does}; the best of them is {decision.speedup:.2f} x one-token decoding")


@partial(devices.jit, static_argnames="plan", donate_argnames="state")
def _observed_round(weights: Weights, state: DecodeState, plan: DecodePlan) -> tuple[DecodeState, tuple[Any, ...]]:
    """Returns the state after a round, and the drafted log-probabilities and the accepted path."""
    tree, proposal = rounds.draft_tree(weights, state, plan)
    verified, accepted = rounds.verify_and_accept(weights, state, tree, proposal, plan)
    values = tree.log_prob_bn, accepted.path_bp, accepted.length_b, state.done_b
    return loops.pin(rounds.commit_path(weights, state, verified, accepted, plan)), values


def _observe(model: tf.TreeFlash, requests: Sequence[Request], config: GenerateConfig) -> Iterator[tuple[Any, ...]]:
    """Decodes at most BATCH requests together, and yields what `_observed_round` returns of every round."""
    plan = model.plan(config)
    capacity = capacity_bucket(max(request.length for request in requests) + config.max_new_tokens + 1 + plan.path_length)
    inputs = model.make_batch(requests, config, batch_size=BATCH, capacity=capacity)
    with sharding.ambient(model.mesh):
        state = loops.prefill(model.weights, *inputs, plan=plan.for_prefill())
        while not np.all(sharding.to_host(state.done_b)):
            state, values = _observed_round(model.weights, state, plan)
            yield sharding.to_host(values)


def measure_acceptance(
    model: tf.TreeFlash, config: GenerateConfig, chats: Sequence[list[int]], nodes: Sequence[int], progress: Progress
) -> tuple[list[float], float]:
    """Measures and prints tokens per round by nodes, and the ratio of accepted to expected draft tokens."""
    progress.step(f"answering {len(chats)} prompts at T {config.temperature:g}")
    kept, expected, count = np.zeros(len(nodes)), np.zeros(len(nodes)), 0
    for first in range(0, len(chats), BATCH):
        progress.detail(f"{first} of them done")
        requests = make_requests(chats[first : first + BATCH], config, model.verifier)
        for log_prob_bn, path_bp, length_b, done_b in _observe(model, requests, config):
            for b in np.flatnonzero(~done_b):
                count += 1
                kept += [np.sum(path_bp[b, : length_b[b]] < n) for n in nodes]
                expected += np.cumsum(np.exp(log_prob_bn[b]))[np.array(nodes) - 1]
    drafted = float(np.sum(expected - count))  # 0 for n-grams if nothing ever matched
    reliability = min(max(float(np.sum(kept - count)) / drafted, 0.1), 10.0) if drafted > 0 else 1.0
    tau = (kept / max(count, 1)).tolist()
    shown = ", ".join(f"{n}: {value:.2f}" for n, value in zip(nodes, tau, strict=True))
    print(f"T {config.temperature:g}: tau by nodes {shown}; {reliability:.2f} accepted per expected token", flush=True)
    return tau, reliability


class Rounds(Bench):
    """`Bench` of one-token rounds, rounds that cut the largest tree to one size, and trees of each size."""

    def build(self, prefill: Any, inputs: tuple[Any, ...]) -> None:
        largest = self.plans[-1]
        never_pauses = Measured(jnp.ones(1), jnp.ones((1, 1)), jnp.full(1, 1e9), jnp.float32(1), jnp.float32(0))
        never_pauses = sharding.place(never_pauses, self.model.mesh, over_batch=False)
        plans = [replace(largest, policy=BudgetPolicy((plan.num_nodes,))) for plan in self.plans]
        runner = Runner(plans[-1], self.weights.replace(policy=never_pauses), self.model.mesh)
        fresh, self.weights = runner.start_policy(self.state), runner.weights
        fields = {"policy": fresh.policy, "nodes_bs": fresh.nodes_bs}
        step = self.compile_rounds(largest.one_token(), {"drafter": None})
        rounds = [self.compile_rounds(plan, fields) for plan in plans]
        expander = EXPANDER(self.weights, self.state, plan=largest)
        self.add_rounds("step", None, step, {"drafter": None})
        for plan, whole in zip(self.plans, rounds, strict=True):
            self.run("tree", plan.num_nodes, TREE, lambda state: (state, expander), plan=plan)
            self.add_rounds("round", plan.num_nodes, whole, fields)
