"""Reuse of prefixes: a prompt that begins like an earlier text continues from a copy of that text's caches.

Shape suffixes: b batch, s token slots, a admitted sequences.
"""

from collections.abc import Sequence

import jax
import numpy as np

from treeflash_jax.core import sharding
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.prefill import PrefixCaches
from treeflash_jax.engine.schedule.runner import Runner

LEAST_REUSED = 64  # tokens; a shorter common beginning is read again


def count_reusable(state: DecodeState, ids: list[int], vocab_size: int) -> np.ndarray:
    """Returns the number of leading tokens of a prompt to which the caches of each slot can be cut, [b]."""
    tokens_bs, length_b = sharding.to_host((state.tokens_bs, state.cache.length_b))
    prompt_s = np.full(state.capacity, -1)
    prompt_s[: len(ids)] = ids[: state.capacity]
    is_known_bs = np.arange(state.capacity) <= length_b[:, None]  # the anchor too, which no cache holds yet
    same_b = np.cumprod((tokens_bs == prompt_s) & is_known_bs, axis=1).sum(axis=1)
    is_damaged_b = np.take_along_axis(tokens_bs, length_b[:, None], axis=1)[:, 0] >= vocab_size  # NaN ended the answer
    count_b = np.where(is_damaged_b, 0, np.maximum(same_b - 1, 0))  # a drafter's state may depend on the next token
    return sharding.to_host(state.cache.longest_cut(count_b.astype(np.int32)))


def copy_prefixes(
    runner: Runner, state: DecodeState, requests: Sequence[Request], num_rows: int
) -> tuple[list[int | None], PrefixCaches | None]:
    """Returns the preferred slot of each request, and copies of the caches from which the rows of their prefill continue.

    A request prefers a slot if it shares at least half of that slot's text; None: any slot. If no prompt shares
    LEAST_REUSED tokens with a slot, nothing is copied and the caches are None. Prompts whose log-probabilities are
    requested are read from their start.

    Args:
      num_rows: number of rows of the prefill; the requests have the first ones.
    """
    known_b = sharding.to_host(state.cache.length_b)
    # Rows that reuse nothing get zeros: NaN of a damaged slot would reach their answers even from masked positions.
    source_a = np.full(num_rows, known_b.size, np.int32)
    count_a = np.zeros(num_rows, np.int32)
    preferred: list[int | None] = []
    for row, request in enumerate(requests):
        count_b = count_reusable(state, request.ids, runner.plan.shared.verifier.vocab_size)
        source = int(np.argmax(count_b))
        is_reused = count_b[source] >= LEAST_REUSED and not request.settings.prompt_log_probs
        if is_reused:
            source_a[row], count_a[row] = source, count_b[source]
        preferred.append(source if is_reused and 2 * count_b[source] >= known_b[source] else None)
    if not count_a.any():
        return preferred, None
    slots_a = sharding.place(jax.device_put(source_a), runner.mesh, over_batch=False)
    cache, drafter = runner.call(loops.copy_slots, (state.cache, state.drafter), slots_a)
    return preferred, PrefixCaches(cache, drafter, count_a, state.capacity)
