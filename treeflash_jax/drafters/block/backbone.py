"""The DFlash block drafter: one forward pass over [anchor, mask, ..., mask] against the verifier's features.

Its cache holds context rows only: keys and values of fused verifier features at positions 0 .. length - 1, written once.
Block rows see the whole context and each other, and are dropped after the pass. Slot i of the block predicts the token at
position start + i, start being the anchor's.

Shape suffixes: b batch, t rows, j tapped layers x model, d model, q block slots (anchor included).

Source: DFlash (arXiv 2602.06036) section 4; the same backbone carries the TreeFlash head (arXiv 2606.03819).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax import vocab
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.params import Spec
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers import layers
from treeflash_jax.verifiers.attention import tree_attention


@struct.dataclass
class DrafterState:
    """What the drafter remembers between rounds; opaque to everyone else."""

    context: caches.KVCache

    def axes(self) -> DrafterState:
        return DrafterState(context=caches.axes(self.context))

    def grow(self, capacity: int) -> DrafterState:
        return DrafterState(context=caches.grow(self.context, capacity))


def specs(config: DrafterConfig) -> dict[str, Any]:
    """Weights of the backbone. Embedding and vocabulary matrix are the verifier's."""
    d = config.layers.hidden_size
    return {
        "fc": Spec((len(config.target_layer_ids) * d, d), ("embed", None)),
        "hidden_norm": Spec((d,), (None,), "ones"),
        "groups": [[layers.layer_specs(config.layers) for _ in range(size)] for size in config.layers.groups],
        "norm": Spec((d,), (None,), "ones"),
    }


def init(config: DrafterConfig, batch: int, capacity: int, dtype: Any) -> DrafterState:
    """The state before any context, with room for `capacity` positions."""
    return DrafterState(context=caches.allocate(config.layers, batch, capacity, dtype))


def fuse(params: dict[str, Any], config: DrafterConfig, features_btj: jax.Array) -> jax.Array:
    """RMSNorm(fc(features)): the context input of every layer, [b, t, d]."""
    fused_btd = layers.linear("btj,jd->btd", features_btj, params["fc"])
    return layers.rms_norm(fused_btd, params["hidden_norm"], config.layers.rms_norm_eps)


def extend(
    params: dict[str, Any], config: DrafterConfig, state: DrafterState, features_btj: jax.Array, count_b: jax.Array
) -> DrafterState:
    """Adds verifier features of the next committed positions to the context.

    Args:
      params: weights of `specs`.
      config: static.
      state: context so far.
      features_btj: tapped features of consecutive positions, the first following the context.
      count_b: how many of them are real; the rest is padding.
    """
    positions_bt = state.context.length_b[:, None] + jnp.arange(features_btj.shape[1])
    table = layers.rotary_table(config.layers.rope, config.layers.head_dim, positions_bt)
    fused_btd = fuse(params, config, features_btj)
    rows = tuple(
        tuple(layers.keys_values(weights, config.layers, fused_btd, table) for weights in group)
        for group in params["groups"]
    )
    return DrafterState(context=caches.append(state.context, rows, count_b))


def block(
    params: dict[str, Any],
    config: DrafterConfig,
    state: DrafterState,
    embed_vd: jax.Array,
    anchor_b: jax.Array,
    *,
    attention: str = "xla",
) -> jax.Array:
    """The block's hidden states before the final norm, [b, q, d]; slot 0 (the anchor) is not a prediction.

    Args:
      params: weights of `specs`.
      config: static.
      state: context of all positions before the anchor.
      embed_vd: the verifier's embedding table.
      anchor_b: last committed token, at position `length` of the context.
      attention: implementation name.
    """
    batch, size = anchor_b.shape[0], config.block_size
    masks_bq = jnp.full((batch, size - 1), config.mask_token_id, anchor_b.dtype)
    x_bqd = vocab.embed(embed_vd, jnp.concatenate([anchor_b[:, None], masks_bq], axis=1))
    length_b = state.context.length_b
    table = layers.rotary_table(config.layers.rope, config.layers.head_dim, length_b[:, None] + jnp.arange(size))
    everything_bqq = jnp.ones((batch, size, size), bool)
    for group, cached in zip(params["groups"], state.context.groups, strict=True):
        for weights, prefix in zip(group, cached, strict=True):

            def attend(weights, x_bqd, prefix=prefix):
                q_bqhe = layers.queries(weights, config.layers, x_bqd, table)
                new = layers.keys_values(weights, config.layers, x_bqd, table)
                mixed = tree_attention(q_bqhe, *new, everything_bqq, prefix, length_b, implementation=attention)
                return mixed, None

            x_bqd, _ = layers.decoder_layer(weights, x_bqd, attend, config.layers.rms_norm_eps)
    return x_bqd
