"""A small language model as the drafter: any supported verifier with the vocabulary of the one that is served.

Its context holds one row more than the verifier's cache: the anchor's, so that what follows the anchor is known before a
round begins. Levels of a tree are rows of the model in lanes (lanes.py); after a round the rows of the accepted path are
computed once more, in one pass, and kept.

Shape suffixes: b batch, t rows, w lanes, d model of the small model.

Source: speculative decoding (arXiv 2211.17192, 2302.01318); EAGLE-2 (arXiv 2406.16858) for trees of few lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax import devices
from treeflash_jax.checks import quoted
from treeflash_jax.costs import Counter, Work
from treeflash_jax.drafters.inputs import Inputs
from treeflash_jax.drafters.lanes import Below, LaneExpander, LaneSettings, Row, children_of, kept_of
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers import forward as model
from treeflash_jax.verifiers.config import ModelConfig

OPTIONS = ("children", "depths")
READS_TOKENS = True
READS_PROMPT = True
DIALECT = "language-model"


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Sizes of a language model that drafts, and how trees are drafted with it unless a call says otherwise.

    Attributes:
      layers: of the model.
      num_depths: the deepest level drafted.
      lanes: nodes of a level that best-first search follows.
      attention: how `extend` reads the context; None: as the devices at hand do it best.
    """

    kind: ClassVar[str] = "language model"

    layers: ModelConfig
    num_depths: int = 8
    num_nodes: int = 16
    lanes: int | None = 4
    drafter_temperature: float = 1.0
    sampled_above: float | None = None
    attention: str | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """It reads the tokens and nothing of the verifier."""
        return ()

    def fitted(self, verifier: ModelConfig) -> LanguageModelConfig:
        """This config. Raises ValueError where the vocabularies differ in size."""
        if self.layers.vocab_size != verifier.vocab_size:
            raise ValueError(
                f"drafter does not fit the verifier: got a language model with a vocabulary of {self.layers.vocab_size}, "
                f"expected the verifier's, of {verifier.vocab_size}; use a smaller model of the same family"
            )
        return self


@struct.dataclass
class LanguageModelState:
    """What the small model remembers: its cache, and its hidden state (after the final norm) at the last row, [b, d]."""

    context: caches.KVCache
    hidden_bd: jax.Array

    def axes(self) -> LanguageModelState:
        return LanguageModelState(caches.axes(self.context), ("batch", None))

    def grow(self, capacity: int) -> LanguageModelState:
        return self.replace(context=caches.grow(self.context, capacity))


def choose(config: LanguageModelConfig, options: Any) -> tuple[LanguageModelConfig, LaneSettings]:
    """The config and the settings of a draft that a user's options ask for; see `drafters.Drafter`.

    Raises:
      ValueError: more children than the vocabulary has tokens.
    """
    vocabulary = config.layers.vocab_size
    if options.children > vocabulary:
        raise ValueError(f"got children {quoted(options.children)}, expected 1 to {vocabulary} (the vocabulary)")
    sizes = replace(config, num_depths=options.depths or config.num_depths, attention=options.attention)
    return sizes, LaneSettings.of(sizes, options)


def specs(config: LanguageModelConfig) -> dict[str, Any]:
    """All weights of the model, its tables among them."""
    return model.specs(config.layers)


def init(config: LanguageModelConfig, batch: int, capacity: int, dtype: Any) -> LanguageModelState:
    """The state before any text, with room for `capacity` positions."""
    context = caches.allocate(config.layers, batch, capacity, dtype)
    return LanguageModelState(context, jnp.zeros((batch, config.layers.hidden_size), dtype))


def extend(
    params: dict[str, Any],
    tables: Any,
    config: LanguageModelConfig,
    state: LanguageModelState,
    features_btj: jax.Array | None,
    tokens_bt: jax.Array,
    count_b: jax.Array,
) -> LanguageModelState:
    """Reads the next tokens of the text, the prompt's from the first on; tables and features are not read."""
    batch, rows = tokens_bt.shape
    positions_bt = state.context.length_b[:, None] + jnp.arange(rows)
    attention = config.attention or devices.here().attention(params["embed"].dtype)
    mask_btt = model.causal_mask(batch, rows)
    out = model.forward(
        params, config.layers, tokens_bt, positions_bt, mask_btt, state.context, attention=attention
    )  # fmt: skip
    last_bd = jnp.take_along_axis(out.hidden_btd, jnp.maximum(count_b - 1, 0)[:, None, None], axis=1)[:, 0]
    # Always all of them: it makes stores wait for the pass, see `append`.
    kept_b = jnp.where(jnp.isnan(out.hidden_btd[:, 0, 0]), 0, count_b)
    return LanguageModelState(
        context=caches.append(state.context, out.rows, kept_b),
        hidden_bd=jnp.where((count_b > 0)[:, None], last_bd, state.hidden_bd),
    )


@dataclass(frozen=True)
class Level:
    """The `Step` of a language model: one row per lane. What it reads is the weights, the context and a temperature."""

    config: LanguageModelConfig
    children: int
    attention: str

    def __call__(self, shared: tuple[Any, caches.KVCache, jax.Array], row: Row) -> Below:
        params, context, temperature_b = shared
        out = model.forward(
            params, self.config.layers, row.token_bw, row.position_bw, row.seen_bwx, context,
            earlier=row.earlier, attention=self.attention,
        )  # fmt: skip
        return Below((), out.rows, *self.offered(params, out.hidden_btd, temperature_b))

    def offered(
        self, params: dict[str, Any], hidden_bwd: jax.Array, temperature_b: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The likeliest tokens after these rows."""
        return children_of(params.get("unembed", params["embed"]), hidden_bwd, self.children, temperature_b)


def draft(inputs: Inputs, _: None) -> LaneExpander:
    """What may follow the anchor, and the model that goes on from there."""
    own, state = Level(inputs.config, inputs.settings.children, inputs.attention), inputs.state
    offered = own.offered(inputs.params, state.hidden_bd[:, None], inputs.temperature_b)
    return LaneExpander(
        (inputs.params, state.context, inputs.temperature_b),
        state.context.length_b,
        Below((), (), *offered),
        step=own,
        kept=kept_of(state.context),
        num_depths=inputs.depths,
    )


def stages(config: LanguageModelConfig) -> Mapping[str, Callable[[Inputs, Any], Any]]:
    """The children of the anchor; all that comes below them is drafted while the tree is built."""
    return {"draft": draft}


def work(
    count: Counter, config: LanguageModelConfig, settings: LaneSettings, verifier: ModelConfig, quantize: str | None = None
) -> dict[str, tuple[Work, Work]]:
    """Of the anchor's children one pass over the vocabulary; of every level below, one row of the model per lane."""
    own, rows = config.layers, settings.rows
    level = count.layers(own, rows, count.context + 1) + count.vocabulary(own, rows) + count.cached(own, count.context)
    levels = sum([level] * (config.num_depths - 1), Work())
    return {"draft": (count.vocabulary(own, 1), Work()), "tree": (levels, Work())}


def extend_work(count: Counter, config: LanguageModelConfig, tokens: float) -> Work:
    """Of reading so many new tokens of a text: a pass over them, and their keys and values."""
    passed = count.layers(config.layers, tokens, count.context + tokens / 2)
    return passed + count.cached(config.layers, count.context) + count.cached(config.layers, tokens)


def identity(params: Any, config: LanguageModelConfig, settings: LaneSettings) -> tuple[dict[str, Any], list[jax.Array]]:
    """What round times and acceptance depend on: sizes and settings by name, and weights that tell models apart."""
    named = {"depths": settings.depths, "children": settings.children, "rows": settings.rows}
    return named, [params["embed"], params["norm"], params["groups"][0][0]["o"]]
