"""Sample-and-match: draw the verifier's own token at every node and walk while a child carries it.

Each node's pick is an exact sample of the verifier, and the tree only decides how far one pass can walk, so the output law
is the verifier's for every tree that does not look at the noise. For deterministic trees no lossless rule accepts more.
Picks at equal positions share their noise, whatever the tree: the output equals one-token-at-a-time sampling with the same
noise. At temperature 0 this is greedy matching.

Source: TreeFlash (arXiv 2606.03819) and DDTree (arXiv 2604.12989), verification; SpecInfer (arXiv 2305.09781), naive
sampling.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from treeflash_jax.acceptance.rows import Acceptance, Noise, TargetRows
from treeflash_jax.tree import DraftTree, Proposal, ancestor_mask, pick


def weights(tree: DraftTree, proposal: Proposal | None, rows: TargetRows) -> jax.Array:
    """The verifier's probability of each node's token after its parent, [b, n]; 1 for the root, 0 in padding."""
    log_p_bnn = rows.gather(jnp.broadcast_to(tree.tokens_bn[:, None], (*tree.tokens_bn.shape, tree.tokens_bn.shape[1])))
    log_p_bn = jnp.take_along_axis(log_p_bnn, tree.parent_bn[:, None], axis=1)[:, 0]
    return jnp.where(tree.valid_bn, jnp.exp(log_p_bn), 0.0).at[:, 0].set(1.0)


def walk(tree: DraftTree, proposal: Proposal | None, rows: TargetRows, noise: Noise) -> Acceptance:
    """Accepts the deepest node all of whose ancestors carry the verifier's pick; the pick there is the bonus.

    Args:
      tree: siblings carry distinct tokens.
      proposal: not read; the rule holds whatever law the nodes came from.
      rows: the verifier's law at every node.
      noise: `gumbel_bpv` with at least as many depths as the tree.
    """
    depths = noise.gumbel_bpv.shape[1]
    picks_bn = rows.sample(pick(noise.gumbel_bpv, tree.depth_bn))
    return follow_picks(tree, picks_bn, depths)


def follow_picks(tree: DraftTree, picks_bn: jax.Array, depths: int) -> Acceptance:
    """Walks from the root while a child carries its parent's pick.

    Args:
      tree: the verified tree.
      picks_bn: next token chosen at every node.
      depths: rows of a path, root included; static, at least the tree's depth + 1.
    """
    matches_bn = (tree.tokens_bn == pick(picks_bn, tree.parent_bn)) & tree.valid_bn
    matches_bn = matches_bn.at[:, 0].set(True)
    above_bnn = ancestor_mask(tree.parent_bn, depths - 1)
    reached_bn = jnp.all(matches_bn[:, None] | ~above_bnn, axis=-1)
    last_b = jnp.argmax(jnp.where(reached_bn, tree.depth_bn + 1, 0), axis=-1)
    on_path_bn = jnp.take_along_axis(above_bnn, last_b[:, None, None], axis=1)[:, 0]
    at_depth_bpn = on_path_bn[:, None] & (tree.depth_bn[:, None] == jnp.arange(depths)[:, None])
    return Acceptance(
        path_bp=jnp.argmax(at_depth_bpn, axis=-1).astype(jnp.int32),
        length_b=jnp.take_along_axis(tree.depth_bn, last_b[:, None], axis=1)[:, 0] + 1,
        bonus_b=jnp.take_along_axis(picks_bn, last_b[:, None], axis=1)[:, 0],
    )
