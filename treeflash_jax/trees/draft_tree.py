"""Draft trees as arrays: nodes and their parents.

Shape suffixes: b batch, n tree nodes (root included), i depth, u nodes under the root, x words of 32 nodes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treeflash_jax.models.backend.indexing import pick

NO_TOKEN = np.iinfo(np.int32).max  # id of an entry without a child: outside every vocabulary


@struct.dataclass
class DraftTree:
    """A prefix-closed set of continuations of the anchor. Node 0 is the anchor; parents precede children.

    Attributes:
      tokens_bn: token ids; 0 in padding.
      parent_bn: index of the parent; 0 for the root and for padding.
      depth_bn: 0 for the root and for padding.
      log_prob_bn: log-probability of the path from the anchor, float32 at least; -inf in padding.
      valid_bn: False in padding, which never matches.
    """

    tokens_bn: jax.Array
    parent_bn: jax.Array
    depth_bn: jax.Array
    log_prob_bn: jax.Array
    valid_bn: jax.Array


def root_only(anchor_b: jax.Array) -> DraftTree:
    """Returns the tree of one-token decoding."""
    zero_b1 = jnp.zeros_like(anchor_b)[:, None]
    return DraftTree(anchor_b[:, None], zero_b1, zero_b1, log_prob_bn=zero_b1.astype(jnp.float32), valid_bn=zero_b1 == 0)


def below_root(
    anchor_b: jax.Array, tokens_bu: jax.Array, parent_bu: jax.Array, depth_bu: jax.Array, log_prob_bu: jax.Array
) -> DraftTree:
    """Returns the tree of the anchor and these nodes below it. Nodes of probability zero become padding."""
    valid_bu = jnp.isfinite(log_prob_bu)

    def with_root(root_b: jax.Array, nodes_bu: jax.Array, padding: float):
        return jnp.concatenate([root_b[:, None], jnp.where(valid_bu, nodes_bu, padding).astype(root_b.dtype)], axis=1)

    zero_b = jnp.zeros_like(anchor_b)
    return DraftTree(
        tokens_bn=with_root(anchor_b, tokens_bu, 0),
        parent_bn=with_root(zero_b, parent_bu, 0),
        depth_bn=with_root(zero_b, depth_bu, 0),
        log_prob_bn=with_root(zero_b.astype(log_prob_bu.dtype), log_prob_bu, -jnp.inf),
        valid_bn=with_root(zero_b == 0, valid_bu, False),
    )


def first(tree: DraftTree, nodes: int) -> DraftTree:
    """Returns the tree of the first `nodes` nodes. For a best-first tree, this is the best-first tree of that size."""
    return jax.tree.map(lambda x_bn: x_bn[:, :nodes], tree)


def ancestor_mask(parent_bn: jax.Array, max_depth: int) -> jax.Array:
    """Returns a mask [b, n, n], which is True at [b, i, j] if node j is node i or one of its ancestors."""
    nodes = parent_bn.shape[1]
    word_n, bit_n = np.divmod(np.arange(nodes), 32)
    self_nx = np.where(np.arange(word_n[-1] + 1) == word_n[:, None], 1 << bit_n[:, None], 0).astype(np.uint32)
    bits_bnx = jnp.broadcast_to(self_nx, (*parent_bn.shape, self_nx.shape[1]))
    above_bn = parent_bn
    # Pointer doubling: `max_depth` gathers in a row would take XLA's GPU compiler exponential time.
    for _ in range(max_depth.bit_length()):
        bits_bnx |= pick(bits_bnx, above_bn)
        above_bn = pick(above_bn, above_bn)
    return (jnp.repeat(bits_bnx, 32, axis=2)[:, :, :nodes] >> bit_n.astype(np.uint32)) & 1 == 1


def path_tokens(tree: DraftTree, depths: int) -> jax.Array:
    """Returns the tokens from depth 1 to each node, [b, n, depths]; NO_TOKEN after the node, and for root and padding."""
    is_at_bin = tree.depth_bn[:, None] == jnp.arange(1, depths + 1)[:, None]
    is_on_path_bnin = ancestor_mask(tree.parent_bn, depths)[:, :, None] & is_at_bin[:, None]
    return jnp.min(jnp.where(is_on_path_bnin, tree.tokens_bn[:, None, None], NO_TOKEN), axis=-1)
