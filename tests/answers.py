"""Random pairs, states after their prompts, made-up calibrations, and drafted answers against one-token decoding."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeflash_jax import GenerateConfig, Result, TreeFlash, drafters
from treeflash_jax.core import parameters
from treeflash_jax.decoding import calibration, loops
from treeflash_jax.decoding.calibration import Calibration
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.engine.planning import make_requests
from treeflash_jax.models import verifier

BUCKETS = [2, 4, 8, 16]
SIZES = {"candidates": 8, "children": 8}
TREE = {"nodes": 8, "candidates": 4, "children": 4}
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
SAMPLED = {"temperature": [0.0, 0.7, 1.0, 0.0], "top_p": [1.0, 0.9, 0.8, 1.0], "top_k": [0, 0, 9, 0]}  # of four prompts
AUTO = {"nodes": "auto"} | SIZES
FLAT, MIXED = [1.0] * 4, [1.0, 1.2, 1.5, 2.1]


def slow_unless(is_quick: bool, *values: Any) -> Any:
    """Parameters of a test that is marked slow with all but the quick ones."""
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)


def draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def make_pair(
    config: Any, drafter: Any, drafter_specs: Any = None, *, dtype: Any = jnp.float32, scale: float = 0.3, mesh: Any = None
) -> TreeFlash:
    """Random weights of a verifier and of a drafter of any kind (None: no drafter), equal wherever they are placed."""
    specs = [verifier.specs(config)]
    specs += [] if drafter is None else [drafter_specs or drafters.get(drafter).specs(drafter)]
    trees = [parameters.initialize(spec, jax.random.key(i), dtype, scale) for i, spec in enumerate(specs)]
    if mesh is not None:
        trees = [jax.device_put(tree, parameters.shardings(spec, mesh)) for tree, spec in zip(trees, specs, strict=True)]
    return TreeFlash(config, Weights(*trees), drafter=drafter, stop_ids=(), mesh=mesh)


def random_weights(specs: Any, seed: int = 0, scale: float = 0.3, dtype: Any = jnp.float32) -> Any:
    """Every weight random, also those that start at zero or one."""
    specs = jax.tree.map(lambda spec: replace(spec, init="normal"), specs, is_leaf=parameters.is_spec)
    return parameters.initialize(specs, jax.random.key(seed), dtype, scale)


def prefilled(model: TreeFlash, prompts: list, capacity: int = 256, **settings) -> tuple[DecodePlan, DecodeState]:
    """The plan of a call, and its state after the prompts."""
    config = GenerateConfig(**{"max_new_tokens": 20} | settings)
    requests, plan = make_requests(prompts, config, model.verifier), model.plan(config)
    inputs = model.make_batch(requests, config, batch_size=len(prompts), capacity=capacity)
    return plan, loops.prefill(model.weights, *inputs, plan=plan.for_prefill())


def make_runner(model: TreeFlash, prompts: list, capacity: int = 256, **settings) -> tuple[Runner, tuple]:
    """The runner of a call whose rounds may choose their trees, and the inputs of its prompts for these caches."""
    config = model.resolve(None, {"max_new_tokens": 64, "stop_ids": ()} | settings)
    requests = make_requests(prompts, config, model.verifier)
    longest = replace(config, max_new_tokens=capacity - 20 - max(map(len, prompts)))
    runner = model.make_runner(longest, requests, len(requests))
    return runner, model.make_batch(requests, config, batch_size=len(requests), capacity=capacity)


def drafted_as_plain(model: TreeFlash, prompts: list, draft: dict, *, plain: Any = None, **settings) -> list[Result]:
    """Asserts that drafted answers are those of one-token decoding (`plain`, if they are known), and returns them."""
    plain = plain or model.generate(prompts, builder="none", **settings)
    drafted = model.generate(prompts, **draft, **settings)
    for prompt, got, expected in zip(prompts, drafted, plain, strict=True):
        assert (got.ids, got.finished) == (expected.ids, expected.finished), (draft, settings, prompt)
        assert 1 + sum(got.accept_lengths) == len(got.ids)
    return drafted


@partial(jax.jit, static_argnames=("config", "taps", "residual_dtype"))
def read_texts(weights: Any, config: Any, tokens_bt: Any, **options) -> tuple[verifier.Output, jax.Array]:
    """The verifier's output for whole texts, and its logits."""
    batch, size = tokens_bt.shape
    mask_btt = verifier.causal_mask(batch, size)
    out = verifier.forward(weights, config, tokens_bt, jnp.arange(size)[None], mask_btt, **options)
    return out, verifier.logits(weights, out.hidden_btd)


def assert_same_positions(got: Any, expected: Any, length_b: Any, atol: float = 1e-12) -> None:
    """Two caches are equal up to the end of each text."""
    for x, y in zip(*([x for x in jax.tree.leaves(cache) if x.ndim == 4] for cache in (got, expected)), strict=True):
        for b, length in enumerate(length_b):
            np.testing.assert_allclose(x[b, :, :length], y[b, :, :length], atol=atol)


def cut_by_stops(results: list[Result]) -> int:
    """Number of answers that stop inside an accepted path."""
    return sum(result.finished == "stop" and result.cut > 0 for result in results)


def table(model, seconds, step, *, tau=(1.8, 2.5, 3.2, 3.8), nodes=BUCKETS, settings=SIZES, **changes) -> Calibration:
    """A calibration that was never measured."""
    plan = model.plan(GenerateConfig(builder="best-first", nodes=nodes[-1], **settings))
    times = dict(round_seconds=[[list(seconds)]], tree_seconds=[[[0.0] * len(nodes)]], step_seconds=[[step]])
    lengths = dict(temperatures=[0.0, 1.0], tau=[list(tau)] * 2, reliability=[1.0, 1.0])
    identity = calibration.make_identity(model.weights, plan, model.mesh) | changes
    return Calibration(identity=identity, nodes=list(nodes), batch=[1], positions=[256], **times, **lengths)


def beside(model: TreeFlash, path, *entries: Calibration) -> TreeFlash:
    """The same model, which reads these entries."""
    for entry in entries:
        calibration.write(path, entry)
    return TreeFlash(model.verifier, model.weights, drafter=model.drafter, mesh=model.mesh, budget=path)
