"""The protocols of a drafter (`Drafter`) and of its state, and the inputs of a draft.

Shape suffixes: b batch, s token slots, t positions, j tapped layers x model, d model, z draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.models.caches import Cache
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import Expander

EITHER = "either"  # a value of `Drafter.thinking`


@struct.dataclass
class State(ABC):
    """A drafter's memory between rounds: a pytree of arrays whose first axis is the batch. No other module reads it."""

    @abstractmethod
    def axes(self) -> Self:
        """Returns the logical axes (`sharding.Axes`) of every array, in the structure of the state."""

    @abstractmethod
    def grow(self, capacity: int) -> Self:
        """Returns the same state with room for `capacity` positions."""

    @abstractmethod
    def cut(self, length_b: jax.Array) -> Self:
        """Returns the state after only the first `length_b` positions. `extend` then adds further positions.

        What a draft reads of the last position may be left as it is: `extend` always comes before the next draft.
        """


@struct.dataclass
class ContextState(State):
    """State of a drafter with a cache. An input of the next draft is None if the drafter does not read it.

    Attributes:
      hidden_bd: hidden state at the last position: the output of EAGLE-3's layer, the output of the final norm in a
        language model or a multi-token prediction layer, or the fused features of a block drafter whose head
        `reads_context`.
    """

    context: Cache
    hidden_bd: jax.Array | None = None

    def axes(self) -> Self:
        return ContextState(self.context.axes(), None if self.hidden_bd is None else ("batch", None))

    def grow(self, capacity: int) -> Self:
        return self.replace(context=self.context.grow(capacity))

    def cut(self, length_b: jax.Array) -> Self:
        return self.replace(context=self.context.cut(length_b))


@dataclass(frozen=True)
class NewPositions:
    """Committed positions that are not in a drafter's state yet.

    Attributes:
      features_btj: verifier features at these positions; None in a prompt if the drafter `reads_prompt`.
      tokens_bt: the token that follows each position.
      count_b: number of valid positions; the others are padding. 0 leaves a sequence unchanged.
      attention: name of the attention implementation, as in `Inputs`; ignored by drafters without a network.
    """

    features_btj: jax.Array | None
    tokens_bt: jax.Array
    count_b: jax.Array
    attention: str = "xla"


@dataclass(frozen=True)
class Inputs:
    """Inputs of a draft.

    Attributes:
      params: the drafter's weights.
      verifier_params: the verifier's weights, whose embedding and vocabulary tables drafters share.
      state: the drafter's state.
      anchor_b: the last committed token of each sequence.
      temperature_b: temperature of the draft distribution, above 0.
      depths: deepest level of the round's tree, from 1 to the drafter's `num_depths`; static.
      tokens_bs: the text so far, with the anchor last; slots past its end hold garbage.
      length_b: number of tokens of the text.
      attention: name of the attention implementation in `attention.IMPLEMENTATIONS`; static.
      cache: the verifier's cache of the text without the anchor; read only.
    """

    params: Params
    verifier_params: Params
    state: State
    anchor_b: jax.Array
    temperature_b: jax.Array
    depths: int
    tokens_bs: jax.Array
    length_b: jax.Array
    attention: str = "xla"
    cache: Cache | None = None


@dataclass(frozen=True, kw_only=True)
class Drafter(ABC):
    """A drafter: sizes, and functions that draft. It must be immutable and hashable, because programs are compiled for it.

    To add a drafter, write a subclass in a new file, a file dialect that reads and writes it (`formats.dialects`, with a
    line in DIALECTS) and a stage that trains it (`train/stages/drafting.py`). tests/test_extending_drafter.py has all
    three.

    A subclass also has two attributes, as fields, properties or class attributes:
      num_depths: deepest level that it can draft.
      taps: 0-based indices of the verifier layers whose output (residual stream) it reads, in the order in which it reads
        them.

    Attributes:
      kind: name for messages and records.
      dialect: name of the file dialect in which it is saved by default.
      settings: names of the GenerateConfig fields that it takes (`configured`). The drafter has attributes of the same
        names. Other settings of drafters are rejected with it.
      reads_tokens: whether `extend` reads tokens. The token that follows a position is known one step after its features.
      reads_prompt: whether `extend` receives the prompt's tokens from the first token on, without features (None), as the
        verifier does. Tokens after the prompt are passed as to any other drafter.
      may_offer_nothing: whether trees often have only a root. If all trees of a round do, it verifies only the roots.
      has_tokenizer: whether its folder contains a tokenizer, which must equal the verifier's.
      keeps_weights: whether it can compute with the weights of quantised files as they are (`models.quantized`).
      thinking: whether it was trained on answers with thinking; EITHER: on answers with and without; None: unknown.
      max_positions: length of the longest text that it was made for; None: no limit.
      lanes: default number of nodes per level that best-first search expands; None: all nodes.
      num_nodes: default number of verified nodes, root included.
      drafter_temperature: default temperature of the draft distribution.
      head_dims: sizes of its attention heads; () without attention.
      tau: mean tokens per round with a CPU's default tree (8 nodes, joined with n-grams), greedy, on typical prompts. CPUs
        decide with it whether to draft by default; None: unknown.
    """

    kind: ClassVar[str]
    dialect: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()
    reads_tokens: ClassVar[bool] = False
    reads_prompt: ClassVar[bool] = False
    may_offer_nothing: ClassVar[bool] = False
    has_tokenizer: ClassVar[bool] = False
    keeps_weights: ClassVar[bool] = False

    num_nodes: int = 16
    drafter_temperature: float = 1.0
    tau: float | None = None

    @property
    def depths(self) -> int:
        """Value of the setting `depths`."""
        return self.num_depths

    @property
    def thinking(self) -> bool | str | None:
        return EITHER

    @property
    def max_positions(self) -> int | None:
        return None

    @property
    def lanes(self) -> int | None:
        return None

    @property
    def head_dims(self) -> tuple[int, ...]:
        return ()

    def setting_values(self) -> dict[str, Any]:
        """Returns the value of each of `settings`, for records."""
        return {name: getattr(self, name) for name in self.settings}

    @abstractmethod
    def specs(self) -> dict[str, Any]:
        """Returns a `parameters.Spec` for each weight, by name; values may be trees."""

    @abstractmethod
    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> State:
        """Returns the empty state, with room for `capacity` positions."""

    @abstractmethod
    def extend(self, params: Params, verifier_params: Params, state: State, new: NewPositions) -> State:
        """Adds the next committed positions to the state.

        Args:
          params, verifier_params: weights of the drafter and of the verifier.
        """

    @abstractmethod
    def draft(self, inputs: Inputs) -> Expander:
        """Returns the continuations of every sequence: a `TransitionTable`, a `LaneExpander` or another `Expander`."""

    def configured(self, **settings: Any) -> Self:
        """Returns the drafter with settings of a call or a device stored in its fields.

        Weights and states do not depend on these settings.

        Args:
          settings: values by name, for some of `Drafter.settings`; never None. By default, stores them in fields of these
            names.

        Raises ValueError for a value that this drafter does not support.
        """
        return replace(self, **settings)

    def fitted(self, verifier: ModelConfig) -> Self:
        """Returns this drafter with sizes of the verifier filled in. Raises ValueError if it was made for another one."""
        return self

    def limited(self, draft_vocab_size: int) -> Self:
        """Returns this drafter with a draft vocabulary of this size. Raises ValueError if its kind supports none."""
        raise ValueError(f"got a draft vocabulary with a drafter of kind {self.kind!r}, expected a kind that supports one")


def require_fit(is_met: bool, problem: str, advice: str = "load the drafter that was trained for this verifier") -> None:
    """Raises ValueError with the problem and the advice unless a drafter fits the verifier."""
    if not is_met:
        raise ValueError(f"drafter does not fit the verifier: {problem}; {advice}")


def require_sizes(verifier: ModelConfig, taps: Sequence[int], **sizes: tuple[Any, Any]) -> None:
    """Raises ValueError unless the verifier has all tapped layers and both values (drafter, verifier) of a size agree."""
    for name, (got, expected) in sizes.items():
        problem = f"{name.replace('_', ' ')} is {got} in the drafter and {expected} in the verifier"
        require_fit(got == expected, problem)
    outside = [tap for tap in taps if not 0 <= tap < verifier.num_layers]
    has_layers = f"but the verifier has layers 0 to {verifier.num_layers - 1}"
    require_fit(not outside, f"it reads verifier layers {outside}, {has_layers}")


def draft_ids(params: Mapping[str, Any]) -> jax.Array | None:
    """Returns the verifier's ids of the draft vocabulary; None if this is the whole vocabulary of the verifier."""
    offsets_z = params.get("offsets")
    return None if offsets_z is None else jnp.arange(offsets_z.size, dtype=jnp.int32) + offsets_z


def listed_specs(draft_vocab_size: int, width: int) -> dict[str, Any]:
    """Returns the specs of a draft vocabulary: its vocabulary table, and offsets of its ids; {} for size 0."""
    if not draft_vocab_size:
        return {}
    offsets = Spec((draft_vocab_size,), (None,), "zeros", dtype=jnp.int32)
    return {"unembed": Spec((draft_vocab_size, width), ("vocab", "embed"), inputs=(1,)), "offsets": offsets}
