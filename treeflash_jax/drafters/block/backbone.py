"""The network of the DFlash block drafter, shared by drafting and training.

Shape suffixes: b batch, t positions, j tapped layers x model, d model. `sizes` are those of the layers.

Source: DFlash (arXiv 2602.06036) section 4; the same backbone carries the TreeFlash head (arXiv 2606.03819).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Spec
from treeflash_jax.models import kv_cache, layers, quantized
from treeflash_jax.models.config import ModelConfig


def specs(sizes: ModelConfig, num_taps: int) -> dict[str, Any]:
    """Returns the specs of a backbone that reads `num_taps` layers of the verifier."""
    d = sizes.hidden_size
    return {
        "fc": Spec((num_taps * d, d), ("embed", None), inputs=(0,), outputs=(1,)),
        "hidden_norm": Spec((d,), (None,), "ones"),
        "groups": [[layers.layer_specs(sizes) for _ in range(sizes.num_layers)]],
        "norm": Spec((d,), (None,), "ones"),
    }


def fuse(params: dict[str, Any], sizes: ModelConfig, features_btj: jax.Array) -> jax.Array:
    """Returns RMSNorm(fc(features)), the context input of every layer, [b, t, d]."""
    fused_btd = quantized.product("btj,jd->btd", features_btj, params["fc"])
    return layers.rms_norm(fused_btd, params["hidden_norm"], sizes.rms_norm_eps)


def context_kv(
    params: dict[str, Any], sizes: ModelConfig, features_btj: jax.Array, positions_bt: jax.Array
) -> kv_cache.NewKV:
    """Returns keys and values [b, t, k, e] of the context at these positions, per layer."""
    table = layers.rotary_table(sizes.rope, sizes.head_dim, positions_bt)
    fused_btd = fuse(params, sizes, features_btj)
    return tuple(layers.keys_values(weights, sizes, fused_btd, table) for group in params["groups"] for weights in group)


def through_layers(
    params: dict[str, Any],
    sizes: ModelConfig,
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
    table = layers.rotary_table(sizes.rope, sizes.head_dim, positions_bt)

    @jax.jit  # traced once for all layers; XLA inlines the calls
    def layer(weights, x_btd, seen):
        def mix(weights, x_btd):
            q_bthe = layers.queries(weights, sizes, x_btd, table)
            new = layers.keys_values(weights, sizes, x_btd, table)
            return attend(q_bthe, *new, seen), None

        return sharding.constrain(layers.decoder_layer(weights, x_btd, mix, sizes.rms_norm_eps)[0], ("batch", None, None))

    for weights, seen in zip((weights for group in params["groups"] for weights in group), context, strict=True):
        x_btd = layer(weights, x_btd, seen)
    return x_btd
