"""The DFlash block drafter: one forward pass over [anchor, mask, ..., mask] against the verifier's features.

Its cache holds the context only: keys and values of fused verifier features at positions 0 .. length - 1, written once.
Block slots see the whole context and each other, and are dropped after the pass. Slot i of the block predicts the token at
position start + i, where start is the anchor's.

Shape suffixes: b batch, t positions, j tapped layers x model, d model, q block slots (anchor included).

Source: DFlash (arXiv 2602.06036) section 4; the same backbone carries the TreeFlash head (arXiv 2606.03819).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Spec
from treeflash_jax.drafters.block.block_config import DrafterConfig
from treeflash_jax.drafters.protocol import ContextState
from treeflash_jax.models import kv_cache, layers, quantized, vocab
from treeflash_jax.models.attention import tree_attention


def specs(config: DrafterConfig) -> dict[str, Any]:
    """Weights of the backbone. Embedding and vocabulary matrix are the verifier's."""
    d = config.layers.hidden_size
    return {
        "fc": Spec((len(config.target_layer_ids) * d, d), ("embed", None), inputs=(0,), outputs=(1,)),
        "hidden_norm": Spec((d,), (None,), "ones"),
        "groups": [[layers.layer_specs(config.layers) for _ in range(config.layers.num_layers)]],
        "norm": Spec((d,), (None,), "ones"),
    }


def init(config: DrafterConfig, batch: int, capacity: int, dtype: Any) -> ContextState:
    return ContextState(kv_cache.allocate(config.layers, batch, capacity, dtype))


def fuse(params: dict[str, Any], config: DrafterConfig, features_btj: jax.Array) -> jax.Array:
    """Returns RMSNorm(fc(features)), the context input of every layer, [b, t, d]."""
    fused_btd = quantized.product("btj,jd->btd", features_btj, params["fc"])
    return layers.rms_norm(fused_btd, params["hidden_norm"], config.layers.rms_norm_eps)


def extend(
    params: dict[str, Any], config: DrafterConfig, state: ContextState, features_btj: jax.Array, count_b: jax.Array
) -> ContextState:
    """Adds verifier features of the next committed positions to the context; see `Drafter.extend`."""
    positions_bt = state.context.length_b[:, None] + jnp.arange(features_btj.shape[1])
    new = context_kv(params, config, features_btj, positions_bt)
    return ContextState(kv_cache.append(state.context, new, count_b))


def context_kv(
    params: dict[str, Any], config: DrafterConfig, features_btj: jax.Array, positions_bt: jax.Array
) -> kv_cache.NewKV:
    """Returns keys and values [b, t, k, e] of the context at these positions, per layer."""
    table = layers.rotary_table(config.layers.rope, config.layers.head_dim, positions_bt)
    fused_btd = fuse(params, config, features_btj)
    return tuple(
        layers.keys_values(weights, config.layers, fused_btd, table) for group in params["groups"] for weights in group
    )


def through_layers(
    params: dict[str, Any],
    config: DrafterConfig,
    x_btd: jax.Array,
    positions_bt: jax.Array,
    context: Iterable[Any],
    attend: Callable[..., jax.Array],
) -> jax.Array:
    """Runs block slots through all layers, [b, t, d], before the final norm.

    Args:
      x_btd: embeddings of the slots, of one block or of several.
      context: per layer, the context passed to `attend`.
      attend: (queries, keys, values, context of the layer) -> mixed values [b, t, h, e].
    """
    sizes = config.layers
    table = layers.rotary_table(sizes.rope, sizes.head_dim, positions_bt)
    for weights, seen in zip((weights for group in params["groups"] for weights in group), context, strict=True):

        def mix(weights, x_btd, seen=seen):
            q_bthe = layers.queries(weights, sizes, x_btd, table)
            new = layers.keys_values(weights, sizes, x_btd, table)
            return attend(q_bthe, *new, seen), None

        x_btd = sharding.constrain(layers.decoder_layer(weights, x_btd, mix, sizes.rms_norm_eps)[0], ("batch", None, None))
    return x_btd


def block(
    params: dict[str, Any],
    config: DrafterConfig,
    state: ContextState,
    embed_vd: jax.Array,
    anchor_b: jax.Array,
    *,
    attention: str = "xla",
) -> jax.Array:
    """Returns the block's hidden states before the final norm, [b, q, d]; slot 0 (the anchor) is not a prediction.

    Args:
      state: context of all positions before the anchor's.
      embed_vd: the verifier's embedding table.
    """
    batch, size = anchor_b.shape[0], config.block_size
    masks_bq = jnp.full((batch, size - 1), config.mask_token_id, anchor_b.dtype)
    x_bqd = vocab.embed(embed_vd, jnp.concatenate([anchor_b[:, None], masks_bq], axis=1))
    length_b = state.context.length_b
    everything_bqq = jnp.ones((batch, size, size), bool)

    def attend(q_bqhe, k_bqke, v_bqke, prefix):
        return tree_attention(q_bqhe, k_bqke, v_bqke, everything_bqq, prefix, length_b, implementation=attention)

    positions_bq = length_b[:, None] + jnp.arange(size)
    return through_layers(params, config, x_bqd, positions_bq, state.context.layers, attend)
