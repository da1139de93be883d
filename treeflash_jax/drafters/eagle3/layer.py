"""The one layer of an EAGLE-3 drafter: its sizes, inputs and outputs.

Position t pairs the feature at t (or, while drafting, the layer's output at t - 1) with the token at t + 1:

    carried_t = fc(features_t)                       or the fed-back output at t - 1
    read_t    = [norm(embed(token_{t+1})), norm(carried_t)]
    hidden_t  = layer(queries, keys, values of read_t; residual carried_t; rotation at t)
    unembed(norm(hidden_t))                          logits of the token at t + 2

Shape suffixes: b batch, t positions, j tapped layers x verifier width, d drafter width, z draft vocabulary; `read` has
width 2 d.

Source: EAGLE-3 (arXiv 2503.01840); EAGLE-3.1 (arXiv 2605.09992).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Spec
from treeflash_jax.drafters.protocol import DrafterSizes, require_fit
from treeflash_jax.models import layers, quantized, vocab
from treeflash_jax.models.config import ModelConfig

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DrafterSizes):
    """An EAGLE-3 drafter: one decoder layer over pairs of a verifier feature and the token that follows it.

    Attributes:
      layers: sizes of that layer; `vocab_size` is the verifier's.
      target_hidden_size: hidden size of the verifier.
      taps: 0-based verifier layers whose output (residual stream) it reads; None: the rule of the EAGLE repository, which
        depends on the verifier's depth (`fitted`).
      taps_are_inputs: whether the file names layers by their inputs; for messages, since `taps` are outputs.
      draft_vocab_size: number of tokens that it can draft; if smaller than the verifier's vocabulary, the weight `offsets`
        lists them.
      own_embedding: whether it has an embedding table; else it reads the verifier's.
      fc_norm: whether the feature of every tapped layer is normalised before they are joined (EAGLE-3.1).
      norm_before_fc: whether the joined features are normalised.
      norm_before_residual: whether the layer adds its attention to the normalised carried state, not to the raw one.
      norm_output: whether the next step is fed the normalised output of the layer (EAGLE-3.1).
      verifier: name of the verifier that it was trained for, and its classes in transformers; () if its files do not say.
    """

    kind: ClassVar[str] = "eagle3"

    layers: ModelConfig
    target_hidden_size: int
    taps: tuple[int, ...] | None = None
    num_taps: int = 3
    taps_are_inputs: bool = False
    draft_vocab_size: int
    own_embedding: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    num_depths: int = 7
    lanes: int | None = 10
    verifier: tuple[str, ...] = ()
    thinking: bool | None = None

    def fitted(self, verifier: ModelConfig) -> EagleConfig:
        """Returns this config with its tapped layers. Raises ValueError if it was made for another verifier."""
        require_fit(
            hidden_size=(self.target_hidden_size, verifier.hidden_size),
            vocabulary_size=(self.layers.vocab_size, verifier.vocab_size),
        )
        taps = default_taps(verifier.num_layers) if self.taps is None else self.taps
        outside = [tap for tap in taps if not 0 <= tap < verifier.num_layers]
        if outside:
            shift, read = (1, "inputs") if self.taps_are_inputs else (0, "outputs")
            raise ValueError(
                f"drafter does not fit the verifier: its layer ids {[tap + shift for tap in outside]}, read as {read} of "
                f"layers, are outputs of layers {outside}, but the verifier has layers 0 to {verifier.num_layers - 1}"
            )
        return replace(self, taps=taps)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the tapped layers for files that name none: the inputs of layers 2, L // 2 and L - 3 (EAGLE repository)."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def specs(config: EagleConfig) -> Params:
    """Weights. Without `embed` the verifier's embedding table is read; draft token i is the verifier's i + offsets[i]."""
    width = config.layers.hidden_size
    joined = config.num_taps * config.target_hidden_size
    layer = layers.layer_specs(config.layers) | {"hidden_norm": Spec((width,), (None,), "ones")}
    for name in ("q", "k", "v"):
        layer[name] = replace(layer[name], shape=(*layer[name].shape[:-1], 2 * width))
    tree = {
        "fc": Spec((joined, width), ("embed", None), inputs=(0,), outputs=(1,)),
        "layer": layer,
        "norm": Spec((width,), (None,), "ones"),
        "unembed": Spec((config.draft_vocab_size, width), ("vocab", "embed"), inputs=(1,)),
    }
    if config.own_embedding:
        tree["embed"] = Spec((config.layers.vocab_size, width), ("vocab", "embed"), inputs=(1,))
    if config.draft_vocab_size < config.layers.vocab_size:
        tree["offsets"] = Spec((config.draft_vocab_size,), (None,), "zeros", dtype=jnp.int32)
    if config.norm_before_fc:
        tree["input_norm"] = Spec((joined,), (None,), "ones")
    if config.fc_norm:
        tree["fc_norm"] = [Spec((config.target_hidden_size,), (None,), "ones") for _ in range(config.num_taps)]
    return tree


def fuse(params: Params, config: EagleConfig, features_btj: jax.Array) -> jax.Array:
    """Maps the features of all tapped layers to the drafter's width, [b, t, d]."""
    eps = config.layers.rms_norm_eps
    if config.fc_norm:
        parts = jnp.split(features_btj, config.num_taps, axis=-1)
        normed = [layers.rms_norm(part, scale, eps) for part, scale in zip(parts, params["fc_norm"], strict=True)]
        features_btj = jnp.concatenate(normed, axis=-1)
    if config.norm_before_fc:
        features_btj = layers.rms_norm(features_btj, params["input_norm"], eps)
    return quantized.product("btj,jd->btd", features_btj, params["fc"])


def feed_back(params: Params, config: EagleConfig, hidden_btd: jax.Array) -> jax.Array:
    """Returns the output that the next step carries."""
    return normed(params, config, hidden_btd) if config.norm_output else hidden_btd


def normed(params: Params, config: EagleConfig, hidden_btd: jax.Array) -> jax.Array:
    """Returns the input of the vocabulary table."""
    return layers.rms_norm(hidden_btd, params["norm"], config.layers.rms_norm_eps)


def read(params: Params, tables: Any, config: EagleConfig, tokens_bt: jax.Array, carried_btd: jax.Array) -> jax.Array:
    """Returns the input of queries, keys and values, [b, t, 2 d]: the following token's embedding and the carried state."""
    eps, layer = config.layers.rms_norm_eps, params["layer"]
    embedded_btd = vocab.embed(params["embed"] if config.own_embedding else tables["embed"], tokens_bt)
    parts = (
        layers.rms_norm(embedded_btd.astype(carried_btd.dtype), layer["attention_norm"], eps),
        layers.rms_norm(carried_btd, layer["hidden_norm"], eps),
    )
    return sharding.constrain(jnp.concatenate(parts, axis=-1), ("batch", None, None))


def rotations(config: EagleConfig, positions_bt: jax.Array) -> Any:
    return layers.rotary_table(config.layers.rope, config.layers.head_dim, positions_bt)


def keys_values(params: Params, config: EagleConfig, read_bt: jax.Array, table: Any) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values, each [b, t, k, e]."""
    return layers.keys_values(params["layer"], config.layers, read_bt, table)


def hidden(
    params: Params,
    config: EagleConfig,
    read_bt: jax.Array,
    carried_btd: jax.Array,
    table: Any,
    attend: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns the layer's output, [b, t, d].

    Args:
      read_bt, carried_btd: result of `read`, and the carried state given to it.
      attend: maps queries [b, t, h, e] to mixed values [b, t, h, e].
    """
    layer, eps = params["layer"], config.layers.rms_norm_eps
    residual_btd = carried_btd
    if config.norm_before_residual:
        residual_btd = layers.rms_norm(carried_btd, layer["hidden_norm"], eps)
    mixed_bthe = attend(layers.queries(layer, config.layers, read_bt, table))
    x_btd = residual_btd + layers.merge_heads(layer, mixed_bthe)
    x_btd += layers.swiglu(layer, layers.rms_norm(x_btd, layer["mlp_norm"], eps))
    return sharding.constrain(x_btd, ("batch", None, None))
