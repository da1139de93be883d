"""A small language model as the drafter: any supported architecture with the verifier's vocabulary.

Its cache holds one position more than the verifier's: the anchor's, so that children of the anchor are known before a round
begins. Levels of a tree run in lanes (lanes.py); after a round the accepted path is computed again in
one pass and appended to the cache.

Shape suffixes: b batch, t positions, w lanes, d model.

Source: speculative decoding (arXiv 2211.17192, 2302.01318); EAGLE-2 (arXiv 2406.16858) for trees of few lanes.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from treeflash_jax.drafters.lanes import LaneDrafter, LaneState, Level, extended
from treeflash_jax.drafters.protocol import ContextState, Inputs, at_last, draft_ids, listed_specs, require_fit
from treeflash_jax.models import verifier as model
from treeflash_jax.models import vocab
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import Expander


@dataclass(frozen=True, kw_only=True)
class LanguageModelDrafter(LaneDrafter):
    """A language model that drafts.

    Attributes:
      draft_vocab_size: number of tokens that it drafts, listed by the weight `offsets`; 0: all.
    """

    kind: ClassVar[str] = "language_model"
    dialect: ClassVar[str] = "language_model"
    reads_prompt: ClassVar[bool] = True
    has_tokenizer: ClassVar[bool] = True
    taps: ClassVar[tuple[int, ...]] = ()

    num_depths: int = 8
    lanes: int | None = 4
    draft_vocab_size: int = 0

    def fitted(self, verifier: ModelConfig) -> Self:
        """Returns this drafter. Raises ValueError if vocabularies differ in size."""
        got, expected = self.layers.vocab_size, verifier.vocab_size
        problem = f"got a language model with a vocabulary of {got}, expected the verifier's, of {expected}"
        require_fit(got == expected, problem, "use a smaller model of the same family")
        return self

    def limited(self, draft_vocab_size: int) -> Self:
        return replace(self, draft_vocab_size=draft_vocab_size)

    def specs(self) -> dict[str, Any]:
        """Returns the specs of the model, its tables included, and of the tokens that it drafts."""
        return model.specs(self.layers) | listed_specs(self.draft_vocab_size, self.layers.hidden_size)

    def extend(
        self, params, tables, state: ContextState, features_btj, tokens_bt, count_b, *, attention: str
    ) -> ContextState:
        """Reads the next tokens of the text, from the first of the prompt; reads neither tables nor features."""
        batch, length = tokens_bt.shape
        positions_bt = state.context.length_b[:, None] + jnp.arange(length)
        mask_btt = model.causal_mask(batch, length)
        out = model.forward(params, self.layers, tokens_bt, positions_bt, mask_btt, state.context, attention=attention)
        return extended(state, out.new, at_last(out.hidden_btd, count_b), count_b)

    def draft(self, inputs: Inputs) -> Expander:
        """Returns the children of the anchor, and the model that continues below them."""
        return self.expand(inputs, (inputs.params, inputs.state, inputs.temperature_b), ModelStep(self, inputs.attention))


@dataclass(frozen=True)
class ModelStep:
    """The `Step` of a language model; it reads the weights, the state and a temperature."""

    config: LanguageModelDrafter
    attention: str

    def __call__(self, shared: tuple[Any, ContextState, jax.Array], level: Level) -> LaneState:
        params, state, _ = shared
        out = model.forward(
            params, self.config.layers, level.token_bw, level.position_bw, level.seen_bwx, state.context,
            earlier=level.earlier, attention=self.attention,
        )  # fmt: skip
        return self.offer(shared, out.hidden_btd, out.new)

    def offer(self, shared: tuple[Any, ContextState, jax.Array], hidden_bwd: jax.Array, kv: Any) -> LaneState:
        """Returns the children below the model's hidden states."""
        params, _, temperature_b = shared
        table_vd = params.get("unembed", params["embed"])
        count, cap = self.config.children, self.config.layers.logit_cap
        offered = vocab.likeliest(table_vd, hidden_bwd, count, temperature_b, draft_ids(params), cap)
        return LaneState((), kv, *offered)
