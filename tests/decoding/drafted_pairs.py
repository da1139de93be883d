"""Pairs of random weights with drafters of every kind, and texts; shared by the tests of this folder."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
from answers import (
    make_assistant,
    make_pair,
    random_weights,
    with_recurrent_layers,
    with_shared_layers,
    with_windows_and_sinks,
)
from conftest import FEW_TOKENS, RANDOM_DRAFTER, RANDOM_MODEL

from treeflash_jax import TreeFlash
from treeflash_jax.drafters import Eagle3Drafter, LanguageModelDrafter, MtpDrafter, NgramDrafter
from treeflash_jax.drafters.block.block_drafter import fresh_layers
from treeflash_jax.drafters.block.heads.candidate_selector import CandidateSelectorSizes
from treeflash_jax.drafters.mtp_drafter import layer_sizes
from treeflash_jax.drafters.steering import Steering
from treeflash_jax.models.config import ModelConfig

ONE_LAYER = replace(RANDOM_MODEL, num_layers=1)
BLOCK = replace(RANDOM_DRAFTER, layers=ONE_LAYER, taps=(0,), num_target_layers=1)
KINDS = {  # for the verifier ONE_LAYER
    "block": BLOCK,
    "frequent": replace(BLOCK, draft_vocab_size=32),
    "eagle3": Eagle3Drafter(
        layers=ONE_LAYER, target_hidden_size=32, draft_vocab_size=64, num_depths=3, taps=(0, 0, 0)
    ).fitted(ONE_LAYER),
    "language_model": LanguageModelDrafter(layers=replace(ONE_LAYER, num_kv_heads=1), num_depths=3),
    "steered": LanguageModelDrafter(layers=ONE_LAYER, num_depths=3, steering=Steering(taps=(0, 0, 0), width=32)),
    "mtp": MtpDrafter(layers=layer_sizes(ONE_LAYER), num_depths=3).fitted(ONE_LAYER),
    "ngram": NgramDrafter(shortest=1, num_depths=3),
}

# Pairs whose vocabulary is so small that drafts are accepted and answers stop inside rounds.

HYBRID = with_recurrent_layers(FEW_TOKENS)
WINDOWS = with_windows_and_sinks(FEW_TOKENS)
SHARED = with_shared_layers(FEW_TOKENS)
VERIFIERS = {"qwen3": FEW_TOKENS, "qwen3_5": HYBRID, "gpt_oss": WINDOWS, "gemma4": SHARED}
FEW = replace(RANDOM_DRAFTER, layers=FEW_TOKENS, mask_token_id=11, taps=(0, 1), num_target_layers=2)
ACCEPTED = {
    "frequent": replace(FEW, layers=replace(FEW_TOKENS, num_layers=1), draft_vocab_size=10),
    "gru": replace(FEW, head="gru", shifted=True, causal_layers=(0, 1), draft_vocab_size=10),
    "selector": replace(
        FEW,
        head="selector",
        head_sizes=CandidateSelectorSizes(8),
        conv_group=2,
        causal_layers=(0,),
        sliding_layers=(0,),
        window=4,
    ),
    "lilicorr": replace(FEW, head="lilicorr", sliding_layers=(1,), window=7, shared_window=True),
    "eagle3": Eagle3Drafter(
        layers=replace(FEW_TOKENS, num_layers=1, num_kv_heads=1), target_hidden_size=16, draft_vocab_size=10,
        norm_output=True, taps=(0, 0, 1), num_depths=3,
    ).fitted(FEW_TOKENS),
    "language_model": LanguageModelDrafter(layers=FEW_TOKENS),
    "steered": LanguageModelDrafter(layers=FEW_TOKENS, steering=Steering(taps=(0, 0, 1), width=16)),
    "windows": LanguageModelDrafter(layers=WINDOWS),
    "shared": LanguageModelDrafter(layers=SHARED),
    "mtp": MtpDrafter(layers=layer_sizes(FEW_TOKENS), draft_vocab_size=10).fitted(FEW_TOKENS),
    "ngram": NgramDrafter(),
    "assistant": make_assistant(SHARED),
    "clusters": make_assistant(SHARED, num_clusters=4, top_clusters=2),
}  # fmt: skip
OF_HYBRIDS = {
    "block": replace(
        RANDOM_DRAFTER, layers=fresh_layers(HYBRID, 1), mask_token_id=11, taps=(0, 1), num_target_layers=None
    ),
    "mtp": MtpDrafter(layers=layer_sizes(HYBRID)).fitted(HYBRID),
    "ngram": NgramDrafter(),
    "assistant": make_assistant(SHARED),
}  # fmt: skip
TEXTS = [[7, 8, 9, 10, 11] * 6 + [7, 8], [3], [1, 2, 3, 4] * 20]  # the last is longer than a chunk of the prefill


@cache
def accepted_pair(kind: str, verifier: str = "qwen3") -> TreeFlash:
    """A pair in float64; language models have the verifier's weights, if it has no recurrent layers, with noise on them."""
    config, drafter = VERIFIERS[verifier], ACCEPTED[kind]
    if verifier == "gemma4" and hasattr(drafter, "num_target_layers"):
        drafter = replace(drafter, num_target_layers=None, logit_cap=config.logit_cap).fitted(config)
    seed = 5 if kind == "clusters" else 4  # some drafts are cut by stops
    pair = make_pair(config, drafter, dtype=jnp.float64, scale=0.5, seed=seed)
    drafter = pair.weights.drafter
    if "offsets" in drafter:  # 4 and 8 cannot be drafted
        drafter["offsets"] += jnp.asarray([0] * 4 + [1] * 3 + [2] * 3, jnp.int32)
    if "steering" in drafter:
        drafter["steering"] = random_weights(pair.drafter.specs()["steering"], dtype=jnp.float64)
    if kind in ("language_model", "steered") and verifier == "qwen3":
        noise = {name: drafter[name] for name in pair.weights.verifier}
        drafter |= jax.tree.map(lambda x, y: x + 0.1 * y, pair.weights.verifier, noise)
    return pair


@cache
def hybrid_pair(kind: str | None = "block", mesh=None, config: ModelConfig = HYBRID) -> TreeFlash:
    drafter = None if kind is None else OF_HYBRIDS[kind]
    return make_pair(config, drafter, dtype=jnp.float64, scale=0.5, mesh=mesh)
