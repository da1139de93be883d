"""A small language model as the drafter: any supported architecture with the verifier's vocabulary.

Its cache holds one position more than the verifier's: the anchor's. The children of the anchor are therefore known before a
round begins. Levels of a tree run in lanes (lanes.py). After a round, the model computes the accepted path again in one
pass and appends it to its cache.

Shape suffixes: b batch, t positions, w lanes, d model.

Source: speculative decoding (arXiv 2211.17192, 2302.01318); EAGLE-2 (arXiv 2406.16858) for trees with few lanes.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Params
from treeflash_jax.drafters import steering
from treeflash_jax.drafters.lanes import LaneDrafter, LaneState, Level, SharedInputs, extended
from treeflash_jax.drafters.protocol import (
    ContextState,
    Inputs,
    NewPositions,
    draft_ids,
    listed_specs,
    require_fit,
    require_sizes,
)
from treeflash_jax.drafters.steering import SteeredState, Steering
from treeflash_jax.models import decoder, vocab
from treeflash_jax.models.backend.indexing import at_last
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import Expander


@dataclass(frozen=True, kw_only=True)
class LanguageModelDrafter(LaneDrafter):
    """A language model that drafts.

    Attributes:
      draft_vocab_size: number of tokens that it drafts, listed by the weight `offsets`; 0: the whole vocabulary.
      steering: the verifier whose hidden states shift its layers; None: the model reads only tokens.
    """

    kind: ClassVar[str] = "language_model"
    dialect: ClassVar[str] = "language_model"
    reads_prompt: ClassVar[bool] = True
    has_tokenizer: ClassVar[bool] = True
    keeps_weights: ClassVar[bool] = True

    num_depths: int = 8
    lanes: int | None = 4
    draft_vocab_size: int = 0
    steering: Steering | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.steering is None else self.steering.taps

    def fitted(self, verifier: ModelConfig) -> Self:
        """Returns this drafter. Raises ValueError if the vocabularies differ in size, or if another verifier steers it."""
        got, expected = self.layers.vocab_size, verifier.vocab_size
        problem = f"got a language model with a vocabulary of {got}, expected the verifier's, of {expected}"
        require_fit(got == expected, problem, "use a smaller model of the same family")
        if self.steering is not None:
            is_dense = not (self.layers.num_experts or self.layers.sizes)
            kind = self.layers.model_type
            expect(is_dense, "steering of a model of type", kind, "dense layers of one width: leave steering out")
            require_sizes(verifier, self.taps, steering_width=(self.steering.width, verifier.hidden_size))
        return self

    def limited(self, draft_vocab_size: int) -> Self:
        return replace(self, draft_vocab_size=draft_vocab_size)

    def specs(self) -> dict[str, Any]:
        """Returns the specs of the model with its tables, of its steering, and of the list of tokens that it drafts."""
        steers = {} if self.steering is None else {"steering": steering.specs(self.steering, self.layers)}
        return decoder.specs(self.layers) | steers | listed_specs(self.draft_vocab_size, self.layers.hidden_size)

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> ContextState:
        state = super().init(batch, capacity, dtype)
        if self.steering is None:
            return state
        shape = batch, 1, self.layers.intermediate_size
        return SteeredState(**vars(state), shifts=tuple(jnp.zeros(shape, dtype) for _ in self.layers.kinds))

    def extend(self, params: Params, verifier_params: Params, state: ContextState, new: NewPositions) -> ContextState:
        """Reads the next tokens of the text, from the prompt's first token on. Reads no weights of the verifier.

        With steering, features at the last position give the shifts for that position and for the next draft. Positions
        before it keep the shifts with which they were drafted. Prompts come without features and are not shifted.
        """
        batch, length = new.tokens_bt.shape
        if self.steering is not None and new.features_btj is not None:
            shifts = steering.make_shifts(params["steering"], at_last(new.features_btj, new.count_b))
            is_last_bt1 = (jnp.arange(length) == new.count_b[:, None] - 1)[..., None]
            has_last_b11 = (new.count_b > 0)[:, None, None]
            pairs = list(zip(shifts, state.shifts, strict=True))
            params = steering.steer(params, [jnp.where(is_last_bt1, x_b1f, old_b1f) for x_b1f, old_b1f in pairs])
            state = state.replace(shifts=tuple(jnp.where(has_last_b11, x_b1f, old_b1f) for x_b1f, old_b1f in pairs))
        positions_bt = state.context.length_b[:, None] + jnp.arange(length)
        mask_btt = decoder.causal_mask(batch, length)
        out = decoder.forward(
            params, self.layers, new.tokens_bt, positions_bt, mask_btt, state.context, attention=new.attention
        )
        return extended(state, out.new, at_last(out.hidden_btd, new.count_b), new.count_b)

    def draft(self, inputs: Inputs) -> Expander:
        """Returns the children of the anchor, and the model that continues below them."""
        params = inputs.params if self.steering is None else steering.steer(inputs.params, inputs.state.shifts)
        shared = SharedInputs(params, {}, inputs.state.context, inputs.temperature_b)
        return self.expand(inputs, shared, ModelStep(self, inputs.attention))


@dataclass(frozen=True)
class ModelStep:
    """The `Step` of a language model."""

    drafter: LanguageModelDrafter
    attention: str

    def __call__(self, shared: SharedInputs, level: Level) -> LaneState:
        out = decoder.forward(
            shared.params, self.drafter.layers, level.token_bw, level.position_bw, level.seen_bwx, shared.context,
            earlier=level.earlier, attention=self.attention,
        )  # fmt: skip
        return self.offer(shared, out.hidden_btd, out.new)

    def offer(self, shared: SharedInputs, hidden_bwd: jax.Array, kv: Any) -> LaneState:
        """Returns the children below the model's hidden states."""
        params = shared.params
        table_vd = params.get("unembed", params["embed"])
        count, cap = self.drafter.children, self.drafter.layers.logit_cap
        offered = vocab.likeliest(table_vd, hidden_bwd, count, shared.temperature_b, draft_ids(params), cap)
        return LaneState((), kv, *offered)
