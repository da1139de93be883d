"""Trains a small verifier in the Qwen3 layout from scratch, such as that of the shipped pair.

    python -m train.verifier configs/shipped/verifier.toml run=runs/verifier

Leaves a Hugging Face folder in RUN/model, tokenizer included: what every later stage reads.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath
from jax import lax

from train import config, data, folders, hosts, loop, losses, progress, watch
from train.documents import DataConfig
from train.records import Source
from train.state import Stage, Sums, place
from train.teacher import document_mask
from treeflash_jax import files, vocab
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax.checks import bounded
from treeflash_jax.costs import Counter
from treeflash_jax.formats import models
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig, Rope


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a verifier.

    Attributes:
      hidden_size: width of the residual stream.
      intermediate_size: width of a feed-forward layer.
      num_layers: number of layers.
      num_heads: attention heads.
      num_kv_heads: key/value heads; divides `num_heads`.
      head_dim: width of a head.
      max_positions: longest context, in tokens.
      tie_embeddings: uses the token embeddings as the output matrix.
      rope_theta: base of the rotary embeddings.
    """

    hidden_size: int = bounded(least=1)
    intermediate_size: int = bounded(least=1)
    num_layers: int = bounded(least=1)
    num_heads: int = bounded(least=1)
    num_kv_heads: int = bounded(least=1)
    head_dim: int = bounded(least=1)
    max_positions: int = bounded(2048, least=1)
    tie_embeddings: bool = True
    rope_theta: float = bounded(10_000.0, above=0)


@dataclass(frozen=True, kw_only=True)
class VerifierStage:
    """Settings of this stage.

    Attributes:
      run: folder of checkpoints, log and result, local or gs://.
      tokenizer: folder of tokenizer.json (`train.tokenizer`), or any Hugging Face tokenizer folder.
      sources, data: training text.
      model: sizes of the verifier.
      chunk: tokens of a row whose logits exist at a time; divides the row.
      init_scale: standard deviation of fresh weights.
      compute_dtype: dtype of activations.
    """

    run: str
    tokenizer: str
    sources: tuple[Source, ...]
    data: DataConfig = DataConfig()
    model: ModelSizes
    chunk: int = bounded(128, least=1)
    init_scale: float = bounded(0.02, above=0)
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    optimizer: config.OptimizerConfig
    loop: config.LoopConfig
    mesh: config.MeshConfig = config.MeshConfig()


def model_config(sizes: ModelSizes, tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(
        vocab_size=len(tokenizer.inner),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        rope=Rope(theta=sizes.rope_theta),
        max_positions=sizes.max_positions,
        tie_embeddings=sizes.tie_embeddings,
        eos_token_ids=tokenizer.stop_ids,
    )


def next_token_sums(
    params: Any, frozen: Any, rows: data.Rows, keys_b: jax.Array, *, model: ModelConfig, chunk: int, dtype: Any
) -> Sums:
    """Weighted sums of -log p(token | document so far), logits of `chunk` tokens of each row at a time."""
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    mask_btu = document_mask(rows.segments_rt)
    out = verifier.forward(params, model, rows.tokens_rt, rows.positions_rt, mask_btu, attention="chunked")
    labels_bt, weights_bt = (jnp.roll(x, -1, axis=1) for x in (rows.tokens_rt, rows.weights_rt))
    weights_bt = weights_bt.at[:, -1].set(0)

    @jax.checkpoint
    def part(hidden_btd: jax.Array, labels_bt: jax.Array, weights_bt: jax.Array) -> jax.Array:
        loss_bt = losses.cross_entropy(vocab.unembed(table_vd, hidden_btd), losses.Targets(labels_bt, None))
        return jnp.sum(weights_bt * loss_bt)

    table_vd = params.get("unembed", params["embed"])
    chunks = [
        jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0) for x in (out.hidden_btd, labels_bt, weights_bt)
    ]
    total, _ = lax.scan(lambda total, parts: (total + part(*parts), None), jnp.zeros(()), tuple(chunks))
    return {"loss": (total, jnp.sum(weights_bt))}


def make_stage(settings: VerifierStage, model: ModelConfig) -> Stage:
    row, batch = settings.data.row_tokens, settings.loop.batch
    if row % settings.chunk:
        raise ValueError(f"got chunk {settings.chunk}, expected a divisor of data.row_tokens {row}")
    count = Counter(dtype=settings.compute_dtype, batch=batch)
    forward = count.layers(model, row, row / 2) + count.vocabulary(model, row)
    return Stage(
        specs=verifier.specs(model),
        frozen_specs={},
        sums=partial(next_token_sums, model=model, chunk=settings.chunk, dtype=jnp.dtype(settings.compute_dtype)),
        compute_dtype=jnp.dtype(settings.compute_dtype),
        flops=3.0 * forward.flops,
    )


def main(settings: VerifierStage) -> None:
    hosts.connect()
    tokenizer = Tokenizer.load(settings.tokenizer)
    if tokenizer is None:
        raise ValueError(f"{settings.tokenizer}: got no tokenizer.json, expected the folder train.tokenizer wrote")
    model = model_config(settings.model, tokenizer)
    stage = make_stage(settings, model)
    mesh = hosts.make_mesh(settings.mesh)
    corpus = data.open_sources(settings.sources, settings.data, tokenizer, settings.loop.seed)
    init = parameters.initialize(stage.specs, jax.random.key(settings.loop.seed), scale=settings.init_scale)
    params = place(init, stage.specs, mesh, jnp.float32)
    hosts.say(
        f"verifier of {parameters.count(params):,} weights, {corpus.num_rows} rows of {settings.data.row_tokens} tokens"
    )
    params = meshes.to_host(loop.fit(stage, config=settings, mesh=mesh, params=params, frozen={}, corpus=corpus))
    if hosts.is_first():
        target = epath.Path(settings.run) / "model"
        with folders.filled(target, overwrite=True) as folder:
            models.save_verifier(folder, model, params)
            for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                source = Path(settings.tokenizer) / name
                if source.exists():
                    shutil.copyfile(files.regular(source), folder / name)
        progress.table("Trained verifier", watch.summary(settings.run) | {"model": str(target)})


if __name__ == "__main__":
    config.run(main, VerifierStage, __doc__)
