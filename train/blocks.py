"""The drafter in training: many blocks of one row in one pass, each as the drafter sees it at inference.

A block starts at an anchor a and holds [anchor, mask, ..., mask]. Its slots see the context rows of their document at
positions strictly before a (the anchor's own feature does not exist yet when a round is drafted), and each other.
Slot i is trained on the token at a + i.

Blocks do not see each other, so anchors are taken a chunk at a time and no array holds [anchors x block, anchors x block].

Shape suffixes: b batch, s row tokens, n anchors, q block slots, j tapped layers x model, d model, k key/value heads,
g query heads per key/value head, e head dim.

Source: DFlash (arXiv 2602.06036) section 4.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from train.data import Rows
from treeflash_jax import mesh as meshes
from treeflash_jax import vocab
from treeflash_jax.drafters.block import backbone as drafter
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.trees import pick

Layers = list[tuple[jax.Array, jax.Array]]


@struct.dataclass
class Blocks:
    """Where blocks start and what they learn.

    Attributes:
      anchors_bn: index in the row.
      targets_bnq: index of the token that each slot predicts, clipped to the row.
      weights_bnq: loss weights; 0 on the anchor, past the answer, and in blocks without an anchor.
    """

    anchors_bn: jax.Array
    targets_bnq: jax.Array
    weights_bnq: jax.Array


def sample_blocks(rows: Rows, num_anchors: int, size: int, decay: float, keys_b: jax.Array) -> Blocks:
    """Random anchors without replacement, among answer tokens that an answer token of the same document follows.

    Args:
      rows: packed answers; a positive weight marks what the verifier wrote.
      num_anchors: per row; a row with fewer candidates has empty blocks.
      size: block size, anchor included.
      decay: slot i weighs exp(-(i - 1) / decay); 0 weighs all slots alike.
      keys_b: a random key per row, so that anchors do not depend on how rows are spread over devices.
    """
    answers_bs = rows.weights_rt > 0
    follows_bs = answers_bs[:, 1:] & (rows.segments_rt[:, 1:] == rows.segments_rt[:, :-1])
    candidates_bs = answers_bs & jnp.pad(follows_bs, ((0, 0), (0, 1)))
    uniform_bs = jax.vmap(lambda key: jax.random.uniform(key, candidates_bs.shape[1:]))(keys_b)
    drawn_bn, anchors_bn = jax.lax.top_k(jnp.where(candidates_bs, uniform_bs, -1.0), num_anchors)
    slot_q = jnp.arange(size)
    targets_bnq = anchors_bn[:, :, None] + slot_q
    inside_bnq = targets_bnq < rows.tokens_rt.shape[1]
    targets_bnq = jnp.minimum(targets_bnq, rows.tokens_rt.shape[1] - 1)
    same_bnq = pick(rows.segments_rt, targets_bnq) == pick(rows.segments_rt, anchors_bn)[:, :, None]
    kept_bnq = inside_bnq & same_bnq & pick(answers_bs, targets_bnq) & (drawn_bn >= 0)[:, :, None] & (slot_q > 0)
    share_q = jnp.exp(-(slot_q - 1) / decay) if decay > 0 else jnp.ones(size)
    return Blocks(anchors_bn, targets_bnq, jnp.where(kept_bnq, share_q, 0.0))


def context(params: Any, config: DrafterConfig, rows: Rows, features_bsj: jax.Array) -> Layers:
    """Keys and values [b, s, k, e] of the fused features, layer by layer: what the drafter's cache would hold."""
    groups = drafter.context_rows(params, config, features_bsj, rows.positions_rt)
    return [rows for group in groups for rows in group]


def hidden_states(
    params: Any, config: DrafterConfig, embed_vd: jax.Array, rows: Rows, context: Layers, anchors_bn: jax.Array
) -> jax.Array:
    """What `drafter.block` gives for every anchor, [b, n, q, d], before the final norm."""
    size = config.block_size
    batch, count = anchors_bn.shape
    positions_bnq = pick(rows.positions_rt, anchors_bn)[:, :, None] + jnp.arange(size)
    before_bns = jnp.arange(rows.tokens_rt.shape[1]) < anchors_bn[:, :, None]
    seen_bns = before_bns & (rows.segments_rt[:, None] == pick(rows.segments_rt, anchors_bn)[:, :, None])
    tokens_bnq = jnp.full((batch, count, size), config.mask_token_id).at[:, :, 0].set(pick(rows.tokens_rt, anchors_bn))
    x_btd = meshes.constrain(vocab.embed(embed_vd, tokens_bnq.reshape(batch, -1)), ("batch", None, None))

    def attend(q_bthe, k_btke, v_btke, context):
        return block_attention(q_bthe, k_btke, v_btke, *context, seen_bns)

    x_btd = drafter.through_layers(params, config, x_btd, positions_bnq.reshape(batch, -1), context, attend)
    return x_btd.reshape(batch, count, size, -1)


def block_attention(
    q_bthe: jax.Array,
    k_btke: jax.Array,
    v_btke: jax.Array,
    context_k_bske: jax.Array,
    context_v_bske: jax.Array,
    seen_bns: jax.Array,
) -> jax.Array:
    """One softmax over the context rows a block sees and its own rows. t = n x q block rows, block after block."""
    batch, rows, heads, head_dim = q_bthe.shape
    count, kv_heads = seen_bns.shape[1], k_btke.shape[2]
    wide = jnp.promote_types(q_bthe.dtype, jnp.float32)
    q_bnqkge = q_bthe.reshape(batch, count, -1, kv_heads, heads // kv_heads, head_dim) * head_dim**-0.5
    k_bnuke, v_bnuke = (x.reshape(batch, count, -1, kv_heads, head_dim) for x in (k_btke, v_btke))
    past_bkgnqs = jnp.einsum("bnqkge,bske->bkgnqs", q_bnqkge, context_k_bske, preferred_element_type=wide)
    past_bkgnqs = jnp.where(seen_bns[:, None, None, :, None], past_bkgnqs, -jnp.inf)
    own_bkgnqu = jnp.einsum("bnqkge,bnuke->bkgnqu", q_bnqkge, k_bnuke, preferred_element_type=wide)
    peak = jax.lax.stop_gradient(jnp.maximum(past_bkgnqs.max(-1), own_bkgnqu.max(-1)))[..., None]
    past_bkgnqs, own_bkgnqu = jnp.exp(past_bkgnqs - peak), jnp.exp(own_bkgnqu - peak)
    total_bnqkg = jnp.moveaxis(past_bkgnqs.sum(-1) + own_bkgnqu.sum(-1), (1, 2), (3, 4))
    dtype = q_bthe.dtype
    mixed = jnp.einsum("bkgnqs,bske->bnqkge", past_bkgnqs.astype(dtype), context_v_bske, preferred_element_type=wide)
    mixed += jnp.einsum("bkgnqu,bnuke->bnqkge", own_bkgnqu.astype(dtype), v_bnuke, preferred_element_type=wide)
    return (mixed / total_bnqkg[..., None]).astype(dtype).reshape(batch, rows, heads, head_dim)
