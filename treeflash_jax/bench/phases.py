"""The phases of decoding as separate programs, with the device time of each.

The timed programs are the programs of decoding. `prefill` and `decode` are timed as they are shipped: a whole round, or a
one-token step, is an iteration of `decode`'s loop on the device. The functions that `rounds.decode_round` calls are
compiled and timed separately.

A sample consists of many calls, which are all enqueued before the clock waits, so the device hides the time of dispatch.
Samples of all phases alternate. Each sample of rounds or commits begins with a copy of the state after the prompts, so
contexts exceed the requested length by ROUNDS rounds at most.

Shape suffixes: b batch, n tree nodes.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Wrapped

from treeflash_jax.core import programs, sharding
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.accepting import EmittedPath, accept_path
from treeflash_jax.decoding.rounds import Verified, build_tree, commit_path, draft_expander, verify_tree
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.engine.call.requests import make_requests
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.schedule.batching import Batch, SamplingSizes, make_batch, round_capacity
from treeflash_jax.engine.settings.generate_config import GenerateConfig

CALLS = 64  # largest number of calls in a sample
ROUNDS = 16  # largest number of rounds or commits in a sample, since they lengthen the context
SAMPLE_SECONDS = 0.05

VERIFY = jax.jit(verify_tree, static_argnames="plan")
ACCEPT = jax.jit(accept_path, static_argnames="plan")
COMMIT = jax.jit(commit_path, static_argnames="plan", donate_argnames="state")

copied = programs.jit(lambda tree: jax.tree.map(jnp.copy, tree))


@partial(jax.jit, static_argnames="plan")
def compute_draft(weights: Weights, state: DecodeState, plan: DecodePlan):
    """Returns the arrays that a draft computes. Omits weights and caches of its expander, because they would be copied."""
    return computed_leaves(draft_expander(weights, state, plan), (weights, state))


@partial(jax.jit, static_argnames="plan")
def compute_tree(weights: Weights, state: DecodeState, computed: Any, plan: DecodePlan):
    """Builds the tree from the arrays of `compute_draft`. The draft is traced here again, but the compiler drops it."""
    expander = draft_expander(weights, state, plan)
    leaves = computed_leaves(expander, (weights, state))
    arrays = {id(leaf): array for leaf, array in zip(leaves, computed, strict=True)}
    return build_tree(weights, state, jax.tree.map(lambda leaf: arrays.get(id(leaf), leaf), expander), plan)


def computed_leaves(tree: Any, inputs: Any) -> list[Any]:
    """Returns the leaves of a tree that are not leaves of `inputs`."""
    passed_on = {id(leaf) for leaf in jax.tree.leaves(inputs)}
    return [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in passed_on]


@dataclass
class Phase:
    """A phase of a configuration, and its times.

    Attributes:
      nodes: number of nodes of the tree; None if the phase does not depend on it.
      make_enqueue: function of a number of calls; returns a function that enqueues them and returns arrays to wait for.
      most: largest number of calls per sample.
      units: number by which the time of a call is divided (prompt tokens of a prefill).
      seconds: time of a unit, for each sample.
    """

    name: str
    nodes: int | None
    make_enqueue: Callable[[int], Callable[[], Any]]
    most: int = CALLS
    units: int = 1
    calls: int = 1
    seconds: list[float] = field(default_factory=list)

    def sample(self) -> float:
        enqueue = self.make_enqueue(self.calls)
        since = time.perf_counter()
        jax.block_until_ready(enqueue())
        return (time.perf_counter() - since) / self.calls / self.units

    def choose_calls(self) -> None:
        self.calls = 1
        self.seconds = []
        seconds = min(self.sample(), self.sample()) * self.units
        self.calls = min(self.most, math.ceil(SAMPLE_SECONDS / seconds))

    def summarise(self) -> dict[str, Any]:
        """Returns milliseconds (median and quartiles) of a call or token."""
        low, median, high = (1e3 * float(x) for x in np.percentile(self.seconds, (25, 50, 75)))
        times = {"ms": median, "low_ms": low, "high_ms": high}
        return {"phase": self.name, "nodes": self.nodes, **times, "samples": len(self.seconds), "calls": self.calls}


class Bench:
    """A batch of sequences that have read `context` random tokens, and all phases of all plans over them, compiled.

    Attributes:
      state: the state after the prompts.
    """

    def __init__(
        self, model: TreeFlash, plans: Sequence[DecodePlan], *, batch: int, context: int, temperature: float = 0.0
    ):
        """Compiles and runs everything once.

        Args:
          plans: plans that draft. They may differ only in the number of nodes, and in defaults that depend on it.

        Raises ValueError if the context leaves no room for timed rounds, or if the devices have too little memory.
        """
        self.model = model
        self.plans = list(plans)
        self.where = f"batch {batch}, context {context}"
        self.phases: list[Phase] = []
        room = 1 + (ROUNDS + 1) * max(plan.path_length for plan in plans)
        self.context = context
        self.capacity = round_capacity(context + room)
        config = GenerateConfig(max_new_tokens=room, temperature=temperature, stop_ids=())
        ids = np.random.default_rng(0).integers(0, model.verifier.vocab_size, (batch, context)).tolist()
        requests = make_requests(ids, config, model.verifier)
        sizes = SamplingSizes.fit(requests)
        inputs = make_batch(requests, sizes, capacity=self.capacity, dtype=model.dtype, mesh=model.mesh)
        with running(model.mesh, self.where):
            self.state = self._add_prefill(inputs, units=batch * context)
            self._add_phases(model.weights, self.state)

    def _add_phases(self, weights: Weights, state: DecodeState) -> None:
        """Compiles phase by phase. Each phase gets the values and layouts that the previous phase's program returned."""
        self._add_rounds("step", None, state.replace(drafter=None), self.plans[0].one_token())
        for plan in self.plans:
            add = partial(self._add, plan=plan, nodes=plan.num_nodes)
            computed = add("draft", compute_draft, weights, state)
            tree, proposal = add("tree", compute_tree, weights, state, computed)
            verified = add("verify", VERIFY, weights, state, tree)
            accepted = add("accept", ACCEPT, state, tree, proposal, verified.logits_bnv)
            self._add_commits(plan, verified, accepted)
            self._add_rounds("round", plan.num_nodes, state, plan)

    def _add_prefill(self, inputs: Batch, units: int) -> DecodeState:
        """Adds the reading of whole prompts into new caches. Returns the state after it."""
        weights, plan = self.model.weights, self.plans[0].shared
        start = self._compile(loops.init_state, *inputs, plan=plan, dtype=weights.dtype)
        length_b, max_chunks = inputs.length_b, jnp.int32(self.context)  # reading ends after the last chunk
        read = self._compile(loops.prefill_chunks, weights, start(*inputs), length_b, max_chunks, plan=plan)
        return self._add_repeated("prefill", None, lambda: read(weights, start(*inputs), length_b, max_chunks), units)

    def _add(self, name: str, function: Wrapped, *arguments: Any, plan: DecodePlan, nodes: int) -> Any:
        """Adds a phase whose calls all have the same arguments. Returns their output."""
        program = self._compile(function, *arguments, plan=plan)
        return self._add_repeated(name, nodes, lambda: program(*arguments))

    def _add_repeated(self, name: str, nodes: int | None, call: Callable[[], Any], units: int = 1) -> Any:
        """Adds a phase that calls a function again and again. Returns its output."""

        def enqueue(calls: int) -> Any:
            for _ in range(calls):
                out = call()
            return out

        self.phases.append(Phase(name, nodes, lambda calls: partial(enqueue, calls), units=units))
        return jax.block_until_ready(enqueue(1))

    def _add_rounds(self, name: str, nodes: int | None, state: DecodeState, plan: DecodePlan) -> None:
        """Adds rounds of `decode`. A single call runs all rounds of a sample."""
        weights = self.model.weights
        program = self._compile(loops.decode, weights, state, jnp.int32(1), plan=plan)
        self._add_moving(name, nodes, state, lambda state, calls: program(weights, state, jnp.int32(calls)))

    def _add_commits(self, plan: DecodePlan, verified: Verified, accepted: EmittedPath) -> None:
        """Adds repeated commits of the same path, each after the previous commit."""
        weights = self.model.weights
        program = self._compile(COMMIT, weights, self.state, verified, accepted, plan=plan)

        def enqueue(state: DecodeState, calls: int) -> DecodeState:
            for _ in range(calls):
                state = program(weights, state, verified, accepted)
            return state

        self._add_moving("commit", plan.num_nodes, self.state, enqueue)

    def _add_moving(self, name: str, nodes: int | None, state: DecodeState, enqueue: Any) -> None:
        """Adds a phase that changes the state. Every sample has a copy of the state, which `enqueue` donates."""

        def make_enqueue(calls: int) -> Callable[[], Any]:
            return partial(enqueue, jax.block_until_ready(copied(state)), calls)

        self.phases.append(Phase(name, nodes, make_enqueue, most=ROUNDS))
        self.phases[-1].sample()

    def _compile(self, function: Wrapped, *arguments: Any, **static: Any) -> Any:
        return programs.compile_lowered(function.lower(*arguments, **static), self.model.mesh, function)


def measure(benches: Sequence[Bench], repeats: int) -> list[list[dict[str, Any]]]:
    """Takes samples of all phases of several benches in turns, in rotating order. Returns the summaries of each bench."""
    phases = [phase for bench in benches for phase in bench.phases]
    with running(benches[0].model.mesh, benches[0].where):
        for phase in phases:
            phase.choose_calls()
        for turn in range(repeats):
            begin = turn % len(phases)
            for phase in [*phases[begin:], *phases[:begin]]:
                phase.seconds.append(phase.sample())
    return [[phase.summarise() for phase in bench.phases] for bench in benches]


@contextmanager
def running(mesh: Mesh | None, where: str) -> Iterator[None]:
    """Enters the mesh, and converts an out-of-memory error to a one-line ValueError."""
    try:
        with sharding.ambient(mesh):
            yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"{where}: the devices have too little memory for it") from None
