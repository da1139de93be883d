"""The layer kind of attention. It keeps keys and values of committed positions in a cache (`kv_cache`).

Shape suffixes: b batch, t tokens, u tokens as keys, d model, h query heads, k key/value heads, g heads of one
key/value head: its queries, its key, its value and its gates, e head dim, z e or 2 e.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.core import programs
from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.models import kv_cache, layers
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.backend.rotation import rotate
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.layer_protocol import LayerKind, PassInputs, join_positions
from treeflash_jax.models.packed_attention import PackedMask, packed_attention
from treeflash_jax.models.quantized_weight import can_join


@dataclass(frozen=True)
class AttentionLayer(LayerKind):
    """Attention with grouped queries over earlier positions; `ModelConfig` says which parts it has.

    Attributes:
      is_windowed: whether a position sees only the last `ModelConfig.window` positions.
      shares: as in `LayerKind`; a layer that shares has weights for queries only.
    """

    merged: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias")

    is_windowed: bool = False
    shares: str | None = None

    @property
    def stacks(self) -> bool:
        """True without a window.

        Kernels read a layer inside its stack. Layers with a window use XLA, which would first copy the layer out of the
        stack.
        """
        return not self.is_windowed

    def specs(self, config: ModelConfig, is_merged: bool = False) -> dict[str, Spec]:
        specs = layers.attention_specs(config)
        if self.shares:
            return {name: spec for name, spec in specs.items() if name not in ("k", "v", "k_norm", "k_bias", "v_bias")}
        if not is_merged or "v" not in specs:
            return specs
        d, k, e, g = config.hidden_size, config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads
        specs = {name: spec for name, spec in specs.items() if name not in self.merged}
        rows = 2 * g + 2 if config.gates_attention else g + 2
        specs["o"] = Spec((d, config.num_heads * e), ("embed", "heads"), inputs=(1,), outputs=(0,))
        specs["qkv"] = Spec((k, rows, e, d), ("kv_heads", None, None, "embed"), inputs=(3,), outputs=(0, 1, 2))
        if config.qk_norm:
            specs["qkv_norm"] = layers.norm_spec(config, g + 2, e)
        if config.qkv_bias:
            specs["qkv_bias"] = Spec((k, rows, e), ("kv_heads", None, None), "zeros")
        return specs

    def can_merge(self, config: ModelConfig, mesh: Mesh | None) -> bool:
        """Returns whether each device gets whole key/value heads. Otherwise, each would store all queries."""
        return config.num_kv_heads % (1 if mesh is None else mesh.shape["model"]) == 0

    def merge(self, params: Params, config: ModelConfig) -> Params:
        has_all = {*"qkv"} <= params.keys()
        return merge(params) if has_all and can_join(*(params[name] for name in "qkv")) else params

    def init(
        self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike, num_layers: int = 1, *, can_cut: bool
    ) -> kv_cache.KVState:
        is_ring = self.is_windowed and not can_cut
        slots = min(capacity, config.window) if is_ring else capacity
        shape = (batch, num_layers, config.num_kv_heads, slots, config.head_dim)
        arrays = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        return kv_cache.KVRing(*arrays, window=config.window) if is_ring else kv_cache.KVState(*arrays)

    def precompute(self, config: ModelConfig, positions_bt: jax.Array, mask_btu: Any) -> Any:
        """Returns the rotary table, the mask, and the first position that each position sees; None: it sees all."""
        table = layers.rotary_table(config.rope, config.head_dim, positions_bt)
        if not self.is_windowed:
            return table, mask_btu, None
        mask_btu = mask_btu.dense() if isinstance(mask_btu, PackedMask) else mask_btu
        first_bt = jnp.maximum(positions_bt - config.window + 1, 0)
        is_near_btu = positions_bt[:, None] >= first_bt[..., None]
        num_earlier = mask_btu.shape[2] - is_near_btu.shape[2]  # `earlier`: on the path above, and nearer than any window
        is_near_btu = jnp.pad(is_near_btu, ((0, 0), (0, 0), (num_earlier, 0)), constant_values=True)
        return table, mask_btu & is_near_btu, first_bt

    def mix(
        self, params: Params, config: ModelConfig, x_btd: jax.Array, inputs: PassInputs, state: Any, earlier: Any
    ) -> tuple[jax.Array, Any]:
        table, mask_btu, first_bt = inputs.precomputed
        if self.shares:
            q_bthe = layers.queries(params, config, x_btd, table)
            new = None
            seen = earlier
            gate_bthe = None
        else:
            q_bthe, *new, gate_bthe = queries_keys_values(params, config, x_btd, table)
            new = tuple(new)
            seen = join_positions(earlier, new)
        sinks_h = params.get("sinks")
        if isinstance(inputs.mask_btu, PackedMask):
            mixed_bthe = packed_attention(q_bthe, *seen, mask_btu, sinks_h=sinks_h, implementation=inputs.attention)
        else:
            mixed_bthe = tree_attention(
                q_bthe, *seen, mask_btu, prefix=state, length_b=inputs.length_b,
                first_bt=first_bt, window=config.window, sinks_h=sinks_h, implementation=inputs.attention,
            )  # fmt: skip
        if gate_bthe is not None:
            mixed_bthe *= jax.nn.sigmoid(gate_bthe)
        return layers.project_output(params, mixed_bthe), new


@programs.jit
def merge(params: Params) -> Params:
    """Joins the maps, the norms and the biases of queries, keys and values; returns the output's map as a matrix.

    In "qkv", each key/value head comes with its query heads, its key, its value and, if there are any, its gates. A mesh
    therefore shards all of them in the same way.
    """

    def by_kv_head(q_hz: jax.Array, k_ke: jax.Array, v_ke: jax.Array) -> jax.Array:
        q_kgxe = q_hz.reshape(k_ke.shape[0], -1, q_hz.shape[1] // k_ke.shape[1], *k_ke.shape[1:])
        gates = [q_kgxe[:, :, x] for x in range(1, q_kgxe.shape[2])]
        return jnp.concatenate([q_kgxe[:, :, 0], k_ke[:, None], v_ke[:, None], *gates], axis=1)

    merged = {"qkv": jax.tree.map(by_kv_head, params["q"], params["k"], params["v"])}
    merged["o"] = params["o"].reshape(params["o"].shape[0], -1)
    if "q_norm" in params:
        q_norms = [params["q_norm"]] * (params["q"].shape[0] // params["k"].shape[0])
        merged["qkv_norm"] = jnp.stack([*q_norms, params["k_norm"], jnp.ones_like(params["k_norm"])])
    if "q_bias" in params:
        merged["qkv_bias"] = by_kv_head(params["q_bias"], params["k_bias"], params["v_bias"])
    return merged


def queries_keys_values(
    params: Params, config: ModelConfig, x_btd: jax.Array, table: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns rotated queries, rotated keys, values and gates (None: no gates), from merged or unmerged weights."""
    if "qkv" not in params:
        q_bthz = layers.projected("btd,hzd->bthz", x_btd, params, "q")
        q_bthe, gate_bthe = jnp.split(q_bthz, 2, axis=-1) if config.gates_attention else (q_bthz, None)
        q_bthe = layers.rotated_queries(params, config, q_bthe, table)
        return q_bthe, *layers.keys_values(params, config, x_btd, table), gate_bthe
    x_btkge, gate_bthe = raw_heads(params, x_btd), None
    heads = *x_btd.shape[:2], config.num_heads, config.head_dim
    if config.gates_attention:
        x_btkge, gate_btkge = jnp.split(x_btkge, [config.num_heads // config.num_kv_heads + 2], axis=3)
        gate_bthe = gate_btkge.reshape(heads)
    # Values are normed and rotated too, and the result is ignored: without them, a GPU would launch more kernels for a
    # slice.
    rotated_btkge = layers.norm(config, x_btkge, params["qkv_norm"]) if config.qk_norm else x_btkge
    rotated_btkge = rotate(rotated_btkge.reshape(*x_btd.shape[:2], -1, config.head_dim), table).reshape(x_btkge.shape)
    q_bthe = rotated_btkge[..., :-2, :].reshape(heads)
    return q_bthe, rotated_btkge[..., -2, :], layers.normed_values(config, x_btkge[..., -1, :]), gate_bthe


def raw_heads(params: Params, x_btd: jax.Array) -> jax.Array:
    """Returns query heads, key, value and gates of each key/value head, [b, t, k, g, e], from merged weights."""
    return layers.projected("btd,kged->btkge", x_btd, params, "qkv")
