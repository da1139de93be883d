"""Batches: requests padded into device arrays, the sizes of these arrays, and the capacity of their caches.

Shape suffixes: b batch, s token slots, x stop ids, q states, c classes, v vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.constraints import tables
from treeflash_jax.core import programs, sharding
from treeflash_jax.core.clock import Clock
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.settings import changed
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.automaton import Automaton
from treeflash_jax.decoding.processors import PROCESSORS
from treeflash_jax.decoding.state import Biases, DecodePlan, Sampling
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.settings.generate_config import GenerateConfig, number_types
from treeflash_jax.trees import NO_TOKEN

# Default numbers of slots; the programs of each are compiled once. Computing a few empty slots takes less time than loading
# programs of another size: notebooks/results/latency_smollm2.md#defaults-of-cpus.
BATCH_SIZES = (1, 2, 4, 8)
REFILLED_SHARE = 1 / 8  # share of a batch's slots that are refilled together
LIST_SLOTS = 8  # stop ids and biases are padded to a multiple of this, so that changing them rarely recompiles
TOKEN_CLASSES = 512  # kinds of tokens for which arrays of automata have room; SmolLM2's schemas have some 150
ROOM = 256  # new tokens for which caches have room at first; they double for longer answers


class Batch(NamedTuple):
    """Device arrays of a batch of requests: the first arguments of `loops.init_state`.

    Attributes:
      tokens_bs: prompts, right-padded to the capacity of the caches.
      length_b: prompt lengths, at least 1.
      sampling: sampling settings.
    """

    tokens_bs: jax.Array
    length_b: jax.Array
    sampling: Sampling


def round_capacity(positions: int) -> int:
    """Returns the smallest cache capacity of 256, 384, 512, 768, 1024, 1536, ... that holds `positions`."""
    power = 256
    while power < positions:
        if power + power // 2 >= positions:
            return power + power // 2
        power *= 2
    return power


def first_capacity(plan: DecodePlan, requests: Sequence[Request]) -> int:
    """Returns the initial capacity of caches: the longest prompt plus ROOM new tokens.

    It does not depend on `max_new_tokens`, so a call that changes only this setting compiles nothing.
    """
    room = ROOM + 1 + plan.path_length
    if plan.drafts and plan.configured_drafter.reads_prompt:
        # Such a drafter reads one token beyond a prompt. It needs room for a chunk if longer prompts are still being read.
        room = max(room, 1 + plan.shared.prefill_chunk)
    return round_capacity(max(len(request.ids) for request in requests) + room)


def largest_caches(
    plan: DecodePlan, requests: Sequence[Request], batch_size: int, mesh: Mesh | None = None
) -> tuple[int, int]:
    """Returns the largest numbers of sequences and of positions whose caches exist at the same time.

    `batch_size` requests are decoded at a time. The caches of a refill exist beside those of the batch. When caches grow,
    the old ones exist beside the new ones until they are copied.
    """
    sizes = [batch_size]
    if 1 < batch_size < len(requests):
        sizes.append(refill_size(batch_size))
    longest = max(len(request.ids) + request.settings.max_new_tokens for request in requests) + plan.path_length
    capacity = first_capacity(plan, requests)
    previous_capacity = 0
    while capacity < longest:
        previous_capacity = capacity
        capacity *= 2
    return sum(sharding.pad_batch_size(size, mesh) for size in sizes), capacity + previous_capacity


def choose_batch_size(num_requests: int) -> int:
    """Returns the default number of slots: the smallest of BATCH_SIZES with room for all requests, or the last."""
    return next((size for size in BATCH_SIZES if size >= num_requests), BATCH_SIZES[-1])


def refill_size(batch_size: int) -> int:
    """Returns the number of slots refilled together."""
    return max(1, round(batch_size * REFILLED_SHARE))


@dataclass(frozen=True)
class SamplingSizes:
    """Sizes of the arrays of sampling settings, shared by the requests of a batch. Equal sizes share the programs.

    Attributes:
      config: class of the requests' settings.
      stop_ids, biases: number of stop ids, and of biases, per request, padding included. Programs add no biases if it is 0.
      has_least_end: whether programs delay the end of answers (min_new_tokens).
      processed: names of the settings whose processors (`processors.PROCESSORS`) the programs contain: if a request may
        change one setting of a processor, all settings of that processor.
      automaton: numbers of states, classes and tokens of an automaton; None for programs without automata.
    """

    config: type[GenerateConfig] = GenerateConfig
    stop_ids: int = LIST_SLOTS
    biases: int = 0
    has_least_end: bool = False
    processed: frozenset[str] = frozenset()
    automaton: tuple[int, int, int] | None = None

    @staticmethod
    def fit(requests: Sequence[Request]) -> "SamplingSizes":
        """Returns the sizes for the requests of a call."""

        def pad(lengths: Iterable[int]) -> int:
            return -(-max(lengths) // LIST_SLOTS) * LIST_SLOTS

        changed_names = {name for request in requests for name in changed(request.settings)}
        processed: set[str] = set()
        for names in PROCESSORS:
            if changed_names & {*names}:
                processed.update(names)
        automaton = None
        automata = [request.automaton for request in requests if request.automaton is not None]
        if automata:
            least = requests[0].settings.schema_states, TOKEN_CLASSES
            largest = np.max([least, *(table.next_qc.shape for table in automata)], axis=0).tolist()
            states, classes = [1 << (size - 1).bit_length() for size in largest]
            automaton = states, classes, automata[0].class_v.size
        return SamplingSizes(
            config=type(requests[0].settings),
            stop_ids=max(LIST_SLOTS, pad(len(request.settings.stop_ids) for request in requests)),
            biases=pad(len(request.settings.logit_bias or ()) for request in requests),
            has_least_end="min_new_tokens" in changed_names,
            processed=frozenset(processed),
            automaton=automaton,
        )


def make_batch(
    rows: Sequence[Request | None],
    sizes: SamplingSizes,
    *,
    capacity: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    clock: Clock | None = None,
    automaton: Automaton | None = None,
) -> Batch:
    """Pads prompts and sampling settings into device arrays for `loops.init_state`.

    Args:
      rows: request of each row; None for an unused row, which gets a one-token prompt that finishes immediately. Unused
        rows are added up to a multiple of the mesh's data-parallel groups.
      sizes: sizes that fit all requests.
      capacity: KV-cache capacity per sequence, in tokens.
      dtype: dtype of the model; settings are at least float32.
      mesh: mesh that shards the batch; None for one device.
      clock: clock that counts the compilation of random keys.
      automaton: automata of the rows, if they are already on the device.
    """
    programs.check_process()
    unused = [None] * (sharding.pad_batch_size(len(rows), mesh) - len(rows))
    nothing = Request(ids=[0], settings=sizes.config(max_new_tokens=1, drafter_temperature=1.0, stop_ids=()))
    requests = [request or nothing for request in (*rows, *unused)]
    tokens_bs = np.zeros((len(requests), capacity), np.int32)
    for tokens_s, request in zip(tokens_bs, requests, strict=True):
        tokens_s[: len(request.ids)] = request.ids

    def column(name: str, dtype: DTypeLike) -> np.ndarray:
        return np.array([getattr(request.settings, name) for request in requests], dtype)

    length_b = np.array([len(request.ids) for request in requests], np.int32)
    float_dtype = at_least_float32(dtype)
    key_numbers = np.array([(request.settings.seed, request.index, request.sample) for request in requests], np.uint32)
    numbers = {
        name: column(name, np.int32 if kind is int else float_dtype)
        for name, kind in number_types(sizes.config).items()
        if name in sizes.processed or name not in chain(*PROCESSORS)
    }
    biases = None
    if sizes.biases:
        pairs = [tuple((request.settings.logit_bias or {}).items()) for request in requests]
        ids, added = np.moveaxis(_pad(pairs, sizes.biases, (NO_TOKEN, 0.0)), 2, 0)
        biases = Biases(ids.astype(np.int32), added.astype(float_dtype))
    if sizes.automaton and automaton is None:
        automaton = tables.stack([request.automaton for request in requests], *sizes.automaton)
    sampling = Sampling(  # NumPy converts the dtypes, because JAX would compile a program for each conversion
        key_b=programs.call(loops.make_keys, *jax.device_put([*key_numbers.T]), clock=clock),
        limit_b=length_b + column("max_new_tokens", np.int32),
        stop_ids_bx=_pad([request.settings.stop_ids for request in requests], sizes.stop_ids, -1).astype(np.int32),
        drafter_temperature_b=column("drafter_temperature", float_dtype),
        numbers=numbers,
        biases=biases,
        least_end_b=length_b + column("min_new_tokens", np.int32) if sizes.has_least_end else None,
        automaton=automaton,
    )
    return sharding.place(jax.device_put(Batch(tokens_bs, length_b, sampling)), mesh)


def _pad(lists: Sequence[Sequence[Any]], size: int, padding: Any) -> np.ndarray:
    return np.array([(*values, *[padding] * (size - len(values))) for values in lists])
