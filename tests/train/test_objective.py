"""The drafter that is trained is the drafter that drafts; chunks change nothing; zero is the marginal."""

import dataclasses
import math
import re
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from answers import draw as draw_normal
from answers import random_weights, slow
from refusals import refused
from scipy.special import log_softmax, softmax
from toy_training import make_batch

from train import step_memory
from train.stages import blocks, losses, objective
from train.stages.teacher import teach
from treeflash_jax.drafters import Inputs, NewPositions
from treeflash_jax.drafters.block import backbone as dflash
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.drafters.block.heads.candidate_selector import CandidateSelectorSizes
from treeflash_jax.models import decoder
from treeflash_jax.models.backend.indexing import pick

MODEL = dataclasses.replace(toy_training.MODEL, num_layers=2)
DRAFTER = dataclasses.replace(toy_training.DRAFTER, taps=(0, 1), num_target_layers=2)
WITH_HEAD = dataclasses.replace(DRAFTER, head="mlp")
OBJECTIVE = objective.ObjectiveConfig(loss="forward-kl", decay=4.0, anchors=8, chunk=8)
run_sums = jax.jit(partial(objective.drafting_sums, verifier=MODEL), static_argnames=("settings", "drafter"))
drafting_sums = partial(run_sums, settings=OBJECTIVE)
sample_blocks = jax.jit(blocks.sample_blocks, static_argnums=(1, 2, 3))


@pytest.fixture(scope="module")
def case():
    """Random weights and two packed sequences of several documents, with their blocks."""
    frozen = {
        "verifier": random_weights(decoder.specs(MODEL), 0),
        "backbone": random_weights(DRAFTER.specs()["backbone"], 1),
    }
    batch = make_batch((17, 9, 14, 11, 12))
    keys = jax.random.split(jax.random.key(0), 2)
    chosen = jax.device_get(sample_blocks(batch, 8, DRAFTER.block_size, 4.0, keys))
    return frozen, batch, keys, chosen


def test_weights_of_tokens_multiply_those_of_slots(case):
    """Regression: a small weight of prompts counted as 1."""
    _, batch, keys, chosen = case
    lighter = dataclasses.replace(batch, weights_bt=0.5 * batch.weights_bt)
    half = sample_blocks(lighter, 8, DRAFTER.block_size, 4.0, keys)
    np.testing.assert_allclose(half.weights_bni, 0.5 * chosen.weights_bni)


@jax.jit
def run_blocks(frozen, batch, chosen):
    """The verifier's outputs, and the hidden states of all blocks."""
    backbone, tables = frozen["backbone"], frozen["verifier"]
    teacher = teach(tables, MODEL, DRAFTER.taps, batch)
    context = dflash.context_kv(backbone, DRAFTER.layers, teacher.features_btj, batch.positions_bt)
    return teacher, blocks.hidden_states(backbone, DRAFTER, tables["embed"], batch, context, chosen.anchors_bn)


@jax.jit
def drafted(frozen, document_1t, start):
    """Hidden states of inference for a block that starts at `start` of a padded document."""
    tables, mask = frozen["verifier"], decoder.causal_mask(1, 32)
    out = decoder.forward(tables, MODEL, document_1t, jnp.arange(32)[None], mask, taps=DRAFTER.taps)
    state = DRAFTER.init(1, 32, jnp.float32)
    state = DRAFTER.extend(frozen, tables, state, NewPositions(out.features_btj, document_1t, start[None]))
    inputs = Inputs(frozen, tables, state, document_1t[:, start], jnp.ones(1), 1, document_1t, start[None])
    return DRAFTER.draft_block(inputs)


def test_phases_of_a_step_are_named_for_its_estimate(case):
    frozen, batch, keys, _ = case
    params = {"backbone": frozen["backbone"]}
    text = run_sums.lower(params, frozen, batch, keys, settings=OBJECTIVE, drafter=DRAFTER).as_text(debug_info=True)
    for phase in ("teach", "draft", "score"):
        assert phase in step_memory.PHASES and f"/{phase}/" in text, phase


def test_training_blocks_equal_inference(case):
    """Each block attends to its document strictly before its anchor and to itself, as in drafting."""
    frozen, batch, _, chosen = case
    _, hidden = run_blocks(frozen, batch, chosen)
    real = np.argwhere(np.asarray(chosen.weights_bni).sum(-1) > 0)
    assert len(real) >= 8
    for r, n in real:
        anchor = int(chosen.anchors_bn[r, n])
        members = np.flatnonzero(batch.segments_bt[r] == batch.segments_bt[r, anchor])
        document, start = batch.tokens_bt[r, members], anchor - members[0]
        padded = np.pad(document, (0, 32 - len(document)))[None]
        np.testing.assert_allclose(drafted(frozen, padded, start)[0], hidden[r, n], atol=1e-5, rtol=1e-5)
        for i in np.flatnonzero(chosen.weights_bni[r, n]):
            assert batch.tokens_bt[r, chosen.targets_bni[r, n, i]] == document[start + i]


def test_anchors_are_answers_followed_by_answers(case):
    """And depend on nothing but their sequence and its key."""
    _, batch, keys, chosen = case
    weights = np.asarray(chosen.weights_bni)
    for r in range(2):
        real = np.asarray(chosen.anchors_bn[r])[weights[r].sum(-1) > 0]
        assert len(set(real)) == len(real)
        for anchor in real:
            assert batch.weights_bt[r, anchor] > 0 and batch.weights_bt[r, anchor + 1] > 0
            assert batch.segments_bt[r, anchor] == batch.segments_bt[r, anchor + 1]
    alone = sample_blocks(jax.tree.map(lambda x: x[1:2], batch), 8, DRAFTER.block_size, 4.0, keys[1:])
    np.testing.assert_array_equal(alone.anchors_bn[0], chosen.anchors_bn[1])


def test_blocks_of_prompts_are_those_of_documents_that_are_answers(case):
    frozen, batch, keys, _ = case
    whole = dataclasses.replace(batch, weights_bt=np.float32(batch.positions_bt > 0))
    assert (whole.weights_bt > batch.weights_bt).any()
    everywhere = dataclasses.replace(OBJECTIVE, prompts=True)
    sums, expected, answers = (
        run_sums({}, frozen, of, keys, settings=settings, drafter=DRAFTER)["loss"]
        for settings, of in ((everywhere, batch), (OBJECTIVE, whole), (OBJECTIVE, batch))
    )
    np.testing.assert_array_equal(sums, expected)
    assert sums[0] != answers[0]


@pytest.mark.parametrize("decay", [0.0, 4.0])
def test_slots_weigh_by_their_decay_up_to_the_end_of_the_document(decay):
    """Full sequences: a block that starts q slots before an end has q slots that weigh, whatever follows."""
    batch = make_batch((20, 12, 32), prompt=1)
    assert (batch.segments_bt > 0).all()
    chosen = sample_blocks(batch, 28, 5, decay, jax.random.split(jax.random.key(0), 2))
    shares, results = [0.0, *(np.exp(-np.arange(4) / decay) if decay else np.ones(4))], set()
    for r, n in np.ndindex(2, 28):
        anchor = int(chosen.anchors_bn[r, n])
        end = int(np.flatnonzero(batch.segments_bt[r] == batch.segments_bt[r, anchor])[-1])
        expected = [share * (anchor + i <= end) for i, share in enumerate(shares)]
        np.testing.assert_allclose(chosen.weights_bni[r, n], expected, rtol=1e-6)
        results.add((end, min(4, end - anchor)))
    assert {(31, 1), (31, 4), (19, 1)} <= results


@jax.jit
def plain_logits(params, frozen, batch, chosen):
    """Returns the logits of the marginals, of the drafter and of the verifier for the open slots of all blocks."""
    frozen = frozen | {"backbone": params.get("backbone", frozen["backbone"])}
    backbone, tables, eps = frozen["backbone"], frozen["verifier"], DRAFTER.layers.rms_norm_eps
    teacher, hidden = run_blocks(frozen, batch, chosen)
    hidden, targets = hidden[:, :, 1:], chosen.targets_bni[:, :, 1:]
    normed = hidden / jnp.sqrt(jnp.mean(hidden**2, -1, keepdims=True) + eps) * backbone["norm"]
    base, total = normed @ tables["embed"].T, hidden
    if "head" in params:
        h, e = params["head"], tables["embed"][pick(batch.tokens_bt, targets - 1)]
        e = e / jnp.sqrt(jnp.mean(e**2, -1, keepdims=True) + 1e-6) * h["norm"]
        ug = jnp.tensordot(e, h["token_ug"], 1) + jnp.tensordot(normed, h["hidden_ug"], 1) + h["bias"]
        total = hidden + (jax.nn.silu(ug[..., 1, :]) * ug[..., 0, :]) @ h["down"]
    logits = total / jnp.sqrt(jnp.mean(total**2, -1, keepdims=True) + eps) * backbone["norm"] @ tables["embed"].T
    return base, logits, pick(teacher.hidden_btd, targets - 1) @ tables["embed"].T


def dpace_weights(probs, real):
    """D-PACE, slot by slot: what is reached up to a slot, summed from each slot on."""
    reached, factor = [], 1.0
    for i in range(probs.shape[-1]):
        factor *= jnp.where(real[..., i], 0.5 + 0.5 * probs[..., i], 1.0)
        reached.append(jnp.where(real[..., i], factor, 0.0))
    return jnp.stack([real[..., i] * sum(reached[i:]) for i in range(len(reached))], axis=-1)


def plain_loss(params, frozen, batch, keys, settings):
    """The objective without chunks, from its definition."""
    chosen = sample_blocks(batch, settings.anchors, DRAFTER.block_size, settings.decay, keys)
    base, logits, verified = plain_logits(params, frozen, batch, chosen)
    if settings.vocabulary:
        sample = objective.sample_vocabulary(batch, settings.vocabulary, 64, keys)
        counted = jax.vmap(lambda ids, logs: jnp.full(64, -1e9).at[ids].set(logs))(sample.ids_bc, sample.log_counts_bc)
        base, logits, verified = (x + counted[:, None, None] for x in (base, logits, verified))
    log_p = jax.nn.log_softmax(verified)
    labels = jax.nn.one_hot(pick(batch.tokens_bt, chosen.targets_bni[:, :, 1:]), 64)

    def measure(logits):
        log_q = jax.nn.log_softmax(logits)
        return {
            "cross-entropy": -jnp.sum(labels * log_q, -1),
            "forward-kl": jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1),
            "cross-entropy-l1": jnp.sum(0.9 * jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)) - 0.1 * labels * log_q, -1),
        }[settings.loss]

    loss, weights = measure(logits), chosen.weights_bni[:, :, 1:]
    if settings.base_weight == "annealed":
        share = 1 - batch.progress_b[:, None, None]
        loss = (1 - share) * loss + share * measure(base)
    elif "head" in params:
        loss += settings.base_weight * measure(base)
    if settings.dpace:
        probs = jax.lax.stop_gradient(jnp.sum(jax.nn.softmax(logits) * labels, -1))
        weights = dpace_weights(probs, weights > 0)
    return jnp.sum(loss * weights)


@pytest.mark.parametrize(("loss", "base_weight", "trained", "vocabulary", "dpace"), [
    ("forward-kl", 0.2, "both", 40, False),
    slow("cross-entropy-l1", 0.0, "backbone", 0, False),
    ("cross-entropy", "annealed", "both", 0, True),
])  # fmt: skip
def test_chunked_losses_and_gradients_equal_plain_ones(case, loss, base_weight, trained, vocabulary, dpace):
    frozen, batch, keys, _ = case
    drafter_ = DRAFTER if trained == "backbone" else WITH_HEAD
    all_weights = {"backbone": frozen["backbone"], "head": random_weights(HEADS["mlp"].specs(WITH_HEAD), 5)}
    params = all_weights if trained == "both" else {trained: all_weights[trained]}
    settings = dataclasses.replace(OBJECTIVE, loss=loss, base_weight=base_weight, dpace=dpace, chunk=2)
    settings = dataclasses.replace(settings, vocabulary=vocabulary)
    batch = dataclasses.replace(batch, progress_b=np.full(2, 0.25, np.float32))

    def chunked_loss(*weights_and_data, settings):
        return drafting_sums(*weights_and_data, settings=settings, drafter=drafter_)["loss"][0]

    got, expected = (
        jax.jit(jax.value_and_grad(partial(loss, settings=settings)))(params, frozen, batch, keys)
        for loss in (chunked_loss, plain_loss)
    )
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))


def test_an_annealed_loss_without_progress_is_that_of_the_head(case):
    frozen, batch, keys, _ = case
    params = {"head": random_weights(HEADS["mlp"].specs(WITH_HEAD), 5)}
    settings = OBJECTIVE, dataclasses.replace(OBJECTIVE, base_weight="annealed")
    final, annealed = (drafting_sums(params, frozen, batch, keys, settings=x, drafter=WITH_HEAD) for x in settings)
    np.testing.assert_allclose(annealed["loss"], final["loss"], rtol=1e-6)


def test_a_selector_is_trained_to_choose_among_its_candidates(case):
    """Cross-entropy over the likeliest tokens of the marginal; nothing where the next token is not one of them."""
    frozen, batch, keys, chosen = case
    drafter_ = dataclasses.replace(DRAFTER, head="selector", head_sizes=CandidateSelectorSizes(top_k=6))
    params = {"head": random_weights(HEADS["selector"].specs(drafter_), 5)}
    settings = dataclasses.replace(OBJECTIVE, loss="cross-entropy")

    def loss(params, frozen, batch):
        sums = drafting_sums(params, frozen, batch, keys, settings=settings, drafter=drafter_)
        return sums["loss"][0], sums

    (_, sums), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, frozen, batch)
    assert all(np.all(np.isfinite(x)) and np.any(x) for x in jax.tree.leaves(gradient))
    base = np.asarray(plain_logits({}, frozen, batch, chosen)[0])
    _, hidden = run_blocks(frozen, batch, chosen)
    hidden = np.asarray(hidden[:, :, 1:])
    normed = (
        hidden / np.sqrt(np.mean(hidden**2, -1, keepdims=True) + DRAFTER.layers.rms_norm_eps) * frozen["backbone"]["norm"]
    )
    previous, following, projection = (np.asarray(params["head"][name]) for name in ("previous", "following", "hidden"))
    total, kept, real = 0.0, np.zeros(4), np.zeros(4)
    for b, n, i in np.ndindex(*base.shape[:3]):
        if weight := float(chosen.weights_bni[b, n, i + 1]):
            place = int(chosen.targets_bni[b, n, i + 1])
            label, before = int(batch.tokens_bt[b, place]), int(batch.tokens_bt[b, place - 1])
            candidates = np.argsort(-base[b, n, i])[:6]
            real[i] += 1
            if label in candidates:
                kept[i] += 1
                scores = base[b, n, i] + following @ (previous[before] * (normed[b, n, i] @ projection))
                total += weight * (np.log(np.sum(np.exp(scores[candidates]))) - scores[label])
    assert 0 < kept.sum() < real.sum()
    np.testing.assert_allclose(sums["loss"], (total, chosen.weights_bni.sum()), rtol=1e-4)
    np.testing.assert_array_equal(sums["candidate_recall"], (kept, real))


def test_a_sample_holds_the_sequence_and_stands_for_the_vocabulary(case):
    """Ids ascend, ids of the sequence stand for themselves, and sums over samples have the mean of the whole sum."""
    _, batch, keys, _ = case
    draw = jax.jit(partial(objective.sample_vocabulary, vocab_size=64), static_argnames="size")
    sample = draw(batch, size=40, keys_b=keys)
    for ids, logs, tokens in zip(np.asarray(sample.ids_bc), sample.log_counts_bc, batch.tokens_bt, strict=True):
        assert np.all(np.diff(ids) > 0) and set(tokens.tolist()) <= set(ids.tolist())
        np.testing.assert_array_equal(logs[np.isin(ids, tokens)], 0)
        np.testing.assert_allclose(np.exp(logs).sum(), 64, rtol=1e-6)
    places_bt = jax.jit(objective.Sample.places)(sample, batch.tokens_bt)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(sample.ids_bc), places_bt, 1), batch.tokens_bt)
    alone = draw(jax.tree.map(lambda x: x[1:2], batch), size=40, keys_b=keys[1:])
    np.testing.assert_array_equal(alone.ids_bc[0], sample.ids_bc[1])
    masses = np.exp(draw_normal(64))

    def estimate(key):
        drawn = draw(batch, size=40, keys_b=jax.random.split(key, 2))
        return jnp.sum(jnp.asarray(masses)[drawn.ids_bc] * jnp.exp(drawn.log_counts_bc), axis=-1)

    results = jax.jit(jax.vmap(estimate))(jax.random.split(jax.random.key(2), 500))
    assert np.all(np.std(results, axis=0) > 0)
    error = np.std(results, axis=0) / np.sqrt(500)
    assert np.all(np.abs(np.mean(results, axis=0) - masses.sum()) < 4 * error)
    words = "got objective.vocabulary 32, expected more than the 32 tokens of a sequence"
    refused(lambda: draw(batch, size=32, keys_b=keys), words)


@pytest.mark.parametrize("head", ["lowrank", "gru"])
def test_a_sample_of_all_tokens_changes_nothing(case, head):
    frozen, batch, keys, _ = case
    drafter_ = dataclasses.replace(DRAFTER, head=head)
    params = {"head": random_weights(HEADS[head].specs(drafter_), 5)}
    sampled_sums, sums = (
        drafting_sums(params, frozen, batch, keys, settings=settings, drafter=drafter_)
        for settings in (dataclasses.replace(OBJECTIVE, vocabulary=64), OBJECTIVE)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), sampled_sums, sums)


def test_nothing_holds_the_logits_of_a_batch_or_all_blocks_against_all(case):
    """Chunked, no array of the gradient reaches [positions, vocabulary] or [anchors x block]^2; in one chunk some do."""
    frozen, _, keys, _ = case
    batch = make_batch((30,) * 6)
    anchors, size = 24, DRAFTER.block_size

    def largest(chunk):
        settings = dataclasses.replace(OBJECTIVE, anchors=anchors, chunk=chunk)

        def loss(backbone, frozen):
            sums = drafting_sums({"backbone": backbone}, frozen, batch, keys, settings=settings, drafter=DRAFTER)
            return sums["loss"][0]

        text = jax.jit(jax.grad(loss)).lower(frozen["backbone"], frozen).as_text()
        shapes = {tuple(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<([0-9x]+xf32)>", text)}
        return max(map(math.prod, shapes))

    logits, blocks_against_blocks = 2 * anchors * (size - 1) * 64, 2 * (anchors * size) ** 2
    assert largest(2) < min(logits, blocks_against_blocks) <= logits <= largest(anchors)


def test_a_zero_output_layer_is_exactly_the_marginal(case):
    frozen, batch, keys, _ = case
    started = toy_training.fresh_head()
    assert not np.any(started["down"]) and np.any(started["token_ug"])
    with_head = drafting_sums({"head": started}, frozen, batch, keys, drafter=WITH_HEAD)
    without = drafting_sums({"backbone": frozen["backbone"]}, frozen, batch, keys, drafter=DRAFTER)
    for name, sums in without.items():
        np.testing.assert_array_equal(with_head[name], sums)


@pytest.mark.parametrize("loss", ["cross-entropy", "forward-kl"])
def test_estimated_tau_and_slots_equal_their_definitions(case, loss):
    """1 + the expected run of kept slots over whole blocks; top-1 and overlap per slot over all that weigh."""
    frozen, batch, keys, chosen = case
    settings, params = dataclasses.replace(OBJECTIVE, loss=loss, chunk=2), {"backbone": frozen["backbone"]}
    sums = drafting_sums(params, frozen, batch, keys, settings=settings, drafter=DRAFTER)
    q, _, p = (softmax(logits, axis=-1) for logits in plain_logits(params, frozen, batch, chosen))
    (top1, overlap, weight), runs, whole = np.zeros((3, 4)), 0.0, 0
    for r, n in np.ndindex(*chosen.anchors_bn.shape):
        real = np.asarray(chosen.weights_bni[r, n, 1:]) > 0
        kept = []
        for i in np.flatnonzero(real):
            is_top = q[r, n, i].argmax() == batch.tokens_bt[r, int(chosen.targets_bni[r, n, i + 1])]
            share = np.minimum(q[r, n, i], p[r, n, i]).sum()
            top1[i], overlap[i], weight[i] = top1[i] + is_top, overlap[i] + share, weight[i] + 1
            kept.append(share if loss == "forward-kl" else is_top)
        if real.all():
            whole += 1
            runs += 1 + sum(np.prod(kept[: i + 1]) for i in range(len(kept)))
    assert 0 < whole < weight[0], "blocks cut short count towards slots, not towards tau"
    np.testing.assert_allclose(sums["tau_estimate"], (runs, whole), rtol=1e-5)
    np.testing.assert_allclose(sums["top1"], (top1, weight))
    if loss == "forward-kl":
        np.testing.assert_allclose(sums["overlap"], (overlap, weight), rtol=1e-5)


def test_losses_are_of_float32_and_vanish_if_the_draft_is_the_verifier():
    logits = (20 * draw_normal(8, 64)).astype(jnp.bfloat16)
    wide = logits.astype(np.float32)
    log_p = log_softmax(wide, axis=-1)

    @jax.jit
    def run_losses(x):
        return [losses.drafting_loss(name, x, jnp.arange(8), log_p[::-1]) for name in get_args(losses.LossName)]

    for loss, same in zip(run_losses(logits), run_losses(wide), strict=True):
        assert loss.dtype == jnp.float32
        np.testing.assert_allclose(loss, same, rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: losses.forward_kl(x, losses.log_softmax(wide)).sum()))(jnp.zeros((8, 64)))
    np.testing.assert_allclose(gradient, 1 / 64 - np.exp(log_p), atol=1e-6)
    np.testing.assert_allclose(jax.jit(losses.forward_kl)(wide + 2.0, log_p), 0, atol=1e-5)
