"""The objective of EAGLE-3: what its layer gives for every row, then for a few steps more on its own outputs.

Step 0 of row t reads the verifier's features at t and the token at t + 1, and is to predict the token at t + 2. Step i
reads the output of step i - 1 of the same row and the token at t + 1 + i, at position t + i, as drafting does
("training-time test"). It sees the step-0 keys of the rows before t and those of its own steps. So a row is what decoding
would run below an anchor at t + 1 if the true tokens were drafted.

Rows are worked on a chunk at a time, and every step forms its logits again in the backward pass: no array has the
vocabulary and all rows or all steps as axes.

Shape suffixes: b batch, s row tokens, n rows of a chunk, i steps, u keys of a row's own steps, d drafter width, r 2 d,
v tokens that can be drafted, x chunks.

Source: EAGLE-3 (arXiv 2503.01840) section 3; losses and masks as in SpecForge and DeepSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from train import blocks, losses
from train.data import Rows
from train.state import Sums
from treeflash_jax import vocab
from treeflash_jax.checks import bounded
from treeflash_jax.drafters.eagle3 import EagleConfig, layer
from treeflash_jax.verifiers.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What is trained on.

    Attributes:
      steps: how many tokens are drafted from every row (training-time test steps).
      decay: step i weighs decay ** i.
      chunk: tokens of a row worked on at a time; divides the row.
    """

    steps: int = bounded(7, least=1)
    decay: float = bounded(0.8, above=0, most=1)
    chunk: int = bounded(128, least=1)


@struct.dataclass
class Chunk:
    """Some consecutive rows of each sequence.

    Attributes:
      index_n: where they stand in the sequence.
      carried_bnd: what step 0 carries: the fused features.
      position_bn, segment_bn: of each row.
      token_bni: the token that each step reads.
      label_bni: the token that follows it.
      weight_bni: loss weights; 0 where a step leaves the document or predicts what the verifier did not write.
      teacher_bnid: the verifier's final hidden states that predict the labels.
    """

    index_n: jax.Array
    carried_bnd: jax.Array
    position_bn: jax.Array
    segment_bn: jax.Array
    token_bni: jax.Array
    label_bni: jax.Array
    weight_bni: jax.Array
    teacher_bnid: jax.Array


def rollout_sums(
    params: Any,
    frozen: Any,
    rows: Rows,
    *,
    settings: RolloutConfig,
    verifier: ModelConfig,
    drafter: EagleConfig,
) -> Sums:
    """Weighted sums of the loss and of what a person watches, over all rows and steps.

    Args:
      params: trained weights of the drafter, of any float dtype.
      frozen: "verifier", and "offsets" where the draft vocabulary is a part of the verifier's.
      rows: packed responses.
      settings: static.
      verifier: static.
      drafter: static.

    Returns:
      "loss", cross-entropy against the verifier's law, over the tokens that can be drafted; per step "top1" (the likeliest
      token is the one that followed) and "overlap" (sum min(p, q)); "tau_estimate", 1 + the expected run of kept steps, the
      tokens before each being right.
    """
    tables = frozen["verifier"]
    dtype = tables["embed"].dtype
    own = jax.tree.map(lambda x: x.astype(dtype), params) | {n: x for n, x in frozen.items() if n in ("offsets", "embed")}
    teacher = blocks.teach(tables, verifier, drafter.taps, rows)
    carried_bsd = layer.fuse(own, drafter, teacher.features_bsj)
    next_bs = _ahead(rows.tokens_rt, 1)
    read_bsr = layer.read(own, tables, drafter, next_bs, carried_bsd)
    first = layer.keys_values(own, drafter, read_bsr, layer.rotations(drafter, rows.positions_rt))
    chunks = _chunks(rows, teacher, carried_bsd, settings)

    def part(sums: Sums, chunk: Chunk) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, sums, _chunk_sums(own, tables, rows, first, chunk, settings, drafter)), None

    return lax.scan(part, _no_sums(settings), chunks)[0]


def _chunk_sums(
    own: Any, tables: Any, rows: Rows, first: Any, chunk: Chunk, settings: RolloutConfig, drafter: EagleConfig
) -> Sums:
    """The sums of some rows: all of their steps, one after the other."""
    earlier_ns = jnp.arange(rows.tokens_rt.shape[1]) < chunk.index_n[:, None]
    seen_bns = earlier_ns & (rows.segments_rt[:, None] == chunk.segment_bn[..., None])
    step = jax.checkpoint(partial(_step, drafter=drafter))
    score = jax.checkpoint(partial(_score, drafter=drafter))
    carried_bnd, own_keys, scores = chunk.carried_bnd, (), []
    for i in range(settings.steps):
        position_bn, token_bn = chunk.position_bn + i, chunk.token_bni[:, :, i]
        hidden_bnd, new = step(own, tables, first, seen_bns, carried_bnd, own_keys, position_bn, token_bn)
        own_keys = (*own_keys, new)
        teacher_bnd = chunk.teacher_bnid[:, :, i]
        scores.append(score(own, tables, hidden_bnd, teacher_bnd, chunk.label_bni[:, :, i]))
        carried_bnd = layer.feed_back(own, drafter, hidden_bnd)
    loss_bni, top1_bni, overlap_bni, known_bni = (jnp.stack(x, axis=-1) for x in zip(*scores, strict=True))
    weight_bni = chunk.weight_bni * known_bni * settings.decay ** jnp.arange(settings.steps)
    real_bni = (chunk.weight_bni > 0).astype(jnp.float32)
    run_bn = 1.0 + jnp.sum(jnp.cumprod(overlap_bni * real_bni, axis=-1), axis=-1)
    whole_bn, total_i = jnp.prod(real_bni, axis=-1), jnp.sum(real_bni, axis=(0, 1))
    return {
        "loss": (jnp.sum(loss_bni * weight_bni), jnp.sum(weight_bni)),
        "top1": (jnp.sum(top1_bni * real_bni, axis=(0, 1)), total_i),
        "overlap": (jnp.sum(overlap_bni * real_bni, axis=(0, 1)), total_i),
        "tau_estimate": (jnp.sum(run_bn * whole_bn), jnp.sum(whole_bn)),
    }


def _step(own, tables, first, seen_bns, carried_bnd, own_keys, position_bn, token_bn, *, drafter: EagleConfig) -> Any:
    """One pass of the layer over each row: its output [b, n, d], and the row's new key and value."""
    read_bnr = layer.read(own, tables, drafter, token_bn, carried_bnd)
    table = layer.rotations(drafter, position_bn)
    new = layer.keys_values(own, drafter, read_bnr, table)
    batch, count = token_bn.shape
    k_btke, v_btke = (
        jnp.stack(x_bnke, axis=2).reshape(batch, -1, *new[0].shape[2:]) for x_bnke in zip(*own_keys, new, strict=True)
    )  # t = n u, row by row

    def attend(q_bnhe: jax.Array) -> jax.Array:
        return blocks.block_attention(q_bnhe, k_btke, v_btke, *first, seen_bns)

    return layer.hidden(own, drafter, read_bnr, carried_bnd, table, attend), new


def _score(own, tables, hidden_bnd, teacher_bnd, label_bn, *, drafter: EagleConfig) -> tuple[jax.Array, ...]:
    """Of one step, [b, n] each: loss, whether the likeliest token is the label, overlap, and whether the verifier's
    likeliest token can be drafted."""
    logits_bnv = vocab.unembed(own["unembed"], layer.normed(own, drafter, hidden_bnd))
    wanted_bnv, ids_v = vocab.unembed(tables.get("unembed", tables["embed"]), teacher_bnd), layer.draft_ids(own)
    drafted_bn, known_bn = vocab.argmax(lax.stop_gradient(logits_bnv)), jnp.ones(label_bn.shape)
    if ids_v is not None:
        known_bn = jnp.any(vocab.argmax(wanted_bnv)[..., None] == ids_v, axis=-1).astype(known_bn.dtype)
        wanted_bnv, drafted_bn = wanted_bnv[..., ids_v], ids_v[drafted_bn]
    targets = losses.Targets(label_bn, losses.log_softmax(wanted_bnv))
    loss_bn = -jnp.sum(jnp.exp(targets.log_probs) * losses.log_softmax(logits_bnv), axis=-1)
    overlap_bn = lax.stop_gradient(losses.overlap(logits_bnv, targets))
    return loss_bn, (drafted_bn == label_bn).astype(overlap_bn.dtype), overlap_bn, known_bn


def _chunks(rows: Rows, teacher: blocks.Teacher, carried_bsd: jax.Array, settings: RolloutConfig) -> Chunk:
    """All rows, [x, ...]."""
    size = rows.tokens_rt.shape[1]
    steps = range(1, settings.steps + 1)
    inside_bsi = jnp.stack([_ahead(rows.segments_rt, i + 1) == rows.segments_rt for i in steps], axis=-1)
    weight_bsi = jnp.stack([_ahead(rows.weights_rt, i + 1) for i in steps], axis=-1)
    whole = Chunk(
        index_n=jnp.arange(size)[None],
        carried_bnd=carried_bsd,
        position_bn=rows.positions_rt,
        segment_bn=rows.segments_rt,
        token_bni=jnp.stack([_ahead(rows.tokens_rt, i) for i in steps], axis=-1),
        label_bni=jnp.stack([_ahead(rows.tokens_rt, i + 1) for i in steps], axis=-1),
        weight_bni=jnp.where(inside_bsi & (rows.segments_rt > 0)[..., None], weight_bsi, 0.0),
        teacher_bnid=jnp.stack([_ahead(teacher.hidden_bsd, i) for i in steps], axis=2),
    )

    def cut(x_bs: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_bs.reshape(x_bs.shape[0], -1, settings.chunk, *x_bs.shape[2:]), 1, 0)

    made = jax.tree.map(cut, whole)
    return made.replace(index_n=made.index_n[:, 0])


def _ahead(x_bs: jax.Array, by: int) -> jax.Array:
    """What stands `by` places further in each row; zeros past its end."""
    return jnp.pad(x_bs[:, by:], [(0, 0), (0, min(by, x_bs.shape[1]))] + [(0, 0)] * (x_bs.ndim - 2))


def _no_sums(settings: RolloutConfig) -> Sums:
    scalar, steps = jnp.zeros(()), jnp.zeros(settings.steps)
    return {
        "loss": (scalar, scalar),
        "top1": (steps, steps),
        "overlap": (steps, steps),
        "tau_estimate": (scalar, scalar),
    }
