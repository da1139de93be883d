"""The protocol of a drafter, its inputs in a round, and options that several kinds of drafters share.

Shape suffixes: b batch, t positions, j tapped layers x model, d model, y layers and f feed-forward width of the drafter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax.core.checks import bounded
from treeflash_jax.core.devices import Device
from treeflash_jax.core.parameters import Spec
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.costs import Counter, Work
from treeflash_jax.models.kv_cache import KVCache
from treeflash_jax.trees.shape import MAX_NODES


@dataclass(frozen=True, kw_only=True)
class DrafterSizes:
    """Config of a drafter and its defaults for trees; each kind adds the sizes of its network.

    Attributes:
      kind: the drafter's name in DRAFTERS.
      num_depths: the deepest level that it can draft. Like `taps`, each kind declares it as a field or property.
      taps: 0-based verifier layers whose output (residual stream) it reads, in the order it reads them.
      lent: names of the drafter's weights that are parts of the verifier's.
      lanes: default number of nodes per level that best-first search follows; None: all of them.
      num_nodes: default number of verified nodes, root included.
      drafter_temperature: default temperature of the draft distribution.
      sampled_above: sequences of at least this temperature get a sampled tree by default; None: none do.
      tau: mean tokens per round of a CPU's default tree (8 nodes, joined with n-grams), greedy, on typical prompts. CPUs
        use it to decide whether to draft by default; None: not known.
      thinking: optional. Whether it was trained on answers with thinking; None: its files do not say.
    """

    kind: ClassVar[str]
    lent: ClassVar[tuple[str, ...]] = ()
    lanes: ClassVar[int | None] = None

    num_nodes: int = 16
    drafter_temperature: float = 1.0
    sampled_above: float | None = None
    tau: float | None = None

    def fitted(self, verifier: ModelConfig) -> Any:
        """Returns this config, completed by sizes of the verifier. Raises ValueError if it was made for another one."""
        return self

    def steered(self, steering: Any) -> Any:
        """Returns this config, steered by the verifier (`SteeringConfig`). Raises ValueError if this kind cannot be."""
        raise ValueError(f"got steering with a drafter of kind {self.kind!r}, expected a language model to be steered")

    def limited(self, draft_vocab_size: int) -> Any:
        """Returns this config with a draft vocabulary of this size. Raises ValueError if this kind takes none."""
        expected = "a block drafter or a language model"
        raise ValueError(f"got a draft vocabulary with a drafter of kind {self.kind!r}, expected {expected}")


@struct.dataclass
class State:
    """A drafter's memory between rounds, a pytree of arrays whose first axis is the batch. The base class has none."""

    def axes(self) -> Any:
        """Returns the logical axes (sharding.Axes) of every array, in the structure of the state."""
        return self

    def grow(self, capacity: int) -> Self:
        """Returns the same state with room for `capacity` positions."""
        return self

    def cut(self, length_b: jax.Array) -> Self:
        """Returns the state after only the first `length_b` positions; other positions are added afterwards."""
        return self


@struct.dataclass
class ContextState(State):
    """State of a drafter with a cache: the cache, and inputs of the next draft, which are None if it has none.

    Attributes:
      hidden_bd: hidden state at the last position: the output of EAGLE-3's layer, or of a language model's final norm.
      shift_byf: shifts for the next positions (`steering`). Cached positions keep the shifts they were run with.
    """

    context: KVCache
    hidden_bd: jax.Array | None = None
    shift_byf: jax.Array | None = None

    @property
    def shift(self) -> Callable[[int], jax.Array] | None:
        """The shifts, the same for all positions, as a function of the layer; None without steering."""
        return None if self.shift_byf is None else lambda layer: self.shift_byf[:, None, layer]

    def axes(self) -> Self:
        hidden = None if self.hidden_bd is None else ("batch", None)
        return ContextState(self.context.axes(), hidden, None if self.shift_byf is None else ("batch", None, "ffn"))

    def grow(self, capacity: int) -> Self:
        return self.replace(context=self.context.grow(capacity))

    def cut(self, length_b: jax.Array) -> Self:
        shift_byf = None if self.shift_byf is None else jnp.zeros_like(self.shift_byf)  # prompts are not steered
        return self.replace(context=self.context.cut(length_b), shift_byf=shift_byf)


def require_fit(**sizes: tuple[Any, Any]) -> None:
    """Raises ValueError unless every pair of sizes, by name, is equal in the drafter and the verifier."""
    for name, (drafter, verifier) in sizes.items():
        if drafter != verifier:
            name = name.replace("_", " ")
            raise ValueError(
                f"drafter does not fit the verifier: {name} is {drafter} in the drafter and {verifier} in the verifier; "
                "load the drafter that was trained for this verifier"
            )


def draft_ids(params: Mapping[str, Any]) -> jax.Array | None:
    """Returns the verifier's ids of a draft vocabulary; None if it is the verifier's vocabulary."""
    offsets_z = params.get("offsets")
    return None if offsets_z is None else jnp.arange(offsets_z.size, dtype=jnp.int32) + offsets_z


def listed_specs(draft_vocab_size: int, width: int) -> dict[str, Any]:
    """Returns the weights of a draft vocabulary: its part of a vocabulary table, and offsets of its ids; {} without one."""
    if not draft_vocab_size:
        return {}
    offsets = Spec((draft_vocab_size,), (None,), "zeros", dtype=jnp.int32)
    return {"unembed": Spec((draft_vocab_size, width), ("vocab", "embed"), inputs=(1,)), "offsets": offsets}


@dataclass(frozen=True)
class Inputs:
    """Inputs of a drafter's stages in one round.

    Attributes:
      params: the drafter's weights.
      tables: the verifier's weights, whose embedding and vocabulary tables drafters share.
      config: the drafter's config, static.
      settings: static; returned by the drafter's `choose`.
      anchor_b: the last committed token of each sequence.
      temperature_b: temperature of the draft distribution, above 0.
      depths: the deepest level that the round's tree can have, from 1 to the drafter's; static.
      tokens_bs: the text so far, the anchor last; slots past its end hold garbage.
      length_b: number of tokens of the text.
    """

    params: Any
    tables: Any
    config: Any
    settings: Any
    state: Any
    anchor_b: jax.Array
    temperature_b: jax.Array
    depths: int
    tokens_bs: jax.Array
    length_b: jax.Array
    attention: str = "xla"


class Drafter(Protocol):
    """The functions of a drafter's module. Its state (`State`) is opaque to other modules.

    Attributes:
      OPTIONS: frozen dataclass of its options, declared with `option`: settings of `generate` and of the command line, and
        part of the records. Options of other drafters are refused unless they have their defaults.
      READS_TOKENS: whether `extend` reads the tokens. The token of a position is known one step after its features.
      DIALECT: default file dialect (`formats.dialects`) for saving it.
      STAGES: the steps of drafting by name, in order: functions of the inputs and of the previous step's result. The first
        gets None and the last returns an `Expander`: a table of all levels, or one whose network runs once per level
        (`lanes.LaneExpander`). Benchmarks time each step; levels that run a network belong to the stage "tree".
      READS_PROMPT: optional. If True, `extend` gets the prompt's own tokens, from the first on, and no features (None), for
        drafters that read a text as the verifier does. Tokens after the prompt come as to any other drafter.
      MAY_OFFER_NOTHING: optional. If True, trees are often the root alone, and a round verifies only the roots if all are.
      OWN_TOKENIZER: optional. If True, the drafter's folder has a tokenizer, which must equal the verifier's.
    """

    OPTIONS: type
    READS_TOKENS: bool
    DIALECT: str
    STAGES: Mapping[str, Callable[[Inputs, Any], Any]]

    def choose(self, config: Any, options: Any, device: Device) -> tuple[Any, Any]:
        """Returns the config and the static draft settings for a user's options; both hashable.

        Args:
          config: sizes of the drafter, a `DrafterSizes`.
          options: the call's settings, a `GenerateConfig`.
          device: device that drafts; options that are None get their default for it.

        Raises ValueError for options that this drafter does not support.
        """

    def specs(self, config: Any) -> Any:
        """Returns a tree with one `parameters.Spec` per weight."""

    def init(self, config: Any, batch: int, capacity: int, dtype: Any) -> State:
        """Returns the empty state, with room for `capacity` positions."""

    def extend(
        self,
        params: Any,
        tables: Any,
        config: Any,
        state: Any,
        features_btj: jax.Array,
        tokens_bt: jax.Array,
        count_b: jax.Array,
        *,
        attention: str,
    ) -> Any:
        """Adds the next committed positions to the state.

        Args:
          params, tables: the drafter's and the verifier's weights.
          features_btj: verifier features at consecutive positions, the first following those of the state.
          tokens_bt: the token that follows each of these positions.
          count_b: number of valid positions; the others are padding. 0 leaves a sequence unchanged.
          attention: attention implementation, a name in `attention.IMPLEMENTATIONS`; ignored without a network.
        """

    def work(
        self, count: Counter, config: Any, settings: Any, verifier: ModelConfig, quantize: str | None = None
    ) -> dict[str, tuple[Work, Work]]:
        """Counts bytes and FLOPs by stage: the stage's own work, and moving its result to the next stage.

        Networks that run while the tree is built count under "tree".

        Args:
          count: sizes of the device, the batch and its context.
          verifier, quantize: config of the verifier whose vocabulary tables are read, and their quantisation scheme.
        """

    def extend_work(self, count: Counter, config: Any, tokens: float) -> Work:
        """Counts bytes and FLOPs of `extend` for `tokens` positions of every sequence."""

    def identity(self, config: Any, settings: Any) -> dict[str, Any]:
        """Returns the sizes and settings, by name, that measurements of this drafter depend on besides its weights."""


option = partial(bounded, kind="speed")  # no option of a drafter changes the distribution of the output


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Options of drafters that list the most likely next tokens of every node."""

    children: int = option(16, "most likely next tokens kept for every candidate (K in the paper)", least=1, unit="tokens")


@dataclass(frozen=True, kw_only=True)
class JoinedOptions(ListOptions):
    """Options of drafters whose trees n-grams can join."""

    ngrams: int | None = option(
        None,
        "earlier occurrences of the last tokens in the text whose continuations join the tree (prompt lookup); 0: none",
        unset="0; for trees on a CPU 8",
        least=0,
        unit="matches",
    )


@dataclass(frozen=True, kw_only=True)
class LevelOptions(ListOptions):
    """Options of drafters that draft one level of the tree after the other."""

    depths: int | None = option(
        None,
        "deepest level of the tree, or length of the chain, for drafters whose network runs once per level",
        unset="the drafter's; 4 for the default tree on a CPU not using amx_bf16",
        least=1,
        most=MAX_NODES - 1,
        unit="levels",
    )
