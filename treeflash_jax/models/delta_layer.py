"""The layer kind of gated delta rules (Gated DeltaNet), which keeps a state of fixed size instead of keys and values.

Source: Gated Delta Networks (arXiv 2412.06464); transformers, qwen3_5 and qwen3_next.

Shape suffixes: b batch, t new positions, d model, j inputs of the convolution, c its channels, h value heads, g key heads,
e key dim, f value dim, z = h f.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from treeflash_jax.core import programs
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.models import delta_rule, kernels, layers
from treeflash_jax.models.backend import block_scales
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.delta_rule import DeltaState, NewDelta
from treeflash_jax.models.layer_protocol import LayerKind, LayerState, PassInputs
from treeflash_jax.models.packed_attention import PackedMask
from treeflash_jax.models.quantized import product
from treeflash_jax.models.quantized_weight import can_join

MAPS = ("delta_qkv", "delta_z", "delta_b", "delta_a")  # of the layer's input
_AXES = DeltaState(("batch", None, "heads"), ("batch", "heads", None, None))


@struct.dataclass
class DeltaLayerState(LayerState):
    """The state after all committed positions, and a copy from the end of the last chunk of a prompt.

    A recurrent state cannot be cut to any length, so a session continues from one of these two.

    Attributes:
      at_prompt: the copy; None if the state cannot be cut.
      prompt_b: number of positions before the copy.
    """

    now: DeltaState
    at_prompt: DeltaState | None
    prompt_b: jax.Array

    def commit(self, new: tuple[NewDelta, ...], length_b: jax.Array, count_b: jax.Array, path_bp: jax.Array | None) -> Self:
        now = delta_rule.commit(self.now, new[0], count_b, path_bp)
        if path_bp is not None or self.at_prompt is None:  # drafted positions, or no session
            return self.replace(now=now)
        return DeltaLayerState(now, now, (length_b + count_b).astype(self.prompt_b.dtype))

    def axes(self) -> Self:
        return DeltaLayerState(_AXES, None if self.at_prompt is None else _AXES, ("batch",))

    def grow(self, capacity: int) -> Self:
        return self

    def longest_cut(self, length_b: jax.Array, kept_b: jax.Array) -> jax.Array:
        return jnp.where(kept_b >= length_b, length_b, jnp.where(kept_b >= self.prompt_b, self.prompt_b, 0))

    def cut(self, kept_b: jax.Array) -> Self:
        def choose(now: jax.Array, at_prompt: jax.Array) -> jax.Array:
            kept = kept_b.reshape(-1, *(1,) * (now.ndim - 1))
            at_prompt = jnp.where(kept == self.prompt_b.reshape(kept.shape), at_prompt, now)
            return jnp.where(kept > 0, at_prompt, 0)

        now = jax.tree.map(choose, self.now, self.at_prompt)
        return DeltaLayerState(now, now, kept_b.astype(self.prompt_b.dtype))


class DeltaLayer(LayerKind):
    """A gated delta rule behind a short convolution, with a gated norm of its output."""

    merged = (*MAPS, "conv")

    def specs(self, config: ModelConfig, is_merged: bool = False) -> dict[str, Spec]:
        d, sizes = config.hidden_size, config.delta
        h = sizes.value_heads
        z = sizes.value_heads * sizes.value_dim
        widths = dict(zip(MAPS, (sizes.channels, z, h, h), strict=True))
        if is_merged:
            widths = {"delta_in": sum(widths.values())}
        maps = {name: Spec((size, d), ("heads", "embed"), inputs=(1,), outputs=(0,)) for name, size in widths.items()}
        return maps | {
            "conv": Spec((sizes.channels, sizes.conv_width), ("heads", None)),
            "log_rate": Spec((h,), ("heads",), "zeros", dtype=jnp.float32),
            "time_bias": Spec((h,), ("heads",), "ones", dtype=jnp.float32),
            "gated_norm": Spec((sizes.value_dim,), (None,), "ones"),
            "delta_o": Spec((d, z), ("embed", "heads"), inputs=(1,), outputs=(0,)),
        }

    def merge(self, params: Params, config: ModelConfig) -> Params:
        """Joins quantised maps only if no two outputs share a scale: a block of outputs may belong to several devices."""
        maps = [params[name] for name in MAPS]
        has_row_scales = all(part.shape[0] == x.shape[0] for x in maps for part in jax.tree.leaves(x))
        return merge(params, config=config) if has_row_scales and can_join(*maps) else params

    def init(
        self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike, num_layers: int = 1, *, can_cut: bool
    ) -> DeltaLayerState:
        now = delta_rule.init(config.delta, batch, dtype)
        at_prompt = delta_rule.init(config.delta, batch, dtype)
        return DeltaLayerState(now, at_prompt if can_cut else None, jnp.zeros(batch, jnp.int32))

    def mix(
        self, params: Params, config: ModelConfig, x_btd: jax.Array, inputs: PassInputs, state: Any, earlier: Any
    ) -> tuple[jax.Array, Any]:
        """Raises ValueError for `earlier`: later positions can only continue from committed ones, which a state holds."""
        if earlier is not None:
            raise ValueError("got earlier positions in a layer with a recurrent state, expected all of them committed")
        mask_btu, batch = inputs.mask_btu, x_btd.shape[0]
        if isinstance(mask_btu, PackedMask):
            mask_btu = mask_btu.dense()
        before = delta_rule.init(config.delta, batch, x_btd.dtype) if state is None else state.now
        length_b = jnp.zeros(batch, jnp.int32) if inputs.length_b is None else inputs.length_b
        qkv_btc, z_bthf, beta_bth, decay_bth = _project(params, config, x_btd)
        if x_btd.shape[1] > 1:  # otherwise XLA:GPU keeps float32 partial sums until the commit
            qkv_btc = jax.lax.optimization_barrier(qkv_btc)
        conv_cj = params["conv"] if "delta_in" in params else by_shard(config, [params["conv"]], 0)
        convolved_btc = delta_rule.convolve(qkv_btc, before.window_bjc, conv_cj, inputs.positions_bt, mask_btu, length_b)
        q_btge, k_btge, v_bthf = _heads(config, jax.nn.silu(convolved_btc))
        arrays = q_btge * config.delta.key_dim**-0.5, k_btge, v_bthf, decay_bth, beta_bth, before.state_bgez, mask_btu
        attend = kernels.find("delta rule", *arrays) or partial(delta_rule.attend, is_tree=inputs.is_tree)
        out_bthf, updates_bthf = attend(*arrays)
        wide = out_bthf.dtype
        normed_bthf = layers.rms_norm(out_bthf, params["gated_norm"].astype(wide), config.rms_norm_eps)
        gated_bthf = (normed_bthf * jax.nn.silu(z_bthf.astype(wide))).astype(x_btd.dtype)
        y_btd = product("btz,dz->btd", gated_bthf.reshape(*x_btd.shape[:2], -1), params["delta_o"])
        return y_btd, NewDelta(qkv_btc, k_btge, updates_bthf, decay_bth)


@partial(programs.jit, static_argnames="config")
def merge(params: Params, config: ModelConfig) -> Params:
    """Joins the four maps of the input into an array. Orders its channels, and the convolution's, as `by_shard` does."""
    maps = [params[name] for name in MAPS]
    joined = jax.tree.map(lambda *maps_cd: by_shard(config, maps_cd, 0), *maps)
    return {"delta_in": joined, "conv": by_shard(config, [params["conv"]], 0)}


def by_shard(config: ModelConfig, parts: Sequence[jax.Array], axis: int) -> jax.Array:
    """Joins arrays along their axis of channels: all channels of the first device's heads, then those of the next device.

    Each device of the ambient mesh's model axis then has the queries, keys and values of the same heads, and a pass moves
    none of them to another device.

    Args:
      parts: an array with channels of all queries, all keys and all values; arrays with channels of all value heads.
    """
    keys = config.delta.key_heads * config.delta.key_dim
    parts = [*jnp.split(parts[0], [keys, 2 * keys], axis), *parts[1:]]
    before, after = parts[0].shape[:axis], parts[0].shape[axis + 1 :]
    parts = [part.reshape(*before, _count_shards(config), -1, *after) for part in parts]
    return jnp.concatenate(parts, axis + 1).reshape(*before, -1, *after)


def _split(config: ModelConfig, x_btc: jax.Array, *sizes: int) -> list[jax.Array]:
    """Returns the parts of a result of `by_shard`. `sizes` are the numbers of channels of all parts but the last."""
    place, shards = x_btc.shape[:2], _count_shards(config)
    ends = [end // shards for end in accumulate(sizes)]
    if shards > 1:  # an additional axis of size 1 would take more operations
        x_btc = x_btc.reshape(*place, shards, -1)
    return [part.reshape(*place, -1) for part in jnp.split(x_btc, ends, axis=-1)]


def _count_shards(config: ModelConfig) -> int:
    """Returns the size of the ambient mesh's model axis; 1 if it does not divide the key heads."""
    ways = block_scales.model_ways()
    return ways if config.delta.key_heads % ways == 0 else 1


def _project(params: Params, config: ModelConfig, x_btd: jax.Array) -> tuple[jax.Array, ...]:
    """Returns inputs of the convolution [b, t, c], gates of the norm [b, t, h, f], strengths and log decays [b, t, h]."""
    sizes = config.delta
    z = sizes.value_heads * sizes.value_dim
    if "delta_in" in params:
        parts = _split(config, product("btd,cd->btc", x_btd, params["delta_in"]), sizes.channels, z, sizes.value_heads)
    else:
        parts = [product("btd,cd->btc", x_btd, params[name]) for name in MAPS]
        parts[0] = by_shard(config, parts[:1], 2)
    qkv_btc, z_btz, b_bth, a_bth = parts
    wide = at_least_float32(x_btd.dtype)
    rate_h = params["log_rate"].astype(wide)
    bias_h = params["time_bias"].astype(wide)
    decay_bth = -jnp.exp(rate_h) * jax.nn.softplus(a_bth.astype(wide) + bias_h)
    z_bthf = z_btz.reshape(*z_btz.shape[:2], sizes.value_heads, sizes.value_dim)
    return qkv_btc, z_bthf, jax.nn.sigmoid(b_bth.astype(wide)), decay_bth


def _heads(config: ModelConfig, qkv_btc: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries and keys of length 1, [b, t, g, e], and values [b, t, h, f]."""
    sizes = config.delta
    batch_and_length = qkv_btc.shape[:2]
    keys = sizes.key_heads * sizes.key_dim
    q_btc, k_btc, v_btc = _split(config, qkv_btc, keys, keys)
    q_btge = q_btc.reshape(*batch_and_length, sizes.key_heads, sizes.key_dim)
    k_btge = k_btc.reshape(*batch_and_length, sizes.key_heads, sizes.key_dim)
    q_btge = q_btge * jax.lax.rsqrt(jnp.sum(q_btge * q_btge, axis=-1, keepdims=True) + 1e-6)
    k_btge = k_btge * jax.lax.rsqrt(jnp.sum(k_btge * k_btge, axis=-1, keepdims=True) + 1e-6)
    return q_btge, k_btge, v_btc.reshape(*batch_and_length, sizes.value_heads, sizes.value_dim)
