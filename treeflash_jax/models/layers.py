"""The pieces of a decoder layer, shared by verifier and drafter.

Shape suffixes: b batch, t tokens, d model, h query heads, k key/value heads, g query heads of one key/value head (in
merged weights also its key and value), e head dim, f ffn, x gate and up.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import programs
from treeflash_jax.core.parameters import Spec
from treeflash_jax.models import experts
from treeflash_jax.models.backend.rotation import rotate
from treeflash_jax.models.config import ModelConfig, Rope
from treeflash_jax.models.quantized import product

Params = dict[str, Any]
# Weights that `merge` joins: maps of the same input, and the norms and biases of their results.
MERGED = ("q", "k", "v", "gate", "up", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias")
Attend = Callable[[Params, jax.Array], tuple[jax.Array, Any]]


def layer_specs(config: ModelConfig, is_sparse: bool = False, is_merged: bool = False) -> Params:
    """Returns the specs of one decoder layer, dense or with experts. Linear maps are stored as on disk, [out, in].

    Args:
      is_merged: whether the layer is one after `merge`.
    """
    d, h, k, e, f = (
        config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size
    )  # fmt: skip
    specs = {
        "attention_norm": Spec((d,), (None,), "ones"),
        "q": Spec((h, e, d), ("heads", None, "embed"), inputs=(2,), outputs=(0, 1)),
        "k": Spec((k, e, d), ("kv_heads", None, "embed"), inputs=(2,), outputs=(0, 1)),
        "v": Spec((k, e, d), ("kv_heads", None, "embed"), inputs=(2,), outputs=(0, 1)),
        "o": Spec((d, h, e), ("embed", "heads", None), inputs=(1, 2), outputs=(0,)),
        "mlp_norm": Spec((d,), (None,), "ones"),
    }
    if is_sparse:
        specs |= experts.specs(config)
    else:
        specs |= {
            "gate": Spec((f, d), ("ffn", "embed"), inputs=(1,), outputs=(0,)),
            "up": Spec((f, d), ("ffn", "embed"), inputs=(1,), outputs=(0,)),
            "down": Spec((d, f), ("embed", "ffn"), inputs=(1,), outputs=(0,)),
        }
    if config.qk_norm:
        specs |= {"q_norm": Spec((e,), (None,), "ones"), "k_norm": Spec((e,), (None,), "ones")}
    if config.qkv_bias:
        specs["q_bias"] = Spec((h, e), ("heads", None), "zeros")
        specs |= {name: Spec((k, e), ("kv_heads", None), "zeros") for name in ("k_bias", "v_bias")}
    if is_merged:
        g, specs = h // k, {name: spec for name, spec in specs.items() if name not in MERGED}
        specs["qkv"] = Spec((k, g + 2, e, d), ("kv_heads", None, None, "embed"), inputs=(3,), outputs=(0, 1, 2))
        if not is_sparse:
            specs["gate_up"] = Spec((2, f, d), (None, "ffn", "embed"), inputs=(2,), outputs=(0, 1))
        if config.qk_norm:
            specs["qkv_norm"] = Spec((g + 2, e), (None, None), "ones")
        if config.qkv_bias:
            specs["qkv_bias"] = Spec((k, g + 2, e), ("kv_heads", None, None), "zeros")
    return specs


@programs.jit
def merge(params: Params) -> Params:
    """Returns one array for each group of weights in MERGED, of those of one layer.

    In "qkv" every key/value head has its query heads, its key and its value, so that a mesh shards all three alike.
    """

    def by_kv_head(q_he: jax.Array, k_ke: jax.Array, v_ke: jax.Array) -> jax.Array:
        q_kge = q_he.reshape(k_ke.shape[0], -1, *k_ke.shape[1:])
        return jnp.concatenate([q_kge, k_ke[:, None], v_ke[:, None]], axis=1)

    merged = {"qkv": jax.tree.map(by_kv_head, params["q"], params["k"], params["v"])}
    if "gate" in params:
        merged["gate_up"] = jax.tree.map(lambda *maps_fd: jnp.stack(maps_fd), params["gate"], params["up"])
    if "q_norm" in params:
        q_norms = [params["q_norm"]] * (merged["qkv"].shape[1] - 2)
        merged["qkv_norm"] = jnp.stack([*q_norms, params["k_norm"], jnp.ones_like(params["k_norm"])])
    if "q_bias" in params:
        merged["qkv_bias"] = by_kv_head(params["q_bias"], params["k_bias"], params["v_bias"])
    return merged


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x) * scale over the last axis in the dtype of the scale, from a mean square in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(scale.dtype) * scale


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Returns (x - mean) / standard deviation * scale + bias over the last axis, rounded like `rms_norm`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return rms_norm(wide - jnp.mean(wide, axis=-1, keepdims=True), scale, eps) + bias


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns the radians per position of each rotated pair, [e / 2].

    Source: RoFormer (arXiv 2104.09864); for `llama3`, the Llama 3.1 model card: pairs with few turns within the original
    context are slowed by `factor`, those with many kept, those between blended; for `longrope`, LongRoPE (arXiv
    2402.13753); for `yarn`, YaRN (arXiv 2309.00071) section 3.2.
    """
    frequencies = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "longrope":
        return frequencies / np.array(rope.divisors)
    if rope.kind == "yarn":
        kept = 1.0 - _yarn_ramp(rope, head_dim)
    else:
        turns, low = rope.original_max_positions / (2 * np.pi / frequencies), rope.low_freq_factor
        kept = np.clip((turns - low) / (rope.high_freq_factor - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)


def _yarn_ramp(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns how much each pair is slowed, [e / 2]: 0 keeps its frequency, 1 divides it by `factor`."""

    def pair(turns: float) -> float:
        """Returns the pair, as a real number, that makes this number of turns within the original context."""
        return head_dim * math.log(rope.original_max_positions / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    return np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)


def rotary_table(rope: Rope, head_dim: int, positions_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of every position, [b, t, 1, e], times the attention factor; one table for all layers.

    The first halves are those of the negative angle, since `rotate` subtracts there.
    """
    dtype = jnp.promote_types(jnp.float32, jax.dtypes.canonicalize_dtype(jnp.float64))
    frequencies = rope_frequencies(rope, head_dim)
    angles = positions_bt[:, :, None, None].astype(dtype) * np.concatenate([-frequencies, frequencies]).astype(dtype)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def _projected(equation: str, x_btd: jax.Array, params: Params, name: str) -> jax.Array:
    """Maps the normed input into heads, with the layer's bias if it has one."""
    out = product(equation, x_btd, params[name])
    bias = params.get(f"{name}_bias")
    return out if bias is None else out + bias.astype(out.dtype)


def queries_keys_values(
    params: Params, config: ModelConfig, x_btd: jax.Array, table: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `queries` and `keys_values`, of merged weights or others."""
    if "qkv" not in params:
        return queries(params, config, x_btd, table), *keys_values(params, config, x_btd, table)
    x_btkge = raw_heads(params, x_btd)
    # Values are normed and rotated too, but not read: a GPU would launch kernels of their own for a slice without them.
    turned_btkge = rms_norm(x_btkge, params["qkv_norm"], config.rms_norm_eps) if config.qk_norm else x_btkge
    turned_btkge = rotate(turned_btkge.reshape(*x_btd.shape[:2], -1, config.head_dim), table).reshape(x_btkge.shape)
    q_bthe = turned_btkge[..., :-2, :].reshape(*x_btd.shape[:2], config.num_heads, config.head_dim)
    return q_bthe, turned_btkge[..., -2, :], x_btkge[..., -1, :]


def raw_heads(params: Params, x_btd: jax.Array) -> jax.Array:
    """Returns the query heads, the key and the value of each key/value head [b, t, k, g, e], of merged weights."""
    return _projected("btd,kged->btkge", x_btd, params, "qkv")


def queries(params: Params, config: ModelConfig, x_btd: jax.Array, table: Any) -> jax.Array:
    """Returns rotated queries [b, t, h, e]; QK-norm comes before the rotation."""
    q_bthe = _projected("btd,hed->bthe", x_btd, params, "q")
    if config.qk_norm:
        q_bthe = rms_norm(q_bthe, params["q_norm"], config.rms_norm_eps)
    return rotate(q_bthe, table)


def keys_values(params: Params, config: ModelConfig, x_btd: jax.Array, table: Any) -> tuple[jax.Array, jax.Array]:
    """Returns rotated keys and values, each [b, t, k, e], as caches hold them."""
    k_btke = _projected("btd,ked->btke", x_btd, params, "k")
    if config.qk_norm:
        k_btke = rms_norm(k_btke, params["k_norm"], config.rms_norm_eps)
    return rotate(k_btke, table), _projected("btd,ked->btke", x_btd, params, "v")


def flat_heads(params: Params, mixed_bthe: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns attention output [b, t, z] and the weight [d, z] that maps it back to the residual stream.

    Heads are flattened first: contracted as two axes, XLA's CPU backend would transpose the weight in every pass.
    """
    x_btz = mixed_bthe.reshape(*mixed_bthe.shape[:2], -1)
    return x_btz, params["o"].reshape(-1, x_btz.shape[-1])


def merge_heads(params: Params, mixed_bthe: jax.Array) -> jax.Array:
    """Maps attention output back to the residual stream, [b, t, d]."""
    return product("btz,dz->btd", *flat_heads(params, mixed_bthe))


def swiglu(params: Params, x_btd: jax.Array, shift_btf: jax.Array | None = None) -> jax.Array:
    """Returns down(silu(gate x) * (up x + shift)); without a shift, a plain SwiGLU."""
    return product("btf,df->btd", gated(params, x_btd, shift_btf), params["down"])


def gated(params: Params, x_btd: jax.Array, shift_btf: jax.Array | None = None) -> jax.Array:
    """Returns silu(gate x) * (up x + shift), [b, t, f]."""
    if "gate_up" in params:
        gate_btf, up_btf = jnp.moveaxis(product("btd,xfd->btxf", x_btd, params["gate_up"]), 2, 0)
    else:
        gate_btf, up_btf = (product("btd,fd->btf", x_btd, params[name]) for name in ("gate", "up"))
    up_btf = up_btf if shift_btf is None else up_btf + shift_btf.astype(up_btf.dtype)
    return jax.nn.silu(gate_btf) * up_btf


def decoder_layer(
    params: Params,
    config: ModelConfig,
    x_btd: jax.Array,
    normed_btd: jax.Array | None,
    next_scale_d: jax.Array,
    attend: Attend,
    shift_btf: jax.Array | None = None,
    *,
    fuses: bool = False,
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Applies one pre-norm layer: x + attention(norm x), then x + mlp(norm x).

    Returns it, its norm for what follows if a kernel made it (else None), and the extra results.

    Args:
      normed_btd: the normed input; None: it is normed here.
      next_scale_d: scale of the norm that follows.
      attend: maps the layer's weights and the normed input to attention output [b, t, h, e] and extra results (new keys
        and values).
      shift_btf: shift of the feed-forward part (`swiglu`).
      fuses: whether a kernel adds to the residual stream and norms it, if there is one for the arrays.
    """
    eps = config.rms_norm_eps
    if normed_btd is None:
        normed_btd = rms_norm(x_btd, params["attention_norm"], eps)
    mixed_bthe, extra = attend(params, normed_btd)
    x_btd, normed_btd = add_product(x_btd, *flat_heads(params, mixed_bthe), params["mlp_norm"], eps, fuses)
    if normed_btd is None:
        normed_btd = rms_norm(x_btd, params["mlp_norm"], eps)
    if "router" in params:
        return x_btd + experts.mixture(params, config, normed_btd), None, extra
    gated_btf = gated(params, normed_btd, shift_btf)
    return *add_product(x_btd, gated_btf, params["down"], next_scale_d, eps, fuses), extra


def add_product(
    residual_btd: jax.Array, x_btz: jax.Array, weight_dz: Any, scale_d: jax.Array, eps: float, fuses: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns residual + weight x, and its RMS norm if a kernel made both, else None."""
    if fuses:
        from treeflash_jax.models.backend import add_norm_mosaic  # slow to import

        if add_norm_mosaic.supports(residual_btd, weight_dz, scale_d):
            return add_norm_mosaic.add_product(residual_btd, x_btz, weight_dz, scale_d, eps)
    return residual_btd + product("btz,dz->btd", x_btz, weight_dz), None
