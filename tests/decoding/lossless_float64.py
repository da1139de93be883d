"""Losslessness by equality, in float64: drafted output is the one-token output, token for token, with the same seed.

    python tests/decoding/lossless_float64.py core | all | random [seed] [programs per verifier]

Run by test_lossless.py in a separate process, since x64 is a process-wide switch; prints one JSON line. Temperatures,
filters, seeds, lengths, stop ids and weights are data, so a dozen compiled programs serve every case. `core` drafts one
kind of tree for verifiers of one size, hence few programs compiled; `all` drafts every kind, for all. `random` draws
verifiers, drafters, trees and settings; with two programs for each verifier it meets every head and every one of KINDS.
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
from answers import cut_by_stops, drafted_as_plain  # noqa: E402
from budgets import AUTO, MIXED, beside, table  # noqa: E402

from treeflash_jax import trees  # noqa: E402
from treeflash_jax.core import parameters, programs  # noqa: E402
from treeflash_jax.core.parameters import is_spec  # noqa: E402
from treeflash_jax.decoding.state import Weights  # noqa: E402
from treeflash_jax.drafters import block  # noqa: E402
from treeflash_jax.drafters.block.block_config import DrafterConfig, fresh_layers  # noqa: E402
from treeflash_jax.drafters.block.heads import HEADS  # noqa: E402
from treeflash_jax.engine.batching import capacity_bucket  # noqa: E402
from treeflash_jax.engine.loading import load  # noqa: E402
from treeflash_jax.engine.model import TreeFlash  # noqa: E402
from treeflash_jax.models import quantized, verifier  # noqa: E402
from treeflash_jax.models.config import ModelConfig, Rope  # noqa: E402

DATA = Path(__file__).parents[1] / "data"
PAIR, QWEN2 = DATA / "conformance" / "b_trained", DATA / "qwen2"
SIZES = {"candidates": 8, "children": 8}
DRAFTS = [
    *({"builder": "best-first", "nodes": nodes, "head": "mlp"} for nodes in (1, 2, 5, 16, 64)),
    {"builder": "best-first", "nodes": 16, "head": "marginal"},
    {"builder": "best-first", "nodes": 16, "head": "linear"},
    {"builder": "walk", "head": "mlp"},
    {"builder": "chain", "head": "mlp"},
]
CORE = [DRAFTS[3]]
HOT = [0.0, 0.7, 1.3, 0.0, 1.3]  # temperatures
counts: Counter[str] = Counter()


def check(model: TreeFlash, prompts: list[list[int]], draft: dict, **settings) -> None:
    """Drafts in one call, and decodes one token at a time."""
    results = drafted_as_plain(model, prompts, SIZES | draft, **{"batch_size": 5} | settings)
    counts["cases"] += len(results)
    counts["tokens"] += sum(len(result.ids) for result in results)
    counts["rounds"] += sum(len(result.accept_lengths) for result in results)
    counts["stops_inside_a_path"] += cut_by_stops(results)
    counts["cut_at_the_limit"] += sum(result.finished == "length" and result.cut > 0 for result in results)


def draw_call(draw: random.Random, longest: int, tokens: range, filters: tuple[int, ...]) -> tuple[list[list[int]], dict]:
    """Prompts of one call, and settings that differ between them."""
    prompts = [[draw.choice(tokens) for _ in range(draw.randint(1, longest))] for _ in range(draw.randint(1, 5))]
    return prompts, {
        "temperature": [draw.choice((0.0, 0.0, 0.7, 1.3)) for _ in prompts],
        "top_k": [draw.choice((0, *filters)) for _ in prompts],
        "top_p": [draw.choice((1.0, 0.9, 0.5)) for _ in prompts],
        "seed": [draw.randrange(2**32) for _ in prompts],
        "max_new_tokens": draw.choice((1, 2, 17, 60)),
        "drafter_temperature": draw.choice((0.5, 1.0)),
    }


def fresh(specs, seed: int, scale: float, *, noisy: bool = False):
    """Random weights in float64, without zeros and ones if `noisy`."""
    normal = jax.tree.map(lambda spec: replace(spec, init="normal") if noisy else spec, specs, is_leaf=is_spec)
    made = parameters.initialize(normal, jax.random.key(seed), jnp.float64, scale)
    return jax.tree.map(lambda x, spec: 1 + x if noisy and spec.init == "ones" else x, made, specs)


def make_drafter(model: ModelConfig, mask: int, head: str = "mlp") -> DrafterConfig:
    return DrafterConfig(
        layers=fresh_layers(model, 1), block_size=6, mask_token_id=mask, target_layer_ids=(0, model.num_layers - 1),
        num_target_layers=model.num_layers, head=head,
    )  # fmt: skip


def fixed(drafts: list[dict]) -> None:
    """Checks the trained pair, with its own weights and random ones, and with `DRAFTS` everything else."""
    trained = load(verifier=PAIR / "verifier", drafter=PAIR / "drafter", dtype=jnp.float64)
    linear_config, draw = replace(trained.drafter, head="linear"), random.Random(4)

    def models(kind: str) -> dict[str, TreeFlash]:
        """Returns the pair with its trained head and with a linear head, by name."""
        weights, seed = trained.weights, draw.randrange(10**6)
        linear = fresh(HEADS["linear"].specs(linear_config), seed, 0.1, noisy=True)
        if kind != "trained":
            weights = weights.replace(drafter=fresh(block.specs(trained.drafter), seed + 1, 0.3))
        if kind == "random pair":
            weights = weights.replace(verifier=fresh(verifier.specs(trained.verifier), seed + 3, 0.4))
        with_linear = weights.replace(drafter=weights.drafter | {"head": linear})
        return {
            "mlp": TreeFlash(trained.verifier, weights, drafter=trained.drafter, stop_ids=(2,)),
            "linear": TreeFlash(trained.verifier, with_linear, drafter=linear_config, stop_ids=(2,)),
        }

    for kind, repeats in (("trained", 6), ("random drafter", 2), ("random pair", 2)):
        for _ in range(repeats):
            made = models(kind)
            prompts, settings = draw_call(draw, 60, range(3, 130), (3, 20))
            plain = made["mlp"].generate(prompts, builder="none", batch_size=5, **settings)
            # A token from the middle of an answer as stop id: the cut then falls inside accepted paths.
            seen = made["mlp"].generate(prompts[:1], builder="none", batch_size=5, max_new_tokens=40, seed=5)[0].ids
            stops = {"max_new_tokens": 40, "seed": 5, "stop_ids": [seen[len(seen) // 2]]}
            stopped = made["mlp"].generate(prompts, builder="none", batch_size=5, **stops)
            for draft in drafts:
                model = made.get(draft["head"], made["mlp"])
                check(model, prompts, draft, plain=plain, **settings)
                if draft not in DRAFTS[:3]:
                    check(model, prompts, draft, plain=stopped, **stops)
    if drafts == DRAFTS:
        others(models("trained")["mlp"], draw)


def others(trained: TreeFlash, draw: random.Random) -> None:
    """Checks full caches, batches, other verifiers, and rounds that choose their nodes."""
    full = [[draw.randrange(3, 130) for _ in range(190)], [5, 6, 7]]
    assert [capacity_bucket(190 + new + 8 + 1) for new in (57, 58)] == [256, 384]
    check(trained, full, DRAFTS[3], max_new_tokens=57, temperature=0.7)

    # Batch composition: each answer is what it is in a batch of five, in smaller ones, and alone.
    prompts = [[draw.randrange(3, 130) for _ in range(draw.randint(1, 40))] for _ in range(5)]
    settings = {"max_new_tokens": 40, "temperature": HOT, "nodes": 16, **SIZES}
    together, alone = (trained.generate(prompts, batch_size=size, **settings) for size in (5, 1))
    assert [result.ids for result in together] == [result.ids for result in alone]

    # A verifier with biases and YaRN; its drafter has neither.
    settings, short = (
        {"max_new_tokens": 60, "temperature": HOT},
        [[draw.randrange(4, 63) for _ in range(n)] for n in (3, 50, 17, 9, 1)],
    )
    scaled = load(verifier=QWEN2, dtype=jnp.float64)
    config = make_drafter(scaled.verifier, 63)
    assert scaled.verifier.rope.kind == "yarn" and config.layers.rope.kind == "default"
    weights = scaled.weights.replace(drafter=fresh(block.specs(config), 5, 0.3))
    check(TreeFlash(scaled.verifier, weights, drafter=config, stop_ids=(3,)), short, CORE[0], **settings)

    # A mixture of experts, of which CPUs gather those that are chosen. Sampled trees are greedy at temperature 0.
    sparse = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
        max_positions=512, num_experts=32, experts_per_token=2, expert_size=8, normalize_experts=True, dense_layers=(1,),
        model_type="qwen3_moe",
    )  # fmt: skip
    config = make_drafter(sparse, 63)
    weights = Weights(fresh(verifier.specs(sparse), 7, 0.4), fresh(block.specs(config), 8, 0.3))
    mixture = TreeFlash(sparse, weights, drafter=config, stop_ids=(3,))
    check(mixture, short, CORE[0], **settings)
    for builder in trees.BUILDERS:
        check(mixture, short, {"builder": builder, "nodes": 6}, max_new_tokens=40, temperature=0.0)

    # Rounds that choose their nodes, and pause: the budget must keep its types, and choose nothing but speed.
    entry = table(trained, [1.0, 1.2, 1.5], 0.7, tau=(1.8, 2.5, 3.2), nodes=[2, 4, 8])
    with tempfile.TemporaryDirectory() as folder:
        check(beside(trained, Path(folder) / "budget.json", entry), prompts, {"nodes": "auto"}, **settings)


VOCABULARY = 16  # few tokens, so that random drafts are accepted sometimes
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=6, max_positions=512
)
LLAMA3 = Rope(theta=500.0, kind="llama3", factor=4.0, original_max_positions=32)
YARN = Rope(theta=500.0, kind="yarn", factor=4.0, original_max_positions=32, attention_factor=1.14, beta_fast=4.0)
VERIFIERS = {
    "qwen3": ModelConfig(num_layers=2, tie_embeddings=True, **SMALL),
    "llama": ModelConfig(num_layers=2, model_type="llama", qk_norm=False, rope=LLAMA3, **SMALL),
    "qwen2": ModelConfig(num_layers=2, model_type="qwen2", qk_norm=False, qkv_bias=True, rope=YARN, **SMALL),
    "qwen3_moe": ModelConfig(
        num_layers=2, model_type="qwen3_moe", num_experts=5, experts_per_token=2, expert_size=16, normalize_experts=True,
        dense_layers=(1,), **SMALL,
    ),
}  # fmt: skip
KINDS = (  # of drafted programs
    {"builder": "best-first"}, {"builder": "best-first", "shortlist": 7}, {"builder": "best-first", "lanes": 2, "nodes": 9},
    {"builder": "best-first", "block_size": 4, "nodes": 6}, {"builder": "walk"}, {"builder": "chain"}, AUTO,
)  # fmt: skip


def drawn(seed: int, each: int) -> None:
    """Checks random verifiers, two of them in int8, random drafters, trees and settings."""
    draw = random.Random(seed)
    warnings.filterwarnings("ignore", message="tau is")
    # Seven kinds and four heads in turns: all of them within 8 programs, every pair within 28.
    rounded, kinds, heads = draw.sample([*VERIFIERS], 2), draw.sample(KINDS, len(KINDS)), draw.sample([*HEADS], len(HEADS))
    turns = zip(itertools.cycle(kinds), itertools.cycle(heads), strict=True)
    for name, config in VERIFIERS.items():
        for kind, head in itertools.islice(turns, each):
            drafter, number, specs = (
                make_drafter(config, VOCABULARY - 1, head),
                draw.randrange(10**6),
                verifier.specs(config),
            )
            weights, scheme = fresh(specs, number, 0.35, noisy=True), "int8" if name in rounded else None
            weights = jax.tree.map(lambda x, spec, scheme=scheme: quantized.compress(x, spec, scheme), weights, specs)
            weights = Weights(weights, fresh(block.specs(drafter), number + 1, 0.35, noisy=True))
            model = TreeFlash(config, weights, drafter=drafter)
            draft = {
                "nodes": draw.choice((2, 5, 9, 16)),
                "candidates": 5,
                "children": 4,
                "ngrams": draw.choice((0, 3)),
            } | kind
            with tempfile.TemporaryDirectory() as folder:
                if kind is AUTO:
                    measured = SIZES | {"ngrams": draft["ngrams"]}
                    entry = table(model, MIXED, draw.choice((0.42, 0.9)), settings=measured)
                    model = beside(model, Path(folder) / "budget.json", entry)
                for _ in range(4):
                    prompts, settings = draw_call(draw, 50, range(VOCABULARY), (3, 9))
                    stops = draw.sample(range(VOCABULARY), draw.choice((0, 1, 3)))
                    check(model, prompts, draft, stop_ids=stops, **settings)
            for key, value in {**kind, "head": head, "verifier": name, "scheme": scheme}.items():
                counts[f"met {key} {value}"] = 1


if __name__ == "__main__":
    which, *numbers = sys.argv[1:]
    if which == "random":
        drawn(*map(int, (numbers + ["0", "2"][len(numbers) :])))
    else:
        fixed({"core": CORE, "all": DRAFTS}[which])
    print(json.dumps(counts | {"programs": len(programs.compiled())}))
