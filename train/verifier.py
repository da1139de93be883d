"""Trains the shipped pair's verifier: a 1.4M-parameter language model in the Qwen3 layout.

    python -m train.verifier --data DIR --tokenizer treeflash_jax/assets/tiny/verifier --run runs/verifier

Leaves weights rounded to bf16 (what is shipped, and what every later stage reads) in RUN/verifier.npz.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from train import checkpoint, data, loop
from treeflash_jax import params as parameters
from treeflash_jax import verifier
from treeflash_jax.config import ModelConfig
from treeflash_jax.vocab import log_sum_exp

SHARES = {
    "gsm8k_train": 0.60,
    "mbpp_train": 0.05,
    "gpteacher_codegen": 0.12,
    "gpteacher_roleplay": 0.05,
    "stdlib": 0.15,
}
ROW_TOKENS = 384


def tiny_config(tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=2048,
        tie_embeddings=True,
        eos_token_ids=(tokenizer.token_to_id("<|im_end|>"),),
    )


def document_mask(segments_bt: jax.Array) -> jax.Array:
    """Causal inside each document, [b, t, t]."""
    same_btu = segments_bt[:, :, None] == segments_bt[:, None, :]
    return same_btu & jnp.tri(segments_bt.shape[1], dtype=bool)


def next_token_loss(params: Any, config: ModelConfig, batch: data.Rows) -> tuple[jax.Array, jax.Array]:
    """Weighted sums over a batch: -log p(token | document so far), and the weights."""
    out = verifier.forward(params, config, batch.tokens_rt, batch.positions_rt, document_mask(batch.segments_rt))
    logits_btv = verifier.logits(params, out.hidden_btd[:, :-1])
    labels_bt, weights_bt = batch.tokens_rt[:, 1:], batch.weights_rt[:, 1:]
    picked_bt = jnp.take_along_axis(logits_btv, labels_bt[..., None], axis=-1)[..., 0]
    return jnp.sum(weights_bt * (log_sum_exp(logits_btv) - picked_bt)), jnp.sum(weights_bt)


Sources = dict[str, data.Rows]


def load_sources(folder: Path, tokenizer: Tokenizer, characters: int) -> tuple[Sources, Sources]:
    """Packed training rows and held-out rows of every source."""
    documents = {
        name: [data.chat_document(tokenizer, messages) for messages in data.conversations(folder, name)]
        for name in data.CHAT_SETS
    }
    documents[data.STDLIB] = data.text_documents(tokenizer, data.stdlib_texts(characters), ROW_TOKENS)
    parts = {name: data.split(members) for name, members in documents.items()}
    train = {name: data.pack(kept, ROW_TOKENS) for name, (kept, _) in parts.items()}
    return train, {name: data.pack(held_out, ROW_TOKENS) for name, (_, held_out) in parts.items()}


def held_out_losses(params: Any, loss, held_out: Sources, batch: int = 8) -> dict[str, float]:
    """Mean loss per source, on at most four batches each."""
    losses = {}
    for name, rows in held_out.items():
        sums = [loss(params, rows.take(np.arange(at, at + batch) % len(rows))) for at in range(0, 4 * batch, batch)]
        total, weight = np.sum(np.array(sums), axis=0)
        losses[f"held_out/{name}"] = round(float(total / weight), 4)
    return losses


def load(path: Path, config: ModelConfig) -> Any:
    """Weights that this script wrote."""
    return checkpoint.load(path, parameters.abstract(verifier.specs(config), jnp.float32))


def round_to_bf16(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of training JSONL files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--run", type=Path, required=True, help="folder of the log and the checkpoint")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--batch", type=int, default=5, help="rows of 384 tokens per step")
    parser.add_argument("--learning-rate", type=float, default=8e-3)
    parser.add_argument("--stdlib-characters", type=int, default=2_500_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    config = tiny_config(tokenizer)
    train, held_out = load_sources(args.data, tokenizer, args.stdlib_characters)
    rows = data.Rows.concatenate(list(train.values()))
    order = data.schedule({name: len(part) for name, part in train.items()}, SHARES, args.steps, args.batch, args.seed)
    params = parameters.initialize(verifier.specs(config), jax.random.key(args.seed), scale=0.04)
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} weights; rows:", {n: len(p) for n, p in train.items()})

    def loss_fn(params: Any, batch: data.Rows, _key: jax.Array):
        total, weight = next_token_loss(params, config, batch)
        return total / weight, {}

    held_out_loss = jax.jit(lambda params, batch: next_token_loss(params, config, batch))
    params = loop.fit(
        params,
        loss_fn,
        loop.optimizer(args.steps, args.learning_rate, weight_decay=0.05),
        lambda step: rows.take(order[step]),
        steps=args.steps,
        seed=args.seed,
        folder=args.run,
        validate=lambda params: held_out_losses(params, held_out_loss, held_out),
    )
    params = round_to_bf16(params)
    checkpoint.save(args.run / "verifier.npz", params)
    print("after rounding to bf16:", held_out_losses(params, held_out_loss, held_out))


if __name__ == "__main__":
    main()
