"""The network of the DFlash block drafter, shared by drafting and training.

Shape suffixes: b batch, t positions, j tapped layers x model, d model.

Source: DFlash (arXiv 2602.06036) section 4; the same backbone carries the TreeFlash head (arXiv 2606.03819).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Spec
from treeflash_jax.drafters.block.block_config import DrafterConfig
from treeflash_jax.models import kv_cache, layers, quantized


def specs(config: DrafterConfig) -> dict[str, Any]:
    """Weights of the backbone. Embedding and vocabulary matrix are the verifier's."""
    d = config.layers.hidden_size
    return {
        "fc": Spec((len(config.target_layer_ids) * d, d), ("embed", None), inputs=(0,), outputs=(1,)),
        "hidden_norm": Spec((d,), (None,), "ones"),
        "groups": [[layers.layer_specs(config.layers) for _ in range(config.layers.num_layers)]],
        "norm": Spec((d,), (None,), "ones"),
    }


def fuse(params: dict[str, Any], config: DrafterConfig, features_btj: jax.Array) -> jax.Array:
    """Returns RMSNorm(fc(features)), the context input of every layer, [b, t, d]."""
    fused_btd = quantized.product("btj,jd->btd", features_btj, params["fc"])
    return layers.rms_norm(fused_btd, params["hidden_norm"], config.layers.rms_norm_eps)


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
