"""A small language model as the drafter: any supported architecture with the verifier's vocabulary.

Its cache holds one position more than the verifier's: the anchor's, so that children of the anchor are known before a round
begins. Levels of a tree run in lanes (lanes.py); after a round the accepted path is computed once more, in one pass, and
kept.

Shape suffixes: b batch, t positions, w lanes, d model, y layers and f feed-forward width of the small model.

Source: speculative decoding (arXiv 2211.17192, 2302.01318); EAGLE-2 (arXiv 2406.16858) for trees of few lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from treeflash_jax.drafters import steering
from treeflash_jax.drafters.lanes import LaneDrafterConfig, LaneState, Level
from treeflash_jax.drafters.protocol import ContextState, Inputs, draft_ids, listed_specs, require_fit
from treeflash_jax.drafters.steering import SteeringConfig
from treeflash_jax.models import kv_cache, vocab
from treeflash_jax.models import verifier as model
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import Expander


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(LaneDrafterConfig):
    """A language model that drafts.

    Attributes:
      steering: sizes of the steering by the verifier's hidden states; None: not steered.
      draft_vocab_size: number of tokens that it drafts, the weight `offsets`; 0: all.
    """

    kind: ClassVar[str] = "language_model"
    dialect: ClassVar[str] = "language_model"
    reads_prompt: ClassVar[bool] = True
    has_tokenizer: ClassVar[bool] = True

    num_depths: int = 8
    lanes: int | None = 4
    steering: SteeringConfig | None = None
    draft_vocab_size: int = 0

    @property
    def taps(self) -> tuple[int, ...]:
        """Verifier layers that steer it; it reads nothing else of the verifier but the tokens."""
        return () if self.steering is None else self.steering.taps

    def fitted(self, verifier: ModelConfig) -> Self:
        """Returns this config. Raises ValueError if vocabularies differ in size, or if the steering is for other models."""
        got, expected = self.layers.vocab_size, verifier.vocab_size
        problem = f"got a language model with a vocabulary of {got}, expected the verifier's, of {expected}"
        require_fit(got == expected, problem, "use a smaller model of the same family")
        if self.steering is not None:
            self.steering.check_fits(verifier, self.layers)
        return self

    def steered(self, steering: SteeringConfig) -> Self:
        return replace(self, steering=steering)

    def limited(self, draft_vocab_size: int) -> Self:
        return replace(self, draft_vocab_size=draft_vocab_size)

    def specs(self) -> dict[str, Any]:
        """Weights of the model, its tables included, of its steering, and of the tokens that it drafts."""
        steered = {} if self.steering is None else {"steering": steering.specs(self.steering)}
        return model.specs(self.layers) | steered | listed_specs(self.draft_vocab_size, self.layers.hidden_size)

    def init(self, batch: int, capacity: int, dtype: Any) -> ContextState:
        context, sizes = kv_cache.allocate(self.layers, batch, capacity, dtype), self.steering
        shift_byf = None if sizes is None else jnp.zeros((batch, sizes.num_layers, sizes.ffn), dtype)
        return ContextState(context, jnp.zeros((batch, self.layers.hidden_size), dtype), shift_byf)

    def extend(
        self, params, tables, state: ContextState, features_btj, tokens_bt, count_b, *, attention: str
    ) -> ContextState:
        """Reads the next tokens of the text, the prompt's from the first on; tables are not read.

        A steered model runs its last position with shifts from the verifier's features there, and the positions before it
        with the shifts they were drafted with. Prompts come without features and are not steered.
        """
        batch, length = tokens_bt.shape
        shift, shift_byf = state.shift, state.shift_byf
        if shift_byf is not None and features_btj is not None:
            shift, shift_byf = _steered(params["steering"], state, features_btj, count_b)
        positions_bt = state.context.length_b[:, None] + jnp.arange(length)
        mask_btt = model.causal_mask(batch, length)
        out = model.forward(
            params, self.layers, tokens_bt, positions_bt, mask_btt, state.context, shift=shift, attention=attention
        )  # fmt: skip
        last_bd = jnp.take_along_axis(out.hidden_btd, jnp.maximum(count_b - 1, 0)[:, None, None], axis=1)[:, 0]
        return ContextState(
            context=kv_cache.append(state.context, out.new_kv, kv_cache.count_after(count_b, out.hidden_btd[:, 0, 0])),
            hidden_bd=jnp.where((count_b > 0)[:, None], last_bd, state.hidden_bd),
            shift_byf=shift_byf,
        )

    def draft(self, inputs: Inputs) -> Expander:
        """Returns the children of the anchor, and the model that continues below them."""
        return self.expand(inputs, (inputs.params, inputs.state, inputs.temperature_b), ModelStep(self, inputs.attention))


def _steered(
    params: Any, state: ContextState, features_btj: jax.Array, count_b: jax.Array
) -> tuple[Callable[[int], jax.Array], jax.Array]:
    """Returns the shifts of the new positions, as a function of the layer, and the shifts of later positions."""
    last_b1j = jnp.take_along_axis(features_btj, jnp.maximum(count_b - 1, 0)[:, None, None], axis=1)
    new_byf = steering.shifts(params, steering.normed(params, last_b1j)[:, 0]).astype(state.shift_byf.dtype)
    new_byf = jnp.where((count_b > 0)[:, None, None], new_byf, state.shift_byf)
    is_last_bt1 = (jnp.arange(features_btj.shape[1]) == count_b[:, None] - 1)[..., None]
    shift = lambda layer: jnp.where(is_last_bt1, new_byf[:, None, layer], state.shift_byf[:, None, layer])  # noqa: E731
    return shift, new_byf


@dataclass(frozen=True)
class ModelStep:
    """The `Step` of a language model; it reads the weights, the state and a temperature."""

    config: LanguageModelConfig
    attention: str

    def __call__(self, shared: tuple[Any, ContextState, jax.Array], level: Level) -> LaneState:
        params, state, _ = shared
        out = model.forward(
            params, self.config.layers, level.token_bw, level.position_bw, level.seen_bwx, state.context,
            earlier=level.earlier, attention=self.attention, shift=state.shift,
        )  # fmt: skip
        return self.offer(shared, out.hidden_btd, out.new_kv)

    def offer(self, shared: tuple[Any, ContextState, jax.Array], hidden_bwd: jax.Array, kv: Any) -> LaneState:
        """Returns the children below the model's hidden states."""
        params, _, temperature_b = shared
        table_vd = params.get("unembed", params["embed"])
        offered = vocab.likeliest(table_vd, hidden_bwd, self.config.children, temperature_b, draft_ids(params))
        return LaneState((), kv, *offered)
