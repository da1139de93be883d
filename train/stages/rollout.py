"""The training objective of drafters that read their own outputs: EAGLE-3 and multi-token prediction.

One verifier pass computes features and final hidden states. A scan over chunks of positions then unrolls the drafter's
layer, as `train.eagle3` describes, and compares every step with the verifier.

Shape suffixes: b sequences, s positions of a sequence, n positions of a chunk, i steps, t = n i, d drafter width, k
key/value heads, h heads, e head dim, v tokens that can be drafted.

Source: EAGLE-3 (arXiv 2503.01840) section 3; losses and masks as in SpecForge and DeepSpec.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from train.data.packing import PackedBatch
from train.runtime.training_state import Sums, split_chunks, sum_chunks
from train.stages import blocks, losses
from train.stages.teacher import Teacher, teach
from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters.protocol import Drafter, draft_ids
from treeflash_jax.models import vocab
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.packed_attention import MAX_BLOCKS


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The number of positions to roll out, and of steps."""

    steps: int = setting(7, "number of tokens drafted from every position (training-time test steps)", least=1)
    decay: float = setting(0.8, "step i weighs decay ** i", above=0, most=1)
    anchors: int = setting(0, "positions of a sequence that are rolled out, drawn in every step; 0: all of them", least=0)
    chunk: int = setting(
        128,
        "positions of a sequence processed at a time; divides `anchors`, or the sequence length",
        least=1,
        most=MAX_BLOCKS,
    )


@dataclass(frozen=True)
class RolloutNetwork(ABC):
    """The layer of a drafter, as a rollout runs it."""

    drafter: Drafter

    @abstractmethod
    def carried(self, weights: Params, teacher: Teacher) -> jax.Array:
        """Returns the state that step 0 reads at every position, [b, s, d]."""

    @abstractmethod
    def layer_input(self, weights: Params, tables: Params, token_bn: jax.Array, carried_bnd: jax.Array) -> jax.Array:
        """Returns the input of `keys_values` and `output`. `tables` are weights of the verifier."""

    @abstractmethod
    def keys_values(self, weights: Params, input_bn: jax.Array, position_bn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the layer's keys and values, [b, n, k, e]."""

    @abstractmethod
    def output(
        self, weights: Params, input_bn: jax.Array, carried_bnd: jax.Array, position_bn: jax.Array, attend: Callable
    ) -> jax.Array:
        """Returns the layer's output, [b, n, d]. `attend` maps queries [b, n, h, e] to mixed values."""

    @abstractmethod
    def feed_back(self, weights: Params, hidden_bnd: jax.Array) -> jax.Array:
        """Returns the state that the next step reads, from the layer's output."""

    @abstractmethod
    def logits(self, weights: Params, tables: Params, hidden_bnd: jax.Array) -> jax.Array:
        """Returns logits [b, n, v] from the layer's output."""


def check_chunks(objective: RolloutConfig, sequence_length: int) -> None:
    """Raises ValueError for more anchors than positions, or if chunks do not divide the anchors."""
    anchors, chunk = objective.anchors, objective.chunk
    expect(anchors <= sequence_length, "objective.anchors", anchors, f"at most data.sequence_length {sequence_length}")
    divided = f"objective.anchors {anchors}" if anchors else f"data.sequence_length {sequence_length}"
    expect((anchors or sequence_length) % chunk == 0, "objective.chunk", chunk, f"a divisor of {divided}")


def rollout_sums(
    params: Params,
    frozen: Params,
    batch: PackedBatch,
    keys_b: jax.Array,
    *,
    settings: RolloutConfig,
    verifier: ModelConfig,
    network: RolloutNetwork,
    attention: str = "chunked",
) -> Sums:
    """Computes weighted sums of the loss and of metrics for monitoring, over the drawn positions and their steps.

    Args:
      params: trained weights of the drafter, of any float dtype.
      frozen: "verifier", and "offsets" if the draft vocabulary is a part of the verifier's.

    Returns the sums of `losses.path_sums`. The loss is the cross-entropy to the verifier's distribution over the draft
    vocabulary.
    """
    tables = frozen["verifier"]
    dtype = tables["embed"].dtype
    weights = jax.tree.map(lambda x: x.astype(dtype), params)
    weights |= {name: frozen[name] for name in ("offsets", "embed") if name in frozen}
    teacher = teach(tables, verifier, network.drafter.taps, batch, attention)
    carried_bsd = network.carried(weights, teacher)
    next_bs = jnp.pad(batch.tokens_bt[:, 1:], ((0, 0), (0, 1)))
    input_bs = network.layer_input(weights, tables, next_bs, carried_bsd)
    first = network.keys_values(weights, input_bs, batch.positions_bt)
    step = jax.checkpoint(partial(_step, network=network, attention=attention))
    score = jax.checkpoint(partial(_score, network=network, logit_cap=teacher.logit_cap))

    def chunk_sums(drawn: tuple[jax.Array, jax.Array]) -> Sums:
        index_bn, is_drawn_bn = drawn
        position_bn = pick(batch.positions_bt, index_bn)
        where = (index_bn, batch.segments_bt)
        token_bni = _after(batch.tokens_bt, index_bn, 1, settings.steps)
        label_bni = _after(batch.tokens_bt, index_bn, 2, settings.steps)
        carried_bnd = pick(carried_bsd, index_bn)
        keys = ()
        scores = []
        for i in range(settings.steps):
            hidden_bnd, new = step(
                weights, tables, first, where, carried_bnd, keys, position_bn=position_bn + i, token_bn=token_bni[:, :, i]
            )
            keys = (*keys, new)
            teacher_bnd = _after(teacher.hidden_btd, index_bn, 1 + i, 1)[:, :, 0]
            scores.append(score(weights, tables, hidden_bnd, teacher_bnd, label_bni[:, :, i]))
            carried_bnd = network.feed_back(weights, hidden_bnd)
        loss_bni, top1_bni, overlap_bni, known_bni = (jnp.stack(x, axis=-1) for x in zip(*scores, strict=True))
        weight_bni = jnp.where(is_drawn_bn[..., None], _loss_weights(batch, index_bn, settings.steps), 0.0)
        real_bni = (weight_bni > 0).astype(jnp.float32)
        weight_bni *= known_bni * settings.decay ** jnp.arange(settings.steps)
        return losses.path_sums(loss_bni, weight_bni, real_bni, top1_bni, overlap_bni)

    return sum_chunks(chunk_sums, split_chunks(draw_positions(batch, settings, keys_b), settings.chunk))


def _step(
    weights: Params,
    tables: Params,
    first: tuple[jax.Array, jax.Array],
    where: tuple[jax.Array, jax.Array],
    carried_bnd: jax.Array,
    keys: tuple[Any, ...],
    *,
    position_bn: jax.Array,
    token_bn: jax.Array,
    network: RolloutNetwork,
    attention: str,
):
    """Runs the layer at each position; returns its output [b, n, d], and the new key and value."""
    input_bn = network.layer_input(weights, tables, token_bn, carried_bnd)
    new = network.keys_values(weights, input_bn, position_bn)
    shape = len(token_bn), -1, *new[0].shape[2:]
    k_btke, v_btke = [jnp.stack(x_bnke, axis=2).reshape(shape) for x_bnke in zip(*keys, new, strict=True)]

    def attend(q_bnhe: jax.Array) -> jax.Array:
        return blocks.block_attention(q_bnhe, k_btke, v_btke, *first, *where, attention)

    return network.output(weights, input_bn, carried_bnd, position_bn, attend), new


def _score(
    weights: Params,
    tables: Params,
    hidden_bnd: jax.Array,
    teacher_bnd: jax.Array,
    label_bn: jax.Array,
    *,
    network: RolloutNetwork,
    logit_cap: float,
) -> tuple[jax.Array, ...]:
    """Returns four arrays [b, n] for one step: loss, top-1 hits, overlap, and 1 if the verifier's top token is listed."""
    logits_bnv = network.logits(weights, tables, hidden_bnd)
    verifier_bnv = vocab.unembed(tables.get("unembed", tables["embed"]), teacher_bnd)
    verifier_bnv = vocab.cap(verifier_bnv, logit_cap)
    ids_v = draft_ids(weights)
    drafted_bn = vocab.argmax(lax.stop_gradient(logits_bnv))
    known_bn = jnp.ones(label_bn.shape)
    if ids_v is not None:
        known_bn = jnp.any(vocab.argmax(verifier_bnv)[..., None] == ids_v, axis=-1).astype(known_bn.dtype)
        total_bn1 = vocab.log_sum_exp(verifier_bnv)[..., None]
        verifier_bnv, drafted_bn = verifier_bnv[..., ids_v], ids_v[drafted_bn]
    log_p_bnv = losses.log_softmax(verifier_bnv)
    loss_bn = -jnp.sum(jnp.exp(log_p_bnv) * losses.log_softmax(logits_bnv), axis=-1)
    if ids_v is not None:  # the overlap is of the distribution over all tokens
        log_p_bnv = verifier_bnv - total_bn1
    overlap_bn = lax.stop_gradient(losses.overlap(logits_bnv, log_p_bnv))
    return loss_bn, (drafted_bn == label_bn).astype(overlap_bn.dtype), overlap_bn, known_bn


def draw_positions(batch: PackedBatch, settings: RolloutConfig, keys_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws positions [b, n] at which the first step predicts an answer token.

    Also returns whether each position exists, because a sequence may have fewer of them.
    """
    everywhere_bs = jnp.broadcast_to(jnp.arange(batch.tokens_bt.shape[1]), batch.tokens_bt.shape)
    starts_bs = _loss_weights(batch, everywhere_bs, 1)[..., 0] > 0
    if not settings.anchors:
        return everywhere_bs, jnp.ones(starts_bs.shape, bool)
    return blocks.draw_anchors(starts_bs, settings.anchors, keys_b)


def _loss_weights(batch: PackedBatch, index_bn: jax.Array, steps: int) -> jax.Array:
    """Returns the loss weights [b, n, i] of the steps that start at these positions."""
    segment_bn1 = pick(batch.segments_bt, index_bn)[..., None]
    is_inside_bni = (_after(batch.segments_bt, index_bn, 2, steps) == segment_bn1) & (segment_bn1 > 0)
    return jnp.where(is_inside_bni, _after(batch.weights_bt, index_bn, 2, steps), 0.0)


def _after(x_bs: jax.Array, index_bn: jax.Array, first: int, steps: int) -> jax.Array:
    """Returns the values that are `first`, `first + 1`, ... after these positions, [b, n, i, ...]; zeros past the end."""
    padded_bs = jnp.pad(x_bs, [(0, 0), (0, first + steps)] + [(0, 0)] * (x_bs.ndim - 2))
    return pick(padded_bs, index_bn[..., None] + first + jnp.arange(steps))
