"""Drafting with a multi-token prediction layer, which the files of Qwen3.5, Qwen3-Next and later models contain.

Position t pairs the verifier's hidden state at t, after its final norm, with the token at t + 1:

    x_t   = fc [norm(embed(token_{t+1})), norm(hidden_t)]
    out_t = norm(layer(x_t))                         one decoder layer of the verifier's full attention, at position t
    unembed(out_t)                                   logits of the token at t + 2

Embedding and vocabulary table are the verifier's. While drafting, out_t replaces the hidden state at t + 1. As with
EAGLE-3, the context after a commit is as long as the verifier's cache, and the output at its last position gives the first
drafted token.

Shape suffixes: b batch, t positions, w lanes, x keys that a lane may see, j d (one tapped layer), d model, v vocabulary.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, multi-token prediction; the weights `mtp.*` of Qwen3-Next.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Params, Spec
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
from treeflash_jax.models import decoder, layers, quantized, vocab
from treeflash_jax.models.backend.indexing import at_last
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import Expander


@dataclass(frozen=True, kw_only=True)
class MtpDrafter(LaneDrafter):
    """A drafter with a multi-token prediction layer.

    Attributes:
      layers: sizes of that layer; `vocab_size` is the verifier's.
      taps: index of the verifier's last layer; () before `fitted`.
      draft_vocab_size: number of tokens that it drafts, listed by the weight `offsets`; 0: the whole vocabulary.
    """

    kind: ClassVar[str] = "mtp"
    dialect: ClassVar[str] = "mtp"
    keeps_weights: ClassVar[bool] = True

    taps: tuple[int, ...] = ()
    # A level reads about a sixth of the verifier's weights, mostly the vocabulary table. Six levels would pay if every
    # level were accepted as often as DeepSeek-V3's first (0.85). Deeper levels are accepted less often, since the layer was
    # trained to predict one token ahead. More lanes read the same weights, except for the experts of a mixture.
    num_depths: int = 4
    lanes: int | None = 4
    draft_vocab_size: int = 0

    def fitted(self, verifier: ModelConfig) -> Self:
        """Returns this drafter with its tapped layer set. Raises ValueError if it was made for another verifier."""
        own, expected = self.layers.hidden_size, verifier.hidden_size
        problem = f"hidden size is {own} in its multi-token prediction layer and {expected} in the verifier"
        require_fit(
            own == expected, problem, "models with recurrent layers cannot draft; the drafter mtp is the verifier's own"
        )
        require_sizes(verifier, (), vocabulary_size=(self.layers.vocab_size, verifier.vocab_size))
        return replace(self, taps=(verifier.num_layers - 1,))

    def limited(self, draft_vocab_size: int) -> Self:
        return replace(self, draft_vocab_size=draft_vocab_size)

    def specs(self) -> dict[str, Any]:
        """Returns the specs of a one-layer model without tables, and of the layer's input."""
        width, model = self.layers.hidden_size, decoder.specs(self.layers)
        norm = layers.norm_spec(self.layers, width)
        fc = Spec((2 * width, width), ("embed", None), inputs=(0,), outputs=(1,), can_quantize=False)
        tree = {"fc": fc, "embed_norm": norm, "hidden_norm": norm, "groups": model["groups"], "norm": model["norm"]}
        return tree | listed_specs(self.draft_vocab_size, width)

    def extend(self, params: Params, verifier_params: Params, state: ContextState, new: NewPositions) -> ContextState:
        """Adds committed positions."""
        batch, length = new.tokens_bt.shape
        hidden_btd = layers.norm(self.layers, new.features_btj, verifier_params["norm"])
        positions_bt = state.context.length_b[:, None] + jnp.arange(length)
        mask_btt = decoder.causal_mask(batch, length)
        x_btd = layer_input(params, verifier_params, self, new.tokens_bt, hidden_btd)
        out = decoder.through_layers(
            params, self.layers, x_btd, positions_bt, mask_btt, state.context, attention=new.attention
        )
        return extended(state, out.new, at_last(out.hidden_btd, new.count_b), new.count_b)

    def draft(self, inputs: Inputs) -> Expander:
        """Returns the children of the anchor, and the layer that continues below them."""
        tables = {name: inputs.verifier_params[name] for name in ("embed", "unembed") if name in inputs.verifier_params}
        shared = SharedInputs(inputs.params, tables, inputs.state.context, inputs.temperature_b)
        return self.expand(inputs, shared, MtpStep(self, inputs.attention))


def layer_sizes(verifier: ModelConfig) -> ModelConfig:
    """Returns the sizes of the multi-token prediction layer in a verifier's files."""
    return replace(verifier, num_layers=1, layer_types=("full_attention",), dense_layers=())


def layer_input(
    params: Params, tables: Params, drafter: MtpDrafter, tokens_bt: jax.Array, hidden_btd: jax.Array
) -> jax.Array:
    """Returns the layer's input [b, t, d]: the next token's embedding joined with the hidden state."""
    embedded_btd = vocab.embed(tables["embed"], tokens_bt).astype(hidden_btd.dtype)
    parts = (
        layers.norm(drafter.layers, embedded_btd, params["embed_norm"]),
        layers.norm(drafter.layers, hidden_btd, params["hidden_norm"]),
    )
    x_btd = quantized.product("btj,jd->btd", jnp.concatenate(parts, axis=-1), params["fc"])
    return sharding.constrain(x_btd, ("batch", None, None))


@dataclass(frozen=True)
class MtpStep:
    """The `Step` of the layer: runs it for a token in each lane. A lane carries the output of the level above."""

    drafter: MtpDrafter
    attention: str

    def __call__(self, shared: SharedInputs, level: Level) -> LaneState:
        x_bwd = layer_input(shared.params, shared.tables, self.drafter, level.token_bw, level.carry)
        out = decoder.through_layers(
            shared.params, self.drafter.layers, x_bwd, level.position_bw, level.seen_bwx, shared.context,
            earlier=level.earlier, attention=self.attention,
        )  # fmt: skip
        return self.offer(shared, out.hidden_btd, out.new)

    def offer(self, shared: SharedInputs, hidden_bwd: jax.Array, kv: Any) -> LaneState:
        """Returns the children below outputs of the layer."""
        params, tables, count = shared.params, shared.tables, self.drafter.children
        table_vd = params.get("unembed", tables.get("unembed", tables["embed"]))
        offered = vocab.likeliest(table_vd, hidden_bwd, count, shared.temperature_b, draft_ids(params))
        return LaneState(hidden_bwd, kv, *offered)
