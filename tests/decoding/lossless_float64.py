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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402

from treeflash_jax import trees  # noqa: E402
from treeflash_jax.core import parameters, programs  # noqa: E402
from treeflash_jax.decoding import calibration  # noqa: E402
from treeflash_jax.decoding.state import Weights  # noqa: E402
from treeflash_jax.drafters.block import backbone  # noqa: E402
from treeflash_jax.drafters.block.block_config import DrafterConfig, fresh_layers  # noqa: E402
from treeflash_jax.drafters.block.heads import HEADS  # noqa: E402
from treeflash_jax.engine.batching import capacity_bucket  # noqa: E402
from treeflash_jax.engine.loading import load  # noqa: E402
from treeflash_jax.engine.model import TreeFlash  # noqa: E402
from treeflash_jax.engine.settings import GenerateConfig  # noqa: E402
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


def main(which: list[dict]) -> None:
    trained = load(verifier=PAIR / "verifier", drafter=PAIR / "drafter", dtype=jnp.float64)
    linear_config = replace(trained.drafter, head="linear")
    counts = {"cases": 0, "tokens": 0, "rounds": 0, "stops_inside_a_path": 0, "cut_at_the_limit": 0, "nearly_full": 0}
    draw = random.Random(0)

    def fresh(specs, seed: int, scale: float):
        return parameters.initialize(specs, jax.random.key(seed), jnp.float64, scale)

    def models(kind: str) -> dict[str, TreeFlash]:
        """Returns the pair with its trained head and with a linear head, by kind."""
        weights, seed = trained.weights, draw.randrange(10**6)
        linear = fresh(HEADS["linear"].specs(linear_config), seed, 0.3)
        linear = jax.tree.map(lambda x: 0.1 * jax.random.normal(jax.random.key(seed), x.shape, x.dtype), linear)
        if kind != "trained":
            weights = weights.replace(
                drafter={
                    "backbone": fresh(backbone.specs(trained.drafter), seed + 1, 0.3),
                    "head": fresh(HEADS["mlp"].specs(trained.drafter), seed + 2, 0.3),
                }
            )
        if kind == "random pair":
            weights = weights.replace(verifier=fresh(verifier.specs(trained.verifier), seed + 3, 0.4))
        made = {
            "mlp": TreeFlash(trained.verifier, weights, drafter=trained.drafter, stop_ids=(2,)),
            "linear": TreeFlash(
                trained.verifier,
                weights.replace(drafter=weights.drafter | {"head": linear}),
                drafter=linear_config,
                stop_ids=(2,),
            ),
        }
        return made

    def check(made: dict[str, TreeFlash], prompts: list[list[int]], settings: dict, drafts: list[dict]) -> None:
        plain = made["mlp"].generate(prompts, builder="none", batch_size=5, **settings)
        for draft in drafts:
            model = made["linear" if draft["head"] == "linear" else "mlp"]
            results = model.generate(prompts, batch_size=5, candidates=8, children=8, **draft, **settings)
            for b, (result, expected) in enumerate(zip(results, plain, strict=True)):
                assert result.ids == expected.ids, (draft, settings, b, result.ids, expected.ids)
                assert result.finished == expected.finished
                assert 1 + sum(result.accept_lengths) == len(result.ids)
                counts["cases"] += 1
                counts["tokens"] += len(result.ids)
                counts["rounds"] += len(result.accept_lengths)
                counts["stops_inside_a_path"] += result.finished == "stop" and result.cut > 0
                counts["cut_at_the_limit"] += result.finished == "length" and result.cut > 0

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
        full = {"mlp": [[draw.randrange(3, 130) for _ in range(190)], [5, 6, 7]]}["mlp"]
        for new in (57, 58):
            assert capacity_bucket(190 + new + 8 + 1) == (256 if new == 57 else 384)
        check(made, full, {"max_new_tokens": 57, "temperature": 0.7}, DRAFTS[3:4])
        counts["nearly_full"] += 1

        # Batch composition: each answer is what it is in a batch of five, in smaller ones, and alone.
        prompts = parse_prompts(5, 40)
        settings = {
            "max_new_tokens": 40,
            "temperature": [0.0, 0.7, 1.3, 0.0, 1.3],
            "nodes": 16,
            "candidates": 8,
            "children": 8,
        }
        together = [result.ids for result in made["mlp"].generate(prompts, batch_size=5, **settings)]
        assert together == [result.ids for result in made["mlp"].generate(prompts, batch_size=1, **settings)]

        others(made["mlp"], prompts, check, fresh)

    counts |= {"programs": len(programs.compiled()), "tau": counts["tokens"] / max(counts["rounds"], 1)}
    print(json.dumps(counts))


def others(trained_pair: TreeFlash, prompts: list[list[int]], check: Callable, fresh: Callable) -> None:
    """Other verifiers, and rounds that choose their nodes."""
    # A verifier with biases and YaRN; its drafter has neither.
    scaled, qwen2 = load(verifier=QWEN2, dtype=jnp.float64), {}
    config = DrafterConfig(
        layers=fresh_layers(scaled.verifier, 1), block_size=6, mask_token_id=63, target_layer_ids=(0, 1),
        num_target_layers=2, head="mlp",
    )  # fmt: skip
    assert scaled.verifier.rope.kind == "yarn" and config.layers.rope.kind == "default"
    drafter = {"backbone": fresh(backbone.specs(config), 5, 0.3), "head": fresh(HEADS["mlp"].specs(config), 6, 0.3)}
    qwen2["mlp"] = TreeFlash(scaled.verifier, scaled.weights.replace(drafter=drafter), drafter=config, stop_ids=(3,))
    draw = random.Random(1)
    short = [[draw.randrange(4, 63) for _ in range(size)] for size in (3, 50, 17, 9, 1)]
    check(qwen2, short, {"max_new_tokens": 60, "temperature": [0.0, 0.7, 1.3, 0.0, 1.3]}, DRAFTS[3:4])

    # A mixture of experts, of which CPUs gather those that are chosen. Sampled trees are greedy at temperature 0.
    sparse = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
        max_positions=512, num_experts=32, experts_per_token=2, expert_size=8, normalize_experts=True, dense_layers=(1,),
        model_type="qwen3_moe",
    )  # fmt: skip
    config = replace(config, layers=fresh_layers(sparse, 1), num_target_layers=3)
    mixture, weights = (
        {},
        Weights(
            fresh(verifier.specs(sparse), 7, 0.4),
            {"backbone": fresh(backbone.specs(config), 8, 0.3), "head": fresh(HEADS["mlp"].specs(config), 9, 0.3)},
        ),
    )
    mixture["mlp"] = TreeFlash(sparse, weights, drafter=config, stop_ids=(3,))
    check(mixture, short, {"max_new_tokens": 60, "temperature": [0.0, 0.7, 1.3, 0.0, 1.3]}, DRAFTS[3:4])
    greedy = [{"builder": builder, "nodes": 6, "head": "mlp"} for builder in trees.BUILDERS]
    check(mixture, short, {"max_new_tokens": 40, "temperature": 0.0}, greedy)

    # Rounds that choose their nodes, and pause: the budget must keep its types, and choose nothing but speed.
    plan = trained_pair.plan(GenerateConfig(builder="best-first", candidates=8, children=8))
    entry = calibration.Calibration(
        identity=calibration.make_identity(trained_pair.verifier, trained_pair.weights, plan, None),
        nodes=[2, 4, 8],
        batch=[1],
        positions=[256],
        round_seconds=[[[1.0, 1.2, 1.5]]],
        tree_seconds=[[[0.0, 0.0, 0.0]]],
        step_seconds=[[0.7]],
        temperatures=[0.0],
        tau=[[1.8, 2.5, 3.2]],
        reliability=[1.0],
    )
    with tempfile.TemporaryDirectory() as folder:
        trained_pair.budget = Path(folder) / "budget.json"
        calibration.write(trained_pair.budget, entry)
        settings = {"max_new_tokens": 60, "temperature": [0.0, 0.7, 1.3, 0.0, 1.3]}
        check({"mlp": trained_pair}, prompts, settings, [{"nodes": "auto", "head": "mlp"}])


if __name__ == "__main__":
    main({"core": CORE, "all": DRAFTS}[sys.argv[1]])
