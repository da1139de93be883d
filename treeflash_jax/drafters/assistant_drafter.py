"""Gemma 4's assistants: a few layers that read the verifier's keys and values and have none themselves.

    x      = pre_projection [embed(token), hidden]     embedding of the verifier, with its factor
    out    = norm(layers(x))                           queries only, over committed positions of the verifier
    hidden = post_projection(out)                      for the next token
    logits = out . table^T                             the assistant's own table

The first token is the anchor, at position L. The first `hidden` is the verifier's output after its final norm at L - 1. The
tokens of all levels are at position L, too, and see the same committed positions. A node therefore depends only on its
token and on its parent's `hidden`, and the nodes of a level are independent. Each layer reads the verifier's last layer of
the same kind that has keys and values.

Edge models have clusters of tokens. Only the tokens of the clusters with the highest centroid scores get logits. All other
tokens get the smallest of these logits minus 1, and are not drafted.

Shape suffixes: b batch, t positions, w lanes (tokens of a level), k key/value heads, e head dim, d assistant's width, j
verifier's width, c clusters, z tokens of a cluster, n tokens with logits.

Source: transformers, models gemma4_assistant and gemma4_unified_assistant.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.drafters.lanes import LaneDrafter, LaneExpander, LaneState, Level, SharedInputs
from treeflash_jax.drafters.ngram_join import join_ngrams
from treeflash_jax.drafters.protocol import Inputs, NewPositions, State, require_fit, require_sizes
from treeflash_jax.models import decoder, layers, quantized, vocab
from treeflash_jax.models.backend import selection
from treeflash_jax.models.backend.indexing import at_last
from treeflash_jax.models.caches import Cache
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.kv_cache import LayerKV
from treeflash_jax.models.layer_kinds import KINDS
from treeflash_jax.models.layer_protocol import PassInputs
from treeflash_jax.trees import Expander


@struct.dataclass
class LastHidden(State):
    """The verifier's hidden state at the last committed position, after its final norm."""

    hidden_bj: jax.Array

    def axes(self) -> Self:
        return LastHidden(("batch", None))

    def grow(self, capacity: int) -> Self:
        return self

    def cut(self, length_b: jax.Array) -> Self:
        return self  # stays until `extend` replaces it


@dataclass(frozen=True, kw_only=True)
class AssistantDrafter(LaneDrafter):
    """An assistant of Gemma 4.

    Attributes:
      layers: sizes of the assistant's layers, whose kinds all share. `window` is 1 + the number of committed positions that
        a layer with a window sees. `vocab_size` is the verifier's.
      target_hidden_size: hidden size of the verifier.
      num_clusters: number of clusters of equal size into which the vocabulary is divided; 0: all tokens get logits.
      top_clusters: number of clusters whose tokens get logits.
      sources: for each layer, the verifier layer whose keys and values it reads; () before `fitted`.
      taps: index of the verifier's last layer; () before `fitted`.
      embedding_factor: the verifier's factor of token embeddings, set by `fitted`.
    """

    kind: ClassVar[str] = "assistant"
    dialect: ClassVar[str] = "assistant"
    reads_tokens: ClassVar[bool] = False

    target_hidden_size: int
    num_clusters: int = 0
    top_clusters: int = 0
    sources: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()
    embedding_factor: float = 1.0
    # A level reads a few hundredths of the verifier's weights. It was not measured at which depths published assistants are
    # still accepted.
    num_depths: int = 7
    lanes: int | None = 4

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that get logits in a step; 0: all tokens."""
        return self.top_clusters * (self.layers.vocab_size // self.num_clusters) if self.num_clusters else 0

    def fitted(self, verifier: ModelConfig) -> Self:
        """Returns this drafter with the layers that it reads set. Raises ValueError if it was made for another verifier."""
        require_sizes(
            verifier,
            (),
            hidden_size=(self.target_hidden_size, verifier.hidden_size),
            vocabulary_size=(self.layers.vocab_size, verifier.vocab_size),
        )
        last = {kind: layer for layer, kind in enumerate(verifier.kinds)}
        heads = {}
        for kind in dict.fromkeys(self.layers.kinds):
            source = KINDS[kind].shares
            require_fit(source in last, f"it reads keys and values of a {source} layer, and the verifier has none")
            heads[source] = tuple(
                (sizes.num_kv_heads, sizes.head_dim) for sizes in (self.layers.of_kind(kind), verifier.of_kind(source))
            )
        named = {f"key/value heads of {source} and their size": pair for source, pair in heads.items()}
        require_sizes(verifier, (), **named)
        return replace(
            self,
            sources=tuple(last[KINDS[kind].shares] for kind in self.layers.kinds),
            taps=(verifier.num_layers - 1,),
            embedding_factor=verifier.embedding_factor,
        )

    def specs(self) -> dict[str, Any]:
        """Returns the specs of the layers and their table, and of the projections and clusters."""
        d = self.layers.hidden_size
        j = self.target_hidden_size
        vocab_size = self.layers.vocab_size
        tree = decoder.specs(self.layers) | {
            "pre_projection": Spec((d, 2 * j), ("embed", None), inputs=(1,), outputs=(0,)),
            "post_projection": Spec((j, d), (None, "embed"), inputs=(1,), outputs=(0,)),
        }
        if self.num_clusters:
            shape = self.num_clusters, vocab_size // self.num_clusters
            tree["centroids"] = Spec((self.num_clusters, d), (None, None), inputs=(1,))
            tree["clusters"] = Spec(shape, (None, None), "range", dtype=jnp.int32)
        return tree

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> LastHidden:
        return LastHidden(jnp.zeros((batch, self.target_hidden_size), dtype))

    def extend(self, params: Params, verifier_params: Params, state: LastHidden, new: NewPositions) -> LastHidden:
        """Keeps the hidden state of the last committed position."""
        hidden_bj = layers.norm(self.layers, at_last(new.features_btj, new.count_b)[:, 0], verifier_params["norm"])
        is_new_b1 = (new.count_b > 0)[:, None]
        return LastHidden(jnp.where(is_new_b1, hidden_bj.astype(state.hidden_bj.dtype), state.hidden_bj))

    def draft(self, inputs: Inputs) -> Expander:
        """Returns the children of the anchor, and the layers that continue below them."""
        step = AssistantStep(self, inputs.attention)
        committed = committed_layers(inputs.cache, self.sources)
        tables = {"embed": inputs.verifier_params["embed"]}
        shared = SharedInputs(inputs.params, tables, committed, inputs.temperature_b)
        first = step.run(shared, inputs.anchor_b[:, None], inputs.state.hidden_bj[:, None])
        position_b = committed.length_b + 1
        lanes = LaneExpander(shared, position_b, first, step=step, scratch=(), num_depths=inputs.depths)
        return join_ngrams(lanes, inputs, self.ngrams)


@struct.dataclass
class Committed:
    """Committed positions of the verifier, as the assistant's layers read them.

    Attention expects keys and values of the new positions, but the assistant computes none. The last committed position is
    passed in their place.

    Attributes:
      before: keys and values of each layer. Entries at and after the last committed position are not read.
      last: keys and values [b, 1, k, e] of each layer at that position.
      length_b: number of committed positions, at least 1.
    """

    before: tuple[LayerKV, ...]
    last: tuple[tuple[jax.Array, jax.Array], ...]
    length_b: jax.Array


def committed_layers(cache: Cache, sources: Sequence[int]) -> Committed:
    """Returns the committed positions of the verifier's layers `sources`."""
    last = {source: cache.layers[source].last(cache.length_b) for source in {*sources}}
    return Committed(
        tuple(cache.layers[source] for source in sources), tuple(last[source] for source in sources), cache.length_b
    )


@dataclass(frozen=True)
class AssistantStep:
    """The `Step` of an assistant: a token per lane, each carrying the hidden state of its parent."""

    drafter: AssistantDrafter
    attention: str

    def __call__(self, shared: SharedInputs, level: Level) -> LaneState:
        return self.run(shared, level.token_bw, level.carry)

    def run(self, shared: SharedInputs, token_bw: jax.Array, hidden_bwj: jax.Array) -> LaneState:
        """Returns the children of tokens, and the hidden states after them, given the hidden states before them."""
        params = shared.params
        embedded_bwj = vocab.embed(shared.tables["embed"], token_bw, self.drafter.embedding_factor).astype(hidden_bwj.dtype)
        joined_bwj = jnp.concatenate([embedded_bwj, hidden_bwj], axis=-1)
        x_bwd = quantized.product("bwj,dj->bwd", joined_bwj, params["pre_projection"])
        out_bwd = self.through_layers(params, sharding.constrain(x_bwd, ("batch", None, None)), shared.context)
        offered = self.likeliest(params, out_bwd, shared.temperature_b)
        return LaneState(quantized.product("bwd,jd->bwj", out_bwd, params["post_projection"]), (), *offered)

    def through_layers(self, params: Params, x_bwd: jax.Array, committed: Committed) -> jax.Array:
        """Returns the outputs of the layers after the final norm, [b, w, d]."""
        config = self.drafter.layers
        position_b1 = committed.length_b[:, None]
        mask_bw1 = jnp.ones((*x_bwd.shape[:2], 1), bool)
        inputs = {}
        for kind in dict.fromkeys(config.kinds):
            precomputed = KINDS[kind].precompute(config.of_kind(kind), position_b1, mask_bw1)
            inputs[kind] = PassInputs(position_b1, mask_bw1, committed.length_b - 1, precomputed, self.attention)
        weights = decoder.each_layer(params)
        no_inputs = [None] * config.num_layers
        operands = weights, config, params["norm"], x_bwd, inputs, committed.before, committed.last, no_inputs
        return decoder.run_layers(*operands)[0]

    def likeliest(self, params: Params, out_bwd: jax.Array, temperature_b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the likeliest tokens and their log-probabilities, like `vocab.likeliest`."""
        count = self.drafter.children
        drafter = self.drafter
        if not drafter.num_clusters:
            return vocab.likeliest(params["embed"], out_bwd, count, temperature_b)

        def in_clusters(out_bwd: jax.Array) -> tuple[jax.Array, jax.Array]:
            scores_bwc = quantized.product("bwd,cd->bwc", out_bwd, params["centroids"])
            _, chosen_bwc = selection.top_k(scores_bwc, drafter.top_clusters)
            ids_bwn = params["clusters"][chosen_bwc].reshape(*out_bwd.shape[:2], -1)
            logits_bwn = jnp.einsum("bwd,bwnd->bwn", out_bwd, vocab.embed(params["embed"], ids_bwn))
            wide_bwn = logits_bwn.astype(at_least_float32(logits_bwn.dtype))
            num_others = drafter.layers.vocab_size - drafter.draft_vocab_size
            values_bwk, at_bwk = selection.top_k(wide_bwn, count)
            peak_bw1, temperature_b11 = values_bwk[..., :1], temperature_b[:, None, None]
            others_bw1 = jnp.min(wide_bwn, axis=-1, keepdims=True) - 1 - peak_bw1
            total_bw1 = jnp.sum(jnp.exp((wide_bwn - peak_bw1) / temperature_b11), axis=-1, keepdims=True)
            total_bw1 += num_others * jnp.exp(others_bw1 / temperature_b11)
            log_probs_bwk = (values_bwk - peak_bw1) / temperature_b11 - jnp.log(total_bw1)
            return jnp.take_along_axis(ids_bwn, at_bwk, axis=-1), log_probs_bwk

        return vocab.by_chunks(in_clusters, drafter.draft_vocab_size * drafter.layers.hidden_size, out_bwd)
