"""Emission: tokens join an answer, its first one after the prompt, then those of accepted paths.

Shape suffixes: b batch, n tree nodes, p emitted tokens, i path depth, s token slots, d model, x stop ids.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.decoding import processors
from treeflash_jax.decoding.accepting import make_target, target_noise
from treeflash_jax.decoding.scoring import compute_log_probs
from treeflash_jax.decoding.state import DecodeState, LogProbs, SharedPlan, Weights
from treeflash_jax.models import decoder


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
    log_probs = compute_log_probs(logits_bnv, picks_bp, plan.top_log_probs) if plan.log_probs else None
    vocab_size = plan.verifier.vocab_size
    return emit(state, picks_bp, count_b, log_probs, vocab_size=vocab_size, processor=weights.processor)[0]


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
