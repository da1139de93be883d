"""Selector: a small network that chooses the delayed tree of every sequence and round, and the policy that runs it.

There are at most MAX_BUCKETS trees (`Bucket`), listed by increasing cost. Every sequence gets the tree of its highest
score, so that its answer never depends on the rest of the batch; a round runs in the shapes of the largest chosen tree.
The network reads these of the paper's inputs:
  - the verifier's features at the last accepted node (the anchor's are not computed yet), if the drafter taps any layers;
  - there, the entropies of verifier and drafter and their overlap sum_x min(p(x), q(x)). The drafter's are known if the
    last tree drew children of that node, which an indicator tells;
  - the entropy of the drafter below the anchor, over the children that it keeps, and its largest probability;
  - context length, temperature and top-p.
It does not read the drafter's hidden states, which other modules cannot see; the two Kullback-Leibler divergences, which
are infinite if a filter cuts drafted tokens; nor round times, which are constant in training. Two inputs are not the
paper's: the mean length of recent rounds (as for trunk="auto") and the length of the last one.

Shape suffixes: b batch, n tree nodes, j tapped layers x model, s scalars, a buckets, d width,
c tokens of a node's support, v vocabulary.

Source: neural selector of delayed tree expansion (arXiv 2602.16994); computed in float32.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax import trees
from treeflash_jax.core.checks import expect, quoted
from treeflash_jax.core.parameters import Spec
from treeflash_jax.decoding import rounds
from treeflash_jax.decoding.accepting import Accepted, make_target
from treeflash_jax.decoding.rounds import Draft, Verified
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.models import vocab
from treeflash_jax.trees import Bucket
from treeflash_jax.trees.shape import MAX_NODES

MAX_BUCKETS = 12
WIDTH, WIDE, NARROW = 128, 512, 32
OBSERVED = ("verifier entropy", "drafter entropy", "overlap", "is known")  # at the last accepted node
SCALARS = (*OBSERVED, "entropy below the anchor", "largest probability", "log context", "temperature", "top-p")
SCALARS += ("recent mean", "last length")
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """Buckets of a selector by increasing cost, and the pair and rule that it was trained for.

    Attributes:
      width: width of the verifier's tapped features; 0: none.
      pair: digest of verifier and drafter (`calibration.pair_digest`).
    """

    buckets: tuple[Bucket, ...]
    width: int
    pair: str
    rule: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.buckets) <= MAX_BUCKETS:
            raise ValueError(f"got {len(self.buckets)} buckets, expected 1 to {MAX_BUCKETS}")
        for bucket in self.buckets:
            if min(bucket.branches, bucket.trunk + 1, bucket.length + 1, bucket.nodes - 1) < 1:
                raise ValueError(f"got bucket {quoted(bucket)}, expected branches of at least 1, and a node to draft")
        if self.nodes > MAX_NODES:
            raise ValueError(f"got a bucket of {quoted(self.nodes)} nodes, expected at most {MAX_NODES}")

    @property
    def nodes(self) -> int:
        """Number of nodes of the largest tree, root included."""
        return max(bucket.nodes for bucket in self.buckets)


@struct.dataclass
class Features:
    """Inputs of the network, independent of the round's draws.

    Attributes:
      hidden_bj: the verifier's features at the last accepted node.
      scalars_bs: the values of SCALARS; in the policy's state, which is zero at first, only those of OBSERVED.
    """

    hidden_bj: jax.Array
    scalars_bs: jax.Array


def specs(config: SelectorConfig) -> dict[str, Spec]:
    """Returns the weights: hidden features to WIDTH and a LayerNorm, joined by the scalars, to WIDE, NARROW and scores."""
    count, joined = len(SCALARS), (WIDTH if config.width else 0) + len(SCALARS)

    def vector(size: int, init: str) -> Spec:
        return Spec((size,), (None,), init)

    def linear(name: str, inputs: int, outputs: int) -> dict[str, Spec]:
        return {name: Spec((inputs, outputs), (None, None)), f"{name}_bias": vector(outputs, "zeros")}

    weights = {"mean": vector(count, "zeros"), "scale": vector(count, "ones")}
    if config.width:
        weights |= linear("hidden", config.width, WIDTH)
        weights |= {"norm": vector(WIDTH, "ones"), "norm_bias": vector(WIDTH, "zeros")}
    weights |= linear("wide", joined, WIDE) | linear("narrow", WIDE, NARROW)
    return weights | linear("out", NARROW, len(config.buckets))


def scores(params: Any, features: Features, *, dropout: float = 0.0, key: jax.Array | None = None) -> jax.Array:
    """Returns the scores of all buckets, [b, a]; with a key, after dropping a share `dropout` of the hidden units."""

    def drop(x_bd: jax.Array, layer: int) -> jax.Array:
        if key is None:
            return x_bd
        kept_bd = jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - dropout, x_bd.shape)
        return jnp.where(kept_bd, x_bd / (1 - dropout), 0)

    with jax.named_scope("select"):
        x_bd = (features.scalars_bs - params["mean"]) * params["scale"]
        if "hidden" in params:
            hidden_bd = features.hidden_bj.astype(jnp.float32) @ params["hidden"] + params["hidden_bias"]
            hidden_bd -= jnp.mean(hidden_bd, axis=-1, keepdims=True)
            hidden_bd *= jax.lax.rsqrt(jnp.mean(jnp.square(hidden_bd), axis=-1, keepdims=True) + EPSILON)
            x_bd = jnp.concatenate([hidden_bd * params["norm"] + params["norm_bias"], x_bd], axis=-1)
        for layer, name in enumerate(("wide", "narrow")):
            x_bd = drop(jax.nn.gelu(x_bd @ params[name] + params[f"{name}_bias"]), layer)
        return x_bd @ params["out"] + params["out_bias"]


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


def list_shapes(buckets: tuple[Bucket, ...]) -> list[tuple[int, int]]:
    """Returns the shapes of rounds: (number of buckets that fit, counted from the first; nodes of their largest tree).

    There is one for each bucket that has more nodes or more levels than all buckets before it.
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
        *jnp.moveaxis(state.policy.scalars_bs, 1, 0),
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
class SelectorPolicy(rounds.Policy):
    """The policy of a selector; its weights are those of the network.

    Attributes:
      sizes: sizes of the trees to choose from, by increasing cost.
    """

    sizes: tuple[Bucket, ...]

    def buckets(self, plan: DecodePlan) -> list[tuple[int, int]]:
        return list_shapes(self.sizes)

    def start(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> Features:
        batch, width = state.end_b.size, len(plan.taps) * plan.verifier.hidden_size
        return Features(jnp.zeros((batch, width), jnp.float32), jnp.zeros((batch, len(OBSERVED)), jnp.float32))

    def choose(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> SelectorChoice:
        expander = rounds.draft_expander(weights, state, plan)
        scores_ba = scores(weights.policy, make_features(state, expander))
        bucket_b = jnp.argmax(scores_ba, axis=1).astype(jnp.int32)
        largest = jnp.max(jnp.where(state.done_b, 0, bucket_b))
        index = jnp.sum(jnp.asarray([count for count, _ in self.buckets(plan)]) <= largest)
        nodes_b = jnp.asarray([bucket.nodes for bucket in self.sizes], jnp.int32)[bucket_b]
        return SelectorChoice(index, nodes_b, bucket_b, expander)

    def draft(
        self, state: DecodeState, choice: SelectorChoice, bucket: tuple[int, int], plan: DecodePlan
    ) -> tuple[Draft, DecodePlan]:
        count, nodes = bucket
        bucket_plan = replace(plan, num_nodes=nodes, policy=SelectorPolicy(self.sizes[:count]))
        return rounds.build_tree(state, choice.expander, bucket_plan, choice.bucket_b), bucket_plan

    def observe(self, state: DecodeState, proposal: trees.Proposal, verified: Verified, accepted: Accepted) -> Features:
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
        columns = entropy_b, _entropy(log_q_bc), overlap_b, is_known_b
        scalars_bs = jnp.stack([column.astype(jnp.float32) for column in columns], axis=1)
        return Features(at_last(verified.features_btj)[:, 0].astype(jnp.float32), scalars_bs)


def plan_selection(config: SelectorConfig, plan: DecodePlan, nodes: int | None) -> DecodePlan:
    """Returns the plan of rounds that choose between a selector's buckets.

    Raises ValueError if it was trained for another rule, or if its largest tree has more than the requested `nodes`.
    """
    expect(plan.rule == config.rule, "acceptance", plan.rule, f"{config.rule!r}, the selector's")
    if nodes is not None and nodes < config.nodes:
        raise ValueError(f"got nodes {nodes}, expected at least {config.nodes}: the selector's largest tree")
    return replace(plan, num_nodes=config.nodes, policy=SelectorPolicy(config.buckets))
