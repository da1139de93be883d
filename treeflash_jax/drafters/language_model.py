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
from treeflash_jax.drafters import steering
from treeflash_jax.drafters.inputs import Inputs
from treeflash_jax.drafters.lanes import Below, LaneExpander, LaneSettings, Row, children_of, kept_of
from treeflash_jax.drafters.steering import SteeringConfig
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers import forward as model
from treeflash_jax.verifiers.config import ModelConfig

OPTIONS = ("children", "depths")
READS_TOKENS = True
READS_PROMPT = True
OWN_TOKENIZER = True
DIALECT = "language-model"


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Sizes of a language model that drafts, and how trees are drafted with it unless a call says otherwise.

    Attributes:
      lanes: nodes of a level that best-first search follows.
      steering: how the verifier's hidden states steer it; None: not at all.
      attention: how `extend` reads the context; None: as the devices at hand do it best.
    """

    kind: ClassVar[str] = "language model"

    layers: ModelConfig
    num_depths: int = 8
    num_nodes: int = 16
    lanes: int | None = 4
    drafter_temperature: float = 1.0
    sampled_above: float | None = None
    steering: SteeringConfig | None = None
    attention: str | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """It reads the tokens, and of the verifier only what steers it."""
        return () if self.steering is None else self.steering.taps

    def fitted(self, verifier: ModelConfig) -> LanguageModelConfig:
        """This config. Raises ValueError where the vocabularies differ in size, or the steering is of other models."""
        if self.layers.vocab_size != verifier.vocab_size:
            raise ValueError(
                f"drafter does not fit the verifier: got a language model with a vocabulary of {self.layers.vocab_size}, "
                f"expected the verifier's, of {verifier.vocab_size}; use a smaller model of the same family"
            )
        if self.steering is not None:
            self.steering.check_fits(verifier, self.layers)
        return self


@struct.dataclass
class LanguageModelState:
    """What the small model remembers.

    Attributes:
      context: its cache.
      hidden_bd: its hidden state (after the final norm) at the last row.
      shift_byf: what steers its next rows; None where nothing does. Rows of the context keep what steered them.
    """

    context: caches.KVCache
    hidden_bd: jax.Array
    shift_byf: jax.Array | None = None

    def axes(self) -> LanguageModelState:
        shift = None if self.shift_byf is None else ("batch", None, "ffn")
        return LanguageModelState(caches.axes(self.context), ("batch", None), shift)

    def grow(self, capacity: int) -> LanguageModelState:
        return self.replace(context=caches.grow(self.context, capacity))

    def cut(self, length_b: jax.Array) -> LanguageModelState:
        shift_byf = None if self.shift_byf is None else jnp.zeros_like(self.shift_byf)  # prompts are not steered
        return self.replace(context=self.context.cut(length_b), shift_byf=shift_byf)


def steered(config: LanguageModelConfig, steering: SteeringConfig) -> LanguageModelConfig:
    """See `Drafter.steered`."""
    return replace(config, steering=steering)


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
    """All weights of the model, its tables among them, and of its steering."""
    steered = {} if config.steering is None else {"steering": steering.specs(config.steering)}
    return model.specs(config.layers) | steered


def init(config: LanguageModelConfig, batch: int, capacity: int, dtype: Any) -> LanguageModelState:
    """The state before any text, with room for `capacity` positions."""
    context = caches.allocate(config.layers, batch, capacity, dtype)
    shift_byf = None
    if config.steering is not None:
        shift_byf = jnp.zeros((batch, config.steering.num_layers, config.steering.ffn), dtype)
    return LanguageModelState(context, jnp.zeros((batch, config.layers.hidden_size), dtype), shift_byf)


def extend(
    params: dict[str, Any],
    tables: Any,
    config: LanguageModelConfig,
    state: LanguageModelState,
    features_btj: jax.Array | None,
    tokens_bt: jax.Array,
    count_b: jax.Array,
) -> LanguageModelState:
    """Reads the next tokens of the text, the prompt's from the first on; tables are not read.

    A steered model runs its last row under what the verifier knew there, and the rows before it as it did when it drafted
    them. Prompts, whose features it is not shown, are not steered.
    """
    batch, rows = tokens_bt.shape
    shift, shift_byf = None, state.shift_byf
    if shift_byf is not None and features_btj is not None:
        shift, shift_byf = _steered(params["steering"], state, features_btj, count_b)
    elif shift_byf is not None:
        shift = _held(shift_byf)
    positions_bt = state.context.length_b[:, None] + jnp.arange(rows)
    attention = config.attention or devices.here().attention(params["embed"].dtype)
    mask_btt = model.causal_mask(batch, rows)
    out = model.forward(
        params, config.layers, tokens_bt, positions_bt, mask_btt, state.context, shift=shift, attention=attention
    )  # fmt: skip
    last_bd = jnp.take_along_axis(out.hidden_btd, jnp.maximum(count_b - 1, 0)[:, None, None], axis=1)[:, 0]
    # Always all of them: it makes stores wait for the pass, see `append`.
    kept_b = jnp.where(jnp.isnan(out.hidden_btd[:, 0, 0]), 0, count_b)
    return LanguageModelState(
        context=caches.append(state.context, out.rows, kept_b),
        hidden_bd=jnp.where((count_b > 0)[:, None], last_bd, state.hidden_bd),
        shift_byf=shift_byf,
    )


def _steered(
    own: Any, state: LanguageModelState, features_btj: jax.Array, count_b: jax.Array
) -> tuple[Callable[[int], jax.Array], jax.Array]:
    """What steers each of the new rows, by layer, and what steers the rows to come."""
    last_b1j = jnp.take_along_axis(features_btj, jnp.maximum(count_b - 1, 0)[:, None, None], axis=1)
    new_byf = steering.shifts(own, steering.normed(own, last_b1j)[:, 0]).astype(state.shift_byf.dtype)
    new_byf = jnp.where((count_b > 0)[:, None, None], new_byf, state.shift_byf)
    is_last_bt1 = (jnp.arange(features_btj.shape[1]) == count_b[:, None] - 1)[..., None]
    shift = lambda layer: jnp.where(is_last_bt1, new_byf[:, None, layer], state.shift_byf[:, None, layer])  # noqa: E731
    return shift, new_byf


def _held(shift_byf: jax.Array) -> Callable[[int], jax.Array]:
    """The same for all rows, by layer."""
    return lambda layer: shift_byf[:, None, layer]


@dataclass(frozen=True)
class Level:
    """The `Step` of a language model: one row per lane. What it reads is the weights, the context and a temperature."""

    config: LanguageModelConfig
    children: int
    attention: str

    def __call__(self, shared: tuple[Any, LanguageModelState, jax.Array], row: Row) -> Below:
        params, state, temperature_b = shared
        out = model.forward(
            params, self.config.layers, row.token_bw, row.position_bw, row.seen_bwx, state.context,
            earlier=row.earlier, attention=self.attention,
            shift=None if state.shift_byf is None else _held(state.shift_byf),
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
        (inputs.params, state, inputs.temperature_b),
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
    steered = Work() if config.steering is None else count.weights(steering.specs(config.steering), 1)
    return passed + steered + count.cached(config.layers, count.context) + count.cached(config.layers, tokens)


def identity(config: LanguageModelConfig, settings: LaneSettings) -> dict[str, Any]:
    return {"depths": settings.depths, "children": settings.children, "lanes": config.lanes}
