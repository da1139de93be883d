"""`skeleton`: some nodes by best-first search, the rest as sampled chains where the walk most likely leaves them.

Shape suffixes: b batch, n tree nodes (root included), c children kept per node, k skeleton nodes (root included), j steps
of a chain, y = j k pairs of both, s sampled nodes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.trees.best_first import best_first_search
from treeflash_jax.trees.draft_tree import DraftTree
from treeflash_jax.trees.sampled.draw_tokens import UNUSED, Outline, draw_tokens
from treeflash_jax.trees.sampled.proposal import DETERMINISTIC, WITHOUT_REPLACEMENT, Proposal
from treeflash_jax.trees.tree_inputs import TreeInputs

REACH = 0.6  # assumed chance that a sampled node is accepted; used only to divide nodes between chains


def skeleton_chains(inputs: TreeInputs) -> tuple[DraftTree, Proposal]:
    """Chooses a share `shape.skeleton` of the nodes by best-first search, and samples chains below them.

    Each skeleton node may have one sampled child, which continues as a chain. The child is drawn from the node's
    distribution without the deterministic children, and is tested before them. Chains begin at the nodes at which the walk
    most likely leaves the skeleton: the j-th nodes of all chains are ranked by
    q(node) (1 - q(deterministic children)) REACH^(j - 1), which is known before anything is drawn.

    Source: greedy drafting with one sampled child, Hu et al. (arXiv 2502.18779), here at every node of a best-first tree.
    """
    num_chosen = round(inputs.shape.skeleton * (inputs.num_nodes - 1))
    skeleton, slot_bk, open_bk = best_first_search(inputs, num_chosen + 1)
    num_fixed = skeleton.tokens_bn.shape[1] - 1
    depth_bk = jnp.where(skeleton.valid_bn, skeleton.depth_bn, UNUSED)
    kind_bk = jnp.full_like(depth_bk, DETERMINISTIC)
    outline = Outline(skeleton.parent_bn, depth_bk, kind_bk, jnp.zeros_like(depth_bk), slot_bk)
    children_bk = jax.vmap(lambda parent_k, valid_k: jnp.zeros_like(parent_k).at[parent_k].add(valid_k))(
        skeleton.parent_bn, skeleton.valid_bn.at[:, 0].set(False).astype(jnp.int32)
    )
    has_spare_bk = open_bk & (children_bk < inputs.noise_bnc.shape[2])  # False if all children are in the skeleton
    chains = _chains(skeleton, has_spare_bk, inputs.num_nodes - 1 - num_fixed, inputs.expander.num_depths)
    outline = jax.tree.map(lambda fixed_bk, drawn_bs: jnp.concatenate([fixed_bk, drawn_bs], axis=1), outline, chains)
    return draw_tokens(inputs, outline, num_fixed=num_fixed)


def _chains(skeleton: DraftTree, has_spare_bk: jax.Array, count: int, depths: int) -> Outline:
    """Returns the outline [b, s] of the sampled nodes: the best `count` pairs (step j of a chain, skeleton node k)."""
    batch, nodes = has_spare_bk.shape
    mass_bk = jnp.exp(skeleton.log_prob_bn)
    child_mass_bk = jax.vmap(lambda parent_k, mass_k: jnp.zeros_like(mass_k).at[parent_k].add(mass_k))(
        skeleton.parent_bn, mass_bk.at[:, 0].set(0)
    )
    spare_bk = jnp.where(has_spare_bk, jnp.maximum(mass_bk - child_mass_bk, 0), 0)
    step_j1 = jnp.arange(depths, dtype=jnp.int32)[:, None]
    fits_bjk = skeleton.depth_bn[:, None] + step_j1 < depths
    score_bjk = jnp.where(fits_bjk, spare_bk[:, None] * REACH ** step_j1.astype(mass_bk.dtype), 0)

    # The sort is stable and in the order of steps, so that a node of a chain never comes before its parent.
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
