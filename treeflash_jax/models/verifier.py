"""The verifier: a Qwen, gpt-oss or Llama language model as one pure forward pass.

One function serves prefill chunks, single tokens, chains and trees: they differ in positions and mask only. It knows no
kind of layer (`layer_kinds`). Logits are a separate call on the positions that are read (`vocab.unembed`).

Shape suffixes: b batch, t new positions, u new positions as keys, x positions of `earlier`, d model, j tapped layers
x model, v vocabulary.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Spec
from treeflash_jax.models import kernels, layers, quantized, vocab
from treeflash_jax.models.caches import Cache
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.layer_kinds import KINDS
from treeflash_jax.models.layer_protocol import LayerKind, PassInputs


@struct.dataclass
class Output:
    """Result of a forward pass.

    Attributes:
      hidden_btd: hidden states after the final norm; `logits` turns chosen positions into logits.
      features_btj: outputs of the tapped layers (residual stream, before the final norm), concatenated in tap order;
        of width 0 without taps.
      new: results of the layers for the new positions, for `caches.commit`: keys and values of attention.
    """

    hidden_btd: jax.Array
    features_btj: jax.Array
    new: tuple[Any, ...]


def specs(config: ModelConfig, quantize: str | None = None, is_merged: bool = False, mesh: Any = None) -> dict[str, Any]:
    """Returns the spec of every weight, matrices quantised by the scheme. Tied models have no `unembed`.

    Args:
      is_merged: whether to return the specs of the weights after `merge`.
      mesh: mesh whose shards have whole blocks of quantised weights; None: one device.
    """
    table = Spec((config.vocab_size, config.hidden_size), ("vocab", "embed"), inputs=(1,))

    def layer(kind: str, is_sparse: bool) -> dict[str, Spec]:
        return layers.layer_specs(config, KINDS[kind].specs(config, is_merged), is_sparse, is_merged)

    tree = {
        "embed": table,
        "groups": [[layer(kind, is_sparse) for _ in range(size)] for kind, is_sparse, size in config.runs],
        "norm": layers.norm_spec(config, config.hidden_size),
    }
    return quantized.specs(tree if config.tie_embeddings else tree | {"unembed": table}, quantize, mesh)


def merge(params: dict[str, Any], config: ModelConfig) -> None:
    """Stores maps of the same input as one array, in place, unless they are quantised in different ways.

    Devices hold those of one layer twice.
    """

    def join(weights: dict[str, Any], names: tuple[str, ...], run: Callable[[Any], Any]) -> None:
        if parts := {name: weights.pop(name) for name in names if name in weights}:
            weights |= jax.block_until_ready(run(parts))

    for weights, kind in zip(chain(*params["groups"]), config.kinds, strict=True):
        join(weights, KINDS[kind].merged, KINDS[kind].merge)
        join(weights, layers.GATE_UP, layers.merge_gate_up)


def forward(
    params: dict[str, Any],
    config: ModelConfig,
    tokens_bt: jax.Array,
    positions_bt: jax.Array,
    mask_btu: jax.Array,
    cache: Cache | None = None,
    *,
    earlier: tuple[Any, ...] | None = None,
    taps: tuple[int, ...] = (),
    attention: str = "xla",
    residual_dtype: Any = None,
) -> Output:
    """Runs new positions through the model; the cache is read, never written.

    Args:
      positions_bt: absolute positions.
      mask_btu: True if new position t sees new position u (causal for a chunk, ancestors for a tree).
      cache: committed positions, all visible to every new one.
      earlier: `Output.new` of x positions that are in no cache yet; the mask is then [b, t, x + u].
      taps: 0-based layers whose outputs are returned.
      residual_dtype: dtype of the residual stream and of `hidden_btd`; None: that of the weights.
    """
    x_btd = sharding.constrain(vocab.embed(params["embed"], tokens_bt), ("batch", None, None))
    dtype = x_btd.dtype
    x_btd = x_btd.astype(residual_dtype or dtype)
    where = positions_bt, mask_btu, cache
    out = through_layers(params, config, x_btd, *where, earlier=earlier, taps=taps, attention=attention)
    return out.replace(features_btj=out.features_btj.astype(dtype))


def through_layers(
    params: dict[str, Any],
    config: ModelConfig,
    x_btd: jax.Array,
    positions_bt: jax.Array,
    mask_btu: jax.Array,
    cache: Cache | None = None,
    *,
    earlier: tuple[Any, ...] | None = None,
    taps: tuple[int, ...] = (),
    attention: str = "xla",
) -> Output:
    """Runs the layers and the final norm on inputs [b, t, d], otherwise as `forward`; reads no table."""
    all_weights = list(chain(*params["groups"]))
    length_b, states = (None, None) if cache is None else (cache.length_b, cache.layers)
    inputs = {}
    for kind in dict.fromkeys(config.kinds):
        precomputed = KINDS[kind].precompute(config, positions_bt, mask_btu)
        inputs[kind] = PassInputs(positions_bt, mask_btu, length_b, precomputed, attention)
    operands = all_weights, config, params["norm"], x_btd, inputs, states, earlier
    run = kernels.find("decoder layers", *operands) or run_layers
    normed_btd, outputs, new = run(*operands)
    tapped = [outputs[layer] for layer in taps] or [jnp.zeros((*positions_bt.shape, 0), x_btd.dtype)]
    return Output(normed_btd.astype(x_btd.dtype), jnp.concatenate(tapped, axis=-1), tuple(new))


def run_layers(
    all_weights: list[dict[str, Any]],
    config: ModelConfig,
    norm_d: jax.Array,
    x_btd: jax.Array,
    inputs: dict[str, PassInputs],
    states: tuple[Any, ...] | None,
    earlier: tuple[Any, ...] | None,
) -> tuple[jax.Array, list[jax.Array], list[Any]]:
    """Returns the final norm with the scale `norm_d`, the output of each layer, and its part of `Output.new`."""
    run = {kind: _make_layer(config, KINDS[kind], shared) for kind, shared in inputs.items()}
    outputs, new = [], []
    for index, (weights, kind) in enumerate(zip(all_weights, config.kinds, strict=True)):
        state, earlier_positions = (None if x is None else x[index] for x in (states, earlier))
        with jax.named_scope(f"layer_{index}"):
            x_btd, new_positions = run[kind](weights, x_btd, state, earlier_positions)
        outputs.append(x_btd)
        new.append(new_positions)
    return layers.norm(config, x_btd, norm_d), outputs, new


def _make_layer(config: ModelConfig, kind: LayerKind, inputs: PassInputs) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns a function of a layer's weights, input, state and `earlier`: the layer's output, and `Output.new`."""

    @jax.jit  # traced once for all layers of the same kind; XLA inlines the calls
    def layer(weights, x_btd, state, earlier):
        normed_btd = layers.norm(config, x_btd, weights["attention_norm"])
        mixed_btd, new = kind.mix(weights, config, normed_btd, inputs, state, earlier)
        x_btd = x_btd + mixed_btd
        normed_btd = layers.norm(config, x_btd, weights["mlp_norm"])
        x_btd = x_btd + layers.feed_forward(weights, config, normed_btd)
        return sharding.constrain(x_btd, ("batch", None, None)), new

    return layer


def logits(params: dict[str, Any], hidden_btd: jax.Array) -> jax.Array:
    """Returns logits of chosen positions, [..., v]: products in the weights' dtype, summed in that of the hidden states."""
    table = params.get("unembed", params["embed"])
    return vocab.unembed(table, hidden_btd.astype(table.dtype), hidden_btd.dtype)


def causal_mask(batch: int, length: int) -> jax.Array:
    return jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, length, length))
