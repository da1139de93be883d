"""The training objective of block drafters: backbone and head, against the verifier, a chunk of anchors at a time.

One verifier pass gives features and final hidden states. A scan over chunks of anchors then runs blocks, head and both
vocabulary passes, and keeps nothing of a chunk but its hidden states: logits are formed again in the backward pass. No
logits of the whole batch exist.

Where the passes over the vocabulary are most of a step, as on CPUs, distributions can be compared over a sample of it
(`vocabulary`): the tokens that occur in a row, and random ones that stand for all others.

Shape suffixes: b batch, s row tokens, n anchors of a chunk, q block slots, d model, v vocabulary, z sampled tokens, x
chunks.

Source: TreeFlash (arXiv 2606.03819); DFlash (arXiv 2602.06036) section 4; `overlap` as in the acceptance of one draft;
sampled softmax (arXiv 1412.2007).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from train import blocks, losses
from train.data import Rows
from train.state import Sums
from train.teacher import Teacher, teach
from treeflash_jax import vocab
from treeflash_jax.checks import bounded
from treeflash_jax.costs import Counter
from treeflash_jax.drafters.block import costs
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.drafters.block.heads import HEADS, Unembed
from treeflash_jax.trees import pick
from treeflash_jax.verifiers.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is trained, on how many blocks, against what.

    Attributes:
      loss: name in LOSSES.
      decay: slot i weighs exp(-(i - 1) / decay); 0 weighs all alike.
      base_weight: weight of the same loss on the backbone's marginals, added if a head is trained with its backbone, so
        that the candidates of the first stage do not drift.
      anchors: blocks per row.
      chunk: blocks per row worked on at a time; divides `anchors`.
      vocabulary: tokens that the distributions of a row are compared over, at least as many as the row has tokens; 0: all.
        Held-out rows are measured over all of them.
    """

    loss: Literal["cross-entropy", "forward-kl", "total-variation"]
    decay: float = bounded(7.0, least=0)
    base_weight: float = bounded(0.0, least=0)
    anchors: int = bounded(least=1)
    chunk: int = bounded(16, least=1)
    vocabulary: int = bounded(0, least=0)

    def __post_init__(self) -> None:
        if self.anchors % self.chunk:
            raise ValueError(
                f"got objective.anchors {self.anchors} and chunk {self.chunk}, expected a multiple of the chunk"
            )


@struct.dataclass
class Sample:
    """Tokens that stand for the vocabulary, for every row.

    Attributes:
      ids_bz: ascending, none twice.
      log_counts_bz: log of the number of tokens that each stands for; added to logits, the sum over the sample estimates
        the sum over the vocabulary without bias.
    """

    ids_bz: jax.Array
    log_counts_bz: jax.Array

    def places(self, ids: jax.Array) -> jax.Array:
        """Where tokens of the sample, [b, ...], are in it."""
        return jax.vmap(jnp.searchsorted)(self.ids_bz, ids)


def sample_vocabulary(rows: Rows, size: int, vocab_size: int, keys_b: jax.Array) -> Sample:
    """All tokens that occur in a row, and random others, without replacement.

    Raises:
      ValueError: a sample that is smaller than a row.
    """
    if size < rows.tokens_rt.shape[1]:
        raise ValueError(
            f"got objective.vocabulary {size}, expected at least the {rows.tokens_rt.shape[1]} tokens of a row, or 0"
        )
    size = min(size, vocab_size)
    noise_bv = jax.vmap(lambda key: jax.random.uniform(key, (vocab_size,)))(keys_b)
    score_bv = jax.vmap(lambda score_v, tokens_s: score_v.at[tokens_s].set(2.0))(noise_bv, rows.tokens_rt)
    ids_bz = jnp.sort(vocab.local_top_k(score_bv, size)[1], axis=-1)
    occurs_bz = jnp.take_along_axis(score_bv, ids_bz, axis=-1) > 1
    count_b1 = jnp.sum(occurs_bz, axis=-1, keepdims=True)
    others_b1 = jnp.log(vocab_size - count_b1) - jnp.log(jnp.maximum(size - count_b1, 1))
    return Sample(ids_bz, jnp.where(occurs_bz, 0.0, others_b1))


def drafting_sums(
    params: Any,
    frozen: Any,
    rows: Rows,
    keys_b: jax.Array,
    *,
    settings: ObjectiveConfig,
    verifier: ModelConfig,
    drafter: DrafterConfig,
) -> Sums:
    """Weighted sums of the loss and of metrics for monitoring, over the anchors drawn in these rows.

    Args:
      params: trained weights, "backbone" and/or "head", of any float dtype.
      frozen: "verifier", and "backbone" where it is not trained, in the compute dtype.
      keys_b: one random key per row.
      drafter: static; its `head` names the correction.

    Returns:
      "loss"; per slot "top1" (the likeliest token is the one that followed) and, where the loss reads the verifier's
      distribution, "overlap" (sum min(p, q)); "tau_estimate", 1 + the expected run of kept slots, each slot kept with
      probability overlap (or 0 / 1 for top1), the tokens before it being right. All of them over the sample, where there
      is one.

    Raises:
      ValueError: a sample of the vocabulary that is smaller than a row.
    """
    backbone = params["backbone"] if "backbone" in params else frozen["backbone"]
    dtype = frozen["verifier"]["embed"].dtype
    teacher = teach(frozen["verifier"], verifier, drafter.target_layer_ids, rows)
    chosen = blocks.sample_blocks(rows, settings.anchors, drafter.block_size, settings.decay, keys_b)
    context = blocks.context(_cast(backbone, dtype), drafter, rows, teacher.features_bsj)
    sample = None
    if settings.vocabulary:
        other_keys_b = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys_b)
        sample = sample_vocabulary(rows, settings.vocabulary, verifier.vocab_size, other_keys_b)

    def hidden_states(backbone: Any, context: blocks.Layers, anchors_bn: jax.Array) -> jax.Array:
        embed_vd = frozen["verifier"]["embed"]
        return blocks.hidden_states(_cast(backbone, dtype), drafter, embed_vd, rows, context, anchors_bn)[:, :, 1:]

    def part(sums: Sums, chunk: blocks.Blocks) -> tuple[Sums, None]:
        run = jax.checkpoint(hidden_states) if "backbone" in params else hidden_states
        hidden_bnqd = run(backbone, context, chunk.anchors_bn)
        score = jax.checkpoint(partial(score_sums, settings=settings, drafter=drafter))
        new = score(params.get("head"), backbone["norm"], frozen["verifier"], rows, teacher, chunk, hidden_bnqd, sample)
        return jax.tree.map(jnp.add, sums, new), None

    return lax.scan(part, _no_sums(settings, drafter), _chunks(chosen, settings.chunk))[0]


def score_sums(
    head: Any,
    norm: jax.Array,
    tables: Any,
    rows: Rows,
    teacher: Teacher,
    chunk: blocks.Blocks,
    hidden_bnqd: jax.Array,
    sample: Sample | None,
    *,
    settings: ObjectiveConfig,
    drafter: DrafterConfig,
) -> Sums:
    """The sums of one chunk of blocks, from its hidden states (anchor slot left out)."""
    unembed_vd, eps = tables.get("unembed", tables["embed"]), drafter.layers.rms_norm_eps
    head, norm = _cast(head, unembed_vd.dtype), norm.astype(unembed_vd.dtype)
    targets_bnq, weights_bnq = chunk.targets_bnq[:, :, 1:], chunk.weights_bnq[:, :, 1:]
    previous_bnq = jnp.maximum(targets_bnq - 1, 0)
    previous_br = pick(rows.tokens_rt, previous_bnq).reshape(len(hidden_bnqd), -1)
    hidden_brd = hidden_bnqd.reshape(*previous_br.shape, -1)

    def listed(table_vd: jax.Array) -> jax.Array:
        """The rows of a table that distributions are compared over: all, or [b, z, ...] of the sample."""
        return table_vd if sample is None else vocab.embed(table_vd, sample.ids_bz)

    unembed = Unembed(embed_vd=tables["embed"], unembed_vd=listed(unembed_vd), norm=norm, eps=eps)

    def drafter_logits(name: str, weights: Any) -> jax.Array:
        own = {table: listed(weights[table]) for table in HEADS[name].LOOKED_UP[1:]}
        return HEADS[name].logits(weights | own, unembed, previous_br, hidden_brd)

    def counted(logits_brv: jax.Array) -> jax.Array:
        """As [b, n, q, v]; a sampled token counts as the tokens that it stands for."""
        if sample is not None:
            logits_brv = logits_brv + sample.log_counts_bz[:, None].astype(logits_brv.dtype)
        return logits_brv.reshape(*previous_bnq.shape, -1)

    labels_bnq = pick(rows.tokens_rt, targets_bnq)
    log_p_bnqv = None
    if settings.loss in losses.NEEDS_VERIFIER:
        of_bsd = pick(teacher.hidden_bsd, previous_bnq).reshape(*previous_br.shape, -1)
        log_p_bnqv = losses.log_softmax(counted(vocab.unembed(unembed.unembed_vd, of_bsd)))
    targets = losses.Targets(labels=labels_bnq if sample is None else sample.places(labels_bnq), log_probs=log_p_bnqv)
    measure = losses.LOSSES[settings.loss]

    logits_brv = drafter_logits(drafter.head, head) if head is not None else drafter_logits("marginal", {})
    logits_bnqv = counted(logits_brv)
    loss_bnq = measure(logits_bnqv, targets)
    if head is not None and settings.base_weight > 0:
        loss_bnq += settings.base_weight * measure(counted(drafter_logits("marginal", {})), targets)

    real_bnq = (weights_bnq > 0).astype(jnp.float32)
    likeliest_bnq = vocab.argmax(lax.stop_gradient(logits_brv)).reshape(real_bnq.shape)
    top1_bnq = (likeliest_bnq == targets.labels) * real_bnq
    kept_bnq, total_q = top1_bnq, jnp.sum(real_bnq, axis=(0, 1))
    sums: Sums = {
        "loss": (jnp.sum(loss_bnq * weights_bnq), jnp.sum(weights_bnq)),
        "top1": (jnp.sum(top1_bnq, axis=(0, 1)), total_q),
    }
    if log_p_bnqv is not None:
        kept_bnq = losses.overlap(lax.stop_gradient(logits_bnqv), targets) * real_bnq
        sums["overlap"] = (jnp.sum(kept_bnq, axis=(0, 1)), total_q)
    whole_bn = jnp.prod(real_bnq, axis=-1)
    run_bn = 1.0 + jnp.sum(jnp.cumprod(kept_bnq, axis=-1), axis=-1)
    return sums | {"tau_estimate": (jnp.sum(run_bn * whole_bn), jnp.sum(whole_bn))}


def _cast(tree: Any, dtype: Any) -> Any:
    """Weights in the compute dtype. Cast where they are read, their gradients add up in the dtype they come in."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _no_sums(settings: ObjectiveConfig, drafter: DrafterConfig) -> Sums:
    scalar, slots = jnp.zeros(()), jnp.zeros(drafter.num_depths)
    sums: Sums = {"loss": (scalar, scalar), "top1": (slots, slots), "tau_estimate": (scalar, scalar)}
    return sums | ({"overlap": (slots, slots)} if settings.loss in losses.NEEDS_VERIFIER else {})


def _chunks(chosen: blocks.Blocks, size: int) -> blocks.Blocks:
    """[b, n, ...] -> [x, b, size, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0), chosen)


def drafting_flops(
    settings: ObjectiveConfig,
    verifier: ModelConfig,
    drafter: DrafterConfig,
    *,
    batch: int,
    row_tokens: int,
    trains_backbone: bool,
) -> float:
    """Floating-point operations a step needs, for MFU: 2 per multiply-add, nothing recomputed counted twice.

    Counted: the verifier's forward pass (causal attention at half the square), the drafter's context and blocks, the head,
    and a vocabulary pass each for drafter and (where the loss reads it) verifier. A trained map counts three times, the
    drafter's vocabulary pass twice (gradient of its input only), frozen maps once.
    """
    count = Counter(dtype=jnp.float32, batch=batch)
    teacher = count.layers(verifier, row_tokens, row_tokens / 2).flops
    context = costs.extend_work(count, drafter, row_tokens).flops
    blocks_ = costs.block(count, drafter, settings.anchors * drafter.block_size, row_tokens / 2 + drafter.block_size).flops
    slots = settings.anchors * drafter.num_depths
    kind = HEADS[drafter.head]
    products = {name: spec for name, spec in kind.specs(drafter).items() if name not in kind.LOOKED_UP[:1]}
    head = 2 * batch * slots * sum(math.prod(spec.shape) for spec in products.values())
    vocabulary = count.vocabulary(drafter.layers, slots).flops
    if settings.vocabulary:
        vocabulary *= min(1, settings.vocabulary / drafter.layers.vocab_size)
    trained = 3 if trains_backbone else 1
    passes = 2 + (settings.loss in losses.NEEDS_VERIFIER)
    if drafter.head != "marginal" and settings.base_weight > 0:
        passes += 2
    return float(teacher + trained * (context + blocks_) + 3 * head + passes * vocabulary)
