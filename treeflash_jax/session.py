"""Caches of a conversation, kept from one answer to the next."""

from __future__ import annotations

import numpy as np

from treeflash_jax import mesh as meshes
from treeflash_jax.batching import Batch
from treeflash_jax.decoding.runner import Kept, Runner


class Session:
    """A conversation whose caches are kept: only the part of a prompt after the tokens that they hold is read.

    The answers are the same as without one. If a chat template or the tokenizer writes earlier messages differently, the
    tokens before the first difference are reused.

    Example:
      >>> session = tf.Session()
      >>> for piece in model.stream(messages, session=session): ...
    """

    def __init__(self):
        self.batch: Batch | None = None  # of the last answer

    def take(self, runner: Runner, ids: list[int]) -> Kept | None:
        """Hands out the last state and the number of the prompt's tokens that it keeps; None if it keeps none."""
        last, self.batch = self.batch, None
        if last is None or last.is_lost or last.runner.weights is not runner.weights:
            return None
        if last.runner.plan.for_prefill() != runner.plan.for_prefill():
            return None
        state = last.runner.inner(last.state)
        tokens_bs, length_b = meshes.to_host((state.tokens_bs, state.cache.length_b))
        # An adaptive drafter may lag behind by a path; a conversation shorter than that keeps nothing.
        known = tokens_bs[0, : max(0, length_b[0] - last.runner.plan.path_rows)]
        prompt = np.array(ids[: known.size])
        same = int(np.cumprod(known[: prompt.size] == prompt).sum())
        return (state, same - 1) if same > 1 else None  # a drafter's row may depend on the token after it
