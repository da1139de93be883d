"""Batches: requests padded into device arrays, the number of their slots, and the capacity of their caches."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import numpy as np

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.clock import Clock
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodePlan, Sampling
from treeflash_jax.engine import constraints
from treeflash_jax.engine.requests import PENALTIES, Request

# Numbers of slots by default, each compiled once. SmolLM2 on two CPU cores, one token at a time: 3 prompts take 14 % longer
# in 4 slots than in 3, and 5 take 20 % longer in 8 slots than in 5. That is 0.2 s for 48 tokens; programs of another size
# take 2 s to load.
BATCH_SIZES = (1, 2, 4, 8)
REFILLED_SHARE = 1 / 8  # share of a batch's slots that are refilled together
ROOM = 256  # new tokens for which caches have room at first; they double for longer answers

Batch = tuple[jax.Array, jax.Array, Sampling]  # prompts [b, s], their lengths [b], sampling settings


def round_capacity(positions: int) -> int:
    """Returns the smallest cache capacity of 256, 384, 512, 768, 1024, 1536, ... that holds `positions`."""
    sizes = (size for n in count(7) for size in (2 * 2**n, 3 * 2**n))
    return next(size for size in sizes if size >= positions)


def first_capacity(plan: DecodePlan, requests: Sequence[Request]) -> int:
    """Returns the capacity of caches at first: that of the longest prompt and ROOM new tokens, however long answers may be.

    So a call that changes `max_new_tokens` alone compiles nothing.
    """
    room = ROOM + 1 + plan.path_length
    if plan.drafts and plan.drafter.reads_prompt:
        # Such a drafter has read one token more than the prompt when longer prompts of the batch are still read.
        room = max(room, 1 + plan.prefill.chunk)
    return round_capacity(max(request.length for request in requests) + room)


def largest_caches(plan: DecodePlan, requests: Sequence[Request], batch_size: int, mesh: Any = None) -> tuple[int, int]:
    """Returns the most sequences and positions that the caches of requests, decoded `batch_size` at a time, have at once.

    The caches of a refill exist beside those of the batch, and the last capacity beside the one before, which is copied.
    """
    sizes = [batch_size]
    if 1 < batch_size < len(requests):
        sizes.append(refill_size(batch_size))
    longest = max(request.length + request.settings.max_new_tokens for request in requests) + plan.path_length
    capacity, before = first_capacity(plan, requests), 0
    while capacity < longest:
        capacity, before = 2 * capacity, capacity
    return sum(sharding.pad_batch_size(size, mesh) for size in sizes), capacity + before


def choose_batch_size(requests: int) -> int:
    """Returns the default number of slots: the smallest of BATCH_SIZES with room for all requests, or the last."""
    return next((size for size in BATCH_SIZES if size >= requests), BATCH_SIZES[-1])


def refill_size(batch_size: int) -> int:
    """Returns the number of slots refilled together."""
    return max(1, round(batch_size * REFILLED_SHARE))


def make_batch(
    requests: Sequence[Request],
    *,
    batch_size: int,
    capacity: int,
    dtype: Any,
    mesh: Any = None,
    clock: Clock | None = None,
) -> Batch:
    """Pads prompts and sampling settings into device arrays for `prefill`.

    Args:
      requests: prompts with their sampling settings; at most `batch_size`.
      batch_size: number of sequences; rounded up to a multiple of the mesh's data-parallel groups. Unused slots get a
        one-token prompt that finishes immediately.
      capacity: KV-cache capacity per sequence, in tokens.
      dtype: dtype of the model; settings are at least float32.
      mesh: mesh that shards the batch; None for one device.
      clock: counts the compilation of keys.
    """
    programs.check_process()
    batch_size = sharding.pad_batch_size(batch_size, mesh)
    first = requests[0] if requests else Request(ids=[0])
    unused = replace(first, ids=[0], settings=replace(first.settings, max_new_tokens=1))
    slots = [*requests, *[unused] * (batch_size - len(requests))]
    tokens_bs = np.zeros((batch_size, capacity), np.int32)
    for i, request in enumerate(slots):
        tokens_bs[i, : request.length] = request.ids

    def column(name: str, dtype: Any) -> np.ndarray:
        return np.array([getattr(request.settings, name) for request in slots], dtype)

    length_b, dtype = np.array([request.length for request in slots], np.int32), at_least_float32(dtype)
    numbers = np.array([(request.settings.seed, request.index, request.sample) for request in slots], np.uint32)
    penalties_b3 = bias = least_b = automaton = None  # of those that no request of the call has, programs contain nothing
    if first.changed_settings & {*PENALTIES}:
        penalties_b3 = np.stack([column(name, dtype) for name in PENALTIES], axis=1)
    if "logit_bias" in first.changed_settings:
        ids, values = np.moveaxis(np.array([request.bias for request in slots]), 2, 0)
        bias = ids.astype(np.int32), values.astype(dtype)
    if "min_new_tokens" in first.changed_settings:
        least_b = length_b + column("min_new_tokens", np.int32)
    if first.automaton is not None:
        automaton = constraints.stack([request.automaton for request in slots], *first.automaton_sizes)
    sampling = Sampling(  # NumPy converts dtypes: JAX would compile a program for each
        key_b=programs.call(loops.make_keys, *jax.device_put([*numbers.T]), clock=clock),
        temperature_b=column("temperature", dtype),
        top_k_b=column("top_k", np.int32),
        top_p_b=column("top_p", dtype),
        min_p_b=column("min_p", dtype),
        limit_b=length_b + column("max_new_tokens", np.int32),
        stop_ids_bx=np.array([request.stop_ids for request in slots], np.int32),
        drafter_temperature_b=column("drafter_temperature", dtype),
        penalties_b3=penalties_b3,
        bias=bias,
        least_b=least_b,
        automaton=automaton,
    )
    return sharding.place(jax.device_put((tokens_bs, length_b, sampling)), mesh)
