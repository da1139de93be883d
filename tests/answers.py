"""Random pairs, states after their prompts, and drafted answers against one-token decoding."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeflash_jax import Result, TreeFlash
from treeflash_jax.core import parameters
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.drafters import AssistantDrafter
from treeflash_jax.engine.schedule.batching import Batch, SamplingSizes, make_batch
from treeflash_jax.models import decoder, quantized
from treeflash_jax.models.config import DeltaSizes, KindSizes, ModelConfig, Rope

SIZES = {"candidates": 8, "children": 8}
TREE = {"nodes": 8, "candidates": 4, "children": 4}
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
SAMPLED = {"temperature": [0.0, 0.7, 1.0, 0.0], "top_p": [1.0, 0.9, 0.8, 1.0], "top_k": [0, 0, 9, 0]}  # of four prompts


def slow(*values: Any) -> Any:
    """Parameters of a test that is slow with them."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_unless(is_quick: bool, *values: Any) -> Any:
    """Parameters of a test that is marked slow with all but the quick ones."""
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)


def with_recurrent_layers(config: ModelConfig) -> ModelConfig:
    """A verifier like Qwen3.5: gated delta rules in all layers but the last, which has gated attention."""
    kinds = ("linear_attention",) * (config.num_layers - 1) + ("full_attention",)
    return replace(
        config, model_type="qwen3_5_text", layer_types=kinds,
        gates_attention=True, offset_norms=True, rope=Rope(fraction=0.5),
        delta=DeltaSizes(key_heads=2, value_heads=4, key_dim=4, value_dim=6, conv_width=4),
    )  # fmt: skip


def with_windows_and_sinks(config: ModelConfig) -> ModelConfig:
    """A verifier like gpt-oss: windows in every second layer, sinks, biases and clamped experts."""
    kinds = ("sliding_attention", "full_attention") * config.num_layers
    return replace(
        config, model_type="gpt_oss", layer_types=kinds[: config.num_layers], window=5,
        attention_sinks=True, qk_norm=False, qkv_bias=True, o_bias=True,
        num_experts=6, experts_per_token=2, expert_size=12, normalize_experts=True, expert_biases=True, swiglu_limit=0.7,
    )  # fmt: skip


def with_shared_layers(config: ModelConfig) -> ModelConfig:
    """A verifier like the edge models of Gemma 4, with an expert part too: the last two of its four layers keep nothing."""
    scale = dict(attention_factor=config.head_dim**0.25)
    window = dict(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, rope=Rope(**scale), intermediate_size=24)
    full = window | dict(num_kv_heads=1, head_dim=2 * config.head_dim, keys_are_values=True)
    full["rope"] = Rope(kind="proportional", fraction=0.5, attention_factor=(2 * config.head_dim) ** 0.25)
    wide = {"intermediate_size": 48}
    sizes = {
        "sliding_attention": window, "full_attention": full,
        "shared_sliding_attention": window | wide, "shared_full_attention": full | wide,
    }  # fmt: skip
    return replace(
        config, model_type="gemma4_text", num_layers=4, layer_types=tuple(sizes), window=5, rope=Rope(**scale),
        sizes=tuple((name, KindSizes(**x)) for name, x in sizes.items()), tie_embeddings=True,
        value_norm=True, wide_norms=True, post_norms=True, layer_scalars=True, layer_input_size=3, activation="gelu",
        embedding_factor=config.hidden_size**0.5, logit_cap=4.0,
        num_experts=6, experts_per_token=2, expert_size=12, normalize_experts=True, dense_beside_experts=True,
    )  # fmt: skip


def make_assistant(verifier: ModelConfig, **fields: Any) -> AssistantDrafter:
    """An assistant of two layers for a verifier of `with_shared_layers`."""
    layers = replace(
        verifier, num_layers=2, layer_types=("shared_sliding_attention", "shared_full_attention"), hidden_size=8,
        window=verifier.window + 1, layer_input_size=0, num_experts=0, dense_beside_experts=False,
    )  # fmt: skip
    return AssistantDrafter(layers=layers, target_hidden_size=verifier.hidden_size, **fields).fitted(verifier)


def draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def make_pair(
    config: Any,
    drafter: Any,
    drafter_specs: Any = None,
    *,
    dtype: Any = jnp.float32,
    scale: float = 0.3,
    mesh: Any = None,
    scheme: str | None = None,
    seed: int = 0,
) -> TreeFlash:
    """Random weights of a verifier and of a drafter of any kind (None: no drafter), equal wherever they are placed.

    A scheme quantises the verifier's.
    """
    specs = [decoder.specs(config)]
    if config.attention_sinks:  # neither sinks nor biases are 0
        change = {"zeros": "normal", "ones": "ones", "normal": "normal"}
        specs = jax.tree.map(lambda spec: replace(spec, init=change[spec.init]), specs, is_leaf=parameters.is_spec)
    specs += [] if drafter is None else [drafter_specs or drafter.specs()]
    trees = [fresh_weights(spec, i, scale, dtype) for i, spec in enumerate(specs, seed)]
    if "clusters" in trees[-1]:
        ids_cz = trees[-1]["clusters"]
        trees[-1]["clusters"] = jnp.asarray(np.random.default_rng(0).permutation(ids_cz.size), jnp.int32).reshape(
            ids_cz.shape
        )
    if mesh is not None:
        places = jax.tree.map(lambda x: x.sharding, [parameters.abstract(spec, dtype, mesh) for spec in specs])
        trees = jax.device_put(trees, places)
    compress = lambda spec, weight: quantized.compress(weight, spec, scheme, mesh)  # noqa: E731
    trees[0] = jax.tree.map(compress, specs[0], trees[0], is_leaf=parameters.is_spec)
    return TreeFlash(config, Weights(*trees), drafter=drafter, stop_ids=(), mesh=mesh)


def fresh_weights(specs: Any, seed: int = 0, scale: float = 0.3, dtype: Any = jnp.float32) -> Any:
    """Weights as `parameters.initialize` draws them, from numpy's generator.

    Nothing is compiled: `jax.device_put` has no program, unlike `jnp.asarray` (jax 0.10).
    """
    rng = np.random.default_rng(seed)

    def make(spec: parameters.Spec) -> jax.Array:
        if spec.init == "normal":
            return jax.device_put((scale * rng.normal(size=spec.shape)).astype(dtype))
        numbers = np.arange(math.prod(spec.shape)) if spec.init == "range" else np.full(spec.shape, spec.init == "ones")
        return jax.device_put(numbers.reshape(spec.shape).astype(spec.dtype_in(dtype)))

    return jax.tree.map(make, specs, is_leaf=parameters.is_spec)


def random_weights(specs: Any, seed: int = 0, scale: float = 0.3, dtype: Any = jnp.float32) -> Any:
    """Every weight random, even weights that start at zero or one."""
    specs = jax.tree.map(lambda spec: replace(spec, init="normal"), specs, is_leaf=parameters.is_spec)
    return fresh_weights(specs, seed, scale, dtype)


def prefilled(model: TreeFlash, prompts: list, capacity: int = 256, **settings) -> tuple[DecodePlan, DecodeState]:
    """The plan of a call, and its state after the prompts."""
    usual = {"max_new_tokens": 20, "builder": "best-first" if model.drafter else "none"}
    plan, batch = planned_batch(model, prompts, capacity, **usual | settings)
    begun = loops.init_state(*batch, plan=plan.shared, dtype=model.dtype)
    return plan, loops.prefill_chunks(model.weights, begun, batch.length_b, jnp.int32(capacity), plan=plan.shared)


def planned_batch(model: TreeFlash, prompts: list, capacity: int = 256, **settings) -> tuple[DecodePlan, Batch]:
    """The plan of a call, and the inputs of its prompts for these caches."""
    call = model.prepare(prompts, **{"max_new_tokens": 64, "stop_ids": (), "batch_size": len(prompts)} | settings)
    sizes = SamplingSizes.fit(call.requests)
    return call.plan, make_batch(call.requests, sizes, capacity=capacity, dtype=model.dtype, mesh=model.mesh)


def drafted_as_plain(model: TreeFlash, prompts: list, draft: dict, *, plain: Any = None, **settings) -> list[Result]:
    """Asserts that drafted answers equal one-token decoding (`plain`, if known), and returns them."""
    plain = plain or model.generate(prompts, builder="none", **settings)
    drafted = model.generate(prompts, **draft, **settings)
    for prompt, got, expected in zip(prompts, drafted, plain, strict=True):
        assert (got.ids, got.finished) == (expected.ids, expected.finished), (draft, settings, prompt)
        assert 1 + sum(got.accept_lengths) == len(got.ids)
    return drafted


@partial(jax.jit, static_argnames=("config", "taps", "residual_dtype"))
def read_texts(weights: Any, config: Any, tokens_bt: Any, **options) -> tuple[decoder.Output, jax.Array]:
    """The verifier's output for whole texts, and its logits."""
    batch, size = tokens_bt.shape
    mask_btt = decoder.causal_mask(batch, size)
    out = decoder.forward(weights, config, tokens_bt, jnp.arange(size)[None], mask_btt, **options)
    return out, decoder.logits(weights, config, out.hidden_btd)


def assert_greedy(model: TreeFlash, prompts: list[list[int]], results: list[Result]) -> jax.Array:
    """Asserts that answers consist of the likeliest tokens of a pass over each whole text; returns the pass's logits."""
    texts = [prompt + result.ids for prompt, result in zip(prompts, results, strict=True)]
    tokens_bt = np.stack([np.pad(text, (0, max(map(len, texts)) - len(text))) for text in texts])
    logits_btv = read_texts(model.weights.verifier, model.verifier, tokens_bt)[1]
    for likeliest_t, prompt, text in zip(np.argmax(logits_btv, axis=-1), prompts, texts, strict=True):
        assert likeliest_t[len(prompt) - 1 : len(text) - 1].tolist() == text[len(prompt) :], prompt
    return logits_btv


def assert_same_positions(got: Any, expected: Any, length_b: Any, atol: float = 1e-12) -> None:
    """Two caches are equal up to the end of each text."""
    for x, y in zip(*([x for x in jax.tree.leaves(cache) if x.ndim == 5] for cache in (got, expected)), strict=True):
        for b, length in enumerate(length_b):
            np.testing.assert_allclose(x[b, :, :, :length], y[b, :, :, :length], atol=atol)


def cut_by_stops(results: list[Result]) -> int:
    """Number of answers that stop inside an accepted path."""
    return sum(result.finished == "stop" and result.cut > 0 for result in results)
