"""The protocol of a head, and the tables that heads read.

Shape suffixes: b batch, q block slots, i draft depth, m contexts (a slot and the token before it), d model, v vocabulary, k
likeliest tokens, z listed tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax.core.parameters import Entry
from treeflash_jax.models import vocab
from treeflash_jax.models.layers import rms_norm
from treeflash_jax.trees import TransitionTable


@struct.dataclass
class Unembed:
    """The verifier's tables and the drafter's final norm, for heads.

    Attributes:
      unembed_vd: the verifier's vocabulary table, or that of a draft vocabulary.
      ids_v: the verifier's ids of a draft vocabulary; None: the table is the verifier's.
    """

    embed_vd: jax.Array
    unembed_vd: jax.Array
    norm: jax.Array
    eps: float = struct.field(pytree_node=False)
    ids_v: jax.Array | None = None

    def tokens(self, ids: jax.Array) -> jax.Array:
        """Returns the verifier's ids for ids of the vocabulary table."""
        return ids if self.ids_v is None else self.ids_v[ids]

    def normed(self, hidden: jax.Array) -> jax.Array:
        return rms_norm(hidden, self.norm, self.eps)

    def likeliest(self, hidden_bxd: jax.Array, k: int, temperature_b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the k likeliest tokens after each hidden state and their log-probabilities, [b, x, k] each."""
        ids_bxk, log_probs_bxk = vocab.likeliest(self.unembed_vd, self.normed(hidden_bxd), k, temperature_b)
        return self.tokens(ids_bxk), log_probs_bxk


class Head(ABC):
    """A head of block drafters: it conditions a drafted token on the token before it.

    Attributes:
      file_name: `ar_approximation` in a TreeFlash drafter's config.json; None: no head.
      entries: location of each weight in a file, by name.
      looked_up: names of weights of which `expand` reads single vectors only; so does training of the first one.
    """

    file_name: ClassVar[str | None]
    entries: ClassVar[Mapping[str, Entry]]
    looked_up: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def specs(self, drafter: Any) -> dict[str, Any]:
        """Returns one `parameters.Spec` per weight. A fresh head should draft from the block's marginals.

        Args:
          drafter: the `BlockConfig` that the head is part of.
        """

    @abstractmethod
    def expand(
        self,
        params: dict[str, Any],
        unembed: Unembed,
        hidden_bqd: jax.Array,
        anchor_b: jax.Array,
        drafter: Any,
        temperature_b: jax.Array,
    ) -> TransitionTable:
        """Returns the continuations that trees are built from.

        Args:
          drafter: `BlockConfig` with the numbers of candidates and children.
          hidden_bqd: hidden states of the block before the final norm; slot 0 is the anchor.
          temperature_b: above 0.
        """

    @abstractmethod
    def logits(self, params: dict[str, Any], unembed: Unembed, previous_bm: jax.Array, hidden_bmd: jax.Array) -> jax.Array:
        """Returns next-token logits [b, m, v] of block slots, given the token before each; for training."""


def mass_elsewhere(marginal_biv: jax.Array, listed_biz: jax.Array, temperature_b: jax.Array) -> jax.Array:
    """Returns the log of the sum of exp(marginal logits / temperature) over tokens that are not listed, [b, i].

    Args:
      marginal_biv: logits.
      listed_biz: logits of the listed tokens, divided by the temperature; -inf for repeated tokens.
      temperature_b: above 0.
    """
    scale_b11 = temperature_b[:, None, None].astype(listed_biz.dtype)
    whole_bi = vocab.log_sum_exp(marginal_biv.astype(listed_biz.dtype) / scale_b11)
    share_bi = jnp.sum(jnp.exp(listed_biz - whole_bi[..., None]), axis=-1)
    return whole_bi + jnp.log(jnp.maximum(1 - share_bi, 0))
