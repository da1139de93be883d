"""The drafter in training: many blocks of one row in one pass, each as the drafter sees it at inference.

A block starts at an anchor a and holds [anchor, mask, ..., mask]. Its slots see the context rows of their document at
positions strictly before a (the anchor's own feature does not exist yet when a round is drafted), and each other.
Slot i is trained on the token at a + i.

Shape suffixes: b batch, s row tokens, n anchors, q block slots, j tapped layers x model, d model, k key/value heads,
g query heads per key/value head, e head dim.

Source: DFlash (arXiv 2602.06036) section 4.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from train import data
from train.verifier import document_mask
from treeflash_jax import drafter, layers, verifier, vocab
from treeflash_jax.config import DrafterConfig, ModelConfig


@struct.dataclass
class Teacher:
    """One clean pass of the frozen verifier over packed rows."""

    features_bsj: jax.Array
    hidden_bsd: jax.Array


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


def teach(params: Any, config: ModelConfig, drafter_config: DrafterConfig, rows: data.Rows) -> Teacher:
    out = verifier.forward(
        params,
        config,
        rows.tokens_rt,
        rows.positions_rt,
        document_mask(rows.segments_rt),
        taps=drafter_config.target_layer_ids,
    )
    return jax.lax.stop_gradient(Teacher(out.features_btj, out.hidden_btd))


def sample_blocks(rows: data.Rows, num_anchors: int, size: int, decay: float, key: jax.Array) -> Blocks:
    """Random anchors without replacement, among answer tokens that an answer token follows.

    Args:
      rows: packed answers; weight 1 marks what the verifier wrote.
      num_anchors: per row; a row with fewer candidates has empty blocks.
      size: block size, anchor included.
      decay: slot i weighs exp(-(i - 1) / decay).
      key: random key.
    """
    answers_bs = rows.weights_rt > 0
    candidates_bs = answers_bs & jnp.pad(answers_bs[:, 1:], ((0, 0), (0, 1)))
    draw_bs = jnp.where(candidates_bs, jax.random.uniform(key, candidates_bs.shape), -1.0)
    drawn_bn, anchors_bn = jax.lax.top_k(draw_bs, num_anchors)
    slot_q = jnp.arange(size)
    targets_bnq = anchors_bn[:, :, None] + slot_q
    inside_bnq = targets_bnq < rows.tokens_rt.shape[1]
    targets_bnq = jnp.minimum(targets_bnq, rows.tokens_rt.shape[1] - 1)
    same_bnq = at(rows.segments_rt, targets_bnq) == at(rows.segments_rt, anchors_bn)[:, :, None]
    kept_bnq = inside_bnq & same_bnq & at(answers_bs, targets_bnq) & (drawn_bn >= 0)[:, :, None] & (slot_q > 0)
    return Blocks(anchors_bn, targets_bnq, jnp.where(kept_bnq, jnp.exp(-(slot_q - 1) / decay), 0.0))


def hidden_states(
    params: Any,
    config: DrafterConfig,
    embed_vd: jax.Array,
    rows: data.Rows,
    features_bsj: jax.Array,
    anchors_bn: jax.Array,
) -> jax.Array:
    """What `drafter.block` gives for every anchor, [b, n, q, d], before the final norm."""
    own, size = config.layers, config.block_size
    batch, count = anchors_bn.shape
    context_table = layers.rotary_table(own.rope, own.head_dim, rows.positions_rt)
    block_positions = at(rows.positions_rt, anchors_bn)[:, :, None] + jnp.arange(size)
    block_table = layers.rotary_table(own.rope, own.head_dim, block_positions.reshape(batch, -1))
    before_bns = jnp.arange(rows.tokens_rt.shape[1]) < anchors_bn[:, :, None]
    same_bns = rows.segments_rt[:, None] == at(rows.segments_rt, anchors_bn)[:, :, None]
    fused_bsd = drafter.fuse(params, config, features_bsj)

    def attend(weights, x_btd):
        q_bthe = layers.queries(weights, own, x_btd, block_table)
        context = layers.keys_values(weights, own, fused_bsd, context_table)
        new = layers.keys_values(weights, own, x_btd, block_table)
        return block_attention(q_bthe, *new, *context, before_bns & same_bns), None

    tokens_bnq = jnp.full((batch, count, size), config.mask_token_id).at[:, :, 0].set(at(rows.tokens_rt, anchors_bn))
    x_btd = vocab.embed(embed_vd, tokens_bnq.reshape(batch, -1))
    for group in params["groups"]:
        for weights in group:
            x_btd, _ = layers.decoder_layer(weights, x_btd, attend, own.rms_norm_eps)
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
    q_bnqkge = q_bthe.reshape(batch, count, -1, kv_heads, heads // kv_heads, head_dim) * head_dim**-0.5
    k_bnuke, v_bnuke = (x.reshape(batch, count, -1, kv_heads, head_dim) for x in (k_btke, v_btke))
    past_bkgnqs = jnp.einsum("bnqkge,bske->bkgnqs", q_bnqkge, context_k_bske)
    past_bkgnqs = jnp.where(seen_bns[:, None, None, :, None], past_bkgnqs, -jnp.inf)
    own_bkgnqu = jnp.einsum("bnqkge,bnuke->bkgnqu", q_bnqkge, k_bnuke)
    shares = jax.nn.softmax(jnp.concatenate([past_bkgnqs, own_bkgnqu], axis=-1), axis=-1)
    past_bkgnqs, own_bkgnqu = jnp.split(shares, [context_k_bske.shape[1]], axis=-1)
    mixed = jnp.einsum("bkgnqs,bske->bnqkge", past_bkgnqs, context_v_bske)
    mixed += jnp.einsum("bkgnqu,bnuke->bnqkge", own_bkgnqu, v_bnuke)
    return mixed.reshape(batch, rows, heads, head_dim)


def at(values_bs: jax.Array, index_b: jax.Array) -> jax.Array:
    """values[b, index[b, ...]] for rows of values [b, s] or [b, s, d]."""
    return jax.vmap(lambda values_s, index: values_s[index])(values_bs, index_b)
