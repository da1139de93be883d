"""Training blocks: many blocks of a packed sequence in one pass, each in the form that the drafter has at inference.

A block [anchor, mask, ..., mask] starts at an anchor a. It attends to itself and to its document at positions before a, but
not to other blocks. It does not attend to position a, because in a draft the anchor has no feature yet. Slot i is trained
on the token at a + i.

Shape suffixes: b sequences, s positions of a sequence, n anchors, i slots of a block, t = n i, d model, k key/value
heads, h query heads (in products, per key/value head), e head dim, j tapped layers x model.

Source: DFlash (arXiv 2602.06036) section 4.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from train.data.packing import PackedBatch
from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Params
from treeflash_jax.drafters.block import backbone
from treeflash_jax.drafters.block.block_drafter import BlockDrafter
from treeflash_jax.models import packed_attention, vocab
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.models.kv_cache import NewKV
from treeflash_jax.models.packed_attention import BlockMask, PackedMask


@struct.dataclass
class Blocks:
    """Anchors of blocks and their targets.

    Attributes:
      anchors_bn: index of each anchor in the sequence.
      targets_bni: index of the token that each slot predicts, clipped to the sequence.
      weights_bni: loss weights; 0 for the anchor slot, past the answer, and in blocks without an anchor.
    """

    anchors_bn: jax.Array
    targets_bni: jax.Array
    weights_bni: jax.Array


def draw_anchors(candidates_bs: jax.Array, count: int, keys_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws positions [b, n] among the candidates, without replacement.

    Also returns whether each position exists, because there may be fewer candidates.
    """
    uniform_bs = jax.vmap(lambda key: jax.random.uniform(key, candidates_bs.shape[1:]))(keys_b)
    drawn_bn, index_bn = jax.lax.top_k(jnp.where(candidates_bs, uniform_bs, -1.0), count)
    return index_bn, drawn_bn >= 0


def sample_blocks(batch: PackedBatch, num_anchors: int, size: int, decay: float, keys_b: jax.Array) -> Blocks:
    """Draws anchors without replacement, among weighted tokens that precede another weighted token of the same document.

    Args:
      batch: packed documents; a positive weight marks the tokens to train on, such as those that the verifier wrote, and
        multiplies their slots' weights.
      num_anchors: number of anchors per sequence; a sequence with fewer candidates has empty blocks.
      size: block size, anchor included.
      decay: slot i weighs exp(-(i - 1) / decay); 0 weighs all slots equally.
      keys_b: one random key per sequence, so that anchors do not depend on the distribution of sequences over devices.
    """
    is_trained_bs = batch.weights_bt > 0
    follows_bs = is_trained_bs[:, 1:] & (batch.segments_bt[:, 1:] == batch.segments_bt[:, :-1])
    candidates_bs = is_trained_bs & jnp.pad(follows_bs, ((0, 0), (0, 1)))
    anchors_bn, is_drawn_bn = draw_anchors(candidates_bs, num_anchors, keys_b)
    slot_i, length = jnp.arange(size), batch.tokens_bt.shape[1]
    targets_bni = anchors_bn[:, :, None] + slot_i
    inside_bni = targets_bni < length
    targets_bni = jnp.minimum(targets_bni, length - 1)
    same_bni = pick(batch.segments_bt, targets_bni) == pick(batch.segments_bt, anchors_bn)[:, :, None]
    kept_bni = inside_bni & same_bni & pick(is_trained_bs, targets_bni) & is_drawn_bn[:, :, None] & (slot_i > 0)
    share_i = jnp.exp(-(slot_i - 1) / decay) if decay > 0 else jnp.ones(size)
    return Blocks(anchors_bn, targets_bni, jnp.where(kept_bni, share_i * pick(batch.weights_bt, targets_bni), 0.0))


def hidden_states(
    params: Params,
    drafter: BlockDrafter,
    embed_vd: jax.Array,
    batch: PackedBatch,
    context: NewKV,
    anchors_bn: jax.Array,
    attention: str = "chunked",
) -> jax.Array:
    """Returns the hidden states of `BlockDrafter.draft_block` at every anchor, [b, n, i, d], before the final norm."""
    size = drafter.block_size
    batch_size, count = anchors_bn.shape
    positions_bni = pick(batch.positions_bt, anchors_bn)[:, :, None] + jnp.arange(size)
    tokens_bni = jnp.full((batch_size, count, size), drafter.mask_token_id)
    tokens_bni = tokens_bni.at[:, :, 0].set(pick(batch.tokens_bt, anchors_bn))
    x_btd = sharding.constrain(
        vocab.embed(embed_vd, tokens_bni.reshape(batch_size, -1), drafter.embedding_factor), ("batch", None, None)
    )

    def attend(q_bthe: jax.Array, k_btke: jax.Array, v_btke: jax.Array, context: tuple[Any, ...]):
        return block_attention(q_bthe, k_btke, v_btke, *context, anchors_bn, batch.segments_bt, attention)

    x_btd = backbone.through_layers(params, drafter.layers, x_btd, positions_bni.reshape(batch_size, -1), context, attend)
    return x_btd.reshape(batch_size, count, size, -1)


def block_attention(
    q_bthe: jax.Array,
    k_btke: jax.Array,
    v_btke: jax.Array,
    context_k_bske: jax.Array,
    context_v_bske: jax.Array,
    anchors_bn: jax.Array,
    segments_bs: jax.Array,
    attention: str = "chunked",
) -> jax.Array:
    """Attends from each block to its context and itself, in one softmax. The t = n i slots are block after block.

    Kernels get the blocks as further keys after the context. "chunked" skips the products of different blocks.
    """
    batch_size, slots, heads, head_dim = q_bthe.shape
    count, kv_heads = anchors_bn.shape[1], k_btke.shape[2]
    segments_bn = pick(segments_bs, anchors_bn)
    k_bxke = jnp.concatenate((context_k_bske, k_btke), axis=1)
    v_bxke = jnp.concatenate((context_v_bske, v_btke), axis=1)
    if packed_attention.supports(attention, q_bthe, k_bxke):
        queries, keys = slots // count, k_btke.shape[1] // count
        block_mask = BlockMask(segments_bs.shape[1], keys)
        packed_bt = jnp.repeat(block_mask.pack(anchors_bn, jnp.arange(count)), queries, axis=1)
        segments_bx = jnp.concatenate([segments_bs, jnp.repeat(segments_bn, keys, axis=1)], axis=1)
        mask = PackedMask(jnp.repeat(segments_bn, queries, axis=1), segments_bx, packed_bt, block_mask)
        return packed_attention.run_kernel(attention, q_bthe, k_bxke, v_bxke, mask)
    before_bns = jnp.arange(segments_bs.shape[1]) < anchors_bn[:, :, None]
    seen_bns = before_bns & (segments_bs[:, None] == segments_bn[:, :, None])
    sum_dtype = at_least_float32(q_bthe.dtype)
    q_bnikhe = q_bthe.reshape(batch_size, count, -1, kv_heads, heads // kv_heads, head_dim) * head_dim**-0.5
    k_bntke = k_btke.reshape(batch_size, count, -1, kv_heads, head_dim)
    v_bntke = v_btke.reshape(batch_size, count, -1, kv_heads, head_dim)
    past_bkhnis = jnp.einsum("bnikhe,bske->bkhnis", q_bnikhe, context_k_bske, preferred_element_type=sum_dtype)
    past_bkhnis = jnp.where(seen_bns[:, None, None, :, None], past_bkhnis, -jnp.inf)
    inner_bkhnit = jnp.einsum("bnikhe,bntke->bkhnit", q_bnikhe, k_bntke, preferred_element_type=sum_dtype)
    peak = jax.lax.stop_gradient(jnp.maximum(past_bkhnis.max(-1), inner_bkhnit.max(-1)))[..., None]
    past_bkhnis, inner_bkhnit = jnp.exp(past_bkhnis - peak), jnp.exp(inner_bkhnit - peak)
    total_bnikh = jnp.moveaxis(past_bkhnis.sum(-1) + inner_bkhnit.sum(-1), (1, 2), (3, 4))
    dtype = q_bthe.dtype
    mixed = jnp.einsum("bkhnis,bske->bnikhe", past_bkhnis.astype(dtype), context_v_bske, preferred_element_type=sum_dtype)
    mixed += jnp.einsum("bkhnit,bntke->bnikhe", inner_bkhnit.astype(dtype), v_bntke, preferred_element_type=sum_dtype)
    return (mixed / total_bnikh[..., None]).astype(dtype).reshape(batch_size, slots, heads, head_dim)
