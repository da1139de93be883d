"""The network of the DFlash block drafter, shared by drafting and training.

DFlash2's layers also have convolutions over the slots of the block, before and after attention and feed-forward part:

    conv(x)_t = sum over taps a in (0, 1) of (base[side, a] + delta_t[side, a, group]) x_{t - a},   0 before slot 0

The deltas of both sides are computed from the normed input of attention or feed-forward part, one per group of channels.

Shape suffixes: b batch, t positions, j tapped layers x model, d model, y sides (before, after), a taps, g groups of
channels.

Source: DFlash (arXiv 2602.06036) section 4. The TreeFlash head (arXiv 2606.03819) is on the same backbone. DFlash2: NeMo
AutoModel.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.models import decoder, kv_cache, layers, quantized
from treeflash_jax.models.config import ModelConfig

CONVOLVED = ("attention", "mlp")
SIDES, TAPS = 2, 2


def specs(config: ModelConfig, num_taps: int, conv_group: int = 0) -> dict[str, Any]:
    """Returns the specs of a backbone that reads `num_taps` layers of the verifier.

    Args:
      conv_group: number of channels per group of the convolutions; 0: no convolutions.
    """
    d = config.hidden_size
    layer = layers.layer_specs(config)
    if conv_group:
        kernel = Spec((SIDES, TAPS, d // conv_group, d), (None, None, None, "embed"), inputs=(3,), outputs=(0, 1, 2))
        layer |= {f"{name}_conv": Spec((SIDES, TAPS, d), (None, None, None)) for name in CONVOLVED}
        layer |= {f"{name}_conv_delta": kernel for name in CONVOLVED}
    return {
        "fc": Spec((num_taps * d, d), ("embed", None), inputs=(0,), outputs=(1,)),
        "hidden_norm": Spec((d,), (None,), "ones"),
        "groups": [[dict(layer) for _ in range(config.num_layers)]],
        "norm": Spec((d,), (None,), "ones"),
    }


def fuse(params: Params, config: ModelConfig, features_btj: jax.Array) -> jax.Array:
    """Returns RMSNorm(fc(features)), the context input of every layer, [b, t, d]."""
    fused_btd = quantized.product("btj,jd->btd", features_btj, params["fc"])
    return layers.rms_norm(fused_btd, params["hidden_norm"], config.rms_norm_eps)


def context_kv(params: Params, config: ModelConfig, features_btj: jax.Array, positions_bt: jax.Array) -> kv_cache.NewKV:
    """Returns keys and values [b, t, k, e] of the context at these positions, per layer."""
    table = layers.rotary_table(config.rope, config.head_dim, positions_bt)
    fused_btd = fuse(params, config, features_btj)
    return tuple(layers.keys_values(weights, config, fused_btd, table) for weights in decoder.each_layer(params))


def through_layers(
    params: Params,
    config: ModelConfig,
    x_btd: jax.Array,
    positions_bt: jax.Array,
    context: Iterable[Any],
    attend: Callable[..., jax.Array],
) -> jax.Array:
    """Runs block slots through all layers. Returns [b, t, d], before the final norm.

    Args:
      x_btd: embeddings of the slots of one or several blocks.
      context: for each layer, the context that `attend` gets.
      attend: function of queries, keys, values and the layer's context; returns mixed values [b, t, h, e].
    """
    table = layers.rotary_table(config.rope, config.head_dim, positions_bt)

    @jax.jit  # traced once for all equal layers; XLA inlines the calls
    def layer(weights: Params, x_btd: jax.Array, seen: Any):
        def attention(x_btd: jax.Array):
            new = layers.keys_values(weights, config, x_btd, table)
            return layers.project_output(weights, attend(layers.queries(weights, config, x_btd, table), *new, seen))

        for name, run in {"attention": attention, "mlp": partial(layers.swiglu, weights)}.items():
            normed_btd = layers.rms_norm(x_btd, weights[f"{name}_norm"], config.rms_norm_eps)
            x_btd = x_btd + convolved(weights, name, normed_btd, run)
        return sharding.constrain(x_btd, ("batch", None, None))

    for weights, seen in zip(decoder.each_layer(params), context, strict=True):
        x_btd = layer(weights, x_btd, seen)
    return x_btd


def convolved(weights: Params, name: str, x_btd: jax.Array, run: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns conv(run(conv(x))) with the convolutions of attention or feed-forward part; run(x) if a layer has none."""
    if f"{name}_conv" not in weights:
        return run(x_btd)
    delta_btyag = quantized.product("btd,yagd->btyag", x_btd, weights[f"{name}_conv_delta"])
    group = x_btd.shape[-1] // delta_btyag.shape[-1]
    kernel_btyad = weights[f"{name}_conv"] + jnp.repeat(delta_btyag, group, axis=-1)

    def conv(side: int, x_btd: jax.Array) -> jax.Array:
        before_btd = jnp.pad(x_btd, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return kernel_btyad[:, :, side, 0] * x_btd + kernel_btyad[:, :, side, 1] * before_btd

    return conv(1, run(conv(0, x_btd)))
