"""EAGLE-3 drafters: one decoder layer, run once per level of the tree on the verifier's features and the drafted tokens.

Position t pairs the verifier's features at t (or, while drafting, the layer's output at t - 1) with the token at t + 1:

    carried_t = fc(features_t)                       or the fed-back output at t - 1
    read_t    = [norm(embed(token_{t+1})), norm(carried_t)]
    hidden_t  = layer(queries, keys, values of read_t; residual carried_t; rotation at t)
    unembed(norm(hidden_t))                          logits of the token at t + 2

After a commit, the drafter's context is therefore as long as the verifier's cache. The output at its last position gives
the first drafted token.

Shape suffixes: b batch, t positions, w lanes, j tapped layers x verifier width, d drafter width, x keys that a lane may
see, z draft vocabulary; `read` has width 2 d.

Source: EAGLE-3 (arXiv 2503.01840); EAGLE-3.1 (arXiv 2605.09992); EAGLE-2 (arXiv 2406.16858) for the tree.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from treeflash_jax.core import sharding
from treeflash_jax.core.error_text import warn
from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.drafters.lanes import LaneDrafter, LaneState, Level, SharedInputs, extended
from treeflash_jax.drafters.protocol import ContextState, Inputs, NewPositions, draft_ids, require_sizes
from treeflash_jax.models import layers, quantized, vocab
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.backend.indexing import at_last
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import Expander


@dataclass(frozen=True, kw_only=True)
class Eagle3Drafter(LaneDrafter):
    """An EAGLE-3 drafter: one decoder layer over pairs of a verifier feature and the token that follows it.

    Attributes:
      layers: sizes of that decoder layer; `vocab_size` is the verifier's.
      target_hidden_size: hidden size of the verifier.
      taps: 0-based verifier layers whose output (residual stream) it reads; None: the EAGLE repository's layers for the
        verifier's depth, set by `fitted`.
      draft_vocab_size: number of tokens that it can draft. If this is less than the verifier's vocabulary, the weight
        `offsets` lists them.
      own_embedding: whether it has an embedding table; if not, it reads the verifier's.
      fc_norm: whether the feature of every tapped layer is normalised before the features are joined (EAGLE-3.1).
      norm_before_fc: whether the joined features are normalised.
      norm_before_residual: whether the layer's attention is added to the carried state after its norm; if not, before it.
      norm_output: whether the next step gets the normalised output of the layer (EAGLE-3.1).
      verifier: name of the verifier that it was trained for, and its classes in transformers; () if unknown.
    """

    kind: ClassVar[str] = "eagle3"
    dialect: ClassVar[str] = "speculators"

    target_hidden_size: int
    taps: tuple[int, ...] | None = None
    num_taps: int = 3
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

    def fitted(self, verifier: ModelConfig) -> Self:
        """Returns this drafter with its tapped layers set. Raises ValueError if it was made for another verifier."""
        taps = self.taps
        if taps is None:
            taps = default_taps(verifier.num_layers)
            warn(f"the EAGLE-3 drafter's files name no layers: outputs of layers {list(taps)} are read, by EAGLE's rule")
        require_sizes(
            verifier,
            taps,
            hidden_size=(self.target_hidden_size, verifier.hidden_size),
            vocabulary_size=(self.layers.vocab_size, verifier.vocab_size),
        )
        return replace(self, taps=taps)

    def specs(self) -> dict[str, Any]:
        """Returns the specs. Without `embed`, uses the verifier's. Draft token i is verifier token i + offsets[i]."""
        width = self.layers.hidden_size
        joined = self.num_taps * self.target_hidden_size
        layer = layers.layer_specs(self.layers) | {"hidden_norm": Spec((width,), (None,), "ones")}
        for name in ("q", "k", "v"):
            layer[name] = replace(layer[name], shape=(*layer[name].shape[:-1], 2 * width))
        tree = {
            "fc": Spec((joined, width), ("embed", None), inputs=(0,), outputs=(1,)),
            "layer": layer,
            "norm": Spec((width,), (None,), "ones"),
            "unembed": Spec((self.draft_vocab_size, width), ("vocab", "embed"), inputs=(1,)),
        }
        if self.own_embedding:
            tree["embed"] = Spec((self.layers.vocab_size, width), ("vocab", "embed"), inputs=(1,))
        if self.draft_vocab_size < self.layers.vocab_size:
            tree["offsets"] = Spec((self.draft_vocab_size,), (None,), "zeros", dtype=jnp.int32)
        if self.norm_before_fc:
            tree["input_norm"] = Spec((joined,), (None,), "ones")
        if self.fc_norm:
            tree["fc_norm"] = [Spec((self.target_hidden_size,), (None,), "ones") for _ in range(self.num_taps)]
        return tree

    def extend(self, params: Params, verifier_params: Params, state: ContextState, new: NewPositions) -> ContextState:
        """Adds committed positions: all of their keys and values, and the layer's output at the last valid position."""
        prefix = state.context.layers[0]
        length_b = state.context.length_b
        length = new.features_btj.shape[1]
        carried_btd = fuse(params, self, new.features_btj)
        read_bt = layer_input(params, verifier_params, self, new.tokens_bt, carried_btd)
        positions_bt = length_b[:, None] + jnp.arange(length)
        k_btke, v_btke = layers.keys_values(params["layer"], self.layers, read_bt, rotary_table(self, positions_bt))

        last_b1 = jnp.maximum(new.count_b - 1, 0)[:, None]
        read_b1, carried_b1d = at_last(read_bt, new.count_b), at_last(carried_btd, new.count_b)
        seen_b1t = jnp.arange(length) <= last_b1[..., None]
        table = rotary_table(self, length_b[:, None] + last_b1)

        def attend(q_b1he: jax.Array) -> jax.Array:
            return tree_attention(q_b1he, k_btke, v_btke, seen_b1t, prefix, length_b, implementation=new.attention)

        hidden_b1d = layer_output(params, self, read_b1, carried_b1d, table, attend)
        return extended(state, ((k_btke, v_btke),), hidden_b1d, new.count_b)

    def draft(self, inputs: Inputs) -> Expander:
        """Returns the children of the anchor, and the layer that continues below them."""
        embed = {} if self.own_embedding else {"embed": inputs.verifier_params["embed"]}
        shared = SharedInputs(inputs.params, embed, inputs.state.context, inputs.temperature_b)
        return self.expand(inputs, shared, LayerStep(self, inputs.attention))


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the tapped layers for files without a list: the inputs of layers 2, L // 2 and L - 3 (EAGLE repository)."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def fuse(params: Params, drafter: Eagle3Drafter, features_btj: jax.Array) -> jax.Array:
    """Maps the features of all tapped layers to the drafter's width, [b, t, d]."""
    eps = drafter.layers.rms_norm_eps
    if drafter.fc_norm:
        parts = zip(jnp.split(features_btj, drafter.num_taps, axis=-1), params["fc_norm"], strict=True)
        features_btj = jnp.concatenate([layers.rms_norm(part, scale, eps) for part, scale in parts], axis=-1)
    if drafter.norm_before_fc:
        features_btj = layers.rms_norm(features_btj, params["input_norm"], eps)
    return quantized.product("btj,jd->btd", features_btj, params["fc"])


def feed_back(params: Params, drafter: Eagle3Drafter, hidden_btd: jax.Array) -> jax.Array:
    """Returns the output that the next step carries."""
    return normed(params, drafter, hidden_btd) if drafter.norm_output else hidden_btd


def normed(params: Params, drafter: Eagle3Drafter, hidden_btd: jax.Array) -> jax.Array:
    """Returns the hidden states that are multiplied by the vocabulary table."""
    return layers.rms_norm(hidden_btd, params["norm"], drafter.layers.rms_norm_eps)


def layer_input(
    params: Params, tables: Params, drafter: Eagle3Drafter, tokens_bt: jax.Array, carried_btd: jax.Array
) -> jax.Array:
    """Returns the input of queries, keys and values, [b, t, 2 d]: the next token's embedding and the carried state."""
    eps, layer = drafter.layers.rms_norm_eps, params["layer"]
    embedded_btd = vocab.embed(params["embed"] if drafter.own_embedding else tables["embed"], tokens_bt)
    parts = (
        layers.rms_norm(embedded_btd.astype(carried_btd.dtype), layer["attention_norm"], eps),
        layers.rms_norm(carried_btd, layer["hidden_norm"], eps),
    )
    return sharding.constrain(jnp.concatenate(parts, axis=-1), ("batch", None, None))


def rotary_table(drafter: Eagle3Drafter, positions_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
    return layers.rotary_table(drafter.layers.rope, drafter.layers.head_dim, positions_bt)


def layer_output(
    params: Params,
    drafter: Eagle3Drafter,
    read_bt: jax.Array,
    carried_btd: jax.Array,
    table: tuple[jax.Array, jax.Array],
    attend: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns the layer's output, [b, t, d].

    Args:
      read_bt, carried_btd: result of `layer_input`, and the carried state from which it was computed.
      attend: maps queries [b, t, h, e] to mixed values [b, t, h, e].
    """
    layer, eps = params["layer"], drafter.layers.rms_norm_eps
    residual_btd = carried_btd
    if drafter.norm_before_residual:
        residual_btd = layers.rms_norm(carried_btd, layer["hidden_norm"], eps)
    mixed_bthe = attend(layers.queries(layer, drafter.layers, read_bt, table))
    x_btd = residual_btd + layers.project_output(layer, mixed_bthe)
    x_btd += layers.swiglu(layer, layers.rms_norm(x_btd, layer["mlp_norm"], eps))
    return sharding.constrain(x_btd, ("batch", None, None))


@dataclass(frozen=True)
class LayerStep:
    """The `Step` of EAGLE-3: runs the layer for a token in each lane. A lane carries the output of the level above."""

    drafter: Eagle3Drafter
    attention: str

    def __call__(self, shared: SharedInputs, level: Level) -> LaneState:
        params, context, drafter = shared.params, shared.context, self.drafter
        carried_bwd = feed_back(params, drafter, level.carry)
        read_bw = layer_input(params, shared.tables, drafter, level.token_bw, carried_bwd)
        table = rotary_table(drafter, level.position_bw)
        k_bwke, v_bwke = layers.keys_values(params["layer"], drafter.layers, read_bw, table)
        [[earlier_k, earlier_v]] = level.earlier
        keys_bxke, values_bxke = level.join(earlier_k, k_bwke), level.join(earlier_v, v_bwke)

        def attend(q_bwhe: jax.Array) -> jax.Array:
            seen, prefix, length_b = level.seen_bwx, context.layers[0], context.length_b
            return tree_attention(q_bwhe, keys_bxke, values_bxke, seen, prefix, length_b, implementation=self.attention)

        hidden_bwd = layer_output(params, drafter, read_bw, carried_bwd, table, attend)
        return self.offer(shared, hidden_bwd, ((k_bwke, v_bwke),))

    def offer(self, shared: SharedInputs, hidden_bwd: jax.Array, kv: Any) -> LaneState:
        """Returns the children below outputs of the layer."""
        params, count = shared.params, self.drafter.children
        normed_bwd = normed(params, self.drafter, hidden_bwd)
        offered = vocab.likeliest(params["unembed"], normed_bwd, count, shared.temperature_b, draft_ids(params))
        return LaneState(hidden_bwd, kv, *offered)
