"""Top-k and argmax in the variant that the backend runs fastest.

Among equal scores, the lower index comes first. Scores are not sharded; `vocab` has versions for a sharded vocabulary.

Shape suffixes: b batch, n independent score vectors, v scores, g groups of GROUP scores, k largest entries, x candidates;
`...` is any leading axes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32

GROUP = 128  # scores per group: the lanes of a TPU, where other sizes would be padded


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest entries along the last axis and their indices, largest first."""
    scores_nv = scores.reshape(-1, scores.shape[-1])
    values, ids = (_grouped_top_k if is_grouped(scores_nv.shape[1], k) else _flat_top_k)(scores_nv, k)
    return values.reshape(*scores.shape[:-1], k), ids.reshape(*scores.shape[:-1], k)


def _flat_top_k(scores_nv: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Calls `lax.top_k`; XLA:CPU sorts scores in full unless they are a float32 matrix."""

    def in_float32(scores_nv: jax.Array) -> list[jax.Array]:
        values_nk, ids_nk = lax.top_k(scores_nv.astype(at_least_float32(scores_nv.dtype)), k)
        return [values_nk.astype(scores_nv.dtype), ids_nk]

    return lax.platform_dependent(scores_nv, cpu=in_float32, default=lambda scores_nv: lax.top_k(scores_nv, k))


def is_grouped(size: int, k: int) -> bool:
    """Returns whether vectors are long enough for first searching the largest entry of each group."""
    return size % GROUP == 0 and size >= 8 * k * GROUP


def _grouped_top_k(scores_nv: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the top k from the k groups with the largest maxima, which contain them.

    It sorts v / GROUP maxima and k GROUP entries, instead of v entries. Ties are no problem: k groups have a larger maximum
    than a group that is left out, or the same maximum at lower indices.
    """
    groups_ngv = scores_nv.reshape(scores_nv.shape[0], -1, GROUP)
    group_nk = jnp.sort(_flat_top_k(jnp.max(groups_ngv, axis=-1), k)[1], axis=-1)
    few_nx = jnp.take_along_axis(groups_ngv, group_nk[..., None], axis=1).reshape(scores_nv.shape[0], -1)
    values_nk, index_nk = _flat_top_k(few_nx, k)
    return values_nk, jnp.take_along_axis(group_nk, index_nk // GROUP, axis=1) * GROUP + index_nk % GROUP


def argmax(scores: jax.Array) -> jax.Array:
    """Returns the index of the largest entry along the last axis. If all are -inf, or any is NaN, it is out of range."""
    if not is_grouped(scores.shape[-1], 1):
        return plain_argmax(scores)
    return lax.platform_dependent(scores, cpu=_grouped_argmax, default=plain_argmax)


def plain_argmax(scores: jax.Array) -> jax.Array:
    """Computes `argmax` by two reductions: faster on a CPU than `jnp.argmax`, and XLA partitions them over a vocabulary."""
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(scores == peak, ids, scores.shape[-1]), axis=-1)
    return jnp.where(peak[..., 0] > -jnp.inf, first, scores.shape[-1])


def _grouped_argmax(scores: jax.Array) -> jax.Array:
    """Searches the first group with the largest maximum. On CPU, this avoids two vocabulary-sized temporaries."""
    groups = scores.reshape(*scores.shape[:-1], -1, GROUP)
    group = plain_argmax(jnp.max(groups, axis=-1))
    peak_group = jnp.take_along_axis(groups, group[..., None, None], axis=-2)[..., 0, :]
    return group * GROUP + plain_argmax(peak_group)


def stable_top_k(scores_bx: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns `lax.top_k` with ties in order of index. This takes a stable sort, except on a CPU, where `top_k` is stable.

    On a mesh, every device sorts the scores of its sequences.
    """

    def by_sort(scores_bx: jax.Array) -> list[jax.Array]:
        order_bx = lax.broadcasted_iota(jnp.int32, scores_bx.shape, 1)
        cost_bx, order_bx = lax.sort((-scores_bx, order_bx), num_keys=1, is_stable=True)
        return [-cost_bx[:, :k], order_bx[:, :k]]

    def best(scores_bx: jax.Array) -> list[jax.Array]:
        return lax.platform_dependent(scores_bx, cpu=lambda scores_bx: lax.top_k(scores_bx, k), default=by_sort)

    return sharding.over_batch(best, scores_bx)
