"""Prompts with settings of their own, and the answers of their own calls, for tests of what shares a batch."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from answers import make_pair
from conftest import FEW_TOKENS, RANDOM_DRAFTER

import treeflash_jax as tf
from treeflash_jax.models.config import ModelConfig

PLAIN = {"builder": "none"}
LONGEST = 14  # tokens of an answer
DRAFTED = {"nodes": 4, "candidates": 4, "children": 4}
LAYERS = replace(FEW_TOKENS, num_layers=1)
DRAFTER = replace(RANDOM_DRAFTER, layers=LAYERS, mask_token_id=11, taps=(0, 1), num_target_layers=None)


def few_tokens(mesh: Any = None, verifier: ModelConfig = FEW_TOKENS) -> tf.TreeFlash:
    return make_pair(verifier, DRAFTER, dtype=jnp.float64, mesh=mesh)


@dataclass
class Pool:
    """Prompts, each with settings, and the answers of their own calls."""

    model: tf.TreeFlash
    prompts: list[list[int]]
    settings: dict[str, list[Any]]
    shared: dict[str, Any]
    expected: list[list[int]]

    def draw(self, numbers: list[int]) -> tuple[list[list[int]], dict[str, Any]]:
        """Returns some of the prompts, and the settings of a call with them."""
        lists = {name: [values[number] for number in numbers] for name, values in self.settings.items()}
        return [self.prompts[number] for number in numbers], lists | self.shared

    def answer(self, number: int, limit: int, stop_ids: list[int]) -> list[int]:
        """Returns the right answer to a prompt, whose longest one is known."""
        ids = self.expected[number][:limit]
        ends = [i for i, token in enumerate(ids) if token in stop_ids]
        return ids[: ends[0] + 1] if ends else ids


def make_pool(model: tf.TreeFlash, count: int, **shared) -> Pool:
    rng = np.random.default_rng(0)
    vocab_size = model.verifier.vocab_size
    texts = rng.integers(0, vocab_size, (4, 24))
    lengths = rng.integers(1, 25, count)
    prompts = [texts[i % 4, : lengths[i]].tolist() + rng.integers(0, vocab_size, i % 3).tolist() for i in range(count)]
    settings = {
        "temperature": rng.choice([0.0, 0.8, 1.5], count).tolist(),
        "seed": [*range(count)],
    }
    pool = Pool(model, prompts, settings, {"max_new_tokens": LONGEST, "stop_ids": [], **shared}, [])
    calls = (pool.draw([number]) for number in range(count))
    pool.expected = [model.generate(prompts, batch_size=1, **how)[0].ids for prompts, how in calls]
    assert len({tuple(ids) for ids in pool.expected}) > count / 3, "answers have to differ"
    return pool
