"""The compiled programs of a batch, as pure functions of a donated state.

- `init_state` allocates the caches, or reuses earlier ones.
- `prefill_chunks` reads prompts into the caches, in chunks of one size, so that all prompt lengths share a program.
- `decode` runs rounds (rounds.py) until every sequence is done, or a few rounds for streaming.
- `admit` moves prefilled sequences into done slots. `copy_slots` copies caches for prompts that begin like their texts.
  `grow_caches` makes room for longer texts.
- `draft` returns the tree of the next round, for pictures.

`make_keys` makes the random keys.

Shape suffixes: b batch, s token slots, t chunk tokens, k likeliest tokens, d model, j tapped layers x model, a admitted
sequences.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from treeflash_jax import trees
from treeflash_jax.core import programs, sharding
from treeflash_jax.decoding import processors, rounds
from treeflash_jax.decoding.emitting import emit_first_token
from treeflash_jax.decoding.scoring import score_tokens
from treeflash_jax.decoding.state import DecodePlan, DecodeState, LogProbs, Sampling, SharedPlan, Weights, pin
from treeflash_jax.drafters import NewPositions, State
from treeflash_jax.models import caches, decoder, kernels
from treeflash_jax.models.backend.indexing import at_last, pick

Carry = tuple[DecodeState, jax.Array]  # state and number of rounds run
Caches = tuple[caches.Cache, State | None]  # the verifier's cache and the drafter's state


@jax.jit
def make_keys(seed_b: jax.Array, index_b: jax.Array, sample_b: jax.Array) -> jax.Array:
    """Returns one key per sequence: for sample 0 the prompt's key, for sample j > 0 the prompt's key with j folded in."""

    def key(seed: jax.Array, index: jax.Array, sample: jax.Array) -> jax.Array:
        prompt = jax.random.fold_in(jax.random.key(seed), index)
        return jnp.where(sample == 0, prompt, jax.random.fold_in(prompt, sample))

    return jax.vmap(key)(seed_b, index_b, sample_b)


@partial(jax.jit, static_argnames=("plan", "dtype", "can_cut"), donate_argnames=("kept",))
def init_state(
    tokens_bs: jax.Array,
    length_b: jax.Array,
    sampling: Sampling,
    kept: Caches | None = None,
    kept_b: jax.Array | None = None,
    processor: Any = None,
    *,
    plan: SharedPlan,
    dtype: DTypeLike,
    can_cut: bool = False,
) -> DecodeState:
    """Returns the state before prefill. Its caches are empty, or those of earlier texts with the same first tokens.

    Args:
      tokens_bs: prompts, right-padded to the cache capacity.
      length_b: prompt lengths, at least 1.
      kept: caches of earlier texts, with the shape of the state's caches; donated. None: empty caches.
      kept_b: number of positions of these caches to keep, less than the prompt's length.
      processor: the user's processor of logits; None for none.
      can_cut: whether a later state may begin with a part of these caches.
    """
    batch, capacity = tokens_bs.shape
    if kept is not None:
        cache = kept[0].cut(kept_b)
        drafter = kept[1].cut(kept_b) if plan.loaded_drafter else None
    else:
        stacked = plan.stacks_cache
        cache = caches.allocate(plan.verifier, batch, capacity, dtype, stacked=stacked, can_cut=can_cut)
        drafter = plan.loaded_drafter.init(batch, capacity, dtype) if plan.loaded_drafter else None
    log_probs = None
    if plan.log_probs:
        top_bsk = jnp.zeros((batch, capacity, plan.top_log_probs), jnp.float32)
        log_probs = LogProbs(jnp.zeros((batch, capacity), jnp.float32), top_bsk.astype(jnp.int32), top_bsk)
    state = DecodeState(
        tokens_bs=tokens_bs,
        end_b=length_b,
        done_b=jnp.zeros(batch, bool),
        cache=cache,
        drafter=drafter,
        rounds_b=jnp.zeros(batch, jnp.int32),
        accepted_bs=jnp.zeros((batch, capacity), jnp.int32),
        log_probs=log_probs,
        expected_bs=jnp.zeros((batch, capacity), jnp.float32) if plan.expected_lengths else None,
        sampling=sampling,
    )
    return pin(processors.init_processors(state, plan.verifier.vocab_size, processor))


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def prefill_chunks(
    weights: Weights,
    state: DecodeState,
    length_b: jax.Array,
    max_chunks: jax.Array,
    first_b: jax.Array | None = None,
    *,
    plan: SharedPlan,
) -> DecodeState:
    """Reads the next chunks of the prompts, and emits the first token after each prompt that is complete.

    Args:
      state: result of `init_state` or an earlier `prefill_chunks`; donated. Its capacity must have room for the last chunk,
        padding included.
      max_chunks: int32 scalar, maximal number of chunks.
      first_b: first tokens if they are known; None: sampled.
    """
    read = _run_chunks(weights, pin(state), length_b, max_chunks, plan)
    cache, drafter = read.cache, read.drafter
    if plan.scores_prompts:
        state = state.replace(log_probs=read.log_probs)
    count_b = ((cache.length_b == length_b) & (state.end_b == length_b)).astype(jnp.int32)  # 1: complete, no answer yet
    state = emit_first_token(weights, state.replace(cache=cache), read.hidden_bd, count_b, plan, first_b)
    if plan.loaded_drafter and plan.loaded_drafter.reads_tokens:  # the token after the last prompt position
        first_b1 = pick(state.tokens_bs, length_b[:, None])
        new = NewPositions(read.features_bj[:, None], first_b1, count_b, plan.prefill_attention)
        drafter = plan.loaded_drafter.extend(weights.drafter, weights.verifier, drafter, new)
    return pin(state.replace(drafter=drafter))


class _Reading(NamedTuple):
    """Carry of the loop that reads chunks.

    Attributes:
      count: number of chunks that this loop read.
      cache: the verifier's cache.
      drafter: the drafter's state. If the drafter reads tokens, the state lacks the last position of a complete prompt,
        because the token after it is not known yet.
      hidden_bd, features_bj: hidden state and features of the last position that this loop read; zeros if it read none.
      log_probs: log-probabilities of the text so far; None unless planned.
    """

    count: jax.Array
    cache: caches.Cache
    drafter: State | None
    hidden_bd: jax.Array
    features_bj: jax.Array
    log_probs: LogProbs | None


def _run_chunks(
    weights: Weights, state: DecodeState, length_b: jax.Array, max_chunks: jax.Array, plan: SharedPlan
) -> _Reading:
    batch, chunk = state.end_b.size, plan.chunk_size(state.capacity)
    dtype, width = weights.dtype, plan.verifier.hidden_size
    reads_prompt = plan.loaded_drafter and plan.loaded_drafter.reads_prompt
    reads_tokens = plan.loaded_drafter and plan.loaded_drafter.reads_tokens
    start = _Reading(
        count=jnp.zeros_like(max_chunks),
        cache=state.cache,
        drafter=state.drafter,
        hidden_bd=jnp.zeros((batch, width), plan.residual_dtype or dtype),
        features_bj=jnp.zeros((batch, width * len(plan.taps)), dtype),
        log_probs=state.log_probs if plan.scores_prompts else None,
    )
    mask_btt = decoder.causal_mask(batch, chunk)

    def step(read: _Reading) -> _Reading:
        cache = _in_row_order(caches.pin(read.cache))
        drafter, log_probs = read.drafter, read.log_probs
        positions_bt = cache.length_b[:, None] + jnp.arange(chunk)
        tokens_bt = pick(state.tokens_bs, positions_bt)
        next_bt = pick(state.tokens_bs, positions_bt + 1)
        count_b = jnp.clip(length_b - cache.length_b, 0, chunk)
        with kernels.use(plan.kernels):
            out = decoder.forward(
                weights.verifier, plan.verifier, tokens_bt, positions_bt, mask_btt, cache,
                taps=plan.taps, attention=plan.prefill_attention, residual_dtype=plan.residual_dtype,
            )  # fmt: skip
        if plan.loaded_drafter:
            known_b = jnp.clip(length_b - 1 - cache.length_b, 0, chunk) if reads_tokens and not reads_prompt else count_b
            visible = (None, tokens_bt) if reads_prompt else (out.features_btj, next_bt)
            drafter = _in_row_order(sharding.pin(drafter, drafter.axes()))
            new = NewPositions(*visible, known_b, plan.prefill_attention)
            drafter = plan.loaded_drafter.extend(weights.drafter, weights.verifier, drafter, new)

        def at_end(x_btd: jax.Array, before_bd: jax.Array) -> jax.Array:
            return jnp.where((count_b > 0)[:, None], at_last(x_btd, count_b)[:, 0], before_bd)

        hidden_bd = at_end(out.hidden_btd, read.hidden_bd)
        features_bj = at_end(out.features_btj, read.features_bj)
        if plan.scores_prompts:
            is_known_bt = positions_bt + 1 < length_b[:, None]
            log_probs = score_tokens(
                weights, plan.verifier, log_probs, out.hidden_btd, next_bt, positions_bt + 1, is_known_bt
            )
        kept_b = caches.count_after(count_b, hidden_bd[:, 0])
        cache = caches.commit(cache, out.new, kept_b)
        return _Reading(read.count + 1, cache, drafter, hidden_bd, features_bj, log_probs)

    def is_unfinished(read: _Reading) -> jax.Array:
        return (read.count < max_chunks) & jnp.any(read.cache.length_b < length_b)

    return lax.while_loop(is_unfinished, step, start)


def _in_row_order(cache: Any) -> Any:
    """Constrains the layout of a cache in memory.

    Otherwise XLA for GPUs (jax 0.12) gives the loop's carry the layout of the new positions, and transposes all slots in
    each pass.
    """
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), cache)


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def decode(
    weights: Weights, state: DecodeState, max_rounds: jax.Array, enough: jax.Array | None = None, *, plan: DecodePlan
) -> DecodeState:
    """Runs rounds until enough sequences are done, `max_rounds` have run, or the next round might not fit the caches.

    Nothing leaves the device between rounds.

    Args:
      state: result of `prefill_chunks` or an earlier `decode`; donated.
      enough: number of done sequences at which the loop ends, so that waiting requests can be admitted; None: all.
    """
    enough = state.done_b.size if enough is None else enough

    def goes_on(carry: Carry) -> jax.Array:
        state, count = carry
        fits = jnp.max(state.end_b) + plan.path_length <= state.capacity
        return (jnp.sum(state.done_b) < enough) & (count < max_rounds) & fits

    def step(carry: Carry) -> Carry:
        state, count = carry
        return pin(rounds.decode_round(weights, pin(state), plan)), count + 1

    return lax.while_loop(goes_on, step, (pin(state), jnp.zeros_like(max_rounds)))[0]


programs.ROUND_FUNCTIONS.add(decode)


@partial(jax.jit, donate_argnames=("state",))
def admit(state: DecodeState, fresh: DecodeState, slots_a: jax.Array) -> DecodeState:
    """Replaces done sequences by new ones. The caches of all other sequences stay as they are.

    Args:
      state: state of the batch; donated.
      fresh: state of the new sequences after `prefill_chunks`, with caches of the same capacity.
      slots_a: int32, slot of each row of `fresh`; -1 for an unused row.
    """
    used_first_a = jnp.argsort(slots_a < 0)

    def put(index: jax.Array, state: DecodeState) -> DecodeState:
        row = used_first_a[index]

        def replace_one(x: jax.Array, new: jax.Array) -> jax.Array:
            new_1 = lax.dynamic_slice_in_dim(new, row, 1, axis=0)
            return lax.dynamic_update_slice_in_dim(x, new_1, slots_a[row], axis=0)

        return pin(jax.tree.map(replace_one, state, fresh))

    return lax.fori_loop(0, jnp.sum(slots_a >= 0), put, pin(state))


@jax.jit
def copy_slots(kept: Caches, slots_a: jax.Array) -> Caches:
    """Returns copies of the caches of the sequences in these slots; empty ones for slots beyond the last."""
    cache, drafter = jax.tree.map(lambda x: jnp.take(x, slots_a, axis=0, mode="fill", fill_value=0), kept)
    return caches.pin(cache), None if drafter is None else sharding.pin(drafter, drafter.axes())


@partial(jax.jit, static_argnames=("plan",))
def draft(weights: Weights, state: DecodeState, plan: DecodePlan) -> trees.DraftTree:
    """Returns the tree that the next round would verify."""
    return rounds.draft_tree(weights, state, plan)[0]


@partial(jax.jit, static_argnames=("capacity",))
def grow_caches(state: DecodeState, capacity: int) -> DecodeState:
    """Returns the state with room for `capacity` positions."""
    room = capacity - state.capacity

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, room), *((0, 0),) * (x.ndim - 2)))

    names = "tokens_bs", "accepted_bs", "log_probs", "expected_bs"
    padded = {name: jax.tree.map(pad, getattr(state, name)) for name in names}
    drafter = None if state.drafter is None else state.drafter.grow(capacity)
    return pin(state.replace(cache=state.cache.grow(capacity), drafter=drafter, **padded))
