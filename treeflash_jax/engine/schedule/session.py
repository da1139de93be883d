"""Sessions: the caches of a conversation, kept between its answers."""

import weakref
from threading import Lock

import jax
import numpy as np

from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodeState, SharedPlan, Weights
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.batching import round_capacity
from treeflash_jax.engine.schedule.prefill import PrefixCaches
from treeflash_jax.engine.schedule.prefixes import count_reusable
from treeflash_jax.engine.schedule.runner import Runner


class Session:
    """A conversation whose caches are kept: prefill skips the tokens of a prompt that they already contain.

    The answers are the same as without a session. If the chat template or the tokenizer encodes earlier messages
    differently, the tokens before the first difference are reused. A stream takes the caches out of the session until it
    ends: a second stream that starts meanwhile reads its whole prompt. A session keeps no weights.

    Example:
      >>> session = tf.Session()
      >>> for piece in model.stream(messages, session=session): ...
    """

    def __init__(self):
        self._last: tuple[DecodeState, SharedPlan, list[weakref.ref]] | None = None  # of the last answer; its weights
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"Session({'empty' if self._last is None else 'with the caches of its last answer'})"

    def keep_caches(self, runner: Runner, state: DecodeState) -> None:
        """Keeps the state of a batch whose slot 0 has decoded the answer."""
        self._last = state, runner.plan.shared, [*map(weakref.ref, _arrays(runner.weights))]

    def take_caches(self, runner: Runner, request: Request, capacity: int) -> PrefixCaches | None:
        """Takes the caches out of the session, for a prompt in slot 0.

        Returns None if the prompt does not begin like the text of the caches, if the weights or the plan changed, or if
        the prompt's log-probabilities are requested: such a prompt is read from its start.

        Args:
          capacity: smallest capacity of the result. It is raised if the last chunk of the prompt, which may begin at any
            position, would not fit.
        """
        with self._lock:
            last, self._last = self._last, None
        if last is None or request.settings.prompt_log_probs:
            return None
        state, plan, arrays = last
        same_arrays = [id(array()) for array in arrays] == [id(array) for array in _arrays(runner.weights)]
        if plan != runner.plan.shared or not same_arrays:
            return None
        count_b = np.zeros(state.end_b.size, int)
        count_b[0] = count_reusable(state, request.ids, plan.verifier.vocab_size)[0]
        if not count_b[0]:
            return None
        capacity = max(capacity, state.capacity, round_capacity(len(request.ids) + plan.prefill_chunk))
        if state.capacity < capacity:
            state = runner.call(loops.grow_caches, state, capacity=capacity)
        return PrefixCaches(state.cache, state.drafter, count_b, capacity)


def _arrays(weights: Weights) -> list[jax.Array]:
    return jax.tree.leaves((weights.verifier, weights.drafter))
