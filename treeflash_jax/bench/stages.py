"""The stages of decoding as programs of their own, and the device time of each.

What is timed is what runs: `prefill` and `decode` as they are shipped (a whole round and a one-token step are rounds of
`decode`'s own loop on the device), and the stage functions that `rounds.decode_round` is composed of, each compiled alone.

A sample is many calls enqueued back to back before the clock waits, so that dispatch is hidden behind the device. Samples
of all stages are interleaved. Buffers with a slot axis are handed from call to call as their programs donate them; all that
says how far a row has come is put back before every sample, so contexts stay within ROUNDS rounds of what they were.

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

from treeflash_jax import devices, drafters
from treeflash_jax import mesh as meshes
from treeflash_jax.batching import capacity_bucket
from treeflash_jax.bench.floors import stage_work
from treeflash_jax.bench.progress import Tell, nobody
from treeflash_jax.bench.timed import Compiler, Program, Timed, again, running, sample_in_turn
from treeflash_jax.costs import Work, distinct_experts
from treeflash_jax.decoding import loops as core
from treeflash_jax.decoding.loops import DecodePlan, DecodeState
from treeflash_jax.decoding.rounds import (
    accept_path,
    build_tree,
    commit_path,
    draft_stage,
    verify_tree,
)
from treeflash_jax.devices import Ceilings
from treeflash_jax.model import TreeFlash
from treeflash_jax.planning import rows_of
from treeflash_jax.settings import GenerateConfig
from treeflash_jax.verifiers.experts import distinct

ROUNDS = 16  # of one dispatch of `decode`, at most

DRAFT = jax.jit(draft_stage, static_argnames=("plan", "name"))
TREE = jax.jit(build_tree, static_argnames="plan")
VERIFY = jax.jit(verify_tree, static_argnames="plan")
ACCEPT = jax.jit(accept_path, static_argnames="plan")


@partial(jax.jit, static_argnames="plan", donate_argnames="slots")
def COMMIT(weights, slots, marks, verified, accepted, plan):
    """`commit_path` on a divided state, of which only the slots are donated."""
    return divide(core.pin(commit_path(weights, unite(slots, marks), verified, accepted, plan)))


copied = devices.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def divide(state: DecodeState) -> tuple[DecodeState, DecodeState]:
    """The buffers of a state with a slot axis, and what says how far its rows are; None where the other has a value."""
    is_slots = jax.tree.map(lambda x: state.capacity in x.shape[1:], state)
    slots = jax.tree.map(lambda x, yes: x if yes else None, state, is_slots)
    return slots, jax.tree.map(lambda x, yes: None if yes else x, state, is_slots)


def unite(slots: DecodeState, marks: DecodeState) -> DecodeState:
    return jax.tree.map(lambda x, y: y if x is None else x, slots, marks, is_leaf=lambda x: x is None)


def slots_for(context: int, plans: Sequence[DecodePlan]) -> tuple[int, int]:
    """Positions that timing at this context may come to fill, and the slots that `generate` would give them."""
    positions = context + 1 + (ROUNDS + 1) * max(plan.path_rows for plan in plans)
    return positions, capacity_bucket(positions)


def experts_of(
    plans: Sequence[DecodePlan], routes: Sequence[tuple[jax.Array, ...]], batch: int, mesh: Any
) -> dict[int, tuple[list[float], float]]:
    """Distinct experts that each layer reads on one device, and how many routing at random would choose.

    Args:
      plans: with a mixture of experts as verifier.
      routes: experts of every plan's tree, by layer. A tree's root is the row of a one-token step.
      batch: sequences decoded together, on all devices.

    Returns:
      By tokens of a sequence: 1, and the nodes of each plan.
    """
    model, shards = plans[0].verifier, 1 if mesh is None else dict(mesh.shape)["data"]
    passes = {1: [ids_bnk[:, :1] for ids_bnk in routes[0]]}
    passes |= {plan.num_nodes: layers for plan, layers in zip(plans, routes, strict=True)}
    found = {}
    for tokens, layers in passes.items():
        counts = [float(x) for x in meshes.to_host([distinct(ids, model.num_experts, shards) for ids in layers])]
        found[tokens] = counts, distinct_experts(model.num_experts, model.experts_per_token, batch // shards * tokens)
    return found


class Bench:
    """Rows of one batch that have read `context` random tokens, and every stage of every plan over them, warm.

    Attributes:
      timed: the stages.
      compile_seconds: that compiling and warming up all of them took; their own seconds overlap.
      experts: of a mixture of experts, by tokens of a sequence in one pass: distinct experts that each layer reads on one
        device, and how many routing at random would choose.
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
        tell: Tell = nobody,
    ):
        """Compiles and runs everything once.

        Args:
          plans: that draft; alike in everything but nodes.
          batch: rows decoded together, a multiple of the mesh's data axis.
          context: tokens that every row has read, at least 1.
          temperature: of the verifier; 0 is greedy.
          tell: hears how far it is.

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
        prompts = model.inputs(rows_of(ids, config, model.verifier), config, size=batch, capacity=self.capacity)
        self.sizes = {"batch": batch, "context": context, "dtype": model.dtype, "mesh": model.mesh}
        self.sizes["quantize"] = model.quantize
        since = time.perf_counter()
        compiler = Compiler(tell)
        with running(model.mesh, self.where), compiler.pool:
            self._build(compiler, prompts, tokens=batch * context)
        self.compile_seconds = time.perf_counter() - since

    def measure(self, ceilings: Ceilings, repeats: int) -> list[dict[str, Any]]:
        """A row for every stage."""
        self.sample(repeats)
        return [timed.row(ceilings) for timed in self.timed]

    def sample(self, repeats: int) -> None:
        """Times all stages in turn, in an order that rotates."""
        with running(self.model.mesh, self.where):
            sample_in_turn(self.timed, repeats, self.tell)

    @property
    def state(self) -> DecodeState:
        return unite(self.slots, self.marks)

    def works(self) -> dict[DecodePlan, dict[str, Work]]:
        """The work of every stage of every plan."""
        experts = {tokens: float(np.mean(counts)) for tokens, (counts, _) in self.experts.items()}
        return {plan: stage_work(plan, **self.sizes, experts=experts) for plan in self.plans}

    def _build(self, compiler: Compiler, prompts: tuple[Any, ...], tokens: int) -> None:
        """Level by level: what a stage hands to the next has the values, and the layout, that its program gave it."""
        first, plans, weights = self.plans[0], self.plans, self.weights
        prefill = compiler.compile(core.prefill, weights, *prompts, plan=first.for_prefill()).result()
        self.slots, self.marks = divide(prefill.run(weights, *prompts))
        state = self.state

        one = jnp.int32(1)
        step = compiler.compile(core.decode, weights, state.replace(drafter=None), one, plan=first.one_token())
        rounds = [compiler.compile(core.decode, weights, state, one, plan=plan) for plan in plans]

        drafting, expander = [], None  # what each of the drafter's stages takes and gives
        for name in drafters.of(first.drafter).stages(first.drafter):
            program = compiler.compile(DRAFT, weights, state, expander, plan=first, name=name).result()
            drafting.append((name, program, expander))
            expander = program.run(weights, state, expander)
        builds = compiler.each(TREE, plans, [(state, expander) for _ in plans])
        trees = [build.run(state, expander) for build in builds]
        verifies = compiler.each(VERIFY, plans, [(weights, state, tree) for tree, _ in trees])
        verified = [verify.run(weights, state, tree) for verify, (tree, _) in zip(verifies, trees, strict=True)]
        if not all(bool(jnp.isfinite(each.logits_bnv).all()) for each in verified):
            raise ValueError(f"{self.where}: got logits that are not finite")
        if verified[0].routes:
            self.experts = experts_of(self.plans, [each.routes for each in verified], self.sizes["batch"], self.model.mesh)
        judged = [(*pair, each.logits_bnv) for pair, each in zip(trees, verified, strict=True)]
        accepts = compiler.each(ACCEPT, plans, [(state, *args) for args in judged])
        accepted = [accept.run(state, *args) for accept, args in zip(accepts, judged, strict=True)]
        kept = list(zip(verified, accepted, strict=True))
        commits = compiler.each(COMMIT, plans, [(weights, self.slots, self.marks, *pair) for pair in kept])

        works = self.works()
        work = works[first]
        self.add("step", None, step.result(), work, self.rounds, False, least=4, most=ROUNDS)
        self.add("prefill", None, prefill, work, again, lambda: (weights, *prompts), most=4, units=tokens)
        for name, program, given in drafting:
            self.add(name, None, program, work, again, lambda given=given: (weights, self.state, given))
        for i, plan in enumerate(plans):
            nodes, work = plan.num_nodes, works[plan]
            tree, args, pair = trees[i][0], judged[i], kept[i]
            self.add("tree", nodes, builds[i], work, again, lambda: (self.state, expander))
            self.add("verify", nodes, verifies[i], work, again, lambda tree=tree: (weights, self.state, tree))
            self.add("accept", nodes, accepts[i], work, again, lambda args=args: (self.state, *args))
            self.add("commit", nodes, commits[i], work, self._onward, pair)
            self.add("round", nodes, rounds[i].result(), work, self.rounds, True, least=4, most=ROUNDS)

    def add(
        self,
        stage: str,
        nodes: int | None,
        program: Program,
        work: dict[str, Work],
        kind: Callable[..., Callable[[], Any]],
        *args: Any,
        **sizes: int,
    ) -> None:
        """Adds a stage and warms it up.

        Raises:
          RuntimeError: a dispatch of rounds that ended before its last one: its time would be that of fewer rounds.
        """
        timed = Timed(stage, nodes, program, work[stage], partial(kind, program.run, *args), **sizes)
        self.timed.append(timed)
        if kind != self.rounds:
            jax.block_until_ready(timed.prepare(1)())
            return
        done = int(timed.prepare(timed.most)().rounds_b.min())
        if done != timed.most:
            raise RuntimeError(f"{self.where}: got {done} rounds of {stage}, expected {timed.most}")

    def _onward(self, run: Callable[..., Any], pair: tuple[Any, Any], calls: int) -> Callable[[], Any]:
        """Commits at the same place over and over, each into the slots that the one before handed on."""

        def enqueue() -> Any:
            for _ in range(calls):
                self.slots, _ = run(self.weights, self.slots, self.marks, *pair)
            return self.slots

        return enqueue

    def rounds(self, run: Callable[..., Any], drafts: bool, calls: int) -> Callable[[], Any]:
        """So many rounds in one dispatch, from where the prompts ended."""
        marks = jax.block_until_ready(copied(self.marks))  # donated
        state, count = unite(self.slots, marks), jnp.int32(calls)

        def enqueue() -> Any:
            out = run(self.weights, state if drafts else state.replace(drafter=None), count)
            self.slots = divide(out if drafts else out.replace(drafter=state.drafter))[0]
            return out

        return enqueue


def trace(bench: Bench, folder: str, rounds: int = 4) -> None:
    """Writes a profiler trace of a few rounds of every plan."""
    with running(bench.model.mesh, bench.where), jax.profiler.trace(folder):
        for timed in bench.timed:
            if timed.stage == "round":
                with jax.profiler.TraceAnnotation(f"{timed.nodes} nodes"):
                    jax.block_until_ready(timed.prepare(rounds)())
