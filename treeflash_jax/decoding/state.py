"""What decoding is planned as, and what its rounds hand on: the plan, the weights, the settings of rows, the loop carry.

Shape suffixes: b batch, s token slots, x stop ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from flax import struct

from treeflash_jax import mesh as meshes
from treeflash_jax.trees import TreeShape
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Everything that shapes the compiled program; two equal plans share it.

    Attributes:
      drafter: sizes of the drafter, a config of its kind; None with builder "none".
      num_nodes: nodes verified per round, root included.
      draft: settings of the draft, what the drafter's `choose` returned.
      builder: one of `trees.BUILDERS`, or "none": one token a round.
      shape: sizes of a tree whose nodes are drawn.
      rule: acceptance rule, lossless for the builder's law.
      prefill_attention: that of prefill passes; None: the same.
      prefill_chunk: prompt tokens per prefill pass, at most.
      log_probs: whether to keep the verifier's log-probability of every emitted token.
      expected_lengths: whether to keep what every round was expected to commit.
    """

    verifier: ModelConfig
    drafter: Any = None
    num_nodes: int = 16
    draft: Any = None
    builder: str = "best-first"
    shape: TreeShape = TreeShape()
    rule: str = "sample-and-match"
    attention: str = "xla"
    prefill_attention: str | None = None
    prefill_chunk: int = 128
    log_probs: bool = False
    expected_lengths: bool = False

    @property
    def drafts(self) -> bool:
        return self.builder != "none"

    @property
    def path_rows(self) -> int:
        """Rows of the longest path a round can accept, root included."""
        return 1 + min(self.drafter.num_depths, self.num_nodes - 1) if self.drafts else 1

    def chunk(self, capacity: int) -> int:
        """Prompt tokens per prefill pass into caches of this capacity, which it divides."""
        return math.gcd(self.prefill_chunk, capacity)

    def for_prefill(self) -> DecodePlan:
        """The plan that all plans with the same prefill share."""
        names = ("verifier", "drafter", "prefill_chunk", "log_probs", "expected_lengths")
        shared = {name: getattr(self, name) for name in names}
        attention = self.prefill_attention or self.attention
        return DecodePlan(builder="best-first" if self.drafts else "none", attention=attention, **shared)

    def one_token(self) -> DecodePlan:
        """The plan of plain one-token decoding beside this one: what drafting is measured against."""
        names = ("verifier", "attention", "prefill_attention", "prefill_chunk", "log_probs", "expected_lengths")
        return DecodePlan(builder="none", num_nodes=1, **{name: getattr(self, name) for name in names})

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafts else ()


@struct.dataclass
class Weights:
    """Parameters of verifier and drafter, trees of their `specs`; no drafter for plain decoding."""

    verifier: Any
    drafter: Any = None


@struct.dataclass
class Sampling:
    """What each row wants; traced, so changing it never recompiles.

    Attributes:
      key_b: one key per answer, of its seed, prompt index and sample: batch composition never changes an answer.
      temperature_b: 0 is greedy.
      top_k_b: 0 keeps all.
      top_p_b: 1 keeps all.
      limit_b: prompt length + max_new_tokens.
      stop_ids_bx: ids that end a row; -1 pads.
      drafter_temperature_b: of the drafted distribution, > 0.
    """

    key_b: jax.Array
    temperature_b: jax.Array
    top_k_b: jax.Array
    top_p_b: jax.Array
    limit_b: jax.Array
    stop_ids_bx: jax.Array
    drafter_temperature_b: jax.Array


@struct.dataclass
class DecodeState:
    """The loop carry. The last token of a row is its anchor: emitted, but not yet seen by the verifier.

    Attributes:
      tokens_bs: prompt and generated ids.
      end_b: how many of them are real. The caches hold `end_b - 1` rows.
      done_b: rows that need no more tokens.
      drafter: the drafter's state; None for plain decoding.
      rounds_b: rounds each row took part in.
      accepted_bs: tokens accepted per round, bonus included, before any cut at a stop id or limit.
      log_probs_bs: the verifier's log-probability (temperature 1, no filters) of each token; None unless planned.
      expected_bs: tokens each round was expected to commit, given its tree; None unless planned.
    """

    tokens_bs: jax.Array
    end_b: jax.Array
    done_b: jax.Array
    cache: caches.KVCache
    drafter: Any
    rounds_b: jax.Array
    accepted_bs: jax.Array
    log_probs_bs: jax.Array | None
    expected_bs: jax.Array | None
    sampling: Sampling

    @property
    def capacity(self) -> int:
        return self.tokens_bs.shape[1]


def pin(state: DecodeState) -> DecodeState:
    """Constrains the whole state to its layout on the ambient mesh: what a program returns is what the next one takes."""
    if meshes.current() is None:
        return state
    rows = state.replace(cache=None, drafter=None)
    rows = jax.tree.map(lambda x: meshes.constrain(x, (("batch",) + (None,) * (x.ndim - 1))[: x.ndim]), rows)
    drafter = None if state.drafter is None else meshes.pin(state.drafter, state.drafter.axes())
    return rows.replace(cache=caches.pin(state.cache), drafter=drafter)
