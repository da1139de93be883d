"""Losslessness by equality, in float64: drafted output is the one-token output, token for token, with the same seed.

Run by test_lossless.py in a separate process, since x64 is a process-wide switch; prints one JSON line. Temperatures,
filters, seeds, lengths, stop ids and weights are data, so a dozen compiled programs serve every case. With the argument
`core` one kind of tree is drafted for verifiers of one size, hence few programs compiled; with `all`, every one for all.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax.numpy as jnp  # noqa: E402
from answers import cut_by_stops, drafted_as_plain  # noqa: E402
from budgets import beside, table  # noqa: E402

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
from treeflash_jax.models import verifier  # noqa: E402
from treeflash_jax.models.config import ModelConfig  # noqa: E402

DATA = Path(__file__).parents[1] / "data"
PAIR, QWEN2 = DATA / "conformance" / "b_trained", DATA / "qwen2"
DRAFTS = [
    *({"builder": "best-first", "nodes": nodes, "head": "mlp"} for nodes in (1, 2, 5, 16, 64)),
    {"builder": "best-first", "nodes": 16, "head": "marginal"},
    {"builder": "best-first", "nodes": 16, "head": "linear"},
    {"builder": "walk", "head": "mlp"},
    {"builder": "chain", "head": "mlp"},
]
CORE = [DRAFTS[3]]
MIXED = [0.0, 0.7, 1.3, 0.0, 1.3]


def fresh(specs, seed: int, scale: float):
    return parameters.initialize(specs, jax.random.key(seed), jnp.float64, scale)


def main(which: list[dict]) -> None:
    trained = load(verifier=PAIR / "verifier", drafter=PAIR / "drafter", dtype=jnp.float64)
    linear_config = replace(trained.drafter, head="linear")
    counts, draw = Counter(), random.Random(0)

    def models(kind: str) -> dict[str, TreeFlash]:
        """Returns the pair with its trained head and with a linear head, by name."""
        weights, seed = trained.weights, draw.randrange(10**6)
        normal = lambda spec: 0.1 * jax.random.normal(jax.random.key(seed), spec.shape)  # noqa: E731
        linear = jax.tree.map(normal, HEADS["linear"].specs(linear_config), is_leaf=is_spec)
        if kind != "trained":
            weights = weights.replace(drafter=fresh(block.specs(trained.drafter), seed + 1, 0.3))
        if kind == "random pair":
            weights = weights.replace(verifier=fresh(verifier.specs(trained.verifier), seed + 3, 0.4))
        with_linear = weights.replace(drafter=weights.drafter | {"head": linear})
        return {
            "mlp": TreeFlash(trained.verifier, weights, drafter=trained.drafter, stop_ids=(2,)),
            "linear": TreeFlash(trained.verifier, with_linear, drafter=linear_config, stop_ids=(2,)),
        }

    def check(made: dict[str, TreeFlash], prompts: list[list[int]], settings: dict, drafts: list[dict]) -> None:
        settings = {"batch_size": 5} | settings
        plain = made["mlp"].generate(prompts, builder="none", **settings)
        for draft in drafts:
            model, draft = made.get(draft["head"], made["mlp"]), {"candidates": 8, "children": 8} | draft
            results = drafted_as_plain(model, prompts, draft, plain=plain, **settings)
            counts["cases"] += len(results)
            counts["tokens"] += sum(len(result.ids) for result in results)
            counts["rounds"] += sum(len(result.accept_lengths) for result in results)
            counts["stops_inside_a_path"] += cut_by_stops(results)
            counts["cut_at_the_limit"] += sum(result.finished == "length" and result.cut > 0 for result in results)

    def parse_prompts(count: int, longest: int) -> list[list[int]]:
        return [[draw.randrange(3, 130) for _ in range(draw.randint(1, longest))] for _ in range(count)]

    stopped = [draft for draft in which if draft not in DRAFTS[:3]]
    for kind, repeats in (("trained", 6), ("random drafter", 2), ("random pair", 2)):
        for _ in range(repeats):
            made = models(kind)
            count = draw.randint(1, 5)
            prompts = parse_prompts(count, 60)
            settings = {
                "temperature": [draw.choice((0.0, 0.7, 1.3)) for _ in range(count)],
                "top_k": [draw.choice((0, 3, 20)) for _ in range(count)],
                "top_p": [draw.choice((1.0, 0.9, 0.5)) for _ in range(count)],
                "seed": [draw.randrange(2**32) for _ in range(count)],
                "max_new_tokens": draw.choice((1, 2, 17, 60)),
                "drafter_temperature": draw.choice((0.5, 1.0)),
            }
            check(made, prompts, settings, which)
            # A token from the middle of an answer as stop id: the cut then falls inside accepted paths.
            seen = made["mlp"].generate(prompts[:1], builder="none", batch_size=5, max_new_tokens=40, seed=5)[0].ids
            check(made, prompts, {"max_new_tokens": 40, "seed": 5, "stop_ids": [seen[len(seen) // 2]]}, stopped)

    if which == DRAFTS:
        made = models("trained")
        full = [[draw.randrange(3, 130) for _ in range(190)], [5, 6, 7]]
        for new in (57, 58):
            assert capacity_bucket(190 + new + 8 + 1) == (256 if new == 57 else 384)
        check(made, full, {"max_new_tokens": 57, "temperature": 0.7}, DRAFTS[3:4])

        # Batch composition: each answer is what it is in a batch of five, in smaller ones, and alone.
        prompts = parse_prompts(5, 40)
        settings = {"max_new_tokens": 40, "temperature": MIXED, "nodes": 16, "candidates": 8, "children": 8}
        together = [result.ids for result in made["mlp"].generate(prompts, batch_size=5, **settings)]
        assert together == [result.ids for result in made["mlp"].generate(prompts, batch_size=1, **settings)]

        others(made["mlp"], prompts, check)

    counts |= {"programs": len(programs.compiled()), "tau": counts["tokens"] / max(counts["rounds"], 1)}
    print(json.dumps(counts))


def others(trained_pair: TreeFlash, prompts: list[list[int]], check: Callable) -> None:
    """Other verifiers, and rounds that choose their nodes."""
    settings = {"max_new_tokens": 60, "temperature": MIXED}
    # A verifier with biases and YaRN; its drafter has neither.
    scaled = load(verifier=QWEN2, dtype=jnp.float64)
    config = DrafterConfig(
        layers=fresh_layers(scaled.verifier, 1), block_size=6, mask_token_id=63, target_layer_ids=(0, 1),
        num_target_layers=2, head="mlp",
    )  # fmt: skip
    assert scaled.verifier.rope.kind == "yarn" and config.layers.rope.kind == "default"
    weights = scaled.weights.replace(drafter=fresh(block.specs(config), 5, 0.3))
    draw = random.Random(1)
    short = [[draw.randrange(4, 63) for _ in range(size)] for size in (3, 50, 17, 9, 1)]
    check({"mlp": TreeFlash(scaled.verifier, weights, drafter=config, stop_ids=(3,))}, short, settings, CORE)

    # A mixture of experts, of which CPUs gather those that are chosen. Sampled trees are greedy at temperature 0.
    sparse = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
        max_positions=512, num_experts=32, experts_per_token=2, expert_size=8, normalize_experts=True, dense_layers=(1,),
        model_type="qwen3_moe",
    )  # fmt: skip
    config = replace(config, layers=fresh_layers(sparse, 1), num_target_layers=3)
    weights = Weights(fresh(verifier.specs(sparse), 7, 0.4), fresh(block.specs(config), 8, 0.3))
    mixture = {"mlp": TreeFlash(sparse, weights, drafter=config, stop_ids=(3,))}
    check(mixture, short, settings, CORE)
    greedy = [{"builder": builder, "nodes": 6, "head": "mlp"} for builder in trees.BUILDERS]
    check(mixture, short, {"max_new_tokens": 40, "temperature": 0.0}, greedy)

    # Rounds that choose their nodes, and pause: the budget must keep its types, and choose nothing but speed.
    entry = table(trained_pair, [1.0, 1.2, 1.5], 0.7, tau=(1.8, 2.5, 3.2), nodes=[2, 4, 8])
    with tempfile.TemporaryDirectory() as folder:
        chooses = beside(trained_pair, Path(folder) / "budget.json", entry)
        check({"mlp": chooses}, prompts, settings, [{"nodes": "auto", "head": "mlp"}])


if __name__ == "__main__":
    main({"core": CORE, "all": DRAFTS}[sys.argv[1]])
