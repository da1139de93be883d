"""Trains the TreeFlash head on a frozen backbone: what a drafted token depends on besides the context.

    python -m train.head --tokenizer treeflash_jax/assets/tiny/verifier --verifier runs/verifier/verifier.npz \\
        --responses runs/responses.jsonl --drafter runs/drafter/drafter.npz --run runs/head

Forward KL from the verifier's distribution (temperature 1) to the corrected one, given the true previous token. The
head starts at zero, where the drafter is DFlash. Leaves weights in RUN/head.npz.

Source: TreeFlash (arXiv 2606.03819).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from train import blocks, checkpoint, data, loop
from train import drafter as drafter_stage
from train import verifier as verifier_stage
from treeflash_jax import drafter, verifier, vocab
from treeflash_jax import params as parameters
from treeflash_jax.config import DrafterConfig, ModelConfig
from treeflash_jax.heads import mlp
from treeflash_jax.layers import linear, rms_norm


def corrected(params: Any, backbone: Any, config: DrafterConfig, hidden_bnqd: jax.Array, embedding_bnqd: jax.Array):
    """The hidden states after the head, as `mlp.expand` forms them, for one previous token per slot."""
    batch, *_, d = hidden_bnqd.shape
    normed_brd = rms_norm(hidden_bnqd, backbone["norm"], config.layers.rms_norm_eps).reshape(batch, -1, d)
    hidden_ug = linear("brd,dxf->brxf", normed_brd, params["hidden_ug"])
    added_brd = mlp.correction(params, embedding_bnqd.reshape(batch, -1, d), hidden_ug)
    return hidden_bnqd + added_brd.reshape(hidden_bnqd.shape)


def slot_divergences(
    params: Any,
    frozen: Any,
    backbone: Any,
    config: DrafterConfig,
    own: ModelConfig,
    rows: data.Rows,
    num_anchors: int,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """KL(verifier || head), the probability that a token drafted from the head is kept, and the weight of every slot.

    Each [b, n, q - 1]; kept with probability sum_x min(p, q') under the best one-draft coupling.
    """
    teacher = blocks.teach(frozen, own, config, rows)
    chosen = blocks.sample_blocks(rows, num_anchors, config.block_size, drafter_stage.DECAY, key)
    hidden_bnqd = jax.lax.stop_gradient(
        blocks.hidden_states(backbone, config, frozen["embed"], rows, teacher.features_bsj, chosen.anchors_bn)
    )[:, :, 1:]
    previous_bnq = jnp.maximum(chosen.targets_bnq[:, :, 1:] - 1, 0)
    embedding_bnqd = vocab.embed(frozen["embed"], blocks.at(rows.tokens_rt, previous_bnq))
    after_bnqd = corrected(params, backbone, config, hidden_bnqd, embedding_bnqd)
    normed_bnqd = rms_norm(after_bnqd, backbone["norm"], config.layers.rms_norm_eps)
    drafted_bnqv = jax.nn.log_softmax(verifier.logits(frozen, normed_bnqd), axis=-1)
    target_bnqv = jax.nn.log_softmax(verifier.logits(frozen, blocks.at(teacher.hidden_bsd, previous_bnq)), axis=-1)
    probs_bnqv = jnp.exp(target_bnqv)
    divergence_bnq = jnp.sum(probs_bnqv * (target_bnqv - drafted_bnqv), axis=-1)
    kept_bnq = jnp.sum(jnp.minimum(probs_bnqv, jnp.exp(drafted_bnqv)), axis=-1)
    return divergence_bnq, kept_bnq, chosen.weights_bnq[:, :, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    drafter_stage.add_arguments(parser, steps=450, learning_rate=5e-3)
    parser.add_argument("--drafter", type=Path, required=True, help="weights that train.drafter wrote")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    own = verifier_stage.tiny_config(tokenizer)
    config = drafter_stage.tiny_drafter_config(own, tokenizer)
    frozen = verifier_stage.load(args.verifier, own)
    backbone = checkpoint.load(args.drafter, parameters.abstract(drafter.specs(config), jnp.float32))
    rows, held_out = drafter_stage.load_rows(args.responses, args.seed)
    source = drafter_stage.SOURCE
    order = data.schedule({source: len(rows)}, {source: 1.0}, args.steps, args.batch, args.seed + 1)
    params = parameters.initialize(mlp.specs(config), jax.random.key(args.seed + 1), scale=0.04)

    def loss_fn(params: Any, batch: data.Rows, key: jax.Array):
        divergence, kept, weights = slot_divergences(params, frozen, backbone, config, own, batch, args.anchors, key)
        real = weights > 0
        metrics = {f"kept_slot_{i + 1}": drafter_stage.weighted_mean(kept[..., i], real[..., i]) for i in (0, 1, 6)}
        return drafter_stage.weighted_mean(divergence, weights), metrics

    validate = drafter_stage.held_out_metrics(loss_fn, held_out, args.batch)
    print("before training (the marginals of the backbone):", validate(params), flush=True)
    params = loop.fit(
        params,
        loss_fn,
        loop.optimizer(args.steps, args.learning_rate),
        lambda step: rows.take(order[step]),
        steps=args.steps,
        seed=args.seed + 1,
        folder=args.run,
        validate=validate,
    )
    checkpoint.save(args.run / "head.npz", verifier_stage.round_to_bf16(params))


if __name__ == "__main__":
    main()
