"""Acceptance of a verified tree: the path that a rule keeps, the tokens that it emits, and the random numbers for both.

Shape suffixes: b batch, n tree nodes, p accepted path, i path depth, s token slots, t positions, d model, v vocabulary,
k likeliest tokens, x stop ids, coins, or positions of a chunk.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax import acceptance, trees
from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.decoding import processors
from treeflash_jax.decoding.state import DecodePlan, DecodeState, LogProbs, Sampling, SharedPlan, Weights
from treeflash_jax.models import decoder, vocab
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.models.config import ModelConfig

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
            log_probs = _log_probs(pick(logits_bnv, result.path_bp), emitted_bp, plan.shared.top_log_probs)
        if plan.shared.expected_lengths:
            expected_b = jnp.sum(acceptance.RULES[plan.rule].reach_probabilities(tree, proposal, target), axis=1)
        return EmittedPath(result.path_bp, result.length_b, emitted_bp, log_probs, expected_b)


def emit_first_token(
    weights: Weights,
    state: DecodeState,
    last_bd: jax.Array,
    count_b: jax.Array,
    plan: SharedPlan,
    given_b: jax.Array | None = None,
) -> DecodeState:
    """Returns the state after the first token of each answer.

    Args:
      last_bd: hidden state at the last prompt position.
      count_b: number of tokens to emit for each sequence, 1 or 0.
      given_b: first tokens if they are known; None: sampled from `last_bd`.
    """
    logits_bnv = decoder.logits(weights.verifier, plan.verifier, last_bd[:, None])
    processed_bnv = logits_bnv
    if processors.is_needed(state.sampling, weights.processor):
        no_path_bni = jnp.zeros((count_b.size, 1, 0), jnp.int32)
        processed_bnv = processors.process(logits_bnv, state, no_path_bni, weights.processor)
    picks_bp = make_target(processed_bnv, state.sampling).sample(target_noise(state, 1, logits_bnv))
    picks_bp = picks_bp if given_b is None else given_b[:, None]
    log_probs = _log_probs(logits_bnv, picks_bp, plan.top_log_probs) if plan.log_probs else None
    vocab_size = plan.verifier.vocab_size
    return emit(state, picks_bp, count_b, log_probs, vocab_size=vocab_size, processor=weights.processor)[0]


def make_target(logits_bnv: jax.Array, sampling: Sampling) -> acceptance.TargetDistribution:
    """Returns the verifier's distributions after temperature and filters."""
    numbers = (sampling.settings[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    return acceptance.target_distribution(logits_bnv, *numbers)


def target_noise(state: DecodeState, length: int, logits_bnv: jax.Array) -> jax.Array:
    """Returns Gumbel noise [b, length, v] of the next `length` positions; zeros if all sequences are greedy."""
    size, dtype = logits_bnv.shape[-1], at_least_float32(logits_bnv.dtype)
    with jax.named_scope("noise"):
        stream_b = jax.vmap(jax.random.fold_in, (0, None))(state.sampling.key_b, VERIFY_STREAM)
        positions_bp = state.end_b[:, None] + jnp.arange(length)
        keys_bp = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(stream_b, positions_bp)
        return lax.cond(
            jnp.any(state.sampling.settings["temperature"] > 0),
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


def _log_probs(logits_bpv: jax.Array, tokens_bp: jax.Array, top: int) -> LogProbs:
    """Returns the log-probabilities of the given tokens, and of the `top` likeliest tokens."""
    token_bp1, total_bp1 = vocab.take(logits_bpv, tokens_bp[..., None]), vocab.log_sum_exp(logits_bpv)[..., None]
    top_bpk, top_ids_bpk = token_bp1[..., :0], tokens_bp[..., None][..., :0]
    if top:
        top_bpk, top_ids_bpk = vocab.top_k(logits_bpv, top)
    token_bp, top_bpk = ((x - total_bp1).astype(jnp.float32) for x in (token_bp1, top_bpk))
    return LogProbs(token_bp[..., 0], top_ids_bpk.astype(jnp.int32), top_bpk)


def score_tokens(
    weights: Weights,
    verifier: ModelConfig,
    log_probs: LogProbs,
    hidden_btd: jax.Array,
    next_bt: jax.Array,
    positions_bt: jax.Array,
    is_known_bt: jax.Array,
) -> LogProbs:
    """Returns `log_probs` with the log-probabilities of given tokens added, such as a prompt's.

    At most CHUNK_BYTES of logits exist at a time.

    Args:
      hidden_btd: hidden states at the positions before the tokens.
      next_bt: the tokens. Entries are ignored if `is_known_bt` is False.
      positions_bt: positions of the tokens in the text.
    """
    top = log_probs.top_bsk.shape[-1]

    def score(hidden_bxd: jax.Array, next_bx: jax.Array) -> LogProbs:
        return _log_probs(decoder.logits(weights.verifier, verifier, hidden_bxd), next_bx, top)

    new = vocab.by_chunks(score, verifier.vocab_size, hidden_btd, next_bt)
    at_bt = jnp.where(is_known_bt, positions_bt, log_probs.token_bs.shape[1])
    write = jax.vmap(lambda x_s, at_t, new_t: x_s.at[at_t].set(new_t, mode="drop"))
    written = jax.tree.map(lambda x_bs, new_bt: write(x_bs, at_bt, new_bt), log_probs, new)
    return jax.tree.map(lambda x_bs: sharding.constrain(x_bs, ("batch",) + (None,) * (x_bs.ndim - 1)), written)


def emit(
    state: DecodeState,
    tokens_bp: jax.Array,
    count_b: jax.Array,
    log_probs: LogProbs | None,
    *,
    vocab_size: int,
    processor: Any = None,
) -> tuple[DecodeState, jax.Array]:
    """Appends up to `count_b` tokens, cut after the first stop id and at the limit. Also returns the number kept.

    An id outside the vocabulary marks a position whose logits were all -inf. It ends a sequence like a stop id.
    """
    sampling = state.sampling
    offered_bp = jnp.arange(tokens_bp.shape[1]) < count_b[:, None]
    is_stop_bp = jnp.any(tokens_bp[..., None] == sampling.stop_ids_bx[:, None], axis=-1)
    stops_bp = (is_stop_bp | (tokens_bp >= vocab_size)) & offered_bp
    stopped_b = jnp.any(stops_bp, axis=1)
    kept_b = jnp.where(stopped_b, jnp.argmax(stops_bp, axis=1) + 1, count_b)
    room_b = sampling.limit_b - state.end_b
    kept_b = jnp.where(state.done_b, 0, jnp.minimum(kept_b, room_b)).astype(jnp.int32)
    stopped_b &= jnp.argmax(stops_bp, axis=1) < kept_b

    state = processors.count_tokens(state, tokens_bp, kept_b, processor)
    # All tokens are written; later rounds overwrite those beyond `kept_b`.
    write = jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=0))
    log_probs = jax.tree.map(lambda x_bs, new_bp: write(x_bs, new_bp, state.end_b), state.log_probs, log_probs)
    end_b = state.end_b + kept_b
    tokens_bs = write(state.tokens_bs, tokens_bp.astype(state.tokens_bs.dtype), state.end_b)
    done_b = state.done_b | stopped_b | (end_b >= sampling.limit_b)
    return state.replace(tokens_bs=tokens_bs, end_b=end_b, done_b=done_b, log_probs=log_probs), kept_b
