"""DFlash block drafters, with or without a head on top: marginal trees (DDTree), TreeFlash, and other heads.

The network is in backbone.py. A head (heads/) turns a block into a transition table, or runs once per level.

A draft is one pass over the block [anchor, mask, ..., mask] against the verifier's features. The cache holds only the
context: keys and values of fused features at positions 0 .. length - 1, written once. Block slots see the whole context and
each other, and are dropped after the pass. If start is the anchor's position, slot i of the block predicts the token at
start + i, so the anchor's slot predicts nothing. In a shifted block, slot i predicts the token at start + 1 + i, so every
slot predicts a token.

Shape suffixes: b batch, t positions, j tapped layers x model, q block slots (anchor included), i draft depth, d model,
h query heads, k key/value heads, e head dim, v vocabulary.

Source: DFlash (arXiv 2602.06036) section 4, TreeFlash (arXiv 2606.03819).
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Params
from treeflash_jax.drafters import protocol
from treeflash_jax.drafters.block import backbone
from treeflash_jax.drafters.block.heads import HEADS, MARGINAL, Block, Unembed
from treeflash_jax.drafters.ngram_join import join_ngrams
from treeflash_jax.drafters.protocol import ContextState, Drafter, Inputs, NewPositions, draft_ids, listed_specs
from treeflash_jax.models import caches, vocab
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.backend.indexing import at_last
from treeflash_jax.models.config import ModelConfig, Rope
from treeflash_jax.trees import Expander

MAX_LINKS = 2**26  # most pairs per level: a table compares every child with every candidate below it
VOCABULARIES = FREQUENT, ALL = "frequent", "all"


@dataclass(frozen=True, kw_only=True)
class BlockDrafter(Drafter):
    """A DFlash block drafter and the head on top of it.

    Attributes:
      layers: sizes of the drafter's decoder layers.
      block_size: length of the drafted block, anchor included. Draft depths are 1 .. block_size - 1; 1 .. block_size if
        shifted.
      mask_token_id: the token that fills the block's open slots.
      taps: 0-based indices of the verifier layers whose output (residual stream) it reads, in file order.
      num_target_layers: number of layers of the verifier that it was trained for; None: unknown.
      shifted: whether a slot predicts the token that follows its position (`shift_label`, `sample_from_anchor`).
      causal_layers: indices of the layers in which a block slot sees no later slots.
      sliding_layers: indices of the layers in which block slots see a window of the context.
      window: size of this window: a slot at position p sees context positions above p - window; 0: no sliding layers.
      shared_window: whether all slots see the same window instead: the `window` positions before the anchor.
      embedding_factor: the verifier's factor of token embeddings, set by `fitted`.
      scales_embeddings: whether it was trained with that factor; if not, it uses none.
      logit_cap: bound of logits, as in `ModelConfig`; 0: no bound.
      conv_group: number of channels per group of the layers' convolutions (DFlash2); 0: no convolutions.
      head: name in `heads.HEADS` of the head, which says how a drafted token depends on the tokens before it.
      head_rank: rank of a low-rank head, at most the drafter's width; 256 in published files.
      head_sizes: further sizes of the head, as its file defines; None: the default sizes.
      draft_vocab_size: number of tokens that it drafts, listed by the weight `offsets`; 0: the verifier's whole vocabulary.
      owns_vocabulary: whether its files list these tokens and their tables have vectors of these tokens only.
      candidates: number of previous tokens kept per depth (M).
      children: number of likeliest next tokens kept after each of them (K).
      shortlist: number of likeliest marginal tokens per depth. The second stage of a conditional head scores these tokens
        of all depths together. 0: it scores the whole vocabulary.
      ngrams: number of matches of the text's last tokens whose continuations join the table (`ngram_join`).
      verifier: name of the verifier that it was trained for, and its classes in transformers; () if unknown.
      thinking: whether it was trained on answers with thinking; None: unknown.
    """

    kind: ClassVar[str] = "block"
    dialect: ClassVar[str] = "treeflash"
    settings: ClassVar[tuple[str, ...]] = (
        "head", "block_size", "candidates", "children", "shortlist", "draft_vocabulary", "ngrams",
    )  # fmt: skip

    layers: ModelConfig
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int | None
    shifted: bool = False
    causal_layers: tuple[int, ...] = ()
    sliding_layers: tuple[int, ...] = ()
    window: int = 0
    shared_window: bool = False
    embedding_factor: float = 1.0
    scales_embeddings: bool = field(default=True, compare=False)  # `embedding_factor` depends on it
    logit_cap: float = 0.0
    conv_group: int = 0
    head: str = MARGINAL
    head_rank: int = 256
    head_sizes: Any = None
    draft_vocab_size: int = 0
    owns_vocabulary: bool = False
    candidates: int = HEADS[MARGINAL].candidates
    children: int = 16
    shortlist: int = 0
    ngrams: int = 0
    verifier: tuple[str, ...] = ()
    thinking: bool | None = None

    @property
    def draft_vocabulary(self) -> str:
        """Value of the setting `draft_vocabulary`, for records."""
        return FREQUENT if self.draft_vocab_size else ALL

    @property
    def num_depths(self) -> int:
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first drafted token."""
        return 0 if self.shifted else 1

    @property
    def head_dims(self) -> tuple[int, ...]:
        return self.layers.head_dims

    @property
    def max_positions(self) -> int:
        return self.layers.max_positions

    @property
    def lanes(self) -> int | None:
        return HEADS[self.head].lanes

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the fields in which the network differs from DFlash's."""
        names = "shifted", "causal_layers", "sliding_layers", "conv_group", "owns_vocabulary"
        return tuple(name for name in names if getattr(self, name))

    def fitted(self, verifier: ModelConfig) -> Self:
        """Returns this drafter with the verifier's embedding factor. Raises ValueError if it does not fit the verifier."""
        num_layers = self.num_target_layers or verifier.num_layers
        protocol.require_sizes(
            verifier,
            self.taps,
            hidden_size=(self.layers.hidden_size, verifier.hidden_size),
            number_of_verifier_layers=(num_layers, verifier.num_layers),
            vocabulary_size=(self.layers.vocab_size, verifier.vocab_size),
        )
        problem = f"mask id {self.mask_token_id} lies outside the verifier's vocabulary of {verifier.vocab_size}"
        protocol.require_fit(0 <= self.mask_token_id < verifier.vocab_size, problem)
        return replace(self, embedding_factor=verifier.embedding_factor) if self.scales_embeddings else self

    def limited(self, draft_vocab_size: int) -> Self:
        if self.owns_vocabulary:
            raise ValueError("got a draft vocabulary beside that of the drafter's own files, expected one of them")
        return replace(self, draft_vocab_size=draft_vocab_size)

    def configured(self, *, draft_vocabulary: str | None = None, **settings: Any) -> Self:
        """Returns the drafter with these settings.

        Raises ValueError for another head, a longer block, or too many tokens.
        """
        has_list = self.draft_vocab_size > 0
        heads = MARGINAL, self.head
        is_listed = draft_vocabulary != ALL or not self.owns_vocabulary
        expect(is_listed, "draft_vocabulary", draft_vocabulary, "frequent: its files have vectors of no other tokens")
        expect(
            draft_vocabulary != FREQUENT or has_list, "draft_vocabulary", draft_vocabulary, "all: it has no list of tokens"
        )
        listed = 0 if draft_vocabulary == ALL else self.draft_vocab_size
        vocab_size = listed or self.layers.vocab_size
        settings = {"candidates": min(self.candidates, vocab_size)} | settings
        drafter = replace(self, draft_vocab_size=listed, **settings)
        size = drafter.block_size
        expect(2 <= size <= self.block_size, "block_size", size, f"2 to {self.block_size}, as the drafter was trained")
        for name in ("candidates", "children", "shortlist"):
            count = getattr(drafter, name)
            expect(count <= vocab_size, name, count, f"at most {vocab_size} (the vocabulary)")
        links = drafter.candidates**2 * drafter.children
        most = f"at most {MAX_LINKS:,} for candidates x candidates x children, not {links:,}"
        expect(links <= MAX_LINKS, "candidates", drafter.candidates, most)
        expect(drafter.head in heads, "head", drafter.head, f"one of {heads}, this drafter's")
        return drafter

    def specs(self) -> dict[str, Any]:
        """Returns the specs of backbone, head and draft vocabulary. Embedding and vocabulary table are the verifier's."""
        listed = listed_specs(self.draft_vocab_size, self.layers.hidden_size)
        network = backbone.specs(self.layers, len(self.taps), self.conv_group)
        return {"backbone": network, "head": HEADS[self.head].specs(self)} | listed

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> ContextState:
        # Sessions cut the context, and `init` is not told whether there is one.
        context = caches.allocate(self.layers, batch, capacity, dtype, can_cut=True)
        hidden_bd = jnp.zeros((batch, self.layers.hidden_size), dtype) if HEADS[self.head].reads_context else None
        return ContextState(context, hidden_bd)

    def extend(self, params: Params, verifier_params: Params, state: ContextState, new: NewPositions) -> ContextState:
        """Adds features of new committed positions to the context. Keeps the last fused feature if a head reads it."""
        positions_bt = state.context.length_b[:, None] + jnp.arange(new.features_btj.shape[1])
        kv = backbone.context_kv(params["backbone"], self.layers, new.features_btj, positions_bt)
        hidden_bd = state.hidden_bd
        if hidden_bd is not None:
            fused_b1d = backbone.fuse(params["backbone"], self.layers, at_last(new.features_btj, new.count_b))
            hidden_bd = jnp.where((new.count_b > 0)[:, None], fused_b1d[:, 0], hidden_bd).astype(hidden_bd.dtype)
        return ContextState(caches.commit(state.context, kv, new.count_b), hidden_bd)

    def draft(self, inputs: Inputs) -> Expander:
        """Returns next-token distributions at every depth, given the tokens before. `ngrams` above 0 adds n-grams."""
        hidden_bid = self.draft_block(inputs)[:, self.first_slot :]
        embed_vd = inputs.verifier_params["embed"]
        norm = inputs.params["backbone"]["norm"]
        unembed = Unembed(embed_vd, inputs.verifier_params.get("unembed", embed_vd), norm, self.layers.rms_norm_eps)
        unembed = unembed.replace(logit_cap=self.logit_cap, embedding_factor=self.embedding_factor)
        if self.draft_vocab_size:
            unembed = unembed.replace(unembed_vd=inputs.params["unembed"], ids_v=draft_ids(inputs.params))
        with jax.named_scope("expand"):
            block = Block(hidden_bid, inputs.anchor_b, inputs.temperature_b, inputs.state.hidden_bd)
            expander = HEADS[self.head].expand(inputs.params["head"], unembed, block, self)
            return join_ngrams(expander, inputs, self.ngrams)

    def draft_block(self, inputs: Inputs) -> jax.Array:
        """Returns the block's hidden states before the final norm, [b, q, d]; slot 0 is the anchor's."""
        anchor_b, context = inputs.anchor_b, inputs.state.context
        batch = anchor_b.shape[0]
        size = self.block_size
        length_b = context.length_b
        masks_bq = jnp.full((batch, size - 1), self.mask_token_id, anchor_b.dtype)
        tokens_bq = jnp.concatenate([anchor_b[:, None], masks_bq], axis=1)
        x_bqd = vocab.embed(inputs.verifier_params["embed"], tokens_bq, self.embedding_factor)
        positions_bq = length_b[:, None] + jnp.arange(size)
        everything_bqq = jnp.broadcast_to(True, (batch, size, size))
        earlier_bqq = jnp.broadcast_to(jnp.tri(size) > 0, (batch, size, size))
        first_bq = (length_b[:, None] if self.shared_window else positions_bq + 1) - self.window
        first_bq = jnp.broadcast_to(first_bq, positions_bq.shape)

        def attend(q_bqhe: jax.Array, k_bqke: jax.Array, v_bqke: jax.Array, seen: tuple[Any, jax.Array, jax.Array | None]):
            prefix, mask_bqq, first_bq = seen
            return tree_attention(
                q_bqhe, k_bqke, v_bqke, mask_bqq, prefix, length_b, first_bt=first_bq, implementation=inputs.attention
            )

        seen = [
            (
                prefix,
                earlier_bqq if layer in self.causal_layers else everything_bqq,
                first_bq if layer in self.sliding_layers else None,
            )
            for layer, prefix in enumerate(context.layers)
        ]
        return backbone.through_layers(inputs.params["backbone"], self.layers, x_bqd, positions_bq, seen, attend)


def fresh_layers(verifier: ModelConfig, num_layers: int) -> ModelConfig:
    """Returns layers for a new drafter: dense layers of Qwen3 or Llama with the verifier's widths and rotary base, no YaRN.

    They are Qwen3's for every verifier but Llama, because the published PyTorch drafters have Qwen3's dense layers.
    """
    sizes = (
        "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope",
        "max_positions", "tie_embeddings", "eos_token_ids",
    )  # fmt: skip
    if verifier.model_type in ("qwen3", "llama"):
        layers = replace(verifier, num_layers=num_layers)
    else:
        layers = ModelConfig(**{name: getattr(verifier, name) for name in sizes}, num_layers=num_layers)
    is_scaled = layers.rope.kind == "yarn" or layers.rope.fraction != 1 or layers.rope.attention_factor != 1
    return replace(layers, rope=Rope(theta=layers.rope.theta)) if is_scaled else layers


def default_target_layers(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Returns the tapped layers for configs that do not list them. Source: DFlash (arXiv 2602.06036) section 4."""
    if num_features == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_features - 1)
    return tuple(round(1 + i * step) for i in range(num_features))
