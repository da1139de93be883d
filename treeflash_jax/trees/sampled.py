"""Sampled trees: independent paths, siblings without replacement, or chains below a deterministic skeleton.

Their outlines are fixed before the draws.
"""

import heapq
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.trees.containers import DETERMINISTIC, WITH_REPLACEMENT, WITHOUT_REPLACEMENT, DraftTree, Proposal, pick
from treeflash_jax.trees.deterministic import best_first_search
from treeflash_jax.trees.expander import Expander
from treeflash_jax.trees.grow import UNUSED, Outline, grow, make_outline
from treeflash_jax.trees.shape import TreeShape

ACCEPTANCE = 0.7  # assumed chance a that a test accepts: a sibling of rank r is reached and kept with a (1 - a)^r
REACH = 0.6  # assumed chance that a sampled node of a hybrid tree is accepted, for dividing the nodes only


def paths(
    expander: Expander, anchor_b: jax.Array, num_nodes: int, shape: TreeShape, noise_bnc: jax.Array
) -> tuple[DraftTree, Proposal]:
    """Draws `shape.branches` i.i.d. paths of equal length from the anchor; common prefixes are verified once.

    Source: SpecInfer (arXiv 2305.09781); SpecTr (arXiv 2310.15141).
    """
    return delayed(expander, anchor_b, num_nodes, replace(shape, trunk=0), noise_bnc)


def delayed(
    expander: Expander, anchor_b: jax.Array, num_nodes: int, shape: TreeShape, noise_bnc: jax.Array
) -> tuple[DraftTree, Proposal]:
    """Draws one path of `shape.trunk` tokens, then `shape.branches` i.i.d. paths from its end.

    Near the anchor drafter and verifier agree and a second path adds little; their distance grows with depth.

    Source: delayed tree expansion (arXiv 2602.16994).
    """
    trunk, branches, length = _fit_paths(expander.num_depths, num_nodes, shape)
    # Place by place: the trunk, then level by level one place for each branch.
    first = [trunk] * branches if length else []
    parents = [*range(trunk), *first, *range(trunk + 1, 1 + trunk + branches * (length - 1))]
    outline = make_outline(parents, WITH_REPLACEMENT)
    return grow(expander, anchor_b, outline, noise_bnc, leaves=shape.leaves, deepest=trunk + length)


def delayed_size(depths: int, nodes: int, shape: TreeShape) -> int:
    """Returns the largest number of nodes of a delayed tree, at most `nodes`: all branches have equal length."""
    trunk, branches, length = _fit_paths(depths, nodes, shape)
    return 1 + trunk + branches * length


def _fit_paths(depths: int, num_nodes: int, shape: TreeShape) -> tuple[int, int, int]:
    """Returns the length of the trunk, the number of branches and their length in the largest tree that fits."""
    trunk = min(shape.trunk, num_nodes - 1, depths)
    branches = min(shape.branches, max(num_nodes - 1 - trunk, 1))
    return trunk, branches, min((num_nodes - 1 - trunk) // branches, depths - trunk)


def without_replacement(
    expander: Expander, anchor_b: jax.Array, num_nodes: int, shape: TreeShape, noise_bnc: jax.Array
) -> tuple[DraftTree, Proposal]:
    """Draws up to `shape.branches` distinct children per node; the outline is the best for a fixed acceptance rate.

    Source: Sequoia (arXiv 2402.12374) for fixed outlines and sampling without replacement; EAGLE (arXiv 2401.15077).
    """
    ranks = min(shape.branches, noise_bnc.shape[2])
    parents, siblings = best_outline(num_nodes - 1, ranks, expander.num_depths)
    outline = make_outline(parents, WITHOUT_REPLACEMENT, siblings)
    return grow(expander, anchor_b, outline, noise_bnc, leaves=shape.leaves, ranks=ranks)


def best_outline(count: int, ranks: int, depths: int) -> tuple[list[int], list[int]]:
    """Returns parents and sibling ranks of the `count` places that are reached most often, parents first."""
    parents: list[int] = []
    siblings: list[int] = []
    heap = [(-ACCEPTANCE, 0, 0, 1)] if ranks and depths else []
    while heap and len(parents) < count:
        cost, parent, rank, depth = heapq.heappop(heap)
        parents.append(parent)
        siblings.append(rank)
        if rank + 1 < ranks:
            heapq.heappush(heap, (cost * (1 - ACCEPTANCE), parent, rank + 1, depth))
        if depth < depths:
            heapq.heappush(heap, (cost * ACCEPTANCE, len(parents), 0, depth + 1))
    return parents, siblings


def hybrid(
    expander: Expander, anchor_b: jax.Array, num_nodes: int, shape: TreeShape, noise_bnc: jax.Array
) -> tuple[DraftTree, Proposal]:
    """Chooses a share `shape.skeleton` of the nodes by best-first search, and samples chains below them.

    Each skeleton node may have one sampled child, continued as a chain. It is drawn from the node's distribution without
    the deterministic children, and is tested before them. Chains grow where the walk most likely leaves the skeleton: their
    j-th nodes are taken in order of q(node) (1 - q(deterministic children)) REACH^(j - 1), known before anything is drawn.

    Source: greedy drafting with one sampled child, Hu et al. (arXiv 2502.18779), here at every node of a best-first tree.
    """
    wanted = round(shape.skeleton * (num_nodes - 1))
    skeleton, slot_bk, open_bk = best_first_search(expander, anchor_b, wanted + 1)
    fixed = skeleton.tokens_bn.shape[1] - 1
    depth_bk = jnp.where(skeleton.valid_bn, skeleton.depth_bn, UNUSED)
    kind_bk = jnp.full_like(depth_bk, DETERMINISTIC)
    outline = Outline(skeleton.parent_bn, depth_bk, kind_bk, jnp.zeros_like(depth_bk), slot_bk)
    children_bk = jax.vmap(lambda parent_k, valid_k: jnp.zeros_like(parent_k).at[parent_k].add(valid_k))(
        skeleton.parent_bn, skeleton.valid_bn.at[:, 0].set(False).astype(jnp.int32)
    )
    has_spare_bk = open_bk & (children_bk < noise_bnc.shape[2])  # none is left if all children are in the skeleton
    chains = _chains(skeleton, has_spare_bk, num_nodes - 1 - fixed, expander.num_depths)
    outline = jax.tree.map(lambda fixed_bk, drawn_bs: jnp.concatenate([fixed_bk, drawn_bs], axis=1), outline, chains)
    return grow(expander, anchor_b, outline, noise_bnc, leaves=shape.leaves, skeleton=fixed)


def _chains(skeleton: DraftTree, has_spare_bk: jax.Array, count: int, depths: int) -> Outline:
    """Returns the outline of the `count` sampled nodes, [b, s]: the best (chain step j, skeleton node k) by score."""
    batch, nodes = has_spare_bk.shape
    mass_bk = jnp.exp(skeleton.log_prob_bn)
    child_mass_bk = jax.vmap(lambda parent_k, mass_k: jnp.zeros_like(mass_k).at[parent_k].add(mass_k))(
        skeleton.parent_bn, mass_bk.at[:, 0].set(0)
    )
    spare_bk = jnp.where(has_spare_bk, jnp.maximum(mass_bk - child_mass_bk, 0), 0)
    step_j1 = jnp.arange(depths, dtype=jnp.int32)[:, None]
    fits_bjk = skeleton.depth_bn[:, None] + step_j1 < depths
    score_bjk = jnp.where(fits_bjk, spare_bk[:, None] * REACH ** step_j1.astype(mass_bk.dtype), 0)

    # Stable, and step-major: a chain's node never comes before the one above it.
    order_by = jnp.broadcast_to(jnp.arange(depths * nodes, dtype=jnp.int32), (batch, depths * nodes))
    cost_by, order_by = lax.sort((-score_bjk.reshape(batch, -1), order_by), num_keys=1, is_stable=True)
    missing = max(count - depths * nodes, 0)
    used_bs = jnp.pad(cost_by[:, :count] < 0, ((0, 0), (0, missing)))
    chosen_bs = jnp.pad(order_by[:, :count], ((0, 0), (0, missing)))
    step_bs, node_bs = jnp.divmod(chosen_bs, nodes)
    places_s = nodes + jnp.arange(min(count, depths * nodes), dtype=jnp.int32)
    place_by = jax.vmap(lambda chosen_s: jnp.zeros_like(order_by[0]).at[chosen_s].set(places_s))(order_by[:, :count])
    above_bs = pick(place_by, jnp.maximum(chosen_bs - nodes, 0))
    zero_bs = jnp.zeros_like(chosen_bs)
    return Outline(
        parent_bn=jnp.where(used_bs, jnp.where(step_bs == 0, node_bs, above_bs), 0),
        depth_bn=jnp.where(used_bs, pick(skeleton.depth_bn, node_bs) + step_bs + 1, UNUSED),
        kind_bn=jnp.full_like(chosen_bs, WITHOUT_REPLACEMENT),
        rank_bn=zero_bs,
        slot_bn=zero_bs,
    )
