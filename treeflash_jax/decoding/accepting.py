"""Acceptance of a verified tree: the path that a rule keeps, the verifier's distributions, and random numbers for both.

Shape suffixes: b batch, n tree nodes, p accepted path, i path depth, x coins, v vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax import acceptance, trees
from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.decoding import processors
from treeflash_jax.decoding.scoring import compute_log_probs
from treeflash_jax.decoding.state import DecodePlan, DecodeState, LogProbs, Sampling
from treeflash_jax.models import vocab
from treeflash_jax.models.backend.indexing import pick

# Random streams of a sequence's key. No two uses within a sequence share a stream: if a tree depended on the noise of the
# verifier's samples, decoding would not be lossless. Samples are keyed by the position of their token, draws and coins by
# that of the root.
VERIFY_STREAM, DRAFT_STREAM, COINS_STREAM = 0, 1, 2


@struct.dataclass
class EmittedPath:
    """The accepted path of a round and the tokens that it emits, before any cut at a stop id or limit.

    Attributes:
      path_bp: accepted nodes, root first.
      length_b: number of accepted nodes, which is also the number of emitted tokens; later entries are padding.
      tokens_bp: the token emitted after each node; the last one is the bonus token.
      log_probs: the verifier's log-probabilities of these tokens; None unless planned.
      expected_b: number of tokens that the round was expected to commit, given its tree; None unless planned.
    """

    path_bp: jax.Array
    length_b: jax.Array
    tokens_bp: jax.Array
    log_probs: LogProbs | None
    expected_b: jax.Array | None


def accept_path(
    state: DecodeState,
    tree: trees.DraftTree,
    proposal: trees.Proposal | None,
    logits_bnv: jax.Array,
    plan: DecodePlan,
    processor: Any = None,
) -> EmittedPath:
    """Returns the path that the plan's rule keeps, and the tokens that it emits.

    Args:
      processor: the user's processor of logits; None for none.
    """
    with jax.named_scope("accept"):
        coins_bx, bonus_bv = draw_coins(state, tree.tokens_bn.shape[1] - 1, logits_bnv)
        noise = acceptance.Noise(target_noise(state, plan.path_length, logits_bnv), coins_bx, bonus_bv)
        processed_bnv = logits_bnv
        if processors.is_needed(state.sampling, processor):
            path_bni = trees.path_tokens(tree, plan.path_length - 1)
            processed_bnv = processors.process(logits_bnv, state, path_bni, processor)
        target = make_target(processed_bnv, state.sampling)
        result = acceptance.RULES[plan.rule].accept(tree, proposal, target, noise)
        drafted_bp = pick(tree.tokens_bn, result.path_bp)
        is_bonus_bp = jnp.arange(plan.path_length) == result.length_b[:, None] - 1
        emitted_bp = jnp.where(is_bonus_bp, result.bonus_b[:, None], jnp.roll(drafted_bp, -1, axis=1))
        log_probs = expected_b = None
        if plan.shared.log_probs:
            log_probs = compute_log_probs(pick(logits_bnv, result.path_bp), emitted_bp, plan.shared.top_log_probs)
        if plan.shared.expected_lengths:
            expected_b = jnp.sum(acceptance.RULES[plan.rule].reach_probabilities(tree, proposal, target), axis=1)
        return EmittedPath(result.path_bp, result.length_b, emitted_bp, log_probs, expected_b)


def make_target(logits_bnv: jax.Array, sampling: Sampling) -> acceptance.TargetDistribution:
    """Returns the verifier's distributions after temperature and filters."""
    numbers = (sampling.numbers[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    return acceptance.target_distribution(logits_bnv, *numbers)


def target_noise(state: DecodeState, length: int, logits_bnv: jax.Array) -> jax.Array:
    """Returns Gumbel noise [b, length, v] of the next `length` positions; zeros if all sequences are greedy."""
    size = logits_bnv.shape[-1]
    dtype = at_least_float32(logits_bnv.dtype)
    with jax.named_scope("noise"):
        stream_b = jax.vmap(jax.random.fold_in, (0, None))(state.sampling.key_b, VERIFY_STREAM)
        positions_bp = state.end_b[:, None] + jnp.arange(length)
        keys_bp = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(stream_b, positions_bp)
        return lax.cond(
            jnp.any(state.sampling.numbers["temperature"] > 0),
            lambda: vocab.gumbel(keys_bp, size, dtype),
            lambda: sharding.constrain(jnp.zeros((*keys_bp.shape, size), dtype), ("batch", None, "vocab")),
        )


def draw_coins(state: DecodeState, count: int, logits_bnv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns uniforms [b, count] for the tests of a round, and Gumbel noise [b, v] for the bonus token."""
    dtype = at_least_float32(logits_bnv.dtype)
    with jax.named_scope("noise"):
        key_b2 = jax.vmap(jax.random.split)(round_keys(state, COINS_STREAM))
        coins_bx = jax.vmap(lambda key: jax.random.uniform(key, (count,), dtype))(key_b2[:, 0])
        return coins_bx, vocab.gumbel(key_b2[:, 1], logits_bnv.shape[-1], dtype)


def round_keys(state: DecodeState, stream: int) -> jax.Array:
    """Returns a key per sequence for this round: fold_in(fold_in(key, stream), position of the root)."""
    stream_b = jax.vmap(jax.random.fold_in, (0, None))(state.sampling.key_b, stream)
    return jax.vmap(jax.random.fold_in)(stream_b, state.cache.length_b)
