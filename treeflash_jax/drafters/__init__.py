"""Drafters: what proposes continuations of a text to the verifier.

A drafter is one module, with one line in DRAFTERS, that has what `Drafter` lists. Decoding, benchmarks and files reach a
drafter through it. How it is trained is a stage of its own, behind the door in `train/drafting.py`.

Example of a round (decoding/rounds.py):
  >>> own = drafters.of(config)
  >>> inputs = Inputs(weights.drafter, tables, config, settings, state, anchor_b, temperature_b, depths)
  >>> expander = None
  >>> for stage in own.stages(config).values():
  ...     expander = stage(inputs, expander)
  >>> tree = best_first(expander, anchor_b, num_nodes)  # then verified and accepted
  >>> state = own.extend(weights.drafter, weights.verifier, config, state, features_btj, tokens_bt, count_b)

Shape suffixes: b batch, t rows, j tapped layers x model, v vocabulary, d model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from treeflash_jax.costs import Counter, Work
from treeflash_jax.drafters import block, eagle3, language_model, ngram
from treeflash_jax.drafters.inputs import Inputs
from treeflash_jax.drafters.steering import SteeringConfig
from treeflash_jax.trees.expander import Expander
from treeflash_jax.verifiers.config import ModelConfig


class DrafterSizes(Protocol):
    """What everybody may ask of a drafter's config, which is a frozen dataclass of its own kind.

    Attributes:
      kind: its name in DRAFTERS.
      num_depths: the deepest level that it can draft.
      taps: 0-based verifier layers whose output (residual stream) it reads, in the order it reads them.
      num_nodes: default number of verified nodes, root included.
      lanes: default number of nodes of a level that best-first search follows; None: all of them.
      drafter_temperature: default temperature of the draft distribution.
      sampled_above: sequences of at least this temperature get a sampled tree where no builder is asked for; None: none do.
    """

    kind: str
    num_depths: int
    taps: tuple[int, ...]
    num_nodes: int
    lanes: int | None
    drafter_temperature: float
    sampled_above: float | None

    def fitted(self, verifier: Any) -> Any:
        """This config, with what only the verifier's tells filled in.

        Raises:
          ValueError: the drafter was made for another verifier.
        """


class State(Protocol):
    """What a drafter remembers between rounds: a pytree whose arrays have the batch as first axis."""

    def axes(self) -> Any:
        """The logical axes (mesh.Axes) of every array, in the structure of the state."""

    def grow(self, capacity: int) -> State:
        """The same state with room for `capacity` positions."""

    def cut(self, length_b: jax.Array) -> State:
        """Returns the state after only the first `length_b` positions; other positions are added afterwards."""


class Drafter(Protocol):
    """The functions of a drafter's module. Its state (`State`) is opaque to everyone else.

    Attributes:
      OPTIONS: fields of `settings.DraftConfig` that `choose` reads; others are refused unless they have their defaults. The
        temperature of the draft is every drafter's.
      READS_TOKENS: whether `extend` reads the tokens. A row's token is known one step after its features.
      MAY_OFFER_NOTHING: optional. Where it is True, trees are often the root alone, and rounds in which all are then verify
        nothing but the roots.
      DIALECT: the file dialect (`formats.dialects`) that it is saved in unless another one is asked for.
      READS_PROMPT: optional. Where it is True, prompts are shown as their own tokens, from the first on, and without
        features (None): for drafters that read a text as the verifier does. Tokens after the prompt come as to any other.
      OWN_TOKENIZER: optional. Where it is True, the drafter's folder has a tokenizer, which must be the verifier's, token
        for token.
      steered: optional function (config, SteeringConfig) -> the config of the drafter steered by it.
    """

    OPTIONS: tuple[str, ...]
    READS_TOKENS: bool
    DIALECT: str

    def choose(self, config: Any, options: Any) -> tuple[Any, Any]:
        """The config and the static settings of a draft that a user's options ask for; both hashable.

        Raises:
          ValueError: options that this drafter does not have.
        """

    def specs(self, config: Any) -> Any:
        """A tree with one `params.Spec` per weight."""

    def init(self, config: Any, batch: int, capacity: int, dtype: Any) -> State:
        """The state before any context, with room for `capacity` positions."""

    def extend(
        self,
        params: Any,
        tables: Any,
        config: Any,
        state: Any,
        features_btj: jax.Array,
        tokens_bt: jax.Array,
        count_b: jax.Array,
    ) -> Any:
        """Adds the next committed positions to the state.

        Args:
          params: weights of `specs`.
          tables: the verifier's weights, whose embedding table drafters share.
          config: static.
          state: so far.
          features_btj: verifier features at consecutive positions, the first following those of the state.
          tokens_bt: the token that follows each of these positions.
          count_b: how many of the rows are real; the rest is padding. 0 leaves a sequence as it was.
        """

    def stages(self, config: Any) -> Mapping[str, Callable[[Inputs, Any], Any]]:
        """What drafting does, in order, each step a function of the inputs and of what the step before it returned.

        The first gets None and the last returns an `Expander`: a table of all levels, or one whose network runs once per
        level (`lanes.LaneExpander`). Benchmarks time each of them by its name; levels that run a network are part of the
        stage "tree".
        """

    def work(
        self, count: Counter, config: Any, settings: Any, verifier: ModelConfig, quantize: str | None = None
    ) -> dict[str, tuple[Work, Work]]:
        """Bytes and FLOPs of every stage, by its name: what it has to do, and what it hands to the next one.

        Networks that run while the tree is built count under "tree".

        Args:
          count: of the device, the batch and its context.
          config, settings: static.
          verifier: whose embedding and vocabulary tables are read.
          quantize: scheme of these tables.
        """

    def extend_work(self, count: Counter, config: Any, tokens: float) -> Work:
        """Bytes and FLOPs of `extend` for so many positions of every sequence."""

    def identity(self, config: Any, settings: Any) -> dict[str, Any]:
        """Returns the sizes and settings, by name, that measurements of this drafter depend on besides its weights."""


DRAFTERS: dict[str, Drafter] = {"block": block, "eagle3": eagle3, "language model": language_model, "ngram": ngram}


def reads_prompt(config: DrafterSizes) -> bool:
    """Whether this drafter is shown prompts as their own tokens; see `Drafter`."""
    return getattr(of(config), "READS_PROMPT", False)


def may_offer_nothing(config: DrafterSizes) -> bool:
    """Whether rounds have to be ready for trees without a node below the root; see `Drafter`."""
    return getattr(of(config), "MAY_OFFER_NOTHING", False)


def own_tokenizer(config: DrafterSizes) -> bool:
    """Whether this drafter comes with a tokenizer that has to be the verifier's; see `Drafter`."""
    return getattr(of(config), "OWN_TOKENIZER", False)


def steered(config: DrafterSizes, steering: SteeringConfig) -> DrafterSizes:
    """The config of this drafter, steered by the verifier's hidden states. Raises ValueError where it cannot be."""
    own = of(config)
    if not hasattr(own, "steered"):
        raise ValueError(f"got steering with a drafter of kind {config.kind!r}, expected a language model to be steered")
    return own.steered(config, steering)


def of(config: DrafterSizes) -> Drafter:
    """The module of a drafter, by its config."""
    return DRAFTERS[config.kind]


__all__ = ["DRAFTERS", "Drafter", "DrafterSizes", "Expander", "Inputs", "State", "may_offer_nothing", "of", "reads_prompt"]
