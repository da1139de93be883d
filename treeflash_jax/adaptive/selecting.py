"""Decoding with delayed trees that a selector chooses (selector.py): state, round, loops and runner.

Shape suffixes: b batch, j tapped layers x model, l what a round leaves (selector.LEFT), s token slots, c tokens of a node's
support, v vocabulary, a buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from treeflash_jax import acceptance as rules
from treeflash_jax import mesh as meshes
from treeflash_jax import trees, vocab
from treeflash_jax.adaptive import selector
from treeflash_jax.adaptive.selector import LEFT, Features
from treeflash_jax.clock import Clock
from treeflash_jax.decoding import loops as decoding
from treeflash_jax.decoding import rounds
from treeflash_jax.decoding import state as states
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights


@struct.dataclass
class SelectingState:
    """The loop carry.

    Attributes:
      hidden_bj: the verifier's features at the last accepted node.
      left_bl: what the last round leaves, in the order of selector.LEFT; zeros before a first one.
      nodes_bs: rows of the chosen tree, by round.
    """

    decode: DecodeState
    hidden_bj: jax.Array
    left_bl: jax.Array
    nodes_bs: jax.Array


def pin(state: SelectingState) -> SelectingState:
    """Constrains the whole state to its layout on the ambient mesh."""
    own = (state.hidden_bj, state.left_bl, state.nodes_bs)
    return SelectingState(states.pin(state.decode), *(meshes.constrain(x, ("batch", None)) for x in own))


def features_of(state: SelectingState, expander: trees.Expander) -> Features:
    """What is known of every sequence before anything is drawn. The expander is asked for the anchor's children alone."""
    decode = state.decode
    root_bc = expander.children(jnp.int32(0), expander.start(1))[1][:, 0].astype(jnp.float32)
    last_bs = jnp.arange(decode.capacity) == decode.rounds_b[:, None] - 1
    columns = [
        *jnp.moveaxis(state.left_bl, 1, 0),
        _entropy(root_bc),
        jnp.exp(jnp.max(root_bc, axis=-1)),
        jnp.log(decode.end_b.astype(jnp.float32)),
        decode.sampling.temperature_b,
        decode.sampling.top_p_b,
        rounds.recent_lengths(decode),
        jnp.sum(jnp.where(last_bs, decode.accepted_bs, 0), axis=1),
    ]
    return Features(state.hidden_bj, jnp.stack([column.astype(jnp.float32) for column in columns], axis=1))


def left_by(
    decode: DecodeState,
    tree_of: tuple[trees.DraftTree, trees.Proposal],
    verified: rounds.Verified,
    accepted: rounds.Accepted,
) -> tuple[jax.Array, jax.Array]:
    """What a round tells of the next: the verifier's features at the last accepted node [b, j], and LEFT there [b, l]."""
    proposal = tree_of[1]
    last_b1 = jnp.take_along_axis(accepted.path_bp, accepted.length_b[:, None] - 1, axis=1)
    here = lambda x_bn: trees.pick(x_bn, last_b1)  # noqa: E731
    sampling, logits_b1v = decode.sampling, here(verified.logits_bnv)
    rows = rules.target_rows(logits_b1v, sampling.temperature_b, sampling.top_k_b, sampling.top_p_b)
    log_q_bc = here(proposal.log_q_bnc)[:, 0].astype(jnp.float32)
    p_bc = jnp.exp(rows.gather(here(proposal.support_bnc)))[:, 0]
    wide_bv = logits_b1v[:, 0].astype(jnp.float32)
    normaliser_b = vocab.log_sum_exp(wide_bv)
    entropy_b = normaliser_b - jnp.sum(jnp.exp(wide_bv - normaliser_b[:, None]) * wide_bv, axis=-1)
    is_known_b = jnp.any(jnp.isfinite(log_q_bc), axis=-1)
    overlap_b = jnp.sum(jnp.minimum(p_bc, jnp.exp(log_q_bc)), axis=-1)
    left = entropy_b, _entropy(log_q_bc), overlap_b, is_known_b
    return here(verified.features_btj)[:, 0].astype(jnp.float32), jnp.stack([x.astype(jnp.float32) for x in left], axis=1)


def _entropy(log_bc: jax.Array) -> jax.Array:
    return -jnp.sum(jnp.where(jnp.isfinite(log_bc), jnp.exp(log_bc) * log_bc, 0), axis=-1)


def sizes_of(buckets: tuple[trees.Bucket, ...]) -> list[tuple[int, int]]:
    """The rounds there are: how many of the first buckets each can draft, and the nodes of their largest tree.

    A round for each bucket, unless it is no larger and no deeper than those before it.
    """
    found: dict[tuple[int, int], int] = {}
    for count in range(1, len(buckets) + 1):
        first = buckets[:count]
        found[max(one.nodes for one in first), max(one.depth for one in first)] = count
    return [(count, nodes) for (nodes, _), count in found.items()]


def round_of(weights: Weights, params: Any, state: SelectingState, plan: DecodePlan) -> SelectingState:
    """A round in which every sequence takes the delayed tree that scores highest.

    Nothing that is drawn is known by then. Every size of round is a branch that reads the caches and hands on what its
    paths commit, in the shapes of the largest; taken is the smallest that the trees of all live sequences fit.
    """
    decode, buckets = state.decode, plan.shape.trunk
    sizes = sizes_of(buckets)
    expander = rounds.draft_expander(weights, decode, plan)
    choice_b = jnp.argmax(selector.scores(params, features_of(state, expander)), axis=1).astype(jnp.int32)

    def judge(count: int, nodes: int) -> Any:
        own = replace(plan, num_nodes=nodes, shape=replace(plan.shape, trunk=buckets[:count]))
        tree_of = rounds.build_tree(decode, expander, own, choice_b)
        judged = rounds.judged(weights, decode, *tree_of, own)
        return *rounds.along_path(*judged, plan.path_rows), *left_by(decode, tree_of, *judged)

    largest = jnp.max(jnp.where(decode.done_b, 0, choice_b))
    index = jnp.sum(jnp.asarray([count for count, _ in sizes]) <= largest)
    kept, accepted, hidden_bj, left_bl = lax.switch(index, [partial(judge, *size) for size in sizes])
    is_round_bs = (jnp.arange(decode.capacity) == decode.rounds_b[:, None]) & ~decode.done_b[:, None]
    nodes_b = jnp.asarray([bucket.nodes for bucket in buckets], jnp.int32)[choice_b]
    return SelectingState(
        decode=rounds.commit_path(weights, decode, kept, accepted, plan),
        hidden_bj=hidden_bj,
        left_bl=left_bl,
        nodes_bs=jnp.where(is_round_bs, nodes_b[:, None], state.nodes_bs),
    )


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def decode(
    weights: Weights, params: Any, state: SelectingState, max_rounds: jax.Array, enough: jax.Array, *, plan: DecodePlan
) -> SelectingState:
    """`decoding.loops.decode` of rounds that choose their trees."""
    return decoding.repeat(
        lambda state: round_of(weights, params, state, plan),
        (pin(state), jnp.zeros_like(max_rounds)),
        lambda carry: decoding.goes_on(carry[0].decode, carry[1], max_rounds, enough, plan),
        pin,
    )[0]


@partial(jax.jit, donate_argnames=("state",))
def admit(state: SelectingState, fresh: DecodeState, slots_a: jax.Array) -> SelectingState:
    """`decoding.loops.admit`: nothing is known yet of the new sequences."""
    is_new_b1 = jnp.any(jnp.arange(state.decode.end_b.size)[:, None] == slots_a, axis=1)[:, None]
    zeroed = lambda x: jnp.where(is_new_b1, 0, x)  # noqa: E731
    admitted = decoding.admit(state.decode, fresh, slots_a)
    return pin(SelectingState(admitted, zeroed(state.hidden_bj), zeroed(state.left_bl), zeroed(state.nodes_bs)))


@partial(jax.jit, static_argnames=("capacity",))
def grow(state: SelectingState, capacity: int) -> SelectingState:
    """The same state with room for `capacity` positions."""
    missing = (0, 0), (0, capacity - state.nodes_bs.shape[1])
    return pin(state.replace(decode=decoding.grow(state.decode, capacity), nodes_bs=jnp.pad(state.nodes_bs, missing)))


@partial(jax.jit, static_argnames=("plan",))
def draft(weights: Weights, params: Any, state: SelectingState, plan: DecodePlan) -> trees.DraftTree:
    """The tree the next round would verify."""
    expander = rounds.draft_expander(weights, state.decode, plan)
    choice_b = jnp.argmax(selector.scores(params, features_of(state, expander)), axis=1)
    return rounds.build_tree(state.decode, expander, plan, choice_b)[0]


@partial(jax.jit, static_argnames=("draws", "plan"))
def expected_lengths(
    weights: Weights, state: SelectingState, *, draws: int, plan: DecodePlan
) -> tuple[Features, jax.Array]:
    """What a selector learns from: features, and the tokens that the next round would commit with every bucket [b, a].

    The mean over `draws` trees of the rule's exact expectation given the tree: coins are averaged out.
    """
    decode, buckets = state.decode, plan.shape.trunk
    expander = rounds.draft_expander(weights, decode, plan)

    def of_tree(pair: jax.Array) -> jax.Array:
        index, draw = pair
        key_b = jax.vmap(jax.random.fold_in, (0, None))(decode.sampling.key_b, draw)
        drawn = decode.replace(sampling=decode.sampling.replace(key_b=key_b))
        tree, proposal = rounds.build_tree(drawn, expander, plan, jnp.full_like(decode.end_b, index))
        logits_bnv, sampling = rounds.verify_tree(weights, decode, tree, plan).logits_bnv, decode.sampling
        rows = rules.target_rows(logits_bnv, sampling.temperature_b, sampling.top_k_b, sampling.top_p_b)
        return jnp.sum(rules.RULES[plan.rule].weights(tree, proposal, rows), axis=1)

    pairs = np.stack(np.meshgrid(np.arange(len(buckets)), np.arange(1, draws + 1), indexing="ij"), axis=-1)
    length_xb = lax.map(of_tree, jnp.asarray(pairs.reshape(-1, 2), jnp.int32))
    return features_of(state, expander), jnp.mean(length_xb.reshape(len(buckets), draws, -1), axis=1).T


@dataclass(frozen=True, kw_only=True)
class SelectingRunner(Runner):
    """Runs rounds whose trees a selector chooses.

    Attributes:
      plan: its shape lists the selector's buckets; its nodes are those of the largest.
      params: weights of the selector.
    """

    params: Any

    def begin(self, decode: DecodeState) -> SelectingState:
        batch, width = decode.end_b.size, len(self.plan.taps) * self.plan.verifier.hidden_size
        shapes = ((batch, width), jnp.float32), ((batch, len(LEFT)), jnp.float32), (decode.accepted_bs.shape, jnp.int32)
        return SelectingState(decode, *(meshes.place(jnp.zeros(*shape), self.mesh) for shape in shapes))

    def draft(self, inputs: tuple[Any, ...], length: int, anchor: int) -> trees.DraftTree:
        """`Runner.draft` of the tree that a first round below this anchor would choose: it knows of no earlier ones."""
        state = self.begin(self.anchored(inputs, length, anchor))
        return self.call(draft, self.weights, self.params, state, plan=self.plan)

    def run(self, state: SelectingState, rounds: int, enough: int, clock: Clock | None = None) -> SelectingState:
        args = jnp.int32(rounds), jnp.int32(enough)
        return self.call(decode, self.weights, self.params, state, *args, clock=clock, plan=self.plan)

    def admit(
        self, state: SelectingState, inputs: tuple[Any, ...], places: list[int], clock: Clock | None = None
    ) -> SelectingState:
        args = self.prefill(inputs, clock), self.places(places, inputs)
        return self.call(admit, state, *args, clock=clock)

    def grow(self, state: SelectingState, capacity: int, clock: Clock | None = None) -> SelectingState:
        return self.call(grow, state, clock=clock, capacity=capacity)

    def inner(self, state: SelectingState) -> DecodeState:
        return state.decode

    def finish(self, state: SelectingState, done_b: np.ndarray) -> SelectingState:
        return state.replace(decode=super().finish(state.decode, done_b))

    def nodes(self, state: SelectingState) -> jax.Array:
        return state.nodes_bs
