"""The protocol of a head, and the inputs of heads.

Shape suffixes: b batch, i draft depth, m contexts (a slot and the token before it), d model, v vocabulary, k likeliest
tokens, z listed tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax.core.parameters import Entry, Params
from treeflash_jax.models import vocab
from treeflash_jax.models.backend import selection
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.layers import rms_norm
from treeflash_jax.trees import Expander, TransitionTable


@struct.dataclass
class Unembed:
    """The verifier's tables and the drafter's final norm, as heads use them.

    Attributes:
      unembed_vd: vocabulary table, of the verifier or of a draft vocabulary.
      ids_v: the verifier's ids of a draft vocabulary; None: the table has the verifier's vocabulary.
      logit_cap: bound of logits, as in `ModelConfig`.
      embedding_factor: factor of token embeddings, as in `BlockDrafter`.
    """

    embed_vd: jax.Array
    unembed_vd: jax.Array
    norm: jax.Array
    eps: float = struct.field(pytree_node=False)
    ids_v: jax.Array | None = None
    logit_cap: float = struct.field(pytree_node=False, default=0.0)
    embedding_factor: float = struct.field(pytree_node=False, default=1.0)

    def embed(self, ids: jax.Array) -> jax.Array:
        """Returns embeddings of the verifier's ids, [..., d]."""
        return vocab.embed(self.embed_vd, ids, self.embedding_factor)

    def tokens(self, ids: jax.Array) -> jax.Array:
        """Returns the verifier's ids for ids of the vocabulary table."""
        return ids if self.ids_v is None else self.ids_v[ids]

    def normed(self, hidden: jax.Array) -> jax.Array:
        return rms_norm(hidden, self.norm, self.eps)

    def logits(self, normed: jax.Array) -> jax.Array:
        """Returns logits of normed hidden states, over the vocabulary of the table."""
        return vocab.cap(vocab.unembed(self.unembed_vd, normed), self.logit_cap)

    def likeliest(self, hidden_bxd: jax.Array, k: int, temperature_b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the k likeliest tokens after each hidden state and their log-probabilities, [b, x, k] each."""
        return vocab.likeliest(self.unembed_vd, self.normed(hidden_bxd), k, temperature_b, self.ids_v, self.logit_cap)


@struct.dataclass
class Block:
    """A block's state after the backbone.

    Attributes:
      hidden_bid: hidden states of the slots that predict each depth, before the final norm.
      anchor_b: the last committed token.
      temperature_b: temperature of the draft, above 0.
      context_bd: fused features of the position before the anchor; None unless the head `reads_context`.
    """

    hidden_bid: jax.Array
    anchor_b: jax.Array
    temperature_b: jax.Array
    context_bd: jax.Array | None = None


class DrafterSizes(Protocol):
    """The attributes of a `BlockDrafter` that heads read; `BlockDrafter` describes them."""

    layers: ModelConfig
    num_depths: int
    head_rank: int
    head_sizes: Any
    draft_vocab_size: int
    owns_vocabulary: bool
    candidates: int
    children: int
    shortlist: int


class Head(ABC):
    """A head of block drafters. It makes a drafted token depend on the tokens before it.

    Attributes:
      file_name: value of `ar_approximation` in a TreeFlash drafter's config.json; None: no such head.
      entries: location of each weight in a file, by name.
      scored: names of tables with a vector for each drafted token; `expand` reads only the vectors of candidates.
      lanes: default number of nodes per level that best-first search expands; None: all nodes.
      candidates: default number of candidates per depth (`BlockDrafter.candidates`).
      reads_context: whether it reads `Block.context_bd`.
      trains_candidates: whether `logits` gives -inf to tokens that are not candidates.
    """

    file_name: ClassVar[str | None]
    entries: ClassVar[Mapping[str, Entry]]
    scored: ClassVar[tuple[str, ...]] = ()
    lanes: ClassVar[int | None] = None
    candidates: ClassVar[int] = 16
    reads_context: ClassVar[bool] = False
    trains_candidates: ClassVar[bool] = False

    @property
    def is_trainable(self) -> bool:
        """True if the head has `logits`."""
        return type(self).logits is not Head.logits

    def sizes(self, drafter: DrafterSizes) -> Any:
        """Returns `drafter.head_sizes` or the default sizes, a frozen dataclass; None for a head without further sizes."""
        return None

    @abstractmethod
    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        """Returns a `parameters.Spec` for each weight.

        If a head is to be trained, its fresh weights should draft from the block's marginals.

        Args:
          drafter: the `BlockDrafter` that the head is part of.
        """

    @abstractmethod
    def expand(self, params: Params, unembed: Unembed, block: Block, drafter: DrafterSizes) -> Expander:
        """Returns the continuations from which trees are built: a `TransitionTable`, or a network that runs once per level.

        Args:
          drafter: the `BlockDrafter`, which has the numbers of candidates and children.
        """

    def logits(
        self, params: Params, unembed: Unembed, previous_bm: jax.Array, hidden_bmd: jax.Array, drafter: DrafterSizes
    ) -> jax.Array:
        """Returns next-token logits [b, m, v] of block slots, given the token before each; for training.

        Contexts are the drafted slots, block after block, with `drafter.num_depths` slots in each block.
        """
        raise NotImplementedError


def head_rank(drafter: DrafterSizes) -> int:
    """Returns the rank of a low-rank head, at most the drafter's width."""
    return min(drafter.head_rank, drafter.layers.hidden_size)


def scored_size(drafter: DrafterSizes) -> int:
    """Returns the number of tokens in the tables that `Head.scored` names."""
    return drafter.draft_vocab_size if drafter.owns_vocabulary else drafter.layers.vocab_size


def mass_elsewhere(marginal_biv: jax.Array, listed_biz: jax.Array, temperature_b: jax.Array) -> jax.Array:
    """Returns the log of the sum of exp(marginal logits / temperature) over tokens that are not listed, [b, i].

    Args:
      marginal_biv: logits.
      listed_biz: logits of the listed tokens, divided by the temperature; -inf for repeated tokens.
      temperature_b: temperature above 0.
    """
    scale_b11 = temperature_b[:, None, None].astype(listed_biz.dtype)
    whole_bi = vocab.log_sum_exp(marginal_biv.astype(listed_biz.dtype) / scale_b11)
    share_bi = jnp.sum(jnp.exp(listed_biz - whole_bi[..., None]), axis=-1)
    return whole_bi + jnp.log(jnp.maximum(1 - share_bi, 0))


def candidate_table(tokens_bix: jax.Array, log_probs_bimx: jax.Array, children: int) -> TransitionTable:
    """Returns the table of transitions between candidates of adjacent depths, with up to `children` for each context.

    Args:
      tokens_bix: candidates of every depth.
      log_probs_bimx: log-probabilities of the candidates after each of the first m candidates of the previous depth; at
        depth 0, after the anchor.
    """
    depths, m, count = log_probs_bimx.shape[1:]
    values_bimc, at_bimc = selection.top_k(log_probs_bimx, min(children, count))
    children_bimc = jnp.take_along_axis(tokens_bix[:, :, None], at_bimc, axis=-1)
    is_last_i11 = (jnp.arange(depths) == depths - 1)[:, None, None]
    next_context_bimc = jnp.where((at_bimc < m) & ~is_last_i11, at_bimc, -1).astype(jnp.int32)
    return TransitionTable(children_bimc, values_bimc, next_context_bimc)
