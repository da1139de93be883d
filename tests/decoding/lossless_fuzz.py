"""Losslessness by equality, in float64, of random verifiers, drafters, trees and settings.

    python tests/decoding/lossless_fuzz.py [seed] [programs per verifier]

Run by test_lossless.py in a process of its own; prints one JSON line. The seed chooses weights, trees, prompts and
settings; with two programs for each verifier, every head and every kind of program below is met, whatever the seed. Few
programs serve many sequences, since what differs between those is data.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax.numpy as jnp  # noqa: E402
from answers import drafted_as_plain  # noqa: E402
from budgets import AUTO, MIXED, beside, table  # noqa: E402

from treeflash_jax.core import parameters, programs  # noqa: E402
from treeflash_jax.core.parameters import is_spec  # noqa: E402
from treeflash_jax.decoding.state import Weights  # noqa: E402
from treeflash_jax.drafters.block import HEADS  # noqa: E402
from treeflash_jax.drafters.block import specs as drafter_specs  # noqa: E402
from treeflash_jax.drafters.block.block_config import DrafterConfig, fresh_layers  # noqa: E402
from treeflash_jax.engine.model import TreeFlash  # noqa: E402
from treeflash_jax.models import quantized, verifier  # noqa: E402
from treeflash_jax.models.config import ModelConfig, Rope  # noqa: E402

VOCABULARY = 16  # few tokens, so that random drafts are accepted sometimes
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=6, max_positions=512
)
LLAMA3 = Rope(theta=500.0, kind="llama3", factor=4.0, original_max_positions=32)
YARN = Rope(theta=500.0, kind="yarn", factor=4.0, original_max_positions=32, attention_factor=1.14, beta_fast=4.0)
VERIFIERS = {
    "qwen3": ModelConfig(num_layers=2, tie_embeddings=True, **SIZES),
    "llama": ModelConfig(num_layers=2, model_type="llama", qk_norm=False, rope=LLAMA3, **SIZES),
    "qwen2": ModelConfig(num_layers=2, model_type="qwen2", qk_norm=False, qkv_bias=True, rope=YARN, **SIZES),
    "qwen3_moe": ModelConfig(
        num_layers=2, model_type="qwen3_moe", num_experts=5, experts_per_token=2, expert_size=16, normalize_experts=True,
        dense_layers=(1,), **SIZES,
    ),
}  # fmt: skip
KINDS = (  # of drafted programs
    {"builder": "best-first"}, {"builder": "best-first", "shortlist": 7}, {"builder": "best-first", "lanes": 2},
    {"builder": "best-first", "block_size": 4}, {"builder": "walk"}, {"builder": "chain"}, {"nodes": "auto"},
)  # fmt: skip


def make_weights(config: ModelConfig, drafter: DrafterConfig, seed: int, quantize: str | None) -> Weights:
    """Random weights without zeros and ones; the verifier's matrices in `quantize`, if it is not None."""

    def draw(specs, number: int, scale: float):
        normal = jax.tree.map(lambda spec: replace(spec, init="normal"), specs, is_leaf=is_spec)
        made = parameters.initialize(normal, jax.random.key(number), jnp.float64, scale)
        return jax.tree.map(lambda x, spec: 1 + x if spec.init == "ones" else x, made, specs)

    specs = verifier.specs(config)
    drawn = draw(specs, seed, 0.35)
    if quantize:
        drawn = jax.tree.map(lambda x, spec: quantized.compress(x, spec, quantize), drawn, specs)
    return Weights(drawn, draw(drafter_specs(drafter), seed + 1, 0.35))


def check(model: TreeFlash, draft: dict, draw: random.Random, counts: Counter) -> None:
    """One call of several prompts with settings that differ between them, against one token at a time."""
    many = draw.randint(1, 5)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 50))] for _ in range(many)]
    settings = {
        "temperature": [draw.choice((0.0, 0.0, 0.6, 1.2)) for _ in prompts],
        "top_k": [draw.choice((0, 3, 9)) for _ in prompts],
        "top_p": [draw.choice((1.0, 0.9, 0.5)) for _ in prompts],
        "seed": [draw.randrange(2**32) for _ in prompts],
        "stop_ids": draw.sample(range(VOCABULARY), draw.choice((0, 1, 3))),
        "max_new_tokens": draw.choice((1, 2, 30, 60)),
    }
    for got in drafted_as_plain(model, prompts, {"candidates": 5, "children": 4} | draft, batch_size=5, **settings):
        counts["sequences"] += 1
        counts["tokens"] += len(got.ids)
        counts["rounds"] += len(got.accept_lengths)
        counts[f"finished by {got.finished}"] += 1
        counts["cut inside a path"] += got.cut > 0


def main(seed: int, each: int) -> None:
    draw, counts = random.Random(seed), Counter()
    warnings.filterwarnings("ignore", message="tau is")
    # Seven kinds and four heads in turns: all of them within 8 programs, every pair within 28. Two verifiers are in int8.
    rounded = draw.sample([*VERIFIERS], 2)
    kinds = itertools.cycle(draw.sample(KINDS, len(KINDS)))
    heads = itertools.cycle(draw.sample([*HEADS], len(HEADS)))
    with tempfile.TemporaryDirectory() as folder:
        for name, config in VERIFIERS.items():
            for _ in range(each):
                kind, head = next(kinds), next(heads)
                drafter = DrafterConfig(
                    layers=fresh_layers(config, 1), block_size=6, mask_token_id=VOCABULARY - 1,
                    target_layer_ids=(0, config.num_layers - 1), num_target_layers=config.num_layers, head=head,
                )  # fmt: skip
                quantize = "int8" if name in rounded else None
                model = TreeFlash(config, make_weights(config, drafter, draw.randrange(10**6), quantize), drafter=drafter)
                draft = {"nodes": draw.choice((2, 5, 9, 16)), **kind} if "block_size" not in kind else {"nodes": 6, **kind}
                if "lanes" in kind:
                    draft["nodes"] = 9
                if kind.get("nodes") == "auto":
                    draft = dict(AUTO)
                    model = beside(model, Path(folder) / "budget.json", table(model, MIXED, draw.choice((0.42, 0.9))))
                for _ in range(4):
                    check(model, draft, draw, counts)
                counts |= {f"met {key} {value}": 1 for key, value in {**kind, "head": head, "verifier": name}.items()}
                counts["met int8"] += bool(quantize)
    counts["programs"] = len(programs.compiled())
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:3] + ["0", "2"][len(sys.argv[1:3]) :])))
