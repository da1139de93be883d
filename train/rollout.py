"""The objective of EAGLE-3: what its layer gives for every row, then for a few steps more on its own outputs.

Step 0 of row t reads the verifier's features at t and the token at t + 1, and is to predict the token at t + 2. Step i
reads the output of step i - 1 of the same row and the token at t + 1 + i, at position t + i, as drafting does
("training-time test"). It sees the step-0 keys of the rows before t and those of its own steps. So a row is what decoding
would run below an anchor at t + 1 if the true tokens were drafted.

Rows are worked on a chunk at a time, and every step forms its logits again in the backward pass: no array has the
vocabulary and all rows or all steps as axes.

Shape suffixes: b batch, s row tokens, n rows of a chunk, i steps, u keys of a row's own steps, d drafter width, r 2 d,
v tokens that can be drafted.

Source: EAGLE-3 (arXiv 2503.01840) section 3; losses and masks as in SpecForge and DeepSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from train import blocks, losses
from train.data import Rows
from train.state import Sums
from train.teacher import teach
from treeflash_jax import vocab
from treeflash_jax.checks import bounded
from treeflash_jax.drafters.eagle3 import EagleConfig, layer
from treeflash_jax.trees import pick
from treeflash_jax.verifiers.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What is trained on.

    Attributes:
      steps: number of tokens drafted from every row (training-time test steps).
      decay: step i weighs decay ** i.
      anchors: rows of a sequence that are unrolled, drawn anew in every step; 0: all of them.
      chunk: rows of a sequence worked on at a time; divides `anchors`, or the sequence.
    """

    steps: int = bounded(7, least=1)
    decay: float = bounded(0.8, above=0, most=1)
    anchors: int = bounded(0, least=0)
    chunk: int = bounded(128, least=1)


def rollout_sums(
    params: Any,
    frozen: Any,
    rows: Rows,
    keys_b: jax.Array,
    *,
    settings: RolloutConfig,
    verifier: ModelConfig,
    drafter: EagleConfig,
) -> Sums:
    """Weighted sums of the loss and of metrics for monitoring, over the rows drawn and their steps.

    Args:
      params: trained weights of the drafter, of any float dtype.
      frozen: "verifier", and "offsets" where the draft vocabulary is a part of the verifier's.

    Returns:
      "loss", cross-entropy against the verifier's law, over the tokens that can be drafted; per step "top1" (the likeliest
      token is the one that followed) and "overlap" (sum min(p, q)); "tau_estimate", 1 + the expected run of kept steps, the
      tokens before each being right.
    """
    tables = frozen["verifier"]
    dtype = tables["embed"].dtype
    own = jax.tree.map(lambda x: x.astype(dtype), params) | {n: x for n, x in frozen.items() if n in ("offsets", "embed")}
    teacher = teach(tables, verifier, drafter.taps, rows)
    carried_bsd = layer.fuse(own, drafter, teacher.features_bsj)
    next_bs = jnp.pad(rows.tokens_rt[:, 1:], ((0, 0), (0, 1)))
    read_bsr = layer.read(own, tables, drafter, next_bs, carried_bsd)
    first = layer.keys_values(own, drafter, read_bsr, layer.rotations(drafter, rows.positions_rt))
    shared = own, tables, rows, teacher, carried_bsd, first

    def part(sums: Sums, drawn: tuple[jax.Array, jax.Array]) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, sums, _chunk_sums(shared, *drawn, settings, drafter)), None

    chunks = jax.tree.map(
        lambda x_bn: jnp.moveaxis(x_bn.reshape(x_bn.shape[0], -1, settings.chunk), 1, 0), draw_rows(rows, settings, keys_b)
    )
    return lax.scan(part, _no_sums(settings), chunks)[0]


def _chunk_sums(
    shared: Any, index_bn: jax.Array, is_there_bn: jax.Array, settings: RolloutConfig, drafter: EagleConfig
) -> Sums:
    """The sums of some rows: all of their steps, one after the other."""
    own, tables, rows, teacher, carried_bsd, first = shared
    steps = settings.steps
    position_bn, segment_bn = pick(rows.positions_rt, index_bn), pick(rows.segments_rt, index_bn)
    token_bni, label_bni = (_after(rows.tokens_rt, index_bn, first_at, steps) for first_at in (1, 2))
    seen_bns = jnp.arange(rows.tokens_rt.shape[1]) < index_bn[..., None]
    seen_bns &= rows.segments_rt[:, None] == segment_bn[..., None]
    step = jax.checkpoint(partial(_step, drafter=drafter))
    score = jax.checkpoint(partial(_score, drafter=drafter))
    carried_bnd, own_keys, scores = pick(carried_bsd, index_bn), (), []
    for i in range(steps):
        hidden_bnd, new = step(own, tables, first, seen_bns, carried_bnd, own_keys, position_bn + i, token_bni[:, :, i])
        own_keys = (*own_keys, new)
        teacher_bnd = _after(teacher.hidden_bsd, index_bn, 1 + i, 1)[:, :, 0]
        scores.append(score(own, tables, hidden_bnd, teacher_bnd, label_bni[:, :, i]))
        carried_bnd = layer.feed_back(own, drafter, hidden_bnd)
    loss_bni, top1_bni, overlap_bni, known_bni = (jnp.stack(x, axis=-1) for x in zip(*scores, strict=True))
    weight_bni = jnp.where(is_there_bn[..., None], _weights(rows, index_bn, steps), 0.0)
    real_bni = (weight_bni > 0).astype(jnp.float32)
    weight_bni *= known_bni * settings.decay ** jnp.arange(steps)
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


def draw_rows(rows: Rows, settings: RolloutConfig, keys_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which rows are unrolled, [b, n], and which are there: random ones whose first step predicts an answer token."""
    size = rows.tokens_rt.shape[1]
    starts_bs = _weights(rows, jnp.broadcast_to(jnp.arange(size), rows.tokens_rt.shape), 1)[..., 0] > 0
    if not settings.anchors:
        return jnp.broadcast_to(jnp.arange(size), starts_bs.shape), jnp.ones(starts_bs.shape, bool)
    uniform_bs = jax.vmap(lambda key: jax.random.uniform(key, (size,)))(keys_b)
    drawn_bn, index_bn = lax.top_k(jnp.where(starts_bs, uniform_bs, -1.0), settings.anchors)
    return index_bn, drawn_bn >= 0


def _weights(rows: Rows, index_bn: jax.Array, steps: int) -> jax.Array:
    """Loss weights of the steps of these rows, [b, n, i]."""
    segment_bn1 = pick(rows.segments_rt, index_bn)[..., None]
    is_inside_bni = (_after(rows.segments_rt, index_bn, 2, steps) == segment_bn1) & (segment_bn1 > 0)
    return jnp.where(is_inside_bni, _after(rows.weights_rt, index_bn, 2, steps), 0.0)


def _after(x_bs: jax.Array, index_bn: jax.Array, first: int, steps: int) -> jax.Array:
    """What stands `first`, `first + 1`, ... places after these rows, [b, n, i, ...]; zeros past the end."""
    padded_bs = jnp.pad(x_bs, [(0, 0), (0, first + steps)] + [(0, 0)] * (x_bs.ndim - 2))
    return pick(padded_bs, index_bn[..., None] + first + jnp.arange(steps))


def _no_sums(settings: RolloutConfig) -> Sums:
    scalar, steps = jnp.zeros(()), jnp.zeros(settings.steps)
    return {
        "loss": (scalar, scalar),
        "top1": (steps, steps),
        "overlap": (steps, steps),
        "tau_estimate": (scalar, scalar),
    }
