"""The training objective of block drafters. It compares backbone and head with the verifier, a chunk of anchors at a time.

One verifier pass computes features and final hidden states. A scan over chunks of anchors then runs blocks, head and both
vocabulary passes. It keeps only the hidden states of a chunk; logits are recomputed in the backward pass.

If the passes over the vocabulary dominate a step, as on CPUs, distributions can be compared over a sample of it
(`vocabulary`). The sample has the tokens of a sequence, and random tokens that represent all others.

Shape suffixes: b sequences, s positions of a sequence, n anchors of a chunk, i drafted slots of a block, t = n i, d
model, v vocabulary, c sampled tokens.

Source: TreeFlash (arXiv 2606.03819); DFlash (arXiv 2602.06036) section 4; `overlap` as in the acceptance of one draft;
sampled softmax (arXiv 1412.2007).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from train.data.packing import PackedBatch
from train.runtime.training_state import Sums, split_chunks, sum_chunks
from train.stages import blocks, losses
from train.stages.teacher import Teacher, teach
from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters.block.backbone import context_kv
from treeflash_jax.drafters.block.block_drafter import BlockDrafter
from treeflash_jax.drafters.block.heads import HEADS, MARGINAL, Unembed
from treeflash_jax.models import vocab
from treeflash_jax.models.backend import selection
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.kv_cache import NewKV
from treeflash_jax.models.packed_attention import MAX_BLOCKS


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Loss of a block drafter, and the blocks on which it is computed."""

    loss: losses.LossName = setting(
        help="loss of a drafted token; forward-kl is from the verifier's distribution, cross-entropy-l1 is 0.1 times the "
        "cross-entropy plus 0.9 times the L1 distance to that distribution (DSpark)"
    )
    decay: float = setting(7.0, "slot i weighs exp(-(i - 1) / decay); 0 weighs all slots equally", least=0)
    dpace: bool = setting(
        False,
        "instead of `decay`, slots weigh more if more of the path that the drafter is likely to get right depends on them "
        "(D-PACE)",
    )
    base_weight: float | Literal["annealed"] = setting(
        0.0,
        "weight of the same loss on the backbone's marginals, added if a head is trained, so that the candidates do not "
        "drift; annealed: w times the marginals' loss plus 1 - w times the head's, w from 1 to 0 over the run (Domino)",
        least=0,
    )
    anchors: int = setting(help="blocks per sequence", least=1)
    prompts: bool = setting(
        False,
        "draw blocks from prompts too: the verifier's distribution is known there as well. Held-out sequences are measured "
        "on answers alone",
    )
    chunk: int = setting(16, "blocks per sequence processed at a time; divides `anchors`", least=1, most=MAX_BLOCKS)
    vocabulary: int = setting(
        0,
        "size of the sample of the vocabulary, above the sequence length; 0 compares distributions over the whole "
        "vocabulary, as is always done for held-out sequences",
        least=0,
    )

    def __post_init__(self) -> None:
        if self.anchors % self.chunk:
            raise ValueError(f"got objective.anchors {self.anchors}, expected a multiple of objective.chunk {self.chunk}")


@struct.dataclass
class Sample:
    """Sample of the vocabulary for each sequence.

    Attributes:
      ids_bc: distinct ids, ascending.
      log_counts_bc: log of the number of tokens that each sampled token represents. If they are added to logits, the sum
        over the sample is an unbiased estimate of the sum over the vocabulary.
    """

    ids_bc: jax.Array
    log_counts_bc: jax.Array

    def places(self, ids: jax.Array) -> jax.Array:
        """Returns the index of each of these tokens in the sample, [b, ...]. The sample must contain all of them."""
        return jax.vmap(jnp.searchsorted)(self.ids_bc, ids)


def sampled_vectors(table_vd: jax.Array, sample: Sample | None) -> jax.Array:
    """Returns a table's vectors of the sampled tokens, [b, c, d]; without a sample, the table itself."""
    return table_vd if sample is None else vocab.embed(table_vd, sample.ids_bc)


def counted(logits_btv: jax.Array, sample: Sample | None) -> jax.Array:
    """Returns logits in which a sampled token counts as all tokens that it represents."""
    return logits_btv if sample is None else logits_btv + sample.log_counts_bc[:, None].astype(logits_btv.dtype)


def sample_vocabulary(batch: PackedBatch, size: int, vocab_size: int, keys_b: jax.Array) -> Sample | None:
    """Returns a sample of all tokens of a sequence and random others, drawn without replacement; None if `size` is 0."""
    if not size:
        return None
    length = batch.tokens_bt.shape[1]
    expect(size > length, "objective.vocabulary", size, f"more than the {length} tokens of a sequence, or 0")
    size = min(size, vocab_size)
    # The keys are folded, because the unfolded ones draw the anchors.
    noise_bv = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (vocab_size,)))(keys_b)
    score_bv = jax.vmap(lambda score_v, tokens_s: score_v.at[tokens_s].set(2.0))(noise_bv, batch.tokens_bt)
    ids_bc = jnp.sort(selection.top_k(score_bv, size)[1], axis=-1)
    occurs_bc = jnp.take_along_axis(score_bv, ids_bc, axis=-1) > 1
    count_b1 = jnp.sum(occurs_bc, axis=-1, keepdims=True)
    others_b1 = jnp.log(vocab_size - count_b1) - jnp.log(jnp.maximum(size - count_b1, 1))
    return Sample(ids_bc, jnp.where(occurs_bc, 0.0, others_b1))


def drafting_sums(
    params: Params,
    frozen: Params,
    batch: PackedBatch,
    keys_b: jax.Array,
    *,
    settings: ObjectiveConfig,
    verifier: ModelConfig,
    drafter: BlockDrafter,
    attention: str = "chunked",
) -> Sums:
    """Computes weighted sums of the loss and of metrics for monitoring, over anchors drawn in these sequences.

    Args:
      params: trained weights, "backbone" and/or "head", of any float dtype.
      frozen: "verifier", and "backbone" if it is not trained, in the compute dtype.
      attention: implementation, a name in `packed_attention.IMPLEMENTATIONS`.

    Returns:
      The sums of `losses.path_sums`, over the sample of the vocabulary if one is drawn. "overlap" exists only if the loss
      reads the verifier's distribution. Heads that are trained on candidates also have "candidate_recall", the share of
      next tokens that are candidates; they have no loss at other tokens.
    """
    tables, backbone = frozen["verifier"], (frozen | params)["backbone"]
    dtype = tables["embed"].dtype
    teacher = teach(tables, verifier, drafter.taps, batch, attention)
    trained = replace(batch, weights_bt=(batch.positions_bt > 0).astype(jnp.float32)) if settings.prompts else batch
    chosen = blocks.sample_blocks(trained, settings.anchors, drafter.block_size, settings.decay, keys_b)
    with jax.named_scope("draft"):
        context = context_kv(optax.tree.cast(backbone, dtype), drafter.layers, teacher.features_btj, batch.positions_bt)
    sample = sample_vocabulary(batch, settings.vocabulary, verifier.vocab_size, keys_b)

    @jax.named_scope("draft")
    def hidden_states(backbone: Any, context: NewKV, anchors_bn: jax.Array) -> jax.Array:
        backbone = optax.tree.cast(backbone, dtype)  # cast here, so that gradients add up in the original dtype
        hidden_bnid = blocks.hidden_states(backbone, drafter, tables["embed"], batch, context, anchors_bn, attention)
        return hidden_bnid[:, :, 1:]

    def chunk_sums(chunk: blocks.Blocks) -> Sums:
        run = jax.checkpoint(hidden_states) if "backbone" in params else hidden_states
        hidden_bnid = run(backbone, context, chunk.anchors_bn)
        head = params.get("head")
        score = jax.checkpoint(partial(score_sums, settings=settings, drafter=drafter))
        return score(head, backbone["norm"], tables, batch, teacher, chunk=chunk, hidden_bnid=hidden_bnid, sample=sample)

    return sum_chunks(chunk_sums, split_chunks(chosen, settings.chunk))


def with_base(
    loss_bni: jax.Array, base_bni: jax.Array, weight: float | Literal["annealed"], progress_b: jax.Array | None
) -> jax.Array:
    """Returns the head's loss plus the weighted marginals' loss. "annealed" without progress: the head's loss alone."""
    if weight != "annealed":
        return loss_bni + weight * base_bni
    if progress_b is None:
        return loss_bni
    progress_b11 = progress_b[:, None, None]
    return progress_b11 * loss_bni + (1 - progress_b11) * base_bni


@jax.named_scope("score")
def score_sums(
    head: Any,
    norm: jax.Array,
    tables: Params,
    batch: PackedBatch,
    teacher: Teacher,
    *,
    chunk: blocks.Blocks,
    hidden_bnid: jax.Array,
    sample: Sample | None,
    settings: ObjectiveConfig,
    drafter: BlockDrafter,
) -> Sums:
    """Returns the sums of one chunk of blocks, from their hidden states without the anchor slot."""
    unembed_vd = tables.get("unembed", tables["embed"])
    eps = drafter.layers.rms_norm_eps
    head = optax.tree.cast(head, unembed_vd.dtype)
    norm = norm.astype(unembed_vd.dtype)
    targets_bni, weights_bni = chunk.targets_bni[:, :, 1:], chunk.weights_bni[:, :, 1:]
    previous_bni = jnp.maximum(targets_bni - 1, 0)
    previous_bt = pick(batch.tokens_bt, previous_bni).reshape(len(hidden_bnid), -1)
    hidden_btd = hidden_bnid.reshape(*previous_bt.shape, -1)

    unembed = Unembed(embed_vd=tables["embed"], unembed_vd=sampled_vectors(unembed_vd, sample), norm=norm, eps=eps)
    unembed = unembed.replace(logit_cap=drafter.logit_cap, embedding_factor=drafter.embedding_factor)

    def drafter_logits(name: str, weights: Params) -> jax.Array:
        weights = weights | {table: sampled_vectors(weights[table], sample) for table in HEADS[name].scored}
        return HEADS[name].logits(weights, unembed, previous_bt, hidden_btd, drafter)

    def by_block(logits_btv: jax.Array) -> jax.Array:
        return counted(logits_btv, sample).reshape(*previous_bni.shape, -1)

    labels_bni = pick(batch.tokens_bt, targets_bni)
    log_p_bniv = None
    if settings.loss != "cross-entropy":
        verifier_btd = pick(teacher.hidden_btd, previous_bni).reshape(*previous_bt.shape, -1)
        verifier_btv = vocab.cap(vocab.unembed(unembed.unembed_vd, verifier_btd), teacher.logit_cap)
        log_p_bniv = losses.log_softmax(by_block(verifier_btv))
    if sample is not None:
        labels_bni = sample.places(labels_bni)

    logits_btv = drafter_logits(MARGINAL, {}) if head is None else drafter_logits(drafter.head, head)
    logits_bniv = by_block(logits_btv)
    loss_bni = losses.drafting_loss(settings.loss, logits_bniv, labels_bni, log_p_bniv)
    trains_candidates = HEADS[drafter.head].trains_candidates
    if trains_candidates:
        is_candidate_bni = vocab.take(logits_bniv, labels_bni[..., None])[..., 0] != -jnp.inf
        loss_bni = jnp.where(is_candidate_bni, loss_bni, 0.0)
    if head is not None and settings.base_weight:
        base_bniv = by_block(drafter_logits(MARGINAL, {}))
        base_bni = losses.drafting_loss(settings.loss, base_bniv, labels_bni, log_p_bniv)
        loss_bni = with_base(loss_bni, base_bni, settings.base_weight, batch.progress_b)
    likeliest_bni = vocab.argmax(lax.stop_gradient(logits_btv)).reshape(labels_bni.shape)
    overlap_bni = None if log_p_bniv is None else losses.overlap(lax.stop_gradient(logits_bniv), log_p_bniv)
    real_bni = (weights_bni > 0).astype(jnp.float32)
    if settings.dpace:
        label_probs_bni = jnp.exp(-losses.cross_entropy(lax.stop_gradient(logits_bniv), labels_bni))
        weights_bni = losses.dpace_weights(label_probs_bni, real_bni)
    sums = losses.path_sums(loss_bni, weights_bni, real_bni, likeliest_bni == labels_bni, overlap_bni)
    if trains_candidates:
        sums["candidate_recall"] = jnp.sum(is_candidate_bni * real_bni, axis=(0, 1)), jnp.sum(real_bni, axis=(0, 1))
    return sums
