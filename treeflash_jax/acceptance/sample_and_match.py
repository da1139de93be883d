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

from treeflash_jax.acceptance.rows import Acceptance, Noise, TargetRows, accept, follow
from treeflash_jax.trees import DraftTree, Proposal, pick

LAWS = ("deterministic", "one path", "paths", "delayed", "without-replacement", "hybrid")
NEEDS = "a tree that was built without looking at the verifier's noise"


def weights(tree: DraftTree, proposal: Proposal | None, rows: TargetRows) -> jax.Array:
    """The verifier's probability of each node's path, [b, n]; 1 for the root, 0 in padding."""
    log_p_bnn = rows.gather(jnp.broadcast_to(tree.tokens_bn[:, None], (*tree.tokens_bn.shape, tree.tokens_bn.shape[1])))
    log_p_bn = jnp.take_along_axis(log_p_bnn, tree.parent_bn[:, None], axis=1)[:, 0].at[:, 0].set(0)
    above_bn = tree.parent_bn
    for _ in range(tree.parent_bn.shape[1].bit_length()):  # each step doubles how far up the path is summed
        log_p_bn += pick(log_p_bn, above_bn)
        above_bn = pick(above_bn, above_bn)
    return jnp.where(tree.valid_bn, jnp.exp(log_p_bn), 0)


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
    last_b = follow(tree, (tree.tokens_bn == pick(picks_bn, tree.parent_bn)) & tree.valid_bn, depths)
    return accept(tree, last_b, jnp.take_along_axis(picks_bn, last_b[:, None], axis=1)[:, 0], depths)
