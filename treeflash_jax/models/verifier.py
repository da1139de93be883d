"""The verifier: a Qwen3 (dense or a mixture of experts), Qwen2 or Llama language model as one pure forward pass.

One function serves prefill chunks, single tokens, chains and trees: they differ in positions and mask only. Logits are a
separate call on the positions that are read (`vocab.unembed`).

Shape suffixes: b batch, t new positions, u new positions as keys, x positions of `earlier`, d model, j tapped layers
x model, v vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Spec
from treeflash_jax.models import kv_cache, layers, quantized, vocab
from treeflash_jax.models.attention import raw_attention, tree_attention
from treeflash_jax.models.config import ModelConfig


@struct.dataclass
class Output:
    """Result of a forward pass.

    Attributes:
      hidden_btd: hidden states after the final norm; `logits` turns chosen positions into logits.
      features_btj: outputs of the tapped layers (residual stream, before the final norm), concatenated in tap order;
        of width 0 without taps.
      new_kv: keys and values of the new positions, for `kv_cache.append`.
    """

    hidden_btd: jax.Array
    features_btj: jax.Array
    new_kv: kv_cache.NewKV


def specs(config: ModelConfig, quantize: str | None = None, is_merged: bool = False) -> dict[str, Any]:
    """Returns the spec of every weight, matrices quantised by the scheme. Tied models have no `unembed`.

    Args:
      is_merged: whether the specs are those of the weights after `merge`.
    """
    table = Spec((config.vocab_size, config.hidden_size), ("vocab", "embed"), inputs=(1,))
    tree = {
        "embed": table,
        "groups": [
            [layers.layer_specs(config, is_sparse, is_merged) for _ in range(size)] for is_sparse, size in config.runs
        ],
        "norm": Spec((config.hidden_size,), (None,), "ones"),
    }
    return quantized.specs(tree if config.tie_embeddings else tree | {"unembed": table}, quantize)


def merge(params: dict[str, Any]) -> None:
    """Stores maps of the same input as one array (`layers.merge`), in place: devices hold those of one layer twice."""
    for weights in (weights for group in params["groups"] for weights in group):
        parts = {name: weights.pop(name) for name in layers.MERGED if name in weights}
        weights |= jax.block_until_ready(layers.merge(parts))


def forward(
    params: dict[str, Any],
    config: ModelConfig,
    tokens_bt: jax.Array,
    positions_bt: jax.Array,
    mask_btu: jax.Array,
    cache: kv_cache.KVCache | None = None,
    *,
    earlier: kv_cache.NewKV | None = None,
    shift: Callable[[int], jax.Array] | None = None,
    taps: tuple[int, ...] = (),
    attention: str = "xla",
    residual_dtype: Any = None,
) -> Output:
    """Runs new positions through the model; the cache is read, never written.

    Args:
      positions_bt: absolute positions.
      mask_btu: True if new position t sees new position u (causal for a chunk, ancestors for a tree).
      cache: committed positions, all visible to every new one.
      earlier: keys and values [b, x, k, e], per layer, of positions in no cache yet; the mask is then [b, t, x + u].
      shift: maps a layer's index to the shift of its feed-forward part, [b, 1 or t, f] (`layers.swiglu`); None: no shifts.
      taps: 0-based layers whose outputs are returned.
      residual_dtype: dtype of the residual stream and of `hidden_btd`; None: that of the weights.
    """
    table = layers.rotary_table(config.rope, config.head_dim, positions_bt)
    x_btd = sharding.constrain(vocab.embed(params["embed"], tokens_bt), ("batch", None, None))
    dtype = x_btd.dtype
    x_btd = x_btd.astype(residual_dtype or dtype)
    tapped, new_kv = {}, []
    layer = _make_layer(config, table, mask_btu, None if cache is None else cache.length_b, attention)
    all_weights = [weights for group in params["groups"] for weights in group]
    prefixes = [None] * len(all_weights) if cache is None else cache.layers
    scales = [weights["attention_norm"] for weights in all_weights] + [params["norm"]]
    normed_btd = None
    for index, (weights, prefix) in enumerate(zip(all_weights, prefixes, strict=True)):
        earlier_kv = None if earlier is None else earlier[index]
        shift_btf = None if shift is None else shift(index)
        with jax.named_scope(f"layer_{index}"):
            x_btd, normed_btd, new = layer(weights, x_btd, normed_btd, scales[index + 1], prefix, earlier_kv, shift_btf)
        if index in taps:
            tapped[index] = x_btd.astype(dtype)
        new_kv.append(new)
    if normed_btd is None:
        normed_btd = layers.rms_norm(x_btd, params["norm"], config.rms_norm_eps)
    return Output(
        hidden_btd=normed_btd.astype(x_btd.dtype),
        features_btj=jnp.concatenate([tapped[i] for i in taps] or [jnp.zeros((*tokens_bt.shape, 0), dtype)], axis=-1),
        new_kv=tuple(new_kv),
    )


def _make_layer(
    config: ModelConfig, table: Any, mask_btu: jax.Array, length_b: jax.Array | None, attention: str
) -> Callable[..., tuple[jax.Array, jax.Array | None, Any]]:
    """Returns a function of a layer's weights, input, normed input, next norm's scale, cache, earlier new_kv, and shift.

    It returns the layer's output, the normed output if a kernel made it, and its new keys and values.
    """

    @jax.jit  # traced once for all layers of the same kind; XLA inlines the calls
    def layer(weights, x_btd, normed_btd, next_scale_d, prefix, earlier_kv, shift_btf):
        in_kernels = attention == "mosaic-gpu" and "qkv" in weights and prefix is not None and earlier_kv is None

        def attend(weights, x_btd):
            if in_kernels:
                raw = layers.raw_heads(weights, x_btd), table, weights.get("qkv_norm"), config.rms_norm_eps
                return raw_attention(*raw, mask_btu, prefix, length_b)
            q_bthe, *new = layers.queries_keys_values(weights, config, x_btd, table)
            new = seen = tuple(new)
            if earlier_kv is not None:
                seen = [jnp.concatenate(pair, axis=1) for pair in zip(earlier_kv, new, strict=True)]
            return tree_attention(q_bthe, *seen, mask_btu, prefix, length_b, implementation=attention), new

        arrays = x_btd, normed_btd, next_scale_d
        x_btd, normed_btd, new = layers.decoder_layer(weights, config, *arrays, attend, shift_btf, fuses=in_kernels)
        return sharding.constrain(x_btd, ("batch", None, None)), normed_btd, new

    return layer


def logits(params: dict[str, Any], hidden_btd: jax.Array) -> jax.Array:
    """Returns logits of chosen positions, [..., v]: products in the weights' dtype, summed in that of the hidden states."""
    table = params.get("unembed", params["embed"])
    return vocab.unembed(table, hidden_btd.astype(table.dtype), hidden_btd.dtype)


def causal_mask(batch: int, length: int) -> jax.Array:
    return jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, length, length))
