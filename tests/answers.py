"""Pairs of random weights, states after their prompts, and drafted answers against those of one-token decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from treeflash_jax import GenerateConfig, Result, TreeFlash, drafters
from treeflash_jax.core import parameters
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.engine.planning import make_requests
from treeflash_jax.models import verifier


def make_pair(config: Any, drafter: Any, *, dtype: Any = jnp.float32, scale: float = 0.3, mesh: Any = None) -> TreeFlash:
    """Random weights of a verifier and of a drafter of any kind (None: no drafter), equal wherever they are placed."""
    specs = [verifier.specs(config)] + ([] if drafter is None else [drafters.of(drafter).specs(drafter)])
    trees = [parameters.initialize(spec, jax.random.key(i), dtype, scale) for i, spec in enumerate(specs)]
    if mesh is not None:
        trees = [jax.device_put(tree, parameters.shardings(spec, mesh)) for tree, spec in zip(trees, specs, strict=True)]
    return TreeFlash(config, Weights(*trees), drafter=drafter, stop_ids=(), mesh=mesh)


def make_inputs(model: TreeFlash, prompts: list, capacity: int = 256, **settings) -> tuple[DecodePlan, tuple]:
    """The plan of a call, and the inputs of its prompts for caches of this capacity."""
    config = GenerateConfig(**{"max_new_tokens": 20} | settings)
    requests = make_requests(prompts, config, model.verifier)
    return model.plan(config), model.make_batch(requests, config, batch_size=len(prompts), capacity=capacity)


def prefilled(model: TreeFlash, prompts: list, capacity: int = 256, **settings) -> tuple[DecodePlan, DecodeState]:
    """The plan of a call, and its state after the prompts."""
    plan, inputs = make_inputs(model, prompts, capacity, **settings)
    return plan, loops.prefill(model.weights, *inputs, plan=plan.for_prefill())


def make_runner(model: TreeFlash, prompts: list, capacity: int = 256, **settings) -> tuple[Runner, tuple]:
    """The runner of a call whose rounds may choose their trees, and the inputs of its prompts for these caches."""
    config = model.resolve(None, {"max_new_tokens": 64, "stop_ids": ()} | settings)
    requests = make_requests(prompts, config, model.verifier)
    runner = model.make_runner(config, requests, len(requests), capacity - 20 - max(map(len, prompts)))
    return runner, model.make_batch(requests, config, batch_size=len(requests), capacity=capacity)


def drafted_as_plain(model: TreeFlash, prompts: list, draft: dict, *, plain: Any = None, **settings) -> list[Result]:
    """Asserts that drafted answers are those of one-token decoding (`plain`, if they are known), and returns them."""
    plain = plain or model.generate(prompts, builder="none", **settings)
    drafted = model.generate(prompts, **draft, **settings)
    for prompt, got, expected in zip(prompts, drafted, plain, strict=True):
        assert (got.ids, got.finished) == (expected.ids, expected.finished), (draft, settings, prompt)
        assert 1 + sum(got.accept_lengths) == len(got.ids)
    return drafted


def cut_by_stops(results: list[Result]) -> int:
    """Number of answers that stop inside an accepted path."""
    return sum(result.finished == "stop" and result.cut > 0 for result in results)


@contextmanager
def refused(words: str) -> Iterator[None]:
    """Expects a ValueError of one line that matches."""
    with pytest.raises(ValueError, match=words) as error:
        yield
    assert "\n" not in str(error.value)
