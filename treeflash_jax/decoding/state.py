"""Plans of the compiled programs, and the data that they read and return: weights, sampling settings, the loop carry.

Shape suffixes: b batch, s token slots, k likeliest tokens, x stop ids or biases, v vocabulary.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Params
from treeflash_jax.decoding.automaton import Automaton
from treeflash_jax.drafters import Drafter
from treeflash_jax.drafters.protocol import State
from treeflash_jax.models import caches
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import TreeShape


@dataclass(frozen=True, kw_only=True)
class SharedPlan:
    """Settings that determine the programs of prefill; decoding uses most of them, too. Equal plans share the programs.

    Attributes:
      loaded_drafter: the drafter as it was loaded. Prefill and commits extend its state. None if nothing is drafted.
      prefill_attention: attention implementation of prefill.
      prefill_chunk: maximal number of prompt tokens per prefill pass.
      prefill_passes: number of prefill passes per dispatch.
      kernels: kernels of the verifier for other operations, one of `kernels.KERNEL_SETS`; None for XLA's operations.
      stacks_cache: whether the verifier's cache has one state for all layers of a kind (`caches.allocate`).
      residual_dtype: dtype of the verifier's residual stream and logits; None: the weights' dtype.
      log_probs: whether to record the verifier's log-probability of every emitted token.
      top_log_probs: number of likeliest tokens to record for every emitted token.
      scores_prompts: whether to record the same for every token of the prompt, except the first.
      expected_lengths: whether to record the number of tokens that every round was expected to commit.
    """

    verifier: ModelConfig
    loaded_drafter: Drafter | None = None
    prefill_attention: str = "xla"
    prefill_chunk: int = 128
    prefill_passes: int = 16
    kernels: str | None = None
    stacks_cache: bool = False
    residual_dtype: DTypeLike | None = None
    log_probs: bool = False
    top_log_probs: int = 0
    scores_prompts: bool = False
    expected_lengths: bool = False

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.loaded_drafter is None else self.loaded_drafter.taps

    def chunk_size(self, capacity: int) -> int:
        """Returns the number of prompt tokens per prefill pass, a divisor of the capacity."""
        return math.gcd(self.prefill_chunk, capacity)


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Everything that determines the program of rounds. Equal plans share it. The default is one token a round.

    Attributes:
      shared: the part that prefill shares.
      configured_drafter: the drafter with the settings of its drafts (`Drafter.configured`); None with builder "none".
      builder: one of `trees.BUILDERS`, or "none" for one token a round.
      num_nodes: nodes verified per round, root included.
      shape: sizes of the tree besides its number of nodes.
      rule: acceptance rule, lossless for the distribution that the builder draws from.
      attention: implementation of the verify pass.
      why_plain: reason why nothing is drafted although no setting turns drafting off. It does not change the program.
    """

    shared: SharedPlan
    configured_drafter: Drafter | None = None
    builder: str = "none"
    num_nodes: int = 1
    shape: TreeShape = TreeShape()
    rule: str = "sample-and-match"
    attention: str = "xla"
    why_plain: str | None = field(default=None, compare=False)

    @property
    def drafts(self) -> bool:
        return self.configured_drafter is not None

    @property
    def path_length(self) -> int:
        """Maximal number of accepted nodes, root included."""
        return 1 + min(self.configured_drafter.num_depths, self.num_nodes - 1) if self.drafts else 1

    def one_token(self) -> "DecodePlan":
        """Returns the plan of one-token decoding with this plan's other settings: the baseline of measurements."""
        return DecodePlan(shared=replace(self.shared, loaded_drafter=None), attention=self.attention)


@struct.dataclass
class Weights:
    """Weights of the verifier and the drafter, if any; in a call, also of the user's processor and of the tree selector."""

    verifier: Params
    drafter: Params | None = None
    processor: Any = None
    tree_selector: Params | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the verifier's weights, of caches and activations."""
        return self.verifier["embed"].dtype


@struct.dataclass
class Biases:
    """Numbers that are added to the logits of tokens.

    Attributes:
      ids_bx: ids of the tokens, padded with NO_TOKEN.
      added_bx: number added to the logit of each.
    """

    ids_bx: jax.Array
    added_bx: jax.Array


@struct.dataclass
class Sampling:
    """Sampling settings of each sequence; traced, so changing them never recompiles.

    Attributes:
      key_b: random key made from seed, index and sample, so that an answer does not depend on its batch.
      limit_b: prompt length + max_new_tokens.
      stop_ids_bx: ids that end a sequence; -1 pads.
      drafter_temperature_b: temperature of the drafted distribution, > 0.
      numbers: numbers [b] by name of the setting: temperature, top_k, top_p, min_p, and the settings that processors read
        (`processors.PROCESSORS`). If no request of the call uses a processor, its settings are absent, and programs do not
        contain it.
      biases: the setting logit_bias; None if no request has it.
      least_end_b: prompt length + min_new_tokens; None if no request sets it.
      automaton: automata of the tokens that constraints allow; None without constraints.
    """

    key_b: jax.Array
    limit_b: jax.Array
    stop_ids_bx: jax.Array
    drafter_temperature_b: jax.Array
    numbers: dict[str, jax.Array]
    biases: Biases | None = None
    least_end_b: jax.Array | None = None
    automaton: Automaton | None = None


@struct.dataclass
class Counts:
    """Counts of the tokens in each sequence's text, for penalties.

    Attributes:
      in_prompt_bv: whether the prompt contains each token.
      in_answer_bv: number of times that the answer contains each token, float32.
    """

    in_prompt_bv: jax.Array
    in_answer_bv: jax.Array


@struct.dataclass
class LogProbs:
    """The verifier's log-probabilities (temperature 1, unprocessed) at positions of the text.

    Attributes:
      token_bs: log-probability of each token.
      top_ids_bsk: ids of the likeliest tokens at each position, by decreasing probability.
      top_bsk: log-probabilities of these tokens.
    """

    token_bs: jax.Array
    top_ids_bsk: jax.Array
    top_bsk: jax.Array


@struct.dataclass
class DecodeState:
    """The loop carry. The last token of a sequence is its anchor: it is emitted, but not yet in the verifier's cache.

    Attributes:
      tokens_bs: prompt and generated ids.
      end_b: number of ids of each sequence. The verifier's cache has `end_b - 1` positions.
      done_b: whether a sequence needs no more tokens.
      drafter: the drafter's state; None for one-token decoding.
      accepted_bs: number of tokens accepted by each round, bonus included, before any cut at a stop id or limit.
      log_probs: log-probabilities of each token; None unless planned.
      expected_bs: number of tokens that each round was expected to commit, given its tree; None unless planned.
      counts: counts of the text's tokens; None without penalties.
      processor_state: state of the user's processor after the text; None if it has none.
      automaton_b: state of each automaton after the text; None without any.
    """

    tokens_bs: jax.Array
    end_b: jax.Array
    done_b: jax.Array
    cache: caches.Cache
    drafter: State | None
    rounds_b: jax.Array
    accepted_bs: jax.Array
    log_probs: LogProbs | None
    expected_bs: jax.Array | None
    sampling: Sampling
    counts: Counts | None = None
    processor_state: Any = None
    automaton_b: jax.Array | None = None

    @property
    def capacity(self) -> int:
        return self.tokens_bs.shape[1]


def without_caches(tokens_bs: jax.Array, end_b: jax.Array, sampling: Sampling) -> DecodeState:
    """Returns a state that has only the fields needed to sample a token."""
    cleared = "done_b", "cache", "drafter", "rounds_b", "accepted_bs", "log_probs", "expected_bs"
    return DecodeState(tokens_bs=tokens_bs, end_b=end_b, sampling=sampling, **dict.fromkeys(cleared))


def pin(state: DecodeState) -> DecodeState:
    """Constrains the state to its layout on the ambient mesh, so that all programs accept and return the same layout."""
    if sharding.current() is None:
        return state
    by_batch = state.replace(cache=None, drafter=None, counts=None)
    by_batch = jax.tree.map(lambda x: sharding.constrain(x, (("batch",) + (None,) * (x.ndim - 1))[: x.ndim]), by_batch)
    drafter = None if state.drafter is None else sharding.pin(state.drafter, state.drafter.axes())
    counts = jax.tree.map(lambda x_bv: sharding.constrain(x_bv, ("batch", "vocab")), state.counts)
    return by_batch.replace(cache=caches.pin(state.cache), drafter=drafter, counts=counts)
