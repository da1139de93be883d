"""Decoder layers whose norms, rotation, attention and residual additions run in Pallas kernels for Hopper GPUs (Mosaic).

Another form of the layers of `verifier.forward` for attention "mosaic-gpu", in about half as many launches. A kernel that
adds to the residual stream also norms it for what follows, so each layer takes and returns both. FP8 weights with a scale
per block are multiplied in a kernel, too. The kernels were interpreted on CPUs and compiled for an H200, but never ran on
one; no device has them as default.

Shape suffixes: b batch, t new positions, k key/value heads, g query heads of one key/value head, its key and its value,
e head dim, d model, z inner axis of a product.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core import sharding
from treeflash_jax.models import attention_layer, experts, layers
from treeflash_jax.models.attention import over_mesh
from treeflash_jax.models.backend import rotation
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.kv_cache import LayerKV
from treeflash_jax.models.layer_protocol import PassInputs
from treeflash_jax.models.quantized import product, use_kernels

Normed = tuple[jax.Array, jax.Array | None]  # the residual stream, and its norm if a kernel made it


def supports(params: list[dict[str, Any]], config: ModelConfig, prefixes: Any, earlier: Any, attention: str) -> bool:
    """Returns whether a pass runs in kernels: plain attention layers of merged weights, over caches alone."""
    has_more = config.offset_norms or config.gates_attention or config.attention_sinks or config.rope.fraction < 1
    is_plain = {*config.kinds} == {"full_attention"} and not has_more and config.head_dim in (64, 128)
    is_merged = all("qkv" in weights for weights in params)
    return attention == "mosaic-gpu" and is_plain and is_merged and prefixes is not None and earlier is None


def run_layers(
    params: list[dict[str, Any]],
    config: ModelConfig,
    x_btd: jax.Array,
    inputs: PassInputs,
    prefixes: tuple[LayerKV, ...],
    norm_d: jax.Array,
) -> tuple[jax.Array, list[jax.Array], list[Any]]:
    """Runs all layers; returns the final norm, the output of each layer, and its new keys and values.

    Args:
      params: weights of each layer.
      norm_d: scale of the final norm.
    """
    eps = config.rms_norm_eps

    @jax.jit  # traced once for all layers of the same kind; XLA inlines the calls
    def layer(weights, x_btd, normed_btd, next_scale_d, prefix):
        weights = use_kernels(weights)
        if normed_btd is None:
            normed_btd = layers.rms_norm(x_btd, weights["attention_norm"], eps)
        mixed_bthe, new = _attend(weights, config, normed_btd, inputs, prefix)
        x_btd, normed_btd = _add_product(x_btd, *layers.flat_heads(weights, mixed_bthe), weights["mlp_norm"], eps)
        if normed_btd is None:
            normed_btd = layers.rms_norm(x_btd, weights["mlp_norm"], eps)
        if "router" in weights:
            x_btd, normed_btd = x_btd + experts.mixture(weights, config, normed_btd), None
        else:
            gated_btf = layers.gated(weights, normed_btd)
            x_btd, normed_btd = _add_product(x_btd, gated_btf, weights["down"], next_scale_d, eps)
        return sharding.constrain(x_btd, ("batch", None, None)), normed_btd, new

    next_scales = [weights["attention_norm"] for weights in params[1:]] + [norm_d]
    normed_btd, outputs, new = None, [], []
    for index, (weights, prefix, scale_d) in enumerate(zip(params, prefixes, next_scales, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            x_btd, normed_btd, keys_values = layer(weights, x_btd, normed_btd, scale_d, prefix)
        outputs.append(x_btd)
        new.append(keys_values)
    if normed_btd is None:
        normed_btd = layers.rms_norm(x_btd, norm_d, eps)
    return normed_btd, outputs, new


def _attend(
    weights: dict[str, Any], config: ModelConfig, x_btd: jax.Array, inputs: PassInputs, prefix: LayerKV
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Norms and rotates new positions, and attends as `attention.tree_attention` does, in one kernel.

    Returns attention [b, t, h, e], and keys and values [b, t, k, e] for the cache.
    """
    from treeflash_jax.models.backend import attention_mosaic  # slow to import

    qkv_btkge = attention_layer.raw_heads(weights, x_btd)
    heads, batch = ("batch", None, "kv_heads", None, None), ("batch", None, None)
    cos_sin_bte = jnp.concatenate(rotation.per_pair(inputs.prepared[0]), axis=-1)[:, :, 0]
    arrays = qkv_btkge, cos_sin_bte, weights.get("qkv_norm"), inputs.mask_btu
    layouts = (heads, qkv_btkge.shape), (batch, cos_sin_bte.shape), ((), ()), (batch, inputs.mask_btu.shape)
    attend = partial(attention_mosaic.attend_raw, eps=config.rms_norm_eps)
    mixed_btkge, keys_btk1e = over_mesh(attend, arrays, layouts, prefix, inputs.length_b)
    mixed_bthe = mixed_btkge.reshape(*mixed_btkge.shape[:2], -1, mixed_btkge.shape[-1])
    return mixed_bthe, (keys_btk1e[:, :, :, 0], qkv_btkge[:, :, :, -1])


def _add_product(residual_btd: jax.Array, x_btz: jax.Array, weight_dz: Any, scale_d: jax.Array, eps: float) -> Normed:
    """Returns residual + weight x, and its RMS norm if there is a kernel for the arrays, else None."""
    from treeflash_jax.models.backend import add_norm_mosaic  # slow to import

    if add_norm_mosaic.supports(residual_btd, weight_dz, scale_d):
        return add_norm_mosaic.add_product(residual_btd, x_btz, weight_dz, scale_d, eps)
    return residual_btd + product("btz,dz->btd", x_btz, weight_dz), None
