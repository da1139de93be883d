"""Delayed trees that a selector (tree_selector.py) chooses for every sequence and round.

Every sequence gets the bucket of its highest score, so that its answer never depends on the rest of the batch. A round
then runs in the shapes of the largest chosen tree.

Shape suffixes: b batch, n tree nodes, j tapped layers x model, l values of tree_selector.OBSERVED, c tokens of a node's
support, v vocabulary.
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
from treeflash_jax.decoding.tree_selector import OBSERVED, Features, SelectorConfig
from treeflash_jax.models import vocab


@struct.dataclass
class Observed:
    """State of the policy: values at the last accepted node of the last round; zeros before the first round.

    Attributes:
      hidden_bj: the verifier's features.
      scalars_bl: the values of tree_selector.OBSERVED.
    """

    hidden_bj: jax.Array
    scalars_bl: jax.Array


@struct.dataclass
class SelectorChoice:
    """Choice of one round.

    Attributes:
      index: index in `list_shapes` of the smallest shapes into which the trees of all live sequences fit.
      nodes: number of nodes of each sequence's tree, [b].
      bucket_b: index of each sequence's bucket.
    """

    index: jax.Array
    nodes: jax.Array
    bucket_b: jax.Array
    expander: trees.Expander


def list_shapes(buckets: tuple[trees.Bucket, ...]) -> list[tuple[int, int]]:
    """Returns the shapes of rounds: (number of buckets, counted from the first, that fit; nodes of their largest tree).

    One for each bucket that has more nodes or more levels than all buckets before it.
    """
    shapes: dict[tuple[int, int], int] = {}
    for count in range(1, len(buckets) + 1):
        first = buckets[:count]
        shapes[max(bucket.nodes for bucket in first), max(bucket.depth for bucket in first)] = count
    return [(count, nodes) for (nodes, _), count in shapes.items()]


def make_features(state: DecodeState, expander: trees.Expander) -> Features:
    """Returns the selector's inputs. They are independent of all draws: only the anchor's children are expanded."""
    root_bc = expander.children(jnp.int32(0), expander.start(1))[1][:, 0].astype(jnp.float32)
    is_last_bs = jnp.arange(state.capacity) == state.rounds_b[:, None] - 1
    columns = [
        *jnp.moveaxis(state.policy.scalars_bl, 1, 0),
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
    """The policy of a selector; its weights are the network's, its buckets those of the plan's shape."""

    PAUSES = False

    def buckets(self, plan: DecodePlan) -> list[tuple[int, int]]:
        return list_shapes(plan.shape.trunk)

    def start(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> Observed:
        batch, width = state.end_b.size, len(plan.taps) * plan.verifier.hidden_size
        return Observed(jnp.zeros((batch, width), jnp.float32), jnp.zeros((batch, len(OBSERVED)), jnp.float32))

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
        logits_bv = logits_b1v[:, 0].astype(jnp.float32)
        log_z_b = vocab.log_sum_exp(logits_bv)
        entropy_b = log_z_b - jnp.sum(jnp.exp(logits_bv - log_z_b[:, None]) * logits_bv, axis=-1)
        is_known_b = jnp.any(jnp.isfinite(log_q_bc), axis=-1)
        overlap_b = jnp.sum(jnp.minimum(p_bc, jnp.exp(log_q_bc)), axis=-1)
        scalars = entropy_b, _entropy(log_q_bc), overlap_b, is_known_b
        scalars_bl = jnp.stack([x_b.astype(jnp.float32) for x_b in scalars], axis=1)
        return Observed(at_last(verified.features_btj)[:, 0].astype(jnp.float32), scalars_bl)

    def learn(self, state: DecodeState, choice: SelectorChoice, accepted: Accepted, observed: Observed) -> Observed:
        return observed


def plan_selection(config: SelectorConfig, plan: DecodePlan, nodes: int | None) -> DecodePlan:
    """Returns the plan of rounds that choose between a selector's buckets.

    Args:
      nodes: requested number of nodes of a round, root included; None: those of the largest tree.

    Raises:
      ValueError: the selector was trained for another acceptance rule, or its largest tree has more nodes.
    """
    if plan.rule != config.rule:
        raise ValueError(f"got acceptance {quoted(plan.rule)}, expected {config.rule!r}, the selector's")
    if nodes is not None and nodes < config.nodes:
        raise ValueError(f"got nodes {nodes}, expected at least {config.nodes}: the selector's largest tree")
    return replace(plan, num_nodes=config.nodes, shape=replace(plan.shape, trunk=config.buckets), policy=SelectorPolicy())
