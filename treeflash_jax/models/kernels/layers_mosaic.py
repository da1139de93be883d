"""Decoder layers whose norms, rotation, attention and residual additions run in Pallas kernels for Hopper GPUs (Mosaic).

They are another variant of the layers in `decoder.forward`, with about half as many launches. A kernel that adds to the
residual stream also norms the sum for the next part, so each layer takes and returns both. The kernels were compiled for an
H200.

Shape suffixes: b batch, t new positions, k key/value heads, g heads of one key/value head: its queries, key and value,
e head dim, d model, z inner axis of a product.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Params
from treeflash_jax.models import attention_layer, experts, kernels, layers
from treeflash_jax.models.attention import over_mesh
from treeflash_jax.models.backend import rotation
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.kernels import attention_mosaic
from treeflash_jax.models.kv_cache import LayerKV
from treeflash_jax.models.layer_protocol import PassInputs
from treeflash_jax.models.quantized import product

TAKES = "attention 'mosaic-gpu', its caches, and merged weights of layers like those of Qwen3 and Llama"
# Fields that these layers compute or that concern other parts of a model. All others must have their defaults.
SUPPORTED = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps",
    "rope", "max_positions", "tie_embeddings", "qk_norm", "qkv_bias", "model_type", "eos_token_ids", "num_experts",
    "experts_per_token", "expert_size", "normalize_experts", "expert_biases", "swiglu_limit", "dense_layers",
    "embedding_factor", "logit_cap", "window", "layer_types",
})  # fmt: skip
Normed = tuple[jax.Array, jax.Array | None]  # the residual stream, and its norm if a kernel made it


def supports(
    params, config: ModelConfig, norm_d, x_btd, inputs: dict[str, PassInputs], prefixes, earlier, inputs_lbtp
) -> bool:
    """Returns whether a pass runs in kernels. It must have plain attention layers with merged weights, and only caches."""
    is_plain = config == ModelConfig(**{name: getattr(config, name) for name in SUPPORTED}) and config.rope.fraction == 1
    if not is_plain or {*config.kinds} != {"full_attention"} or prefixes is None or earlier is not None:
        return False
    is_merged = all("qkv" in weights for weights in params)
    return is_merged and inputs["full_attention"].attention == "mosaic-gpu" and attention_mosaic.supports_cache(prefixes[0])


def run(
    params: list[Params],
    config: ModelConfig,
    norm_d: jax.Array,
    x_btd: jax.Array,
    inputs: dict[str, PassInputs],
    prefixes: tuple[LayerKV, ...],
    earlier: None,
    inputs_lbtp: Any,
) -> tuple[jax.Array, list[jax.Array], list[Any]]:
    """Runs all layers, like `decoder.run_layers`."""
    eps, [shared] = config.rms_norm_eps, inputs.values()

    @jax.jit  # traced once for all layers of the same kind; XLA inlines the calls
    def layer(weights, x_btd, normed_btd, next_scale_d, prefix):
        if normed_btd is None:
            normed_btd = layers.rms_norm(x_btd, weights["attention_norm"], eps)
        mixed_bthe, new = _attend(weights, config, normed_btd, shared, prefix)
        x_btd, normed_btd = add_product(x_btd, *layers.flatten_heads(weights, mixed_bthe), weights["mlp_norm"], eps)
        if normed_btd is None:
            normed_btd = layers.rms_norm(x_btd, weights["mlp_norm"], eps)
        if "router" in weights:
            x_btd, normed_btd = x_btd + experts.mixture(weights, config, normed_btd), None
        else:
            gated_btf = layers.gated(weights, normed_btd)
            x_btd, normed_btd = add_product(x_btd, gated_btf, weights["down"], next_scale_d, eps)
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
    weights: Params, config: ModelConfig, x_btd: jax.Array, inputs: PassInputs, prefix: LayerKV
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Norms and rotates new positions, and attends like `attention.tree_attention`, in one kernel.

    Returns attention [b, t, h, e], and keys and values [b, t, k, e] for the cache.
    """
    qkv_btkge = attention_layer.raw_heads(weights, x_btd)
    heads, batch = ("batch", None, "kv_heads", None, None), ("batch", None, None)
    cos_sin_bte = jnp.concatenate(rotation.per_pair(inputs.precomputed[0]), axis=-1)[:, :, 0]
    arrays = qkv_btkge, cos_sin_bte, weights.get("qkv_norm"), inputs.mask_btu
    layouts = (heads, qkv_btkge.shape), (batch, cos_sin_bte.shape), ((), ()), (batch, inputs.mask_btu.shape)
    attend = partial(attention_mosaic.attend_raw, eps=config.rms_norm_eps)
    mixed_btkge, keys_btk1e = over_mesh(attend, arrays, layouts, prefix, inputs.length_b)
    mixed_bthe = mixed_btkge.reshape(*mixed_btkge.shape[:2], -1, mixed_btkge.shape[-1])
    return mixed_bthe, (keys_btk1e[:, :, :, 0], qkv_btkge[:, :, :, -1])


def add_product(residual_btd: jax.Array, x_btz: jax.Array, weight_dz: Any, scale_d: jax.Array, eps: float) -> Normed:
    """Returns residual + weight x and its RMS norm. Without a kernel for these arrays, the norm is None."""
    operands = residual_btd, x_btz, weight_dz, scale_d, eps
    if add := kernels.find("norm and add", *operands):
        return add(*operands)
    return residual_btd + product("btz,dz->btd", x_btz, weight_dz), None
