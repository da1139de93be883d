"""The phases of decoding as programs of their own, and the device time of each.

The timed programs are those that run: `prefill` and `decode` as they are shipped (a whole round and a one-token step are
rounds of `decode`'s loop on the device), and the functions that `rounds.decode_round` is composed of, each compiled alone.

A sample is many calls enqueued back to back before the clock waits, so that dispatch is hidden behind the device. Samples
of all phases are interleaved. Buffers with a slot axis are handed from call to call as their programs donate them; the
positions that sequences have reached are reset before every sample, so contexts stay within ROUNDS rounds of the request.

A phase's floor is the time of reading once, at the measured rate of copies, the arrays that its program reads: weights, the
cached positions of the context, and results of the phase before. Of a mixture of experts, those of one token count.

Shape suffixes: b batch, n tree nodes.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.bench.timed import Timed, running, sample_in_turns
from treeflash_jax.core import parameters, programs
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.rounds import accept_path, build_tree, commit_path, draft_expander, verify_tree
from treeflash_jax.decoding.state import DecodePlan, DecodeState
from treeflash_jax.engine.batching import make_batch, round_capacity
from treeflash_jax.engine.device_memory import device_bytes
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.requests import make_requests
from treeflash_jax.models import verifier

# From a program and a number of calls to a function that enqueues them and returns arrays to wait for.
Prepare = Callable[[Callable[..., Any], int], Callable[[], Any]]
MakeArgs = Callable[[DecodeState], tuple[Any, ...]]
ROUNDS = 16  # maximal number of rounds in one dispatch of `decode`

VERIFY = jax.jit(verify_tree, static_argnames="plan")
ACCEPT = jax.jit(accept_path, static_argnames="plan")


@partial(jax.jit, static_argnames="plan")
def DRAFT(weights, state, plan):
    """Returns the arrays that a draft computes. Weights and caches that its expander passes on would be copied."""
    return computed_leaves(draft_expander(weights, state, plan), (weights, state))


@partial(jax.jit, static_argnames="plan")
def TREE(weights, state, computed, plan):
    """Builds the tree from the arrays that DRAFT computed. The compiler drops the draft that is traced here again."""
    expander = draft_expander(weights, state, plan)
    leaves = computed_leaves(expander, (weights, state))
    given = {id(leaf): array for leaf, array in zip(leaves, computed, strict=True)}
    return build_tree(state, jax.tree.map(lambda leaf: given.get(id(leaf), leaf), expander), plan)


def computed_leaves(tree: Any, inputs: Any) -> list[Any]:
    """Returns the leaves of a tree that are not leaves of `inputs`."""
    passed_on = {id(leaf) for leaf in jax.tree.leaves(inputs)}
    return [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in passed_on]


@partial(jax.jit, static_argnames="plan", donate_argnames="slots")
def COMMIT(weights, slots, marks, verified, accepted, plan):
    """`commit_path` on a divided state, of which only the slots are donated."""
    return divide(loops.pin(commit_path(weights, unite(slots, marks), verified, accepted, plan)))


copied = programs.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def divide(state: DecodeState) -> tuple[DecodeState, DecodeState]:
    """Splits a state into buffers with a slot axis and everything else; each part is None where the other has a value."""
    slots = jax.tree.map(lambda x: x if state.capacity in x.shape[1:] else None, state)
    return slots, jax.tree.map(lambda x: None if state.capacity in x.shape[1:] else x, state)


def unite(slots: DecodeState, marks: DecodeState) -> DecodeState:
    """Joins the two parts that `divide` returns."""
    return jax.tree.map(lambda x, y: y if x is None else x, slots, marks, is_leaf=lambda x: x is None)


def slots_for(context: int, plans: Sequence[DecodePlan]) -> tuple[int, int]:
    """Returns the largest number of positions that timing at this context fills, and the slots `generate` allocates."""
    positions = context + 1 + (ROUNDS + 1) * max(plan.path_length for plan in plans)
    return positions, round_capacity(positions)


def check_sizes(plans: Sequence[DecodePlan], batches: list[int], contexts: list[int], mesh: Any) -> None:
    """Refuses batches that the mesh does not divide, and contexts that leave no room for timed rounds."""
    ways, most = 1 if mesh is None else mesh.shape["data"], plans[0].verifier.max_positions
    for batch in batches:
        if batch % ways:
            raise ValueError(f"got --batch {batch} on a mesh with a data axis of {ways}, expected a multiple of it")
    room = slots_for(0, plans)[0]
    if max(contexts) + room > most:
        why = f"the verifier's context is {most}, and timed rounds need room"
        raise ValueError(f"got --context {max(contexts)}, expected at most {most - room}: {why}")


class Bench:
    """A batch of sequences that have read `context` random tokens, and every phase of every plan over them, warm.

    Attributes:
      compile_seconds: time of compiling and warming up all phases.
    """

    def __init__(
        self,
        model: TreeFlash,
        plans: Sequence[DecodePlan],
        *,
        batch: int,
        context: int,
        temperature: float = 0.0,
    ):
        """Compiles and runs everything once.

        Args:
          plans: plans that draft; alike in everything but nodes.

        Raises ValueError for logits that are not finite, or too little memory on the devices.
        """
        self.model, self.plans, self.weights = model, list(plans), model.weights
        self.where, self.timed = f"batch {batch}, context {context}", list[Timed]()
        self.batch, self.context = batch, context
        positions, self.capacity = slots_for(context, plans)
        config = GenerateConfig(max_new_tokens=positions - context, temperature=temperature, stop_ids=())
        ids = np.random.default_rng(0).integers(0, model.verifier.vocab_size, (batch, context)).tolist()
        requests = make_requests(ids, config, model.verifier)
        batched = make_batch(requests, batch_size=batch, capacity=self.capacity, dtype=model.dtype, mesh=model.mesh)
        inputs = self.weights, *batched
        since = time.perf_counter()
        with running(model.mesh, self.where):
            prefill = self.compile(loops.prefill, *inputs, plan=self.plans[0].for_prefill())
            self.slots, self.marks = divide(prefill(*inputs))
            self.build(prefill, inputs)
        self.compile_seconds = time.perf_counter() - since

    def measure(self, bytes_per_second: float, repeats: int) -> list[dict[str, Any]]:
        """Times all phases; returns `Timed.summarise` of each, with its floor at this rate of copies."""
        self.sample(repeats)
        return [timed.summarise(bytes_per_second) for timed in self.timed]

    def find_reads(self, program: Any, arguments: Sequence[Any], parts: Sequence[int] | None = None) -> float:
        """Returns the bytes of the arrays that a program reads on one device.

        An embedding table beside a separate vocabulary table is left out, since few of its vectors are looked up. Of the
        experts, only those of a single token count.

        Args:
          parts: arguments that count; None: all.
        """
        weights, config, total = self.weights, self.model.verifier, 0.0
        held = {id(leaf): 1.0 for leaf in jax.tree.leaves(weights)}
        specs = jax.tree.leaves(verifier.specs(config, self.model.quantize), is_leaf=parameters.is_spec)
        for spec, leaf in zip(specs, jax.tree.leaves(weights.verifier), strict=True):
            if spec.axes[0] == "experts":
                held[id(leaf)] = config.experts_per_token / config.num_experts
        if "unembed" in weights.verifier:
            held |= {id(leaf): 0.0 for leaf in jax.tree.leaves(weights.verifier["embed"])}

        def add(array: jax.Array, layout: Any) -> None:
            nonlocal total
            if layout is not None:  # the compiler did not drop it
                filled = self.context / self.capacity if self.capacity in array.shape[1:] else 1.0
                total += held.get(id(array), filled) * device_bytes(array)

        layouts = program.input_shardings[0]
        for part in range(len(arguments)) if parts is None else parts:
            jax.tree.map(add, arguments[part], layouts[part])
        return total

    def sample(self, repeats: int) -> dict[tuple[str, int | None], float]:
        """Times all phases in turns; returns the median seconds of each, by phase and nodes."""
        with running(self.model.mesh, self.where):
            sample_in_turns(self.timed, repeats)
        return {(timed.phase, timed.nodes): float(np.median(timed.seconds)) for timed in self.timed}

    @property
    def state(self) -> DecodeState:
        return unite(self.slots, self.marks)

    def compile(self, function: Any, *args: Any, **static: Any) -> Callable[..., Any]:
        return programs.compile_lowered(function.lower(*args, **static), self.model.mesh, function.__name__)

    def build(self, prefill: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        """Compiles phase by phase: each gets values and layouts as the program of the phase before returned them."""
        first, weights = self.plans[0], self.weights
        self.add_rounds("step", None, first.one_token(), {"drafter": None})
        prepare = partial(self.repeated, lambda state: inputs)
        reads = self.find_reads(prefill, inputs)
        self.add("prefill", None, prefill, prepare, reads, most=4, units=self.batch * self.context)
        computed = self.run("draft", None, DRAFT, lambda state: (weights, state), plan=first)
        for plan in self.plans:
            self.run_tree(plan, computed)
            self.add_rounds("round", plan.num_nodes, plan, {})

    def run_tree(self, plan: DecodePlan, computed: list[jax.Array]) -> None:
        """Adds the phases that depend on the number of nodes, given the arrays that DRAFT computed."""
        weights, run = self.weights, partial(self.run, nodes=plan.num_nodes, plan=plan)
        tree, proposal = run("tree", function=TREE, make_args=lambda state: (weights, state, computed))
        verified = run("verify", function=VERIFY, make_args=lambda state: (weights, state, tree))
        if not bool(jnp.isfinite(verified.logits_bnv).all()):
            raise ValueError(f"{self.where}: got logits that are not finite")
        accepted = run("accept", function=ACCEPT, make_args=lambda state: (state, tree, proposal, verified.logits_bnv))

        def commit(run: Callable[..., Any], calls: int) -> Callable[[], Any]:
            """Prepares commits at the same positions, each into the slots that the one before returned."""

            def enqueue() -> Any:
                for _ in range(calls):
                    self.slots, _ = run(weights, self.slots, self.marks, verified, accepted)
                return self.slots

            return enqueue

        arguments = weights, self.slots, self.marks, verified, accepted
        program = self.compile(COMMIT, *arguments, plan=plan)
        reads = self.find_reads(program, arguments, parts=(0, 2, 3, 4))  # slots are written, not read
        self.add("commit", plan.num_nodes, program, commit, reads)

    def run(self, phase: str, nodes: int | None, function: Any, make_args: MakeArgs, **static: Any) -> Any:
        """Compiles a phase without effect on the state, adds it, and returns its output."""
        arguments = make_args(self.state)
        program = self.compile(function, *arguments, **static)
        return self.add(phase, nodes, program, partial(self.repeated, make_args), self.find_reads(program, arguments))

    def repeated(self, make_args: MakeArgs, run: Callable[..., Any], calls: int) -> Callable[[], Any]:
        args = make_args(self.state)
        return lambda: [run(*args) for _ in range(calls)][-1]

    def add(
        self,
        phase: str,
        nodes: int | None,
        program: Callable[..., Any],
        prepare: Prepare,
        reads: float,
        *,
        warm: int = 1,
        **sizes: int,
    ) -> Any:
        """Adds a phase, and returns the output of its last of `warm` calls."""
        self.timed.append(Timed(phase, nodes, partial(prepare, program), reads=reads, **sizes))
        return jax.block_until_ready(self.timed[-1].prepare(warm)())

    def add_rounds(self, phase: str, nodes: int | None, plan: DecodePlan, fields: dict[str, Any]) -> None:
        """Adds rounds of `decode`, on the state with some fields replaced; they begin at the end of the prompts.

        Raises RuntimeError for a dispatch that ended before its last round, whose time would be that of fewer rounds.
        """

        def prepare(run: Callable[..., Any], calls: int) -> Callable[[], Any]:
            marks, others = jax.block_until_ready(copied((self.marks, fields)))  # donated
            state, count = unite(self.slots, marks), jnp.int32(calls)

            def enqueue() -> Any:
                out = run(self.weights, state.replace(**others), count)
                self.slots, _ = divide(out.replace(**{name: getattr(state, name) for name in fields}))
                return out

            return enqueue

        arguments = self.weights, self.state.replace(**fields), jnp.int32(1)
        program = self.compile(loops.decode, *arguments, plan=plan)
        reads = self.find_reads(program, arguments)
        out = self.add(phase, nodes, program, prepare, reads, warm=ROUNDS, least=4, most=ROUNDS)
        if (done := int(out.rounds_b.min())) != ROUNDS:
            raise RuntimeError(f"{self.where}: got {done} rounds of {phase}, expected {ROUNDS}")
