"""Forward pass of a decoder: a language model of the Qwen, Gemma, gpt-oss or Llama families. Verifiers are decoders, and
drafters consist of such layers.

One function serves prefill chunks, single tokens, chains and trees, which differ only in positions and mask. It knows no
kind of layer (`layer_kinds`). Logits are computed by a separate call, only for positions that need them (`vocab.unembed`).

Shape suffixes: b batch, t new positions, u new positions as keys, x positions of `earlier`, d model, j tapped layers
x model, v vocabulary, l layers, p width of a layer's own input.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.models import kernels, layers, quantized, vocab
from treeflash_jax.models.caches import Cache
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.layer_kinds import KINDS, find_sources
from treeflash_jax.models.layer_protocol import LayerKind, PassInputs, join_positions
from treeflash_jax.models.packed_attention import PackedMask


@struct.dataclass
class Output:
    """Result of a forward pass.

    Attributes:
      hidden_btd: hidden states after the final norm; `logits` turns chosen positions into logits.
      features_btj: outputs of the tapped layers (residual stream, before the final norm), concatenated in tap order;
        without taps, the last axis has size 0.
      new: results of the layers for the new positions, for `caches.commit`; for attention, keys and values. It ends with
        the last layer that keeps a state, as `Cache.layers` does, and has None for earlier layers without a state.
    """

    hidden_btd: jax.Array
    features_btj: jax.Array
    new: tuple[Any, ...]


def specs(
    config: ModelConfig,
    quantize: str | None = None,
    is_merged: bool = False,
    mesh: Mesh | None = None,
    wide_tables: bool = False,
) -> dict[str, Any]:
    """Returns the spec of every weight; matrices are quantised by the scheme. Tied models have no `unembed`.

    Args:
      is_merged: whether to return the specs of the weights after `merge`.
      mesh: mesh on which every shard has whole blocks of quantised weights; None: one device.
      wide_tables: whether vocabulary tables stay unquantised under every scheme.
    """
    shape = config.vocab_size, config.hidden_size
    merged = _can_merge(config, mesh) if is_merged else dict.fromkeys(config.kinds, False)
    table = Spec(shape, ("vocab", "embed"), inputs=(1,), can_quantize=not wide_tables)

    def layer(kind: str, is_sparse: bool) -> dict[str, Spec]:
        sizes = config.of_kind(kind)
        return layers.layer_specs(sizes, KINDS[kind].specs(sizes, merged[kind]), is_sparse, all(merged.values()))

    tree = {
        "embed": table,
        "groups": [[layer(kind, is_sparse) for _ in range(size)] for kind, is_sparse, size in config.runs],
        "norm": layers.norm_spec(config, config.hidden_size),
    } | layer_input_specs(config)
    return quantized.specs(tree if config.tie_embeddings else tree | {"unembed": table}, quantize, mesh)


def layer_input_specs(config: ModelConfig) -> dict[str, Spec]:
    """Returns the specs of `layer_inputs`, if the model has any. The table is never quantised: passes read few vectors."""
    p = config.layer_input_size
    width = config.num_layers * config.layer_input_size
    if not p:
        return {}
    return {
        "input_embed": Spec((config.vocab_size, width), ("vocab", None), inputs=(1,), can_quantize=False),
        "input_map": Spec((width, config.hidden_size), (None, "embed"), inputs=(1,), outputs=(0,)),
        "input_norm": layers.norm_spec(config, p),
    }


def each_layer(params: Params) -> list[Any]:
    """Returns the weights of each layer, or their specs; both are nested in groups of equal layers."""
    return list(chain(*params["groups"]))


def merge(params: Params, config: ModelConfig, mesh: Mesh | None = None) -> None:
    """Joins maps of the same input into one array, in place, unless they are quantised in different ways.

    While a layer is joined, devices hold its weights twice.
    """

    def join(weights: Params, names: tuple[str, ...], run: Callable[[Any], Any]) -> None:
        if parts := {name: weights.pop(name) for name in names if name in weights}:
            weights |= jax.block_until_ready(run(parts))

    can_merge = _can_merge(config, mesh)
    with sharding.ambient(mesh):
        for weights, name in zip(each_layer(params), config.kinds, strict=True):
            if can_merge[name]:
                join(weights, KINDS[name].merged, partial(KINDS[name].merge, config=config.of_kind(name)))
            if all(can_merge.values()):
                join(weights, layers.GATE_UP, layers.merge_gate_up)


def _can_merge(config: ModelConfig, mesh: Mesh | None) -> dict[str, bool]:
    """Returns for each kind of layer whether the mesh can shard its weights after `merge`.

    Gate and up are joined only if all kinds can: otherwise, a step on TPUs would take longer by their compiler's estimate
    (`notebooks/results/tpu_estimates.md`).
    """
    return {kind: KINDS[kind].can_merge(config.of_kind(kind), mesh) for kind in config.kinds}


def forward(
    params: Params,
    config: ModelConfig,
    tokens_bt: jax.Array,
    positions_bt: jax.Array,
    mask_btu: jax.Array | PackedMask,
    cache: Cache | None = None,
    *,
    earlier: tuple[Any, ...] | None = None,
    taps: tuple[int, ...] = (),
    attention: str = "xla",
    residual_dtype: DTypeLike | None = None,
    is_tree: bool = False,
) -> Output:
    """Runs new positions through the model. The cache is read, never written.

    Args:
      positions_bt: absolute positions.
      mask_btu: True if new position t sees new position u (causal for a chunk, ancestors for a tree).
      cache: committed positions; every new position sees all of them.
      earlier: `Output.new` of x positions that are not yet in a cache. The mask is then [b, t, x + u].
      taps: 0-based indices of layers whose outputs are returned.
      residual_dtype: dtype of the residual stream and of `hidden_btd`; None: dtype of the weights.
      is_tree: whether the new positions are a tree; otherwise they are texts, one after the other.
    """
    x_btd = sharding.constrain(vocab.embed(params["embed"], tokens_bt, config.embedding_factor), ("batch", None, None))
    dtype = x_btd.dtype
    inputs_lbtp = layer_inputs(params, config, tokens_bt, x_btd)
    x_btd = x_btd.astype(residual_dtype or dtype)
    out = through_layers(
        params, config, x_btd, positions_bt, mask_btu, cache,
        earlier=earlier, taps=taps, attention=attention, inputs_lbtp=inputs_lbtp, is_tree=is_tree,
    )  # fmt: skip
    return out.replace(features_btj=out.features_btj.astype(dtype))


def layer_inputs(params: Params, config: ModelConfig, tokens_bt: jax.Array, x_btd: jax.Array) -> jax.Array | Sequence[None]:
    """Returns each layer's additional input, computed from tokens and their embeddings; None in models without such inputs.

    Source: transformers, gemma4 (per-layer embeddings).
    """
    p = config.layer_input_size
    shape = (*tokens_bt.shape, config.num_layers, config.layer_input_size)
    if not p:
        return [None] * config.num_layers
    of_token_btlp = vocab.embed(params["input_embed"], tokens_bt, p**0.5).reshape(shape)
    mapped_btz = quantized.product("btd,zd->btz", x_btd, params["input_map"]) * config.hidden_size**-0.5
    normed_btlp = layers.norm(config, mapped_btz.reshape(shape), params["input_norm"])
    return jnp.moveaxis((normed_btlp + of_token_btlp) * 2**-0.5, 2, 0)


def through_layers(
    params: Params,
    config: ModelConfig,
    x_btd: jax.Array,
    positions_bt: jax.Array,
    mask_btu: jax.Array | PackedMask,
    cache: Cache | None = None,
    *,
    earlier: tuple[Any, ...] | None = None,
    taps: tuple[int, ...] = (),
    attention: str = "xla",
    inputs_lbtp: jax.Array | Sequence[jax.Array | None] | None = None,
    is_tree: bool = False,
) -> Output:
    """Runs the layers and the final norm on inputs [b, t, d], like `forward`, but reads no table.

    Args:
      inputs_lbtp: result of `layer_inputs`; None: layers have no additional inputs.
    """
    split = [each_layer(specs(config, is_merged=is_merged)) for is_merged in (False, True)]
    all_weights = list(map(quantized.with_partitions, each_layer(params), *split))
    length_b, states = (None, None) if cache is None else (cache.length_b, cache.layers)
    inputs = {}
    for kind in dict.fromkeys(config.kinds):
        precomputed = KINDS[kind].precompute(config.of_kind(kind), positions_bt, mask_btu)
        inputs[kind] = PassInputs(positions_bt, mask_btu, length_b, precomputed, attention, is_tree)
    inputs_lbtp = [None] * config.num_layers if inputs_lbtp is None else inputs_lbtp
    operands = all_weights, config, params["norm"], x_btd, inputs, states, earlier, inputs_lbtp
    run = kernels.find("decoder layers", *operands) or run_layers
    normed_btd, outputs, new = run(*operands)
    tapped = [outputs[layer] for layer in taps] or [jnp.zeros((*positions_bt.shape, 0), x_btd.dtype)]
    return Output(normed_btd.astype(x_btd.dtype), jnp.concatenate(tapped, axis=-1), tuple(new))


def run_layers(
    all_weights: list[Params],
    config: ModelConfig,
    norm_d: jax.Array,
    x_btd: jax.Array,
    inputs: dict[str, PassInputs],
    states: tuple[Any, ...] | None,
    earlier: tuple[Any, ...] | None,
    inputs_lbtp: jax.Array | Sequence[jax.Array | None],
) -> tuple[jax.Array, list[jax.Array], list[Any]]:
    """Returns the final norm with the scale `norm_d`, the output of each layer, and each layer's part of `Output.new`."""
    run = {kind: _make_layer(config.of_kind(kind), KINDS[kind], shared) for kind, shared in inputs.items()}
    sources = find_sources(config)
    outputs: list[jax.Array] = []
    new: list[Any] = []
    for index, (source, kind) in enumerate(zip(sources, config.kinds, strict=True)):
        state = None if states is None else states[source]
        earlier_positions = None if earlier is None else earlier[source]
        if source != index:
            earlier_positions = join_positions(earlier_positions, new[source])
        with jax.named_scope(f"layer_{index}"):
            x_btd, new_positions = run[kind](all_weights[index], x_btd, state, earlier_positions, inputs_lbtp[index])
        outputs.append(x_btd)
        new.append(new_positions)
    return layers.norm(config, x_btd, norm_d), outputs, new[: max(sources) + 1]


def _make_layer(config: ModelConfig, kind: LayerKind, inputs: PassInputs) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns a function of a layer's weights, input, state and `earlier`. It returns the output and `Output.new`."""

    @jax.jit  # traced once for all layers of the same kind; XLA inlines the calls
    def layer(weights: Params, x_btd: jax.Array, state: Any, earlier: Any, input_btp: jax.Array | None):
        normed_btd = layers.norm(config, x_btd, weights["attention_norm"])
        mixed_btd, new = kind.mix(weights, config, normed_btd, inputs, state, earlier)
        x_btd = x_btd + layers.post_norm(weights, config, "attention_post_norm", mixed_btd)
        x_btd = x_btd + layers.feed_forward(weights, config, x_btd)
        x_btd = layers.add_input_and_scale(weights, config, x_btd, input_btp)
        return sharding.constrain(x_btd, ("batch", None, None)), new

    return layer


def logits(params: Params, config: ModelConfig, hidden_btd: jax.Array) -> jax.Array:
    """Returns logits of chosen positions, [..., v]. Products have the dtype of weights, sums the dtype of hidden states."""
    table = params.get("unembed", params["embed"])
    return vocab.cap(vocab.unembed(table, hidden_btd.astype(table.dtype), hidden_btd.dtype), config.logit_cap)


def causal_mask(batch: int, length: int) -> jax.Array:
    return jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, length, length))
