"""The phases of decoding as programs of their own, and the device time of each.

The timed programs are those that run: `prefill` and `decode` as they are shipped (a whole round and a one-token step are
rounds of `decode`'s loop on the device), and the functions that `rounds.decode_round` is composed of, each compiled alone.

A sample is many calls enqueued back to back before the clock waits, so that dispatch is hidden behind the device. Samples
of all phases are interleaved. Buffers with a slot axis are handed from call to call as their programs donate them; the
positions that sequences have reached are reset before every sample, so contexts stay within ROUNDS rounds of the request.

Shape suffixes: b batch, s token slots, q block slots, n tree nodes, v vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import drafters
from treeflash_jax.bench.bars import Tell
from treeflash_jax.bench.floors import phase_work
from treeflash_jax.bench.timed import Compiler, Program, Timed, repeat, running, sample_in_turn
from treeflash_jax.core import devices, sharding
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.loops import DecodePlan, DecodeState
from treeflash_jax.decoding.rounds import accept_path, build_tree, commit_path, draft_stage, verify_tree
from treeflash_jax.engine.batching import capacity_bucket
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.planning import make_requests
from treeflash_jax.engine.settings import GenerateConfig
from treeflash_jax.models.ceilings import Ceilings
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.costs import Work, distinct_experts
from treeflash_jax.models.experts import count_distinct

ROUNDS = 16  # most rounds of one dispatch of `decode`

DRAFT = jax.jit(draft_stage, static_argnames=("plan", "name"))
TREE = jax.jit(build_tree, static_argnames="plan")
VERIFY = jax.jit(verify_tree, static_argnames="plan")
ACCEPT = jax.jit(accept_path, static_argnames="plan")


@partial(jax.jit, static_argnames="plan", donate_argnames="slots")
def COMMIT(weights, slots, marks, verified, accepted, plan):
    """`commit_path` on a divided state, of which only the slots are donated."""
    return divide(loops.pin(commit_path(weights, unite(slots, marks), verified, accepted, plan)))


copied = devices.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def divide(state: DecodeState) -> tuple[DecodeState, DecodeState]:
    """Splits a state into buffers with a slot axis and everything else; each part is None where the other has a value."""
    is_slots = jax.tree.map(lambda x: state.capacity in x.shape[1:], state)
    slots = jax.tree.map(lambda x, yes: x if yes else None, state, is_slots)
    return slots, jax.tree.map(lambda x, yes: None if yes else x, state, is_slots)


def unite(slots: DecodeState, marks: DecodeState) -> DecodeState:
    """Joins the two parts that `divide` returns."""
    return jax.tree.map(lambda x, y: y if x is None else x, slots, marks, is_leaf=lambda x: x is None)


def slots_for(context: int, plans: Sequence[DecodePlan]) -> tuple[int, int]:
    """Returns the largest number of positions that timing at this context fills, and the slots `generate` allocates."""
    positions = context + 1 + (ROUNDS + 1) * max(plan.path_length for plan in plans)
    return positions, capacity_bucket(positions)


def check_sizes(
    model: ModelConfig, plans: Sequence[DecodePlan], batches: list[int], contexts: list[int], mesh: Any
) -> None:
    """Refuses batches that the mesh does not divide, and contexts that leave no room for timed rounds."""
    ways = 1 if mesh is None else dict(mesh.shape)["data"]
    for batch in batches:
        if batch % ways:
            raise ValueError(f"got --batch {batch} on a mesh with a data axis of {ways}, expected a multiple of it")
    for context in contexts:
        positions, _ = slots_for(context, plans)
        if positions > model.max_positions:
            raise ValueError(
                f"got --context {context}, expected at most {model.max_positions - positions + context}: "
                f"the verifier's context is {model.max_positions}, and timed rounds need room"
            )


def count_experts(
    plans: Sequence[DecodePlan], routes: Sequence[tuple[jax.Array, ...]], batch: int, mesh: Any
) -> dict[int, tuple[list[float], float]]:
    """Counts the distinct experts that each layer reads on one device, and those that routing at random would choose.

    Args:
      plans: plans with a mixture of experts as verifier.
      routes: experts of every plan's tree, by layer. The root of a tree is the token of a one-token step.
      batch: sequences decoded together, on all devices.

    Returns:
      (counts by layer, count at random) by tokens per sequence: 1, and the nodes of each plan.
    """
    model, shards = plans[0].verifier, 1 if mesh is None else dict(mesh.shape)["data"]
    passes = {1: [ids_bnk[:, :1] for ids_bnk in routes[0]]}
    passes |= {plan.num_nodes: layers for plan, layers in zip(plans, routes, strict=True)}
    experts = {}
    for tokens, layers in passes.items():
        counts = [float(x) for x in sharding.to_host([count_distinct(ids, model.num_experts, shards) for ids in layers])]
        experts[tokens] = counts, distinct_experts(model.num_experts, model.experts_per_token, batch // shards * tokens)
    return experts


class Bench:
    """A batch of sequences that have read `context` random tokens, and every phase of every plan over them, warm.

    Attributes:
      timed: the phases.
      compile_seconds: time of compiling and warming up all of them; the times of single programs overlap.
      experts: of a mixture of experts, as `count_experts` returns them.
    """

    experts: dict[int, tuple[list[float], float]]

    def __init__(
        self,
        model: TreeFlash,
        plans: Sequence[DecodePlan],
        *,
        batch: int,
        context: int,
        temperature: float = 0.0,
        tell: Tell = lambda text: None,
    ):
        """Compiles and runs everything once.

        Args:
          plans: plans that draft; alike in everything but nodes.
          batch: sequences decoded together, a multiple of the mesh's data axis.
          context: tokens that every sequence has read, at least 1.

        Raises:
          ValueError: logits that are not finite, or too little memory on the devices.
        """
        self.model, self.plans, self.weights = model, list(plans), model.weights
        self.where, self.tell = f"batch {batch}, context {context}", tell
        self.timed: list[Timed] = []
        self.experts = {}
        positions, self.capacity = slots_for(context, plans)
        config = GenerateConfig(max_new_tokens=positions - context, temperature=temperature, stop_ids=())
        ids = np.random.default_rng(0).integers(0, model.verifier.vocab_size, (batch, context)).tolist()
        prompts = model.make_batch(
            make_requests(ids, config, model.verifier), config, batch_size=batch, capacity=self.capacity
        )
        self.sizes = {"batch": batch, "context": context, "dtype": model.dtype, "mesh": model.mesh}
        self.sizes["quantize"] = model.quantize
        since = time.perf_counter()
        compiler = Compiler(tell)
        with running(model.mesh, self.where), compiler.pool:
            self._build(compiler, prompts, tokens=batch * context)
        self.compile_seconds = time.perf_counter() - since

    def measure(self, ceilings: Ceilings, repeats: int) -> list[dict[str, Any]]:
        """Times all phases; returns `Timed.summarise` of each."""
        self.sample(repeats)
        return [timed.summarise(ceilings) for timed in self.timed]

    def sample(self, repeats: int) -> None:
        """Times all phases in turns."""
        with running(self.model.mesh, self.where):
            sample_in_turn(self.timed, repeats, self.tell)

    @property
    def state(self) -> DecodeState:
        return unite(self.slots, self.marks)

    def work(self, plan: DecodePlan) -> dict[str, Work]:
        """Counts the work of every phase of a plan."""
        experts = {tokens: float(np.mean(counts)) for tokens, (counts, _) in self.experts.items()}
        return phase_work(plan, **self.sizes, experts=experts)

    def _build(self, compiler: Compiler, prompts: tuple[Any, ...], tokens: int) -> None:
        """Compiles phase by phase: each gets values and layouts as the program of the phase before returned them."""
        first, plans, weights = self.plans[0], self.plans, self.weights
        prefill = compiler.compile(loops.prefill, weights, *prompts, plan=first.for_prefill()).result()
        self.slots, self.marks = divide(prefill.run(weights, *prompts))
        state = self.state

        count = jnp.int32(1)
        step = compiler.compile(loops.decode, weights, state.replace(drafter=None), count, plan=first.one_token())
        rounds = [compiler.compile(loops.decode, weights, state, count, plan=plan) for plan in plans]

        drafting, expander = _compile_draft(compiler, first, weights, state)
        builds = compiler.each(TREE, plans, [(state, expander) for _ in plans])
        trees = [build.run(state, expander) for build in builds]
        verifies = compiler.each(VERIFY, plans, [(weights, state, tree) for tree, _ in trees])
        verified = [verify.run(weights, state, tree) for verify, (tree, _) in zip(verifies, trees, strict=True)]
        if not all(bool(jnp.isfinite(each.logits_bnv).all()) for each in verified):
            raise ValueError(f"{self.where}: got logits that are not finite")
        if verified[0].routes:
            self.experts = count_experts(
                self.plans, [each.routes for each in verified], self.sizes["batch"], self.model.mesh
            )
        judged = [(*pair, each.logits_bnv) for pair, each in zip(trees, verified, strict=True)]
        accepts = compiler.each(ACCEPT, plans, [(state, *args) for args in judged])
        accepted = [accept.run(state, *args) for accept, args in zip(accepts, judged, strict=True)]
        kept = list(zip(verified, accepted, strict=True))
        commits = compiler.each(COMMIT, plans, [(weights, self.slots, self.marks, *pair) for pair in kept])

        work = self.work(first)
        self.add("step", None, step.result(), work, self.rounds, False, least=4, most=ROUNDS)
        self.add("prefill", None, prefill, work, repeat, lambda: (weights, *prompts), most=4, units=tokens)
        for name, program, given in drafting:
            self.add(name, None, program, work, repeat, lambda given=given: (weights, self.state, given))
        for i, plan in enumerate(plans):
            nodes, work = plan.num_nodes, self.work(plan)
            tree, args, pair = trees[i][0], judged[i], kept[i]
            self.add("tree", nodes, builds[i], work, repeat, lambda: (self.state, expander))
            self.add("verify", nodes, verifies[i], work, repeat, lambda tree=tree: (weights, self.state, tree))
            self.add("accept", nodes, accepts[i], work, repeat, lambda args=args: (self.state, *args))
            self.add("commit", nodes, commits[i], work, self._onward, pair)
            self.add("round", nodes, rounds[i].result(), work, self.rounds, True, least=4, most=ROUNDS)

    def add(
        self,
        phase: str,
        nodes: int | None,
        program: Program,
        work: dict[str, Work],
        kind: Callable[..., Callable[[], Any]],
        *args: Any,
        **sizes: int,
    ) -> None:
        """Adds a phase and warms it up.

        Raises:
          RuntimeError: a dispatch that ended before its last round, whose time would be that of fewer rounds.
        """
        timed = Timed(phase, nodes, program, work[phase], partial(kind, program.run, *args), **sizes)
        self.timed.append(timed)
        if kind != self.rounds:
            jax.block_until_ready(timed.prepare(1)())
            return
        done = int(timed.prepare(timed.most)().rounds_b.min())
        if done != timed.most:
            raise RuntimeError(f"{self.where}: got {done} rounds of {phase}, expected {timed.most}")

    def _onward(self, run: Callable[..., Any], pair: tuple[Any, Any], calls: int) -> Callable[[], Any]:
        """Prepares commits at the same positions, each into the slots that the one before returned."""

        def enqueue() -> Any:
            for _ in range(calls):
                self.slots, _ = run(self.weights, self.slots, self.marks, *pair)
            return self.slots

        return enqueue

    def rounds(self, run: Callable[..., Any], drafts: bool, calls: int) -> Callable[[], Any]:
        """Prepares `calls` rounds in one dispatch, from the end of the prompts."""
        marks = jax.block_until_ready(copied(self.marks))  # donated
        state, count = unite(self.slots, marks), jnp.int32(calls)

        def enqueue() -> Any:
            out = run(self.weights, state if drafts else state.replace(drafter=None), count)
            self.slots = divide(out if drafts else out.replace(drafter=state.drafter))[0]
            return out

        return enqueue


def _compile_draft(
    compiler: Compiler, plan: DecodePlan, weights: Any, state: DecodeState
) -> tuple[list[tuple[str, Program, Any]], Any]:
    """Returns the drafter's phases, each with its program and its input, and the output of the last."""
    phases, value = [], None
    for name in drafters.of(plan.drafter).stages(plan.drafter):
        program = compiler.compile(DRAFT, weights, state, value, plan=plan, name=name).result()
        phases.append((name, program, value))
        value = program.run(weights, state, value)
    return phases, value


def trace(bench: Bench, folder: str, rounds: int = 4) -> None:
    """Writes a profiler trace of a few rounds of every plan."""
    with running(bench.model.mesh, bench.where), jax.profiler.trace(folder):
        for timed in bench.timed:
            if timed.phase == "round":
                with jax.profiler.TraceAnnotation(f"{timed.nodes} nodes"):
                    jax.block_until_ready(timed.prepare(rounds)())
