"""Deterministic trees of one branch.

Shape suffixes: b batch, c children kept per node, u nodes under the root.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.models.backend.levels import over_depths
from treeflash_jax.trees.draft_tree import DraftTree, below_root, root_only
from treeflash_jax.trees.expander import TransitionTable
from treeflash_jax.trees.tree_inputs import TreeInputs


def walk(inputs: TreeInputs) -> tuple[DraftTree, None]:
    """Follows the likeliest child of each drafted token until its branch ends."""
    return _one_branch(inputs, inputs.expander.follow), None


def chain(inputs: TreeInputs) -> tuple[DraftTree, None]:
    """Builds the published chain: at each depth, the likeliest child in the first context of that depth.

    It ignores which token was drafted before. With one context per depth, this is DFlash's chain, and equal to `walk`.
    Expanders other than a `TransitionTable` (networks, n-grams, constraints) only know children of the drafted path, so
    with them the result equals `walk`, too.

    Source: TreeFlash (arXiv 2606.03819), released code; DFlash (arXiv 2602.06036).
    """
    if not isinstance(inputs.expander, TransitionTable):
        return walk(inputs)

    def stay(depth: jax.Array, context_b1: jax.Array, child_b1: jax.Array, token_b1: jax.Array) -> jax.Array:
        return context_b1  # all are 0

    return _one_branch(inputs, stay), None


def _one_branch(inputs: TreeInputs, follow: Callable) -> DraftTree:
    expander, anchor_b = inputs.expander, inputs.anchor_b
    length = min(inputs.num_nodes - 1, expander.num_depths)
    if length == 0:
        return root_only(anchor_b)
    best_b1 = jnp.zeros_like(anchor_b)[:, None]

    def step(carry: tuple[jax.Array, Any], depth: jax.Array):
        score_b1, state_b1 = carry
        tokens_b1c, log_probs_b1c = expander.children(depth, state_b1)
        score_b1 += log_probs_b1c[..., 0]
        return (score_b1, follow(depth, state_b1, best_b1, tokens_b1c[..., 0])), (tokens_b1c[:, 0, 0], score_b1[:, 0])

    state_b1 = expander.start(1)
    dtype = jax.eval_shape(expander.children, jnp.int32(0), state_b1)[1].dtype
    _, (tokens_ub, score_ub) = over_depths(step, (jnp.zeros(best_b1.shape, dtype), state_b1), range(length))
    index_bu = jnp.broadcast_to(jnp.arange(length), (anchor_b.shape[0], length))
    return below_root(anchor_b, tokens_ub.T, index_bu, index_bu + 1, score_ub.T)
