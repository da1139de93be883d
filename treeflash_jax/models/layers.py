"""The pieces of a decoder layer, used by verifier and drafter.

Shape suffixes: b batch, t tokens, d model, h query heads, k key/value heads, e head dim, z heads flattened, f ffn, x gate
and up, p width of a layer's own input.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import programs
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.models import experts
from treeflash_jax.models.backend.rotation import rotate
from treeflash_jax.models.config import ModelConfig, Rope
from treeflash_jax.models.quantized import product
from treeflash_jax.models.quantized_weight import can_join

GATE_UP = ("gate", "up")  # weights that `merge_gate_up` joins
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=True)}


def layer_specs(
    config: ModelConfig, mixer: dict[str, Any] | None = None, is_sparse: bool = False, is_merged: bool = False
) -> dict[str, Any]:
    """Returns the specs of one decoder layer, dense or with experts. Linear maps are stored as on disk, [out, in].

    Args:
      mixer: specs of the part that mixes positions (`LayerKind.specs`); None: specs of attention.
      is_merged: whether gate and up are one array (`merge_gate_up`).
    """
    d, f = config.hidden_size, config.intermediate_size
    specs = attention_specs(config) if mixer is None else mixer
    specs = specs | {name: norm_spec(config, d) for name in ("attention_norm", "mlp_norm")} | optional_specs(config)
    if is_sparse:
        specs |= experts.specs(config) | experts.shared_specs(config)
    if is_sparse and not config.dense_beside_experts:
        return specs
    specs["down"] = Spec((d, f), ("embed", "ffn"), inputs=(1,), outputs=(0,))
    if is_merged:
        return specs | {"gate_up": Spec((2, f, d), (None, "ffn", "embed"), inputs=(2,), outputs=(0, 1))}
    return specs | {name: Spec((f, d), ("ffn", "embed"), inputs=(1,), outputs=(0,)) for name in GATE_UP}


def optional_specs(config: ModelConfig) -> dict[str, Spec]:
    """Returns the specs of a layer's norms after its two parts, and of `add_input_and_scale`."""
    d, p = config.hidden_size, config.layer_input_size
    specs: dict[str, Spec] = {}
    if config.post_norms:
        specs |= {name: norm_spec(config, d) for name in ("attention_post_norm", "mlp_post_norm")}
    if p:
        specs["input_gate"] = Spec((p, d), (None, "embed"), inputs=(1,), outputs=(0,))
        specs["input_out"] = Spec((d, p), ("embed", None), inputs=(1,), outputs=(0,))
        specs["input_norm"] = norm_spec(config, d)
    if config.layer_scalars:
        specs["scalar"] = Spec((1,), (None,), "ones")
    return specs


def attention_specs(config: ModelConfig) -> dict[str, Spec]:
    """Returns the specs of attention's maps (queries, keys, values, output) and of its norms and biases, if it has any."""
    d, h, k, e = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    size = 2 * e if config.gates_attention else e
    specs = {
        "q": Spec((h, size, d), ("heads", None, "embed"), inputs=(2,), outputs=(0, 1)),
        "k": Spec((k, e, d), ("kv_heads", None, "embed"), inputs=(2,), outputs=(0, 1)),
        "v": Spec((k, e, d), ("kv_heads", None, "embed"), inputs=(2,), outputs=(0, 1)),
        "o": Spec((d, h, e), ("embed", "heads", None), inputs=(1, 2), outputs=(0,)),
    }
    if config.keys_are_values:
        del specs["v"]
    if config.qk_norm:
        specs |= {"q_norm": norm_spec(config, e), "k_norm": norm_spec(config, e)}
    if config.qkv_bias:
        specs["q_bias"] = Spec((h, size), ("heads", None), "zeros")
        specs |= {name: Spec((k, e), ("kv_heads", None), "zeros") for name in ("k_bias", "v_bias")}
    if config.o_bias:
        specs["o_bias"] = Spec((d,), (None,), "zeros")
    if config.attention_sinks:
        specs["sinks"] = Spec((h,), ("heads",), "zeros")
    return specs


def norm_spec(config: ModelConfig, *shape: int) -> Spec:
    """Returns the spec of the scale of `norm`."""
    return Spec(shape, (None,) * len(shape), "zeros" if config.offset_norms else "ones")


def merge_gate_up(params: Params) -> Params:
    """Joins gate and up of a layer into one array. Returns them unchanged if they cannot be joined."""
    return _stack_gate_up(params) if can_join(*params.values()) else params


@programs.jit
def _stack_gate_up(params: Params) -> Params:
    return {"gate_up": jax.tree.map(lambda *maps_fd: jnp.stack(maps_fd), params["gate"], params["up"])}


def norm(config: ModelConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `rms_norm`. Multiplies before rounding if the model has wide norms or stores scale - 1."""
    if not (config.offset_norms or config.wide_norms):
        return rms_norm(x, scale, config.rms_norm_eps)
    wide = scale.astype(at_least_float32(scale.dtype))
    if config.offset_norms:
        wide = 1 + wide
    return rms_norm(x, wide, config.rms_norm_eps).astype(scale.dtype)


def post_norm(params: Params, config: ModelConfig, name: str, added_btd: jax.Array) -> jax.Array:
    """Returns the output of a part of a layer, normed if the layer has a norm for it."""
    return norm(config, added_btd, params[name]) if name in params else added_btd


def unit_norm(x: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x), in the dtype of x."""
    return rms_norm(x, jnp.ones((), x.dtype), eps)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x) * scale over the last axis, in the dtype of the scale. The mean square is float32 at least."""
    wide = x.astype(at_least_float32(x.dtype))
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(scale.dtype) * scale


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Returns (x - mean) / standard deviation * scale + bias over the last axis, rounded like `rms_norm`."""
    wide = x.astype(at_least_float32(x.dtype))
    return rms_norm(wide - jnp.mean(wide, axis=-1, keepdims=True), scale, eps) + bias


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns the radians per position of each rotated pair, [e / 2].

    Sources: RoFormer (arXiv 2104.09864). For `llama3`, the Llama 3.1 model card: pairs with few turns within the original
    context are slowed by `factor`, pairs with many turns are kept, and pairs in between are blended. For `longrope`,
    LongRoPE (arXiv 2402.13753). For `yarn`, YaRN (arXiv 2309.00071), section 3.2. For `proportional`, transformers, gemma4.
    """
    frequencies = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "longrope":
        return frequencies / np.array(rope.divisors)
    if rope.kind == "proportional":
        return np.where(np.arange(0, head_dim, 2) < int(head_dim * rope.fraction), frequencies, 0.0)
    if rope.kind == "yarn":
        kept = 1.0 - _yarn_ramp(rope, head_dim)
    else:
        turns = rope.original_max_positions / (2 * np.pi / frequencies)
        low = rope.low_freq_factor
        kept = np.clip((turns - low) / (rope.high_freq_factor - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)


def _yarn_ramp(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns how far each pair is slowed, [e / 2]: 0 keeps its frequency, 1 divides the frequency by `factor`."""

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
    """Returns cosine and sine of every position, [b, t, 1, e], times the attention factor. All layers share the table.

    The last axis has only the elements that are rotated (`Rope.fraction`). The first halves are for the negative angle,
    since `rotate` subtracts there.
    """
    dtype = jnp.promote_types(jnp.float32, jax.dtypes.canonicalize_dtype(jnp.float64))
    size = head_dim if rope.kind == "proportional" else int(head_dim * rope.fraction)
    frequencies = rope_frequencies(rope, size)
    angles = positions_bt[:, :, None, None].astype(dtype) * np.concatenate([-frequencies, frequencies]).astype(dtype)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def projected(equation: str, x_btd: jax.Array, params: Params, name: str) -> jax.Array:
    """Maps the normed input into heads, with the layer's bias if it has one."""
    out = product(equation, x_btd, params[name])
    bias = params.get(f"{name}_bias")
    return out if bias is None else out + bias.astype(out.dtype)


def queries(params: Params, config: ModelConfig, x_btd: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns rotated queries [b, t, h, e]. QK-norm is applied before the rotation."""
    return rotated_queries(params, config, projected("btd,hed->bthe", x_btd, params, "q"), table)


def rotated_queries(
    params: Params, config: ModelConfig, q_bthe: jax.Array, table: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Returns queries after QK-norm and rotation."""
    if config.qk_norm:
        q_bthe = norm(config, q_bthe, params["q_norm"])
    return rotate(q_bthe, table)


def keys_values(
    params: Params, config: ModelConfig, x_btd: jax.Array, table: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns rotated keys and values, each [b, t, k, e], as caches hold them."""
    raw_btke = projected("btd,ked->btke", x_btd, params, "k")
    k_btke = norm(config, raw_btke, params["k_norm"]) if config.qk_norm else raw_btke
    k_btke = rotate(k_btke, table)
    v_btke = raw_btke if config.keys_are_values else projected("btd,ked->btke", x_btd, params, "v")
    return k_btke, normed_values(config, v_btke)


def normed_values(config: ModelConfig, v_btke: jax.Array) -> jax.Array:
    """Returns values, normed if the model norms them."""
    return unit_norm(v_btke, config.rms_norm_eps) if config.value_norm else v_btke


def flatten_heads(params: Params, mixed_bthe: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns attention output [b, t, z] and the weight [d, z] that maps it back to the residual stream.

    Heads are flattened first. If they were contracted as two axes, XLA's CPU backend would transpose the weight in every
    pass.
    """
    x_btz = mixed_bthe.reshape(*mixed_bthe.shape[:2], -1)
    return x_btz, params["o"].reshape(-1, x_btz.shape[-1])


def project_output(params: Params, mixed_bthe: jax.Array) -> jax.Array:
    """Maps attention output back to the residual stream, [b, t, d], with the layer's bias if it has one."""
    out_btd = product("btz,dz->btd", *flatten_heads(params, mixed_bthe))
    return out_btd + params["o_bias"].astype(out_btd.dtype) if "o_bias" in params else out_btd


def swiglu(params: Params, x_btd: jax.Array, activation: str = "silu") -> jax.Array:
    """Returns down(silu(gate x) * up x); `activation` replaces silu."""
    return product("btf,df->btd", gated(params, x_btd, activation), params["down"])


def gated(params: Params, x_btd: jax.Array, activation: str = "silu") -> jax.Array:
    """Returns silu(gate x) * (up x + up_bias), [b, t, f]; `activation` replaces silu. The bias is optional."""
    if "gate_up" in params:
        gate_btf, up_btf = jnp.moveaxis(product("btd,xfd->btxf", x_btd, params["gate_up"]), 2, 0)
    else:
        gate_btf = product("btd,fd->btf", x_btd, params["gate"])
        up_btf = product("btd,fd->btf", x_btd, params["up"])
    if "up_bias" in params:
        up_btf += params["up_bias"]
    return ACTIVATIONS[activation](gate_btf) * up_btf


def feed_forward(params: Params, config: ModelConfig, x_btd: jax.Array) -> jax.Array:
    """Returns the output of the feed-forward part of a layer, dense or with experts, before its residual addition."""
    normed_btd = norm(config, x_btd, params["mlp_norm"])
    if config.dense_beside_experts:
        added_btd = dense_and_experts(params, config, x_btd, normed_btd)
    else:
        added_btd = dense_or_experts(params, config, normed_btd)
    return post_norm(params, config, "mlp_post_norm", added_btd)


def dense_and_experts(params: Params, config: ModelConfig, x_btd: jax.Array, normed_btd: jax.Array) -> jax.Array:
    """Returns the sum of a dense feed-forward part and of experts, whose norm and router read the residual stream."""
    routed_btd = rms_norm(x_btd, params["router_norm"], config.rms_norm_eps) * config.hidden_size**-0.5
    experts_btd = experts.mixture(params, config, norm(config, x_btd, params["experts_norm"]), routed_btd)
    dense_btd = norm(config, swiglu(params, normed_btd, config.activation), params["dense_post_norm"])
    return dense_btd + norm(config, experts_btd, params["experts_post_norm"])


def dense_or_experts(params: Params, config: ModelConfig, x_btd: jax.Array) -> jax.Array:
    """Returns the feed-forward part of a layer, dense or with experts, for the normed residual stream."""
    if "router" not in params:
        return swiglu(params, x_btd, config.activation)
    y_btd = experts.mixture(params, config, x_btd)
    if not config.shared_expert_size:
        return y_btd
    shared = {name: params[f"shared_{name}"] for name in (*GATE_UP, "down")}
    weight_bt1 = jax.nn.sigmoid(product("btd,xd->btx", x_btd, params["shared_router"]))
    return y_btd + weight_bt1 * swiglu(shared, x_btd)


def add_input_and_scale(params: Params, config: ModelConfig, x_btd: jax.Array, input_btp: jax.Array | None) -> jax.Array:
    """Adds a layer's additional input, then multiplies by the layer's scalar. A layer may have neither."""
    if "input_gate" in params:
        gate_btp = ACTIVATIONS[config.activation](product("btd,pd->btp", x_btd, params["input_gate"]))
        added_btd = product("btp,dp->btd", gate_btp * input_btp, params["input_out"])
        x_btd = x_btd + norm(config, added_btd, params["input_norm"])
    return x_btd * params["scalar"] if "scalar" in params else x_btd
