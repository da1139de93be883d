"""Draws the tokens of a tree with a given outline, level by level, and records the distribution of its nodes.

A builder decides the outline (parent, depth and kind of every place) before anything is drawn. `draw_tokens` draws a token
for every place, merges i.i.d. duplicates, and moves unused places to the end.

Shape suffixes: b batch, n places of the outline = tree nodes (root included), c children kept per node, x draws (n - 1).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treeflash_jax.models.backend import selection
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.models.backend.levels import over_depths
from treeflash_jax.trees.draft_tree import NO_TOKEN, DraftTree
from treeflash_jax.trees.expander import Expander
from treeflash_jax.trees.sampled.proposal import DETERMINISTIC, WITHOUT_REPLACEMENT, Proposal
from treeflash_jax.trees.tree_inputs import TreeInputs

UNUSED = -1  # depth of a place without a node


@struct.dataclass
class DrawnPlaces:
    """Places of an outline with the tokens that were drawn for them.

    Attributes:
      token_bn: drawn token.
      slot_bn: index of the token among the children of the parent place.
      is_alive_bn: whether the place is used: its parent is used and had a child to draw.
      first_bn: first place with an equal draw. All duplicates share the node of this place.
      log_prob_bn: drafted log-probability of the path.
      support_bnc: tokens of the children of the place.
      log_q_bnc: log-probabilities with which the children were drawn.
    """

    token_bn: jax.Array
    slot_bn: jax.Array
    is_alive_bn: jax.Array
    first_bn: jax.Array
    log_prob_bn: jax.Array
    support_bnc: jax.Array
    log_q_bnc: jax.Array


@struct.dataclass
class Outline:
    """Places of a tree before its tokens are known. Place 0 is the root, and parents precede children.

    Arrays are [b, n], or [n] if all sequences have the same outline.

    Attributes:
      parent_bn: place of the parent.
      depth_bn: UNUSED for places without a node.
      kind_bn: DETERMINISTIC, WITHOUT_REPLACEMENT or WITH_REPLACEMENT.
      rank_bn: number of siblings drawn before this one, without replacement.
      slot_bn: index among the parent's children, for deterministic nodes.
    """

    parent_bn: jax.Array
    depth_bn: jax.Array
    kind_bn: jax.Array
    rank_bn: jax.Array
    slot_bn: jax.Array


def make_outline(parents: Sequence[int], kind: int, ranks: Sequence[int] = (), num_places: int = 0) -> Outline:
    """Returns an outline of sampled nodes that is the same for all sequences.

    Args:
      parents: parents of places 1, 2, ...
      kind: kind of all nodes.
      ranks: ranks of places 1, 2, ...; without them, all are 0.
      num_places: least number of places; those without a parent are unused.
    """
    used = 1 + len(parents)
    parent_n, depth_n, rank_n = np.zeros((3, max(used, num_places)), np.int32)
    parent_n[1:used], rank_n[1 : 1 + len(ranks)], depth_n[used:] = parents, ranks, UNUSED
    for place, parent in enumerate(parents, start=1):
        depth_n[place] = depth_n[parent] + 1
    return Outline(parent_n, depth_n, np.full_like(parent_n, kind), rank_n, np.zeros_like(parent_n))


def draw_noise(key_b: jax.Array, expander: Expander, num_nodes: int) -> jax.Array:
    """Returns Gumbel noise [b, n, c] for the draws of a tree, from one key per sequence."""
    log_probs = jax.eval_shape(expander.children, jnp.int32(0), expander.start(1))[1]
    shape = num_nodes, log_probs.shape[2]
    return jax.vmap(lambda key: jax.random.gumbel(key, shape, log_probs.dtype))(key_b)


def draw_tokens(
    inputs: TreeInputs, outline: Outline, *, ranks: int = 1, num_fixed: int = 0, deepest: int | None = None
) -> tuple[DraftTree, Proposal]:
    """Draws the nodes of an outline from q, the expander's distribution on the tokens that do not end their branch.

    An i.i.d. draw is argmax(log q + noise of its place). Siblings without replacement are the largest entries of
    log q + noise of their parent, in decreasing order. The first of them is distributed as q, and each later one as q
    without the earlier ones. q also has tokens that end their branch if `shape.leaves` is true, if the outline has no
    children below, or if every token ends its branch.

    Args:
      inputs: inputs of the builder, with noise for every place of the outline or more.
      ranks: maximal number of children of a node drawn without replacement; static.
      num_fixed: number of deterministic places; static. They follow the root, and are tested after their sampled siblings.
      deepest: maximal depth of the places of any sequence; static. None: unknown.

    Source: DDTree and TreeFlash for q; Gumbel top-k (Kool et al., arXiv 1903.06059) for draws without replacement.
    """
    expander, anchor_b, noise_bnc = inputs.expander, inputs.anchor_b, inputs.noise_bnc
    batch, n = anchor_b.size, outline.parent_bn.shape[-1]
    outline = jax.tree.map(lambda x_n: jnp.broadcast_to(x_n, (batch, n)), outline)
    depths = min(expander.num_depths, n - 1 if deepest is None else deepest)
    places = jnp.arange(n, dtype=jnp.int32)
    support_bnc = jnp.broadcast_to(jnp.arange(noise_bnc.shape[2], dtype=jnp.int32), (batch, n, noise_bnc.shape[2]))
    noise_bnc = noise_bnc[:, :n]
    is_drawn_once_bn = outline.kind_bn == WITHOUT_REPLACEMENT
    noise_bnc = jnp.where(is_drawn_once_bn[..., None], pick(noise_bnc, outline.parent_bn), noise_bnc)
    goes_on_bn, barred_bnc = _mark_places(outline, support_bnc)

    def level(carry: tuple[Any, DrawnPlaces], depth: jax.Array):
        state_bn, draws = carry
        offered = _list_children(expander, depth, state_bn, barred_bnc, goes_on_bn, inputs.shape.leaves)
        draws = _draw_level(outline, draws, depth, *offered, noise_bnc, ranks)
        above_state_bn = jax.tree.map(lambda x_bn: pick(x_bn, outline.parent_bn), state_bn)
        is_below_bn = outline.depth_bn == depth + 1
        state_bn = jax.tree.map(
            lambda new, old: jnp.where(is_below_bn.reshape(*is_below_bn.shape, *[1] * (old.ndim - 2)), new, old),
            expander.follow(depth, above_state_bn, draws.slot_bn, draws.token_bn),
            state_bn,
        )
        return (state_bn, draws), None

    start = DrawnPlaces(
        token_bn=jnp.broadcast_to(anchor_b[:, None], (batch, n)).astype(jnp.int32),
        slot_bn=jnp.zeros((batch, n), jnp.int32),
        is_alive_bn=jnp.broadcast_to(places == 0, (batch, n)),
        first_bn=jnp.broadcast_to(places, (batch, n)),
        log_prob_bn=jnp.zeros((batch, n), noise_bnc.dtype),
        support_bnc=support_bnc,
        log_q_bnc=jnp.full(support_bnc.shape, -jnp.inf, noise_bnc.dtype),
    )
    (_, draws), _ = over_depths(level, (expander.start(n), start), range(depths))
    return _compact(anchor_b, outline, draws, num_fixed, depths)


def _list_children(
    expander: Expander, depth: jax.Array, state_bn: Any, barred_bnc: jax.Array, goes_on_bn: jax.Array, leaves: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the children of every place with log p, and the distribution log q of its draws; all [b, n, c]."""
    tokens_bnc, log_p_bnc = expander.children(depth, state_bn)
    # An entry without a child may repeat the token of another entry. Rules would then count that probability twice.
    tokens_bnc = jnp.where(jnp.isfinite(log_p_bnc), tokens_bnc, NO_TOKEN)
    free_bnc = jnp.isfinite(log_p_bnc) & ~barred_bnc
    open_bnc = free_bnc & expander.continues(depth, state_bn, tokens_bnc)
    restricted_bn = goes_on_bn & jnp.any(open_bnc, axis=-1) & (not leaves)
    admitted_bnc = jnp.where(restricted_bn[..., None], open_bnc, free_bnc)
    log_q_bnc = jnp.where(admitted_bnc, log_p_bnc, -jnp.inf)
    mass_bn1 = jax.nn.logsumexp(log_q_bnc, axis=-1, keepdims=True)
    log_q_bnc = jnp.where(admitted_bnc, log_q_bnc - jnp.where(jnp.isfinite(mass_bn1), mass_bn1, 0), -jnp.inf)
    return tokens_bnc, log_p_bnc, log_q_bnc


def _mark_places(outline: Outline, support_bnc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two masks: places whose sampled children have children in the outline [b, n], and undrawn entries [b, n, c].

    An entry is never drawn if it is a deterministic child, or if its place has no sampled children.
    """
    parent_bn, is_fixed_bn = outline.parent_bn, outline.kind_bn == DETERMINISTIC
    places = jnp.arange(parent_bn.shape[1], dtype=jnp.int32)
    is_child_bnn = (parent_bn[:, None] == places[:, None]) & (outline.depth_bn > 0)[:, None]  # [b, node, child]
    has_children_bn = jnp.any(is_child_bnn, axis=-1)
    is_drawn_bnn = is_child_bnn & ~is_fixed_bn[:, None]
    goes_on_bn = jnp.any(is_drawn_bnn & has_children_bn[:, None], axis=-1)
    nothing_nc = jnp.zeros(support_bnc.shape[1:], bool)
    taken_bnc = jax.vmap(lambda parent_n, slot_n, fixed_n: nothing_nc.at[parent_n, slot_n].max(fixed_n))(
        parent_bn, outline.slot_bn, is_fixed_bn & (outline.depth_bn > 0)
    )
    return goes_on_bn, taken_bnc | ~jnp.any(is_drawn_bnn, axis=-1, keepdims=True)


def _draw_level(
    outline: Outline,
    draws: DrawnPlaces,
    depth: jax.Array,
    tokens_bnc: jax.Array,
    log_p_bnc: jax.Array,
    log_q_bnc: jax.Array,
    noise_bnc: jax.Array,
    ranks: int,
) -> DrawnPlaces:
    """Draws the tokens at `depth` + 1 from the distributions of their parents; returns all draws so far."""
    parent_bn, is_fixed_bn = outline.parent_bn, outline.kind_bn == DETERMINISTIC
    rank_bn = jnp.minimum(outline.rank_bn, ranks - 1)
    scores_bnc = pick(log_q_bnc, parent_bn) + noise_bnc
    best = jnp.argmax(scores_bnc, axis=-1, keepdims=True) if ranks == 1 else selection.top_k(scores_bnc, ranks)[1]
    drawn_bn = jnp.take_along_axis(best.astype(jnp.int32), rank_bn[..., None], axis=2)[..., 0]
    slot_bn = jnp.where(is_fixed_bn, outline.slot_bn, drawn_bn)

    def drawn(x_bnc: jax.Array) -> jax.Array:
        return jnp.take_along_axis(pick(x_bnc, parent_bn), slot_bn[..., None], axis=2)[..., 0]

    here_bn1 = (outline.depth_bn == depth)[..., None]
    below_bn = outline.depth_bn == depth + 1
    is_possible_bn = jnp.isfinite(jnp.where(is_fixed_bn, drawn(log_p_bnc), drawn(log_q_bnc)))
    alive_bn = jnp.where(below_bn, pick(draws.is_alive_bn, parent_bn) & is_possible_bn, draws.is_alive_bn)
    token_bn = jnp.where(below_bn, drawn(tokens_bnc), draws.token_bn)
    first_bn = pick(draws.first_bn, parent_bn)
    same_bnn = (first_bn[:, None] == first_bn[..., None]) & (token_bn[:, None] == token_bn[..., None])
    same_bnn &= (below_bn & alive_bn)[:, None] & (below_bn & alive_bn)[..., None]
    return DrawnPlaces(
        token_bn=token_bn,
        slot_bn=jnp.where(below_bn, slot_bn, draws.slot_bn),
        is_alive_bn=alive_bn,
        first_bn=jnp.where(below_bn & alive_bn, jnp.argmax(same_bnn, axis=-1).astype(jnp.int32), draws.first_bn),
        log_prob_bn=jnp.where(below_bn, pick(draws.log_prob_bn, parent_bn) + drawn(log_p_bnc), draws.log_prob_bn),
        support_bnc=jnp.where(here_bn1, tokens_bnc, draws.support_bnc),
        log_q_bnc=jnp.where(here_bn1, log_q_bnc, draws.log_q_bnc),
    )


def _compact(
    anchor_b: jax.Array, outline: Outline, draws: DrawnPlaces, num_fixed: int, depths: int
) -> tuple[DraftTree, Proposal]:
    """Moves nodes to the front, and places that duplicates and ended branches left empty to the end."""
    n = outline.parent_bn.shape[1]
    places = jnp.arange(n, dtype=jnp.int32)
    is_node_bn = draws.is_alive_bn & (draws.first_bn == places)
    # Nodes in order of their places, then the places without a node.
    order_bn = jnp.argsort(~is_node_bn, axis=1, stable=True).astype(jnp.int32)
    node_bn = pick(jnp.argsort(order_bn, axis=1).astype(jnp.int32), draws.first_bn)  # node of each draw
    valid_bn = pick(is_node_bn, order_bn)

    def moved(x_bn: jax.Array, padding: float) -> jax.Array:
        return jnp.where(valid_bn, pick(x_bn, order_bn), padding).astype(x_bn.dtype)

    tree = DraftTree(
        tokens_bn=moved(draws.token_bn, 0).astype(anchor_b.dtype),
        parent_bn=moved(pick(node_bn, outline.parent_bn), 0),
        depth_bn=moved(outline.depth_bn, 0),
        log_prob_bn=moved(draws.log_prob_bn, -jnp.inf),
        valid_bn=valid_bn,
    )
    # Places in order of their tests, deterministic ones last.
    tested_x = jnp.asarray([*range(num_fixed + 1, n), *range(1, num_fixed + 1)], jnp.int32)
    proposal = Proposal(
        support_bnc=pick(draws.support_bnc, order_bn),
        log_q_bnc=jnp.where(valid_bn[..., None], pick(draws.log_q_bnc, order_bn), -jnp.inf),
        node_bx=jnp.where(draws.is_alive_bn, node_bn, 0)[:, tested_x],
        slot_bx=draws.slot_bn[:, tested_x],
        kind_bx=outline.kind_bn[:, tested_x],
        depths=depths,
    )
    return tree, proposal
