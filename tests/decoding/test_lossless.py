"""The library's promise, in float64: drafted output is the one-token output, token for token, with the same seed.

Temperatures, filters, seeds, lengths, stop ids and weights are data, so few compiled programs serve many cases.
"""

import itertools
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from answers import (
    SIZES,
    cut_by_stops,
    drafted_as_plain,
    fresh_weights,
    random_weights,
    with_recurrent_layers,
    with_shared_layers,
    with_windows_and_sinks,
)
from conftest import FOLDERS
from drafted_pairs import accepted_pair

from treeflash_jax import TreeFlash, load
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters.block.block_drafter import BlockDrafter, fresh_layers
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.models import decoder, quantized
from treeflash_jax.models.config import ModelConfig, Rope

pytestmark = pytest.mark.usefixtures("float64")


def draw_call(draw: random.Random, longest: int, tokens: range, filters: tuple[int, ...]) -> tuple[list[list[int]], dict]:
    """Returns prompts of one call, and settings that differ between them."""
    prompts = [[draw.choice(tokens) for _ in range(draw.randint(1, longest))] for _ in range(draw.randint(1, 5))]
    return prompts, {
        "temperature": [draw.choice((0.0, 0.0, 0.7, 1.3)) for _ in prompts],
        "top_k": [draw.choice((0, *filters)) for _ in prompts],
        "top_p": [draw.choice((1.0, 0.9, 0.5)) for _ in prompts],
        "min_p": [0.05 if len(prompt) % 3 == 0 else 0.0 for prompt in prompts],
        "seed": [draw.randrange(2**32) for _ in prompts],
        "max_new_tokens": draw.choice((1, 2, 17, 60)),
        "drafter_temperature": draw.choice((0.5, 1.0)),
        "batch_size": 5,
    }


def fresh(specs, seed: int, scale: float, *, noisy: bool = False):
    """Returns random weights in float64, without zeros and ones if `noisy`."""
    if not noisy:
        return fresh_weights(specs, seed, scale, jnp.float64)
    made = random_weights(specs, seed, scale, jnp.float64)
    return jax.tree.map(lambda x, spec: 1 + x if spec.init == "ones" else x, made, specs)


def test_a_trained_pair_and_random_ones_lose_nothing():
    trained = load(**FOLDERS, dtype="float64")
    draw, draft, results = random.Random(4), SIZES | {"nodes": 16}, []
    for kind in ["trained"] * 6 + ["random drafter"] * 2 + ["random pair"] * 2:
        weights, seed = trained.weights, draw.randrange(10**6)
        if kind != "trained":
            weights = weights.replace(drafter=fresh(trained.drafter.specs(), seed + 1, 0.3))
        if kind == "random pair":
            weights = weights.replace(verifier=fresh(decoder.specs(trained.verifier), seed + 3, 0.4))
        model = TreeFlash(trained.verifier, weights, drafter=trained.drafter, stop_ids=(2,))
        prompts, settings = draw_call(draw, 60, range(3, 130), (3, 20))
        results += drafted_as_plain(model, prompts, draft, **settings)
        # A token from the middle of an answer as stop id: the cut then falls inside accepted paths.
        settings = {"max_new_tokens": 40, "seed": 5, "batch_size": 5}
        ids = model.generate(prompts[:1], builder="none", **settings)[0].ids
        results += drafted_as_plain(model, prompts, draft, stop_ids=[ids[len(ids) // 2]], **settings)
    cut_at_the_limit = sum(result.finished == "length" and result.cut > 0 for result in results)
    assert len(results) >= 60 and min(cut_by_stops(results), cut_at_the_limit) >= 10


VOCABULARY = 16  # few tokens, so that random drafts are accepted sometimes
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    max_positions=512,
)  # fmt: skip
LLAMA3 = Rope(theta=500.0, kind="llama3", factor=4.0, original_max_positions=32)
YARN = Rope(theta=500.0, kind="yarn", factor=4.0, original_max_positions=32, attention_factor=1.14, beta_fast=4.0)
VERIFIERS = {
    "qwen3": ModelConfig(tie_embeddings=True, **SMALL),
    "llama": ModelConfig(model_type="llama", qk_norm=False, rope=LLAMA3, **SMALL),
    "qwen2": ModelConfig(model_type="qwen2", qk_norm=False, qkv_bias=True, rope=YARN, **SMALL),
    "qwen3_moe": ModelConfig(
        model_type="qwen3_moe", num_experts=5, experts_per_token=2, expert_size=16, normalize_experts=True,
        dense_layers=(1,), **SMALL,
    ),
    "qwen3_5": replace(with_recurrent_layers(ModelConfig(**SMALL)), rope=Rope(fraction=2 / 3)),
    "qwen3_5_moe": replace(
        with_recurrent_layers(ModelConfig(**SMALL)), model_type="qwen3_5_moe_text", rope=Rope(fraction=2 / 3),
        num_experts=5, experts_per_token=2, expert_size=16, shared_expert_size=8, normalize_experts=True,
    ),
    "gpt_oss": replace(with_windows_and_sinks(ModelConfig(**SMALL)), rope=replace(YARN, truncate=False)),
    "gemma4": with_shared_layers(ModelConfig(**SMALL)),
}  # fmt: skip
KINDS = (  # of drafted programs
    {}, {"shortlist": 7}, {"lanes": 2, "nodes": 9}, {"block_size": 4, "nodes": 6}, {"builder": "walk"},
    {"builder": "chain"},
)  # fmt: skip


NETWORKS = (  # of backbones
    {}, {"shifted": True}, {"causal_layers": (0,)}, {"sliding_layers": (0,), "window": 9, "causal_layers": (0,)},
    {"sliding_layers": (0,), "window": 6, "shared_window": True, "shifted": True, "conv_group": 6},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "programs"), [(0, 3)])  # per verifier: 3 meet all kinds, heads and networks
def test_random_verifiers_drafters_and_trees_lose_nothing(seed, programs):
    """Four of the verifiers, with layers and experts of several kinds and without, are in 8 or 4 bits."""
    draw, results, met = random.Random(seed), [], set()
    schemes = {"qwen3": "int8", "qwen3_5_moe": "int4", "gpt_oss": "mxfp4", "gemma4": "int8"}
    kinds, heads = draw.sample(KINDS, len(KINDS)), draw.sample([*HEADS], len(HEADS))
    turns = zip(itertools.cycle(kinds), itertools.cycle(heads), itertools.cycle(NETWORKS), strict=True)
    for name, config in VERIFIERS.items():
        for kind, head, network in itertools.islice(turns, programs):
            drafter = BlockDrafter(
                layers=fresh_layers(config, 1), block_size=6, mask_token_id=VOCABULARY - 1, taps=(0, 1),
                num_target_layers=None, head=head, logit_cap=config.logit_cap, **network,
            ).fitted(config)  # fmt: skip
            number, specs, scheme = draw.randrange(10**6), decoder.specs(config), schemes.get(name)
            weights = fresh(specs, number, 0.35, noisy=True)
            weights = jax.tree.map(lambda x, spec, scheme=scheme: quantized.compress(x, spec, scheme), weights, specs)
            weights = Weights(weights, fresh(drafter.specs(), number + 1, 0.35, noisy=True))
            model = TreeFlash(config, weights, drafter=drafter)
            draft = {"nodes": draw.choice((2, 5, 9, 16)), "candidates": 5, "children": 4} | kind
            draft["ngrams"] = draw.choice((0, 3)) * (kind.get("builder") != "chain")
            for _ in range(4):
                prompts, settings = draw_call(draw, 50, range(VOCABULARY), (3, 9))
                stops = draw.sample(range(VOCABULARY), draw.choice((0, 1, 3)))
                results += drafted_as_plain(model, prompts, draft, stop_ids=stops, **settings)
            met |= {str(kind), head, scheme}
    assert len(results) >= 60 and {*schemes.values(), *HEADS, *map(str, KINDS)} <= met
    assert sum(len(result.ids) for result in results) >= 1.1 * sum(len(result.accept_lengths) for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gru", "lilicorr", "eagle3", "language_model", "ngram", "assistant", "clusters"])
def test_random_settings_of_gemmas_drafters_lose_nothing(kind):
    pair, draw, results = accepted_pair(kind, "gemma4"), random.Random(kind), []
    draft = {"nodes": 9, "children": 6} | ({"candidates": 6} if hasattr(pair.drafter, "block_size") else {})
    for _ in range(4):
        prompts, settings = draw_call(draw, 50, range(12), (3, 9))
        results += drafted_as_plain(
            pair, prompts, draft, stop_ids=draw.sample(range(12), draw.choice((0, 1, 3))), **settings
        )
    assert max(max(result.accept_lengths, default=1) for result in results) > 1
