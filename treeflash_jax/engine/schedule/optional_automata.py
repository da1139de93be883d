"""Batches and rounds without the automata of answers that have no constraint."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from treeflash_jax.decoding.automaton import Automaton
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.batching import Batch, SamplingSizes, make_batch


class OptionalAutomata:
    """Leaves automata, whose tables are large, out of an open scheduler's batches and rounds if no answer needs them.

    Batches without constraints share one automaton on the device, which allows everything. Rounds without constraints run
    a program without automata.

    Args:
      is_open: whether the scheduler is open. If it is not, every batch and round has automata if its sizes have them.
    """

    def __init__(self, is_open: bool):
        self._is_open = is_open
        self._allow_all: dict[int, Automaton] = {}  # by number of rows

    def make_batch(self, rows: Sequence[Request | None], sizes: SamplingSizes, **options: Any) -> Batch:
        """Pads the requests of rows, as `batching.make_batch` does with these options."""
        if not self._is_open or has_constraint(rows):
            return make_batch(rows, sizes, **options)
        batch = make_batch(rows, sizes, **options, automaton=self._allow_all.get(len(rows)))
        _, _, sampling = batch
        if sampling.automaton is not None:
            self._allow_all[len(rows)] = sampling.automaton
        return batch

    def run_rounds(
        self, decode: Callable[[DecodeState], DecodeState], state: DecodeState, requests: Iterable[Request]
    ) -> DecodeState:
        """Returns the state after rounds.

        Args:
          decode: function that runs the rounds, to which the state is donated.
          requests: requests that have a slot.
        """
        if not self._is_open or has_constraint(requests):
            return decode(state)
        return replace_automata(decode(replace_automata(state)), state.sampling.automaton, state.automaton_b)


def has_constraint(requests: Iterable[Request | None]) -> bool:
    return any(request and request.automaton for request in requests)


def replace_automata(
    state: DecodeState, automaton: Automaton | None = None, automaton_b: jax.Array | None = None
) -> DecodeState:
    """Returns the state with these automata; by default, without any."""
    return state.replace(sampling=state.sampling.replace(automaton=automaton), automaton_b=automaton_b)
