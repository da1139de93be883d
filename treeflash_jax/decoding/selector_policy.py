"""Delayed trees that a selector (tree_selector.py) chooses for every sequence and round.

Every sequence takes the bucket of the highest score, so that sequences decoded beside it never change its answer. A round
then runs in the shapes of the largest chosen tree.

Shape suffixes: b batch, n tree nodes, j tapped layers x model, l values that a round leaves (tree_selector.LEFT),
c tokens of a node's support, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax import trees
from treeflash_jax.core.checks import quoted
from treeflash_jax.decoding import rounds, tree_selector
from treeflash_jax.decoding.accepting import Accepted, make_target
from treeflash_jax.decoding.rounds import Verified
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.decoding.tree_selector import LEFT, Features, SelectorConfig
from treeflash_jax.models import vocab


@struct.dataclass
class Observed:
    """State of the policy: what the last round left behind; zeros before a first one.

    Attributes:
      hidden_bj: the verifier's features at the last accepted node.
      left_bl: in the order of tree_selector.LEFT.
    """

    hidden_bj: jax.Array
    left_bl: jax.Array


@struct.dataclass
class SelectorChoice:
    """Choice of one round.

    Attributes:
      index: the smallest shapes that hold the trees of all live sequences.
      nodes: number of nodes of each sequence's tree, [b].
      bucket_b: bucket of each sequence.
      expander: the drafter's offers.
    """

    index: jax.Array
    nodes: jax.Array
    bucket_b: jax.Array
    expander: trees.Expander


def list_shapes(buckets: tuple[trees.Bucket, ...]) -> list[tuple[int, int]]:
    """Returns the shapes of rounds: how many of the first buckets each can hold, and the nodes of their largest tree.

    A shape for each bucket, unless it has no more nodes and is no deeper than those before it.
    """
    shapes: dict[tuple[int, int], int] = {}
    for count in range(1, len(buckets) + 1):
        first = buckets[:count]
        shapes[max(bucket.nodes for bucket in first), max(bucket.depth for bucket in first)] = count
    return [(count, nodes) for (nodes, _), count in shapes.items()]


def make_features(state: DecodeState, expander: trees.Expander) -> Features:
    """Returns the selector's inputs. They depend on nothing that is drawn: only the anchor's children are expanded."""
    root_bc = expander.children(jnp.int32(0), expander.start(1))[1][:, 0].astype(jnp.float32)
    is_last_bs = jnp.arange(state.capacity) == state.rounds_b[:, None] - 1
    columns = [
        *jnp.moveaxis(state.policy.left_bl, 1, 0),
        _entropy(root_bc),
        jnp.exp(jnp.max(root_bc, axis=-1)),
        jnp.log(state.end_b.astype(jnp.float32)),
        state.sampling.temperature_b,
        state.sampling.top_p_b,
        rounds.recent_lengths(state),
        jnp.sum(jnp.where(is_last_bs, state.accepted_bs, 0), axis=1),
    ]
    return Features(state.policy.hidden_bj, jnp.stack([column.astype(jnp.float32) for column in columns], axis=1))


def _entropy(log_bc: jax.Array) -> jax.Array:
    return -jnp.sum(jnp.where(jnp.isfinite(log_bc), jnp.exp(log_bc) * log_bc, 0), axis=-1)


@dataclass(frozen=True)
class SelectorPolicy:
    """The policy of a selector; its weights are those of the network, the plan's shape lists the buckets."""

    PAUSES = False

    def buckets(self, plan: DecodePlan) -> list[tuple[int, int]]:
        return list_shapes(plan.shape.trunk)

    def start(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> Observed:
        batch, width = state.end_b.size, len(plan.taps) * plan.verifier.hidden_size
        return Observed(jnp.zeros((batch, width), jnp.float32), jnp.zeros((batch, len(LEFT)), jnp.float32))

    def choose(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> SelectorChoice:
        expander = rounds.draft_expander(weights, state, plan)
        scores_ba = tree_selector.scores(weights.policy, make_features(state, expander))
        bucket_b = jnp.argmax(scores_ba, axis=1).astype(jnp.int32)
        largest = jnp.max(jnp.where(state.done_b, 0, bucket_b))
        index = jnp.sum(jnp.asarray([count for count, _ in self.buckets(plan)]) <= largest)
        nodes_b = jnp.asarray([bucket.nodes for bucket in plan.shape.trunk], jnp.int32)[bucket_b]
        return SelectorChoice(index, nodes_b, bucket_b, expander)

    def draft(
        self, state: DecodeState, choice: SelectorChoice, bucket: tuple[int, int], plan: DecodePlan
    ) -> tuple[trees.DraftTree, trees.Proposal | None, DecodePlan]:
        count, nodes = bucket
        bucket_plan = replace(plan, num_nodes=nodes, shape=replace(plan.shape, trunk=plan.shape.trunk[:count]))
        return *rounds.build_tree(state, choice.expander, bucket_plan, choice.bucket_b), bucket_plan

    def observe(self, state: DecodeState, proposal: trees.Proposal, verified: Verified, accepted: Accepted) -> Observed:
        last_b1 = jnp.take_along_axis(accepted.path_bp, accepted.length_b[:, None] - 1, axis=1)

        def at_last(x_bn: jax.Array) -> jax.Array:
            return trees.pick(x_bn, last_b1)

        logits_b1v = at_last(verified.logits_bnv)
        log_q_bc = at_last(proposal.log_q_bnc)[:, 0].astype(jnp.float32)
        p_bc = jnp.exp(make_target(logits_b1v, state.sampling).gather(at_last(proposal.support_bnc)))[:, 0]
        wide_bv = logits_b1v[:, 0].astype(jnp.float32)
        normaliser_b = vocab.log_sum_exp(wide_bv)
        entropy_b = normaliser_b - jnp.sum(jnp.exp(wide_bv - normaliser_b[:, None]) * wide_bv, axis=-1)
        is_known_b = jnp.any(jnp.isfinite(log_q_bc), axis=-1)
        overlap_b = jnp.sum(jnp.minimum(p_bc, jnp.exp(log_q_bc)), axis=-1)
        left = entropy_b, _entropy(log_q_bc), overlap_b, is_known_b
        left_bl = jnp.stack([x_b.astype(jnp.float32) for x_b in left], axis=1)
        return Observed(at_last(verified.features_btj)[:, 0].astype(jnp.float32), left_bl)

    def learn(self, state: DecodeState, choice: SelectorChoice, accepted: Accepted, observed: Observed) -> Observed:
        return observed


def plan_selection(config: SelectorConfig, plan: DecodePlan, nodes: int | None) -> DecodePlan:
    """Returns the plan of rounds that choose between a selector's buckets.

    Args:
      nodes: requested number of nodes of a round, root included; None: those of the largest tree.

    Raises:
      ValueError: the selector is for another acceptance rule, or its largest tree has more nodes.
    """
    if plan.rule != config.rule:
        raise ValueError(f"got acceptance {quoted(plan.rule)}, expected {config.rule!r}, which the selector was made for")
    if nodes is not None and nodes < config.nodes:
        raise ValueError(f"got nodes {nodes}, expected at least {config.nodes}: the selector's largest tree")
    return replace(plan, num_nodes=config.nodes, shape=replace(plan.shape, trunk=config.buckets), policy=SelectorPolicy())
