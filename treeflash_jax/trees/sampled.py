"""Sampled trees of an outline that is fixed before the draws: independent paths, or siblings without replacement."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from treeflash_jax.trees.containers import WITH_REPLACEMENT, WITHOUT_REPLACEMENT, DraftTree, Proposal
from treeflash_jax.trees.expander import Expander
from treeflash_jax.trees.grow import grow, make_outline
from treeflash_jax.trees.shape import Bucket, TreeShape

ACCEPTANCE = 0.7  # assumed chance a that a test accepts: a sibling of rank r is reached and kept with a (1 - a)^r


def paths(
    expander: Expander, anchor_b: jax.Array, num_nodes: int, shape: TreeShape, noise_bnc: jax.Array
) -> tuple[DraftTree, Proposal]:
    """Draws `shape.branches` i.i.d. paths of equal length from the anchor; common prefixes are verified once.

    Source: SpecInfer (arXiv 2305.09781); SpecTr (arXiv 2310.15141).
    """
    return delayed(expander, anchor_b, num_nodes, replace(shape, trunk=0), noise_bnc)


def delayed(
    expander: Expander,
    anchor_b: jax.Array,
    num_nodes: int,
    shape: TreeShape,
    noise_bnc: jax.Array,
    recent_b: jax.Array | None = None,
    buckets: Sequence[Bucket] = (),
    choice_b: jax.Array | None = None,
) -> tuple[DraftTree, Proposal]:
    """Draws one path of `shape.trunk` tokens, then `shape.branches` i.i.d. paths from its end.

    Near the anchor drafter and verifier agree and a second path adds little; their distance grows with depth. With
    trunk="auto" every sequence branches at the depth at which its recent rounds ended on average. This depth, like the
    choice among buckets, must be known before anything is drawn.

    Args:
      recent_b: recent mean number of tokens that a round of each sequence commits; for trunk="auto".
      buckets: sizes to choose from, in place of the shape's trunk and branches; static.
      choice_b: index of each sequence's bucket.

    Source: delayed tree expansion (arXiv 2602.16994).
    """
    depths = expander.num_depths
    if buckets:
        table = [bucket.cut(depths) for bucket in buckets]
    else:
        trunks = range(min(num_nodes - 1, depths) + 1) if shape.trunk == "auto" else [shape.trunk]
        table = [_largest_bucket(depths, num_nodes, trunk, shape.branches) for trunk in trunks]
    if recent_b is not None:
        choice_b = jnp.round(recent_b).astype(jnp.int32) - 1
    size = table[0].nodes if choice_b is None else num_nodes
    outlines = [make_outline(_parents(bucket), WITH_REPLACEMENT, size=size) for bucket in table]
    outline = outlines[0]
    if choice_b is not None:
        choice_b = jnp.clip(choice_b, 0, len(table) - 1)
        outline = jax.tree.map(lambda *x_n: jnp.stack(x_n)[choice_b], *outlines)
    deepest = max(bucket.depth for bucket in table)
    return grow(expander, anchor_b, outline, noise_bnc, leaves=shape.leaves, deepest=deepest)


def _largest_bucket(depths: int, num_nodes: int, trunk: int, branches: int) -> Bucket:
    """Returns the largest bucket with this trunk and number of branches that fits."""
    trunk = min(trunk, num_nodes - 1, depths)
    branches = min(branches, max(num_nodes - 1 - trunk, 1))
    return Bucket(branches, trunk, min((num_nodes - 1 - trunk) // branches, depths - trunk))


def _parents(bucket: Bucket) -> list[int]:
    """Returns the parents of places 1, 2, ...: those of the trunk, then level by level, one place for each branch."""
    first = [bucket.trunk] * bucket.branches if bucket.length else []
    return [*range(bucket.trunk), *first, *range(bucket.trunk + 1, bucket.nodes - bucket.branches)]


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
