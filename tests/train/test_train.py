"""The drafter that is trained is the drafter that drafts; chunks, parts and meshes change nothing; zero is the marginal."""

import dataclasses
import json
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from toy_training import DRAFTER, MODEL

from train import blocks, config, data, drafter, drafting, evaluate, head, hosts, losses, objective, stages, state, watch
from train.teacher import teach
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax import vocab
from treeflash_jax.drafters.block import backbone as dflash
from treeflash_jax.drafters.block.heads import HEADS, DraftSettings, Unembed
from treeflash_jax.formats import models
from treeflash_jax.trees import pick
from treeflash_jax.verifiers import forward as verifier

WITH_HEAD = toy_training.with_head()
OBJECTIVE = objective.ObjectiveConfig(loss="forward-kl", decay=4.0, anchors=8, chunk=8)


def rows_of(lengths, row_tokens=32, prompt=3):
    rng = np.random.default_rng(0)
    members = [data.Document(rng.integers(4, 64, n).astype(np.int32), np.float32(np.arange(n) >= prompt)) for n in lengths]
    return data.pack(members, row_tokens).take(np.arange(2))


def random_weights(specs, seed, scale=0.3):
    """Every weight random, also those that start at zero or one."""
    made = jax.tree.map(lambda s: dataclasses.replace(s, init="normal"), specs, is_leaf=parameters.is_spec)
    return parameters.initialize(made, jax.random.key(seed), scale=scale)


@pytest.fixture(scope="module")
def case():
    """Random weights and two packed rows of several documents, with their blocks."""
    frozen = {"verifier": random_weights(verifier.specs(MODEL), 0), "backbone": random_weights(dflash.specs(DRAFTER), 1)}
    rows = rows_of((17, 9, 14, 11, 12))
    keys = jax.random.split(jax.random.key(0), 2)
    chosen = blocks.sample_blocks(rows, 8, DRAFTER.block_size, 4.0, keys)
    return frozen, rows, keys, chosen


@jax.jit
def drafted(frozen, document_1t, start):
    """What inference makes of a block that starts at `start` of one padded document."""
    own, mask = frozen["verifier"], verifier.causal_mask(1, 32)
    out = verifier.forward(own, MODEL, document_1t, jnp.arange(32)[None], mask, taps=DRAFTER.target_layer_ids)
    state = dflash.init(DRAFTER, 1, 32, jnp.float32)
    state = dflash.extend(frozen["backbone"], DRAFTER, state, out.features_btj, start[None])
    return dflash.block(frozen["backbone"], DRAFTER, state, own["embed"], document_1t[:, start])


def test_training_blocks_equal_inference(case):
    frozen, rows, _, chosen = case
    teacher = teach(frozen["verifier"], MODEL, DRAFTER.target_layer_ids, rows)
    context = blocks.context(frozen["backbone"], DRAFTER, rows, teacher.features_bsj)
    hidden = blocks.hidden_states(
        frozen["backbone"], DRAFTER, frozen["verifier"]["embed"], rows, context, chosen.anchors_bn
    )
    checked = 0
    for r, n in np.argwhere(np.asarray(chosen.weights_bnq).sum(-1) > 0):
        anchor = int(chosen.anchors_bn[r, n])
        members = np.flatnonzero(rows.segments_rt[r] == rows.segments_rt[r, anchor])
        document, start = rows.tokens_rt[r, members], anchor - members[0]
        padded = np.pad(document, (0, 32 - len(document)))[None]
        np.testing.assert_allclose(drafted(frozen, padded, start)[0], hidden[r, n], atol=1e-5, rtol=1e-5)
        for i in np.flatnonzero(chosen.weights_bnq[r, n]):
            assert rows.tokens_rt[r, chosen.targets_bnq[r, n, i]] == document[start + i]
        checked += 1
    assert checked >= 8


def test_block_attention_equals_brute_force():
    """The published mask, written out: context columns strictly before the anchor in its document, and the own block."""
    rng = np.random.default_rng(1)
    b, n, q, s, h, k, e = 2, 3, 4, 10, 4, 2, 8
    segments = np.repeat([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]], b, axis=0)
    anchors = rng.integers(0, 9, (b, n))
    arrays = [
        rng.normal(size=shape).astype(np.float32)
        for shape in ((b, n * q, h, e), *2 * [(b, n * q, k, e)], *2 * [(b, s, k, e)])
    ]
    queries, new_k, new_v, old_k, old_v = arrays
    seen = (np.arange(s) < anchors[..., None]) & (segments[:, None] == np.take_along_axis(segments, anchors, 1)[..., None])
    mixed = blocks.block_attention(queries, new_k, new_v, old_k, old_v, seen)
    for r in range(b):
        for t in range(n * q):
            anchor = anchors[r, t // q]
            columns = [("old", c) for c in range(s) if c < anchor and segments[r, c] == segments[r, anchor]]
            columns += [("new", c) for c in range(n * q) if c // q == t // q]
            for head_ in range(h):
                keys = np.stack([(old_k if kind == "old" else new_k)[r, c, head_ // 2] for kind, c in columns])
                values = np.stack([(old_v if kind == "old" else new_v)[r, c, head_ // 2] for kind, c in columns])
                logits = keys @ queries[r, t, head_] * e**-0.5
                shares = np.exp(logits - logits.max())
                np.testing.assert_allclose(mixed[r, t, head_], shares @ values / shares.sum(), atol=1e-5)


def test_anchors_are_answers_followed_by_answers(case):
    _, rows, _, chosen = case
    weights = np.asarray(chosen.weights_bnq)
    assert np.all(weights[..., 0] == 0)
    for r in range(2):
        real = np.asarray(chosen.anchors_bn[r])[weights[r].sum(-1) > 0]
        assert len(set(real)) == len(real)
        for anchor in real:
            assert rows.weights_rt[r, anchor] > 0 and rows.weights_rt[r, anchor + 1] > 0
            assert rows.segments_rt[r, anchor] == rows.segments_rt[r, anchor + 1]
    np.testing.assert_allclose(
        weights[0, 0][weights[0, 0] > 0], np.exp(-np.arange(4) / 4.0)[: (weights[0, 0] > 0).sum()], rtol=1e-6
    )


def test_anchors_depend_on_the_row_alone(case):
    _, rows, keys, chosen = case
    alone = blocks.sample_blocks(rows.take(np.array([1])), 8, DRAFTER.block_size, 4.0, keys[1:])
    np.testing.assert_array_equal(alone.anchors_bn[0], chosen.anchors_bn[1])


@pytest.mark.parametrize("name", ["mlp", "linear"])
def test_head_rows_equal_the_table_of_inference(name):
    drafter_ = dataclasses.replace(DRAFTER, head=name)
    weights = random_weights(HEADS[name].specs(drafter_), 2, scale=1.0)
    embed_vd = jax.random.normal(jax.random.key(3), (64, 16))
    hidden_bqd = jax.random.normal(jax.random.key(4), (2, 5, 16))
    anchor_b, norm = jnp.array([7, 9]), jnp.ones(16)
    unembed = Unembed(embed_vd, embed_vd, norm, DRAFTER.layers.rms_norm_eps)
    settings = DraftSettings(candidates=4, children=6)
    table = HEADS[name].expand(weights, unembed, hidden_bqd, anchor_b, settings, jnp.ones(1))
    _, candidates = vocab.top_k(vocab.unembed(embed_vd, unembed.normed(hidden_bqd[:, 1:-1])), 4)
    for m in range(4):
        previous_bq = jnp.concatenate([anchor_b[:, None], candidates[:, :, m]], axis=1)
        after = HEADS[name].correct(
            weights,
            vocab.embed(embed_vd, previous_bq),
            lambda slots: slots,
            hidden_bqd[:, 1:],
            unembed.normed(hidden_bqd[:, 1:]),
        )
        log_probs = jax.nn.log_softmax(vocab.unembed(embed_vd, unembed.normed(after)))
        expected = jnp.take_along_axis(log_probs, table.tokens_bimc[:, :, m], axis=-1)
        np.testing.assert_allclose(table.log_probs_bimc[:, :, m], expected, atol=2e-5)


def sampled(rows, size, keys):
    return objective.sample_vocabulary(rows, size, 64, jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys))


def plain_sums(params, frozen, rows, keys, settings, drafter_):
    """The objective without chunks, from its definition."""
    backbone = params.get("backbone", frozen.get("backbone"))
    own, eps = frozen["verifier"], drafter_.layers.rms_norm_eps
    teacher = teach(own, MODEL, drafter_.target_layer_ids, rows)
    chosen = blocks.sample_blocks(rows, settings.anchors, drafter_.block_size, settings.decay, keys)
    context = blocks.context(backbone, drafter_, rows, teacher.features_bsj)
    hidden = blocks.hidden_states(backbone, drafter_, own["embed"], rows, context, chosen.anchors_bn)[:, :, 1:]
    targets, weights = chosen.targets_bnq[:, :, 1:], chosen.weights_bnq[:, :, 1:]
    normed = hidden / jnp.sqrt(jnp.mean(hidden**2, -1, keepdims=True) + eps) * backbone["norm"]
    base, total = normed @ own["embed"].T, hidden
    if "head" in params:
        h, e = params["head"], own["embed"][pick(rows.tokens_rt, targets - 1)]
        e = e / jnp.sqrt(jnp.mean(e**2, -1, keepdims=True) + 1e-6) * h["norm"]
        ug = (
            jnp.einsum("bnqd,dxf->bnqxf", e, h["token_ug"])
            + jnp.einsum("bnqd,dxf->bnqxf", normed, h["hidden_ug"])
            + h["bias"]
        )
        total = hidden + (jax.nn.silu(ug[..., 1, :]) * ug[..., 0, :]) @ h["down"]
    logits = total / jnp.sqrt(jnp.mean(total**2, -1, keepdims=True) + eps) * backbone["norm"] @ own["embed"].T
    verified = pick(teacher.hidden_bsd, targets - 1) @ own["embed"].T
    if settings.vocabulary:
        sample = sampled(rows, settings.vocabulary, keys)
        counted = jax.vmap(lambda ids, logs: jnp.full(64, -1e9).at[ids].set(logs))(sample.ids_bz, sample.log_counts_bz)
        base, logits, verified = (x + counted[:, None, None] for x in (base, logits, verified))
    log_p = jax.nn.log_softmax(verified)
    labels = jax.nn.one_hot(pick(rows.tokens_rt, targets), 64)

    def measure(logits):
        log_q = jax.nn.log_softmax(logits)
        return {
            "cross-entropy": -jnp.sum(labels * log_q, -1),
            "forward-kl": jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1),
            "total-variation": 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), -1),
        }[settings.loss]

    loss = measure(logits) + settings.base_weight * (measure(base) if "head" in params else 0)
    return jnp.sum(loss * weights), jnp.sum(weights)


@pytest.mark.parametrize(
    ("loss", "base_weight", "trained", "vocabulary"),
    [
        ("forward-kl", 0.0, "head", 0),
        ("forward-kl", 0.2, "both", 40),
        pytest.param("forward-kl", 0.2, "both", 0, marks=pytest.mark.slow),
        ("cross-entropy", 0.0, "backbone", 0),
        pytest.param("cross-entropy", 0.0, "backbone", 40, marks=pytest.mark.slow),
        ("total-variation", 0.0, "both", 0),
    ],
)
def test_chunked_losses_and_gradients_equal_plain_ones(case, loss, base_weight, trained, vocabulary):
    frozen, rows, keys, _ = case
    drafter_ = DRAFTER if trained == "backbone" else WITH_HEAD
    all_weights = {"backbone": frozen["backbone"], "head": random_weights(HEADS["mlp"].specs(WITH_HEAD), 5)}
    params = all_weights if trained == "both" else {trained: all_weights[trained]}
    settings = dataclasses.replace(OBJECTIVE, loss=loss, base_weight=base_weight, chunk=2, vocabulary=vocabulary)
    plain = jax.jit(jax.value_and_grad(lambda p, frozen: plain_sums(p, frozen, rows, keys, settings, drafter_)[0]))

    def chunked(p, frozen):
        return objective.drafting_sums(p, frozen, rows, keys, settings=settings, verifier=MODEL, drafter=drafter_)["loss"][
            0
        ]

    expected, got = plain(params, frozen), jax.jit(jax.value_and_grad(chunked))(params, frozen)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))


def test_a_sample_holds_the_row_and_stands_for_the_vocabulary(case):
    """Ids ascend, the row's own stand for themselves, and sums over samples have the mean of the sum over all tokens."""
    _, rows, keys, _ = case
    sample = sampled(rows, 40, keys)
    for ids, logs, tokens in zip(np.asarray(sample.ids_bz), sample.log_counts_bz, rows.tokens_rt, strict=True):
        assert np.all(np.diff(ids) > 0) and set(tokens.tolist()) <= set(ids.tolist())
        np.testing.assert_array_equal(logs[np.isin(ids, tokens)], 0)
        np.testing.assert_allclose(np.exp(logs).sum(), 64, rtol=1e-6)
    np.testing.assert_array_equal(np.take_along_axis(sample.ids_bz, sample.places(rows.tokens_rt), 1), rows.tokens_rt)
    alone = sampled(rows.take(np.array([1])), 40, keys[1:])
    np.testing.assert_array_equal(alone.ids_bz[0], sample.ids_bz[1])
    masses = jnp.exp(jax.random.normal(jax.random.key(1), (64,)))

    def estimate(key):
        drawn = sampled(rows, 40, jax.random.split(key, 2))
        return jnp.sum(masses[drawn.ids_bz] * jnp.exp(drawn.log_counts_bz), axis=-1)

    found = jax.vmap(estimate)(jax.random.split(jax.random.key(2), 500))
    assert np.all(np.std(found, axis=0) > 0)
    error = np.std(found, axis=0) / np.sqrt(500)
    assert np.all(np.abs(np.mean(found, axis=0) - masses.sum()) < 4 * error)
    with pytest.raises(ValueError, match="got objective.vocabulary 20, expected at least the 32 tokens of a row"):
        sampled(rows, 20, keys)


@pytest.mark.parametrize("name", ["mlp", "lowrank"])
def test_a_sample_of_all_tokens_changes_nothing(case, name):
    frozen, rows, keys, _ = case
    drafter_ = dataclasses.replace(DRAFTER, head=name)
    params = {"head": random_weights(HEADS[name].specs(drafter_), 5)}

    def sums(vocabulary):
        settings = dataclasses.replace(OBJECTIVE, vocabulary=vocabulary)
        return objective.drafting_sums(params, frozen, rows, keys, settings=settings, verifier=MODEL, drafter=drafter_)

    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), sums(64), sums(0))


def test_nothing_holds_the_logits_of_a_batch_or_all_blocks_against_all(case):
    """Chunked, no array of the gradient reaches [rows, vocabulary] or [anchors x block]^2; in one chunk some do."""
    frozen, _, _, _ = case
    rows = rows_of((30,) * 6)
    anchors, size = 24, DRAFTER.block_size

    def largest(chunk):
        settings = dataclasses.replace(OBJECTIVE, anchors=anchors, chunk=chunk)
        arguments = dict(settings=settings, verifier=MODEL, drafter=DRAFTER)

        def loss(backbone, frozen):
            keys = jax.random.split(jax.random.key(0), 2)
            return objective.drafting_sums({"backbone": backbone}, frozen, rows, keys, **arguments)["loss"][0]

        text = jax.jit(jax.grad(loss)).lower(frozen["backbone"], frozen).as_text()
        shapes = {tuple(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<([0-9x]+xf32)>", text)}
        return max(map(math.prod, shapes))

    logits, blocks_against_blocks = 2 * anchors * (size - 1) * 64, 2 * (anchors * size) ** 2
    assert largest(2) < min(logits, blocks_against_blocks) <= logits <= largest(anchors)


def test_a_zero_output_layer_is_exactly_the_marginal(case):
    frozen, rows, keys, _ = case
    started = toy_training.fresh_head()
    assert not np.any(started["down"]) and np.any(started["token_ug"])
    arguments = dict(settings=OBJECTIVE, verifier=MODEL)
    with_head = objective.drafting_sums({"head": started}, frozen, rows, keys, drafter=WITH_HEAD, **arguments)
    without = objective.drafting_sums({"backbone": frozen["backbone"]}, frozen, rows, keys, drafter=DRAFTER, **arguments)
    for name, sums in without.items():
        np.testing.assert_array_equal(with_head[name], sums)


@pytest.mark.parametrize("loss", ["cross-entropy", "forward-kl"])
def test_estimated_tau_and_slots_equal_their_definitions(case, loss):
    """1 + the expected run of kept slots over whole blocks; top-1 and overlap per slot over all that weigh."""
    frozen, rows, keys, chosen = case
    settings, own = dataclasses.replace(OBJECTIVE, loss=loss, chunk=2), frozen["verifier"]
    params = {"backbone": frozen["backbone"]}
    sums = objective.drafting_sums(params, frozen, rows, keys, settings=settings, verifier=MODEL, drafter=DRAFTER)
    teacher = teach(own, MODEL, DRAFTER.target_layer_ids, rows)
    context = blocks.context(frozen["backbone"], DRAFTER, rows, teacher.features_bsj)
    hidden = blocks.hidden_states(frozen["backbone"], DRAFTER, own["embed"], rows, context, chosen.anchors_bn)
    norm = hidden / np.sqrt(np.mean(np.square(hidden), -1, keepdims=True) + DRAFTER.layers.rms_norm_eps)
    q = np.asarray(jax.nn.softmax(norm * frozen["backbone"]["norm"] @ own["embed"].T))
    p = np.asarray(jax.nn.softmax(teacher.hidden_bsd @ own["embed"].T))
    top1, overlap, weight, runs, whole = np.zeros(4), np.zeros(4), np.zeros(4), 0.0, 0
    for r, n in np.ndindex(*chosen.anchors_bn.shape):
        real = np.asarray(chosen.weights_bnq[r, n, 1:]) > 0
        kept = []
        for i in np.flatnonzero(real):
            target = int(chosen.targets_bnq[r, n, i + 1])
            top1[i] += q[r, n, i + 1].argmax() == rows.tokens_rt[r, target]
            share = np.minimum(q[r, n, i + 1], p[r, target - 1]).sum()
            overlap[i] += share
            weight[i] += 1
            kept.append(share if loss == "forward-kl" else q[r, n, i + 1].argmax() == rows.tokens_rt[r, target])
        if real.all():
            whole += 1
            runs += 1 + sum(np.prod(kept[: i + 1]) for i in range(len(kept)))
    assert 0 < whole < weight[0], "blocks cut short count towards slots, not towards tau"
    np.testing.assert_allclose(sums["tau_estimate"], (runs, whole), rtol=1e-5)
    np.testing.assert_allclose(sums["top1"], (top1, weight))
    if loss == "forward-kl":
        np.testing.assert_allclose(sums["overlap"], (overlap, weight), rtol=1e-5)


def test_blocks_end_with_the_row_and_the_document():
    """Full rows: a block that starts q slots before an end has q slots that weigh, whatever follows."""
    rows = rows_of((20, 12, 32), prompt=1)
    assert (rows.segments_rt > 0).all()
    chosen = blocks.sample_blocks(rows, 28, 5, 0.0, jax.random.split(jax.random.key(0), 2))
    found = set()
    for r, n in np.ndindex(2, 28):
        anchor = int(chosen.anchors_bn[r, n])
        end = np.flatnonzero(rows.segments_rt[r] == rows.segments_rt[r, anchor])[-1]
        expected = [0.0] + [float(anchor + i <= end) for i in range(1, 5)]
        assert chosen.weights_bnq[r, n].tolist() == expected
        found.add((int(end), sum(expected)))
    assert {(31, 1.0), (31, 4.0), (19, 1.0)} <= found


def test_losses_of_bfloat16_are_of_float32():
    logits = (20 * jax.random.normal(jax.random.key(0), (8, 64))).astype(jnp.bfloat16)
    wide = logits.astype(jnp.float32)
    targets = losses.Targets(jnp.arange(8), jax.nn.log_softmax(wide[::-1]))
    for name, loss in losses.LOSSES.items():
        assert loss(logits, targets).dtype == jnp.float32, name
        np.testing.assert_allclose(loss(logits, targets), loss(wide, targets), rtol=1e-6, err_msg=name)


def test_losses_vanish_where_the_draft_is_the_verifier():
    logits = jax.random.normal(jax.random.key(0), (3, 64))
    targets = losses.Targets(jnp.zeros(3, int), losses.log_softmax(logits))
    np.testing.assert_allclose(losses.forward_kl(logits + 2.0, targets), 0, atol=1e-6)
    np.testing.assert_allclose(losses.total_variation(logits - 1.0, targets), 0, atol=1e-6)
    gradient = jax.grad(lambda x: losses.forward_kl(x, targets).sum())(jnp.zeros((3, 64)))
    np.testing.assert_allclose(gradient, 1 / 64 - jnp.exp(targets.log_probs), atol=1e-6)


# Meshes and parts: the same training, 50 steps of it.


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return toy_training.write(tmp_path_factory.mktemp("toy"))


def run_stage(toy, *overrides):
    """(log lines, final weights) of a run in this process."""
    settings = toy_training.settings(toy, *overrides)
    head.main(settings)
    log = [json.loads(line) for line in open(f"{settings.run}/log.jsonl")]
    return log, settings


def final_weights(settings):
    return models.load_drafter(f"{settings.run}/model")[1]


def assert_same_losses(one, other, tolerance):
    names = ("loss", "overlap", "top1", "grad_norm", "held_out/loss")
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for a, b in zip(one, other, strict=True):
        for name in names:
            if name in a:
                np.testing.assert_allclose(np.float64(a[name]), np.float64(b[name]), atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def one_device(toy, tmp_path_factory):
    return run_stage(toy, f"run={tmp_path_factory.mktemp('one')}/run", "loop.steps=50", "train_backbone=true")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh.data=2", "mesh.fsdp=2", "mesh.model=2"),
        ("mesh.fsdp=8", "mesh.data=1", "loop.batch=8"),
        ("loop.accumulate=2", "mesh.data=2", "mesh.model=4", "objective.chunk=4"),
    ],
)
def test_meshes_parts_and_chunks_follow_one_device(toy, one_device, tmp_path, overrides):
    log, _ = run_stage(toy, f"run={tmp_path}/run", "loop.steps=50", "train_backbone=true", *overrides)
    assert log[-1]["loss"] < log[0]["loss"] * 0.9
    assert_same_losses(one_device, log, 1e-4)


@pytest.mark.slow
def test_samples_of_the_vocabulary_are_the_same_on_every_mesh(toy, tmp_path):
    words = ["loop.steps=6", "train_backbone=true", "objective.vocabulary=40"]
    one, _ = run_stage(toy, f"run={tmp_path}/one", *words)
    for name, mesh in {"parts": ["mesh.data=2", "mesh.fsdp=2", "mesh.model=2"], "data": ["mesh.data=8"]}.items():
        other, _ = run_stage(toy, f"run={tmp_path}/{name}", *words, *mesh)
        assert_same_losses(one, other, 1e-4)


def test_state_lies_over_fsdp_and_model(toy):
    settings = toy_training.settings(toy, "train_backbone=true", "mesh.data=2", "mesh.fsdp=2", "mesh.model=2")
    mesh = hosts.make_mesh(settings.mesh)
    stage = drafting.make_stage(settings, MODEL, WITH_HEAD)
    transform = state.make_optimizer(settings.optimizer, 10, stage.specs)
    abstract = jax.eval_shape(
        lambda: state.initial_state(
            stage, transform, jax.tree.map(jnp.zeros_like, random_weights(stage.specs, 0)), rows_of((20, 20))
        )
    )
    places = state.state_shardings(abstract, stage.specs, mesh)
    for tree in (places.params, places.optimizer[1][0].mu, places.optimizer[1][0].nu):
        assert tree["backbone"]["groups"][0][0]["gate"].spec == jax.P("fsdp", "model")
        assert tree["head"]["down"].spec == jax.P("model", "fsdp")
    assert places.params["backbone"]["norm"].spec == jax.P(None)
    assert meshes.partition(("batch", None), (8, 32), mesh) == jax.P(("data", "fsdp"), None)


@pytest.mark.slow
def test_muon_and_linear_heads_train_too(toy, tmp_path):
    log, settings = run_stage(toy, f"run={tmp_path}/run", "head=linear", "optimizer.name=muon")
    assert log[-1]["loss"] < log[0]["loss"]
    weights = final_weights(settings)["head"]
    assert set(weights) == {"norm", "token", "hidden"} and np.any(weights["token"])


def test_copied_layers_read_the_context_as_the_verifier_does(case):
    """A single layer, the one after the tap, has the verifier's own keys and values."""
    frozen, rows, *_ = case
    stage = drafter.DrafterStage(
        run="unused",
        sources=("unused",),
        objective=OBJECTIVE,
        num_layers=1,
        mask_token_id=3,
        target_layer_ids=(1, 0),
        initial_layers=(2,),
        optimizer=config.OptimizerConfig(learning_rate=1e-2),
        loop=config.LoopConfig(steps=1, batch=1),
    )
    own = stage.drafter_config(MODEL)
    made = stage.fresh(own, frozen["verifier"])["backbone"]
    mask_btt = verifier.causal_mask(2, 32)
    out = verifier.forward(frozen["verifier"], MODEL, rows.tokens_rt, rows.positions_rt, mask_btt, taps=own.taps)
    context = dflash.context_rows(made, own, out.features_btj, rows.positions_rt)
    for got, expected in zip(context[0][0], out.rows[0][2], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, made["groups"][0][0], frozen["verifier"]["groups"][0][2])

    two = dataclasses.replace(stage, num_layers=2, initial_layers=(2, 0))
    made = two.fresh(two.drafter_config(MODEL), frozen["verifier"])["backbone"]
    jax.tree.map(np.testing.assert_array_equal, made["groups"][0][1], frozen["verifier"]["groups"][0][0])


def test_a_head_goes_on_where_it_was(toy, tmp_path):
    own = {"backbone": random_weights(dflash.specs(DRAFTER), 1), "head": random_weights(HEADS["mlp"].specs(WITH_HEAD), 2)}
    models.save_drafter(tmp_path / "drafter", WITH_HEAD, own)
    settings = toy_training.settings(toy, f"drafter={tmp_path}/drafter", "keep_head=true")
    made = settings.drafter_config(MODEL)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0.01), settings.fresh(made, None) | settings.kept(made), own)
    settings = toy_training.settings(toy, "keep_head=true")
    with pytest.raises(ValueError, match="got a drafter with head 'marginal' to be kept, expected 'mlp'"):
        settings.drafter_config(MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["marginal", "mlp"])
def test_backbone_from_scratch_learns(toy, tmp_path, monkeypatch, kind):
    """Alone, and together with a head over a sample of the vocabulary."""
    reports = []
    monkeypatch.setattr(watch.Watch, "evaluating", lambda self, *words: reports.append(words))
    text = toy.read_text().replace('drafter = "', 'unused = "')
    lines = [line for line in text.splitlines() if not line.startswith("unused")]
    tables = [line for line in lines if line.endswith("}") or line.endswith("]")]
    plain = [line for line in lines if line not in tables]
    plain += ["num_layers = 1", "block_size = 4", "mask_token_id = 3", f'head = "{kind}"']
    (tmp_path / "drafter.toml").write_text("\n".join(plain + tables))
    words = [f"run={tmp_path}/run", "evaluate.prompts=2", "evaluate.nodes=[4]", "evaluate.new_tokens=8"]
    words += ["evaluate.candidates=2", "loop.best=held_out/tau_4", "loop.best_mode=max"]
    if kind == "mlp":
        with pytest.raises(ValueError, match="head 'mlp' and objective.base_weight 0"):
            stages.read_stage(tmp_path / "drafter.toml", words)
        words += ["objective.base_weight=0.5", "objective.vocabulary=40"]
    else:
        words += ["objective.loss=cross-entropy"]
    settings = stages.read_stage(tmp_path / "drafter.toml", words)
    drafter.main(settings)
    log = [json.loads(line) for line in open(f"{tmp_path}/run/log.jsonl")]
    assert log[-1]["loss"] < log[0]["loss"] and 1 <= log[-1]["held_out/tau_4"] <= 4
    made, weights = models.load_drafter(f"{tmp_path}/run/model")
    assert made.head == kind
    if kind == "mlp":
        assert log[-1]["held_out/tau_marginal_4"] >= 1 and np.any(weights["head"]["down"])
        stage = drafting.make_stage(settings, MODEL, made)
        exact = dataclasses.replace(settings, objective=dataclasses.replace(settings.objective, vocabulary=0))
        whole = drafting.make_stage(exact, MODEL, made)
        parts = weights, {"verifier": random_weights(verifier.specs(MODEL), 0)}, rows_of((20, 20))
        keys = jax.random.split(jax.random.key(0), 2)
        held_out, all_tokens, some = (of(*parts, keys) for of in (stage.held_out_sums, whole.sums, stage.sums))
        jax.tree.map(np.testing.assert_array_equal, held_out, all_tokens)
        assert not np.array_equal(some["loss"], all_tokens["loss"])
    else:
        assert "overlap" not in log[-1]
        assert reports[-3:] == [(done, 2, "prompts with trees of 4 nodes") for done in range(3)]


def test_flops_count_every_pass_once():
    """A shape whose only large factor is one term at a time, against the definition."""
    count = dict(batch=2, row_tokens=32, trains_backbone=True)
    base = objective.drafting_flops(OBJECTIVE, MODEL, DRAFTER, **count)
    slots = 2 * OBJECTIVE.anchors * 4
    more_vocab = objective.drafting_flops(
        OBJECTIVE, MODEL, dataclasses.replace(DRAFTER, layers=dataclasses.replace(DRAFTER.layers, vocab_size=65)), **count
    )
    assert more_vocab - base == 3 * 2 * slots * 16  # forward and input gradient of the drafter, forward of the verifier
    frozen = objective.drafting_flops(OBJECTIVE, MODEL, DRAFTER, **(count | {"trains_backbone": False}))
    deeper = dataclasses.replace(MODEL, num_layers=4)
    layer = 2 * 16 * (2 * 32 + 2 * 16 + 3 * 32) + 2 * 32 * 32
    assert objective.drafting_flops(OBJECTIVE, deeper, DRAFTER, **count) - base == 64 * layer
    assert 1 < base / frozen < 3


def test_rounds_are_seen_where_their_16_gram_was_trained_on():
    known = evaluate.grams([(list(range(100)), list(range(100, 110)))])
    assert tuple(range(94, 110)) in known and tuple(range(85, 101)) in known and tuple(range(84, 100)) not in known
    new = list(range(200, 230))
    answers = [list(range(94, 110)) + new, new]  # the round anchored at token 7 of the first continues a known text
    records = [{"system": "treeflash-16", "ids": answers, "accept_lengths": [[7, 3, 4], [7, 8]]}]
    assert evaluate.by_seen(records, known) == {
        "treeflash-16": {"seen": {"tau": 3.0, "rounds": 1}, "unseen": {"tau": 6.0, "rounds": 2}}
    }
