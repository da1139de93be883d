"""Trains the DFlash backbone of the shipped pair on the verifier's own answers; the verifier stays frozen.

    python -m train.drafter --tokenizer treeflash_jax/assets/tiny/verifier --verifier runs/verifier/verifier.npz \\
        --responses runs/responses.jsonl --run runs/drafter

Cross-entropy of every slot on the answer, weighted exp(-(i - 1) / 4). Leaves weights in RUN/drafter.npz.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from train import blocks, checkpoint, data, loop
from train import verifier as verifier_stage
from treeflash_jax import drafter, verifier
from treeflash_jax import params as parameters
from treeflash_jax.config import DrafterConfig, ModelConfig
from treeflash_jax.layers import rms_norm
from treeflash_jax.vocab import log_sum_exp

DECAY = 4.0  # for blocks of 8
SOURCE = "responses"


def tiny_drafter_config(own: ModelConfig, tokenizer: Tokenizer) -> DrafterConfig:
    return DrafterConfig(
        layers=dataclasses.replace(own, num_layers=2),
        block_size=8,
        mask_token_id=tokenizer.token_to_id("<|mask|>"),
        target_layer_ids=(1, 3, 4),
        num_target_layers=own.num_layers,
        head="mlp",
        drafter_temperature=0.55,  # what train.evaluate found best under a greedy verifier
    )


def slot_losses(
    params: Any, frozen: Any, config: DrafterConfig, own: ModelConfig, rows: data.Rows, num_anchors: int, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross-entropy, top-1 hit and loss weight of every slot, each [b, n, q - 1]."""
    teacher = blocks.teach(frozen, own, config, rows)
    chosen = blocks.sample_blocks(rows, num_anchors, config.block_size, DECAY, key)
    hidden_bnqd = blocks.hidden_states(params, config, frozen["embed"], rows, teacher.features_bsj, chosen.anchors_bn)
    normed_bnqd = rms_norm(hidden_bnqd[:, :, 1:], params["norm"], config.layers.rms_norm_eps)
    logits_bnqv = verifier.logits(frozen, normed_bnqd)
    labels_bnq = blocks.at(rows.tokens_rt, chosen.targets_bnq[:, :, 1:])
    picked_bnq = jnp.take_along_axis(logits_bnqv, labels_bnq[..., None], axis=-1)[..., 0]
    hits_bnq = jnp.argmax(logits_bnqv, axis=-1) == labels_bnq
    return log_sum_exp(logits_bnqv) - picked_bnq, hits_bnq, chosen.weights_bnq[:, :, 1:]


def weighted_mean(values_bnq: jax.Array, weights_bnq: jax.Array) -> jax.Array:
    return jnp.sum(values_bnq * weights_bnq) / jnp.maximum(jnp.sum(weights_bnq), 1e-6)


def hit_metrics(hits_bnq: jax.Array, weights_bnq: jax.Array, name: str) -> dict[str, jax.Array]:
    """Share of slots 1, 2 and 7 whose likeliest token is right, and the mean number right from slot 1 on."""
    real_bnq = weights_bnq > 0
    metrics = {f"{name}_slot_{i + 1}": weighted_mean(hits_bnq[..., i], real_bnq[..., i]) for i in (0, 1, 6)}
    run_bn = jnp.sum(jnp.cumprod(hits_bnq & real_bnq, axis=-1), axis=-1)
    return metrics | {f"{name}_run": weighted_mean(run_bn, jnp.all(real_bnq, axis=-1))}


def held_out_metrics(loss_fn: Callable, rows: data.Rows, batch: int, batches: int = 4) -> Callable:
    """`validate` of train.loop: the loss and metrics on fixed rows, anchors and keys."""
    measure = jax.jit(loss_fn)

    def validate(params: Any) -> dict[str, float]:
        lines = []
        for number in range(batches):
            part = rows.take(np.arange(number * batch, (number + 1) * batch) % len(rows))
            loss, metrics = measure(params, part, jax.random.key(number))
            lines.append({"loss": loss, **metrics})
        return {f"held_out/{name}": round(float(np.mean([line[name] for line in lines])), 4) for name in lines[0]}

    return validate


def add_arguments(parser: argparse.ArgumentParser, *, steps: int, learning_rate: float) -> None:
    """What the drafter's two stages have in common."""
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--verifier", type=Path, required=True, help="weights that train.verifier wrote")
    parser.add_argument("--responses", type=Path, required=True, help="what train.respond wrote")
    parser.add_argument("--run", type=Path, required=True, help="folder of the log and the checkpoint")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=5, help="rows of 384 tokens per step")
    parser.add_argument("--anchors", type=int, default=48, help="blocks per row")
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--seed", type=int, default=0)


def load_rows(path: Path, seed: int) -> tuple[data.Rows, data.Rows]:
    """Packed training and held-out answers."""
    documents = data.response_documents(path)
    order = np.random.default_rng(seed).permutation(len(documents))
    kept, held_out = data.split([documents[i] for i in order])
    return data.pack(kept, verifier_stage.ROW_TOKENS), data.pack(held_out, verifier_stage.ROW_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, steps=800, learning_rate=8e-3)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    own = verifier_stage.tiny_config(tokenizer)
    config = tiny_drafter_config(own, tokenizer)
    frozen = verifier_stage.load(args.verifier, own)
    rows, held_out = load_rows(args.responses, args.seed)
    order = data.schedule({SOURCE: len(rows)}, {SOURCE: 1.0}, args.steps, args.batch, args.seed)
    params = parameters.initialize(drafter.specs(config), jax.random.key(args.seed), scale=0.04)
    params["norm"] = frozen["norm"]  # the vocabulary matrix was trained behind this scale
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} weights; {len(rows)} rows, {len(held_out)} held out")

    def loss_fn(params: Any, batch: data.Rows, key: jax.Array):
        losses, hits, weights = slot_losses(params, frozen, config, own, batch, args.anchors, key)
        return weighted_mean(losses, weights), hit_metrics(hits, weights, "hit")

    params = loop.fit(
        params,
        loss_fn,
        loop.optimizer(args.steps, args.learning_rate),
        lambda step: rows.take(order[step]),
        steps=args.steps,
        seed=args.seed,
        folder=args.run,
        validate=held_out_metrics(loss_fn, held_out, args.batch),
    )
    checkpoint.save(args.run / "drafter.npz", verifier_stage.round_to_bf16(params))


if __name__ == "__main__":
    main()
