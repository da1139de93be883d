"""The second stage over a shortlist: equal to the whole vocabulary if it lists all tokens, else still a lossless draft."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import drafted_as_plain
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices, random_pair

import treeflash_jax as tf
from treeflash_jax.core.devices import Device
from treeflash_jax.drafters.block.heads import HEADS, DraftSettings, Unembed, mlp
from treeflash_jax.engine.planning import make_plan

BATCH, VOCAB, M, K = 3, 60, 5, 6  # a vocabulary as wide as nothing else
DEPTHS = RANDOM_DRAFTER.num_depths


@pytest.fixture(scope="module")
def pair():
    return random_pair()


def expand(pair, shortlist: int, mesh=None):
    """The table of random blocks, contexts at different drafter temperatures."""
    keys = jax.random.split(jax.random.key(3), 2)
    hidden_bqd = jax.random.normal(keys[0], (BATCH, DEPTHS + 1, RANDOM_MODEL.hidden_size))
    anchor_b = jax.random.randint(keys[1], (BATCH,), 0, VOCAB)
    tables, drafter = pair.weights.verifier, pair.weights.drafter["backbone"]
    unembed = Unembed(tables["embed"][:VOCAB], tables["unembed"][:VOCAB], drafter["norm"], eps=1e-6)
    settings = DraftSettings(candidates=M, children=K, shortlist=shortlist)
    return jax.jit(HEADS["mlp"].expand, static_argnums=4), (
        *(pair.weights.drafter["head"], unembed, hidden_bqd, anchor_b, settings),
        jnp.array([0.5, 1.0, 1.6]),
    )


def run(pair, shortlist: int):
    function, args = expand(pair, shortlist)
    return jax.tree.map(np.asarray, function(*args))


def test_a_list_of_all_tokens_changes_nothing(pair):
    whole, listed = run(pair, 0), run(pair, VOCAB)
    np.testing.assert_array_equal(listed.tokens_bimc, whole.tokens_bimc)
    np.testing.assert_array_equal(listed.next_context_bimc, whole.next_context_bimc)
    np.testing.assert_allclose(listed.log_probs_bimc, whole.log_probs_bimc, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_children_are_distinct_tokens_of_the_list_with_a_distribution_of_their_own(pair, size):
    """The list, and the mass off it, by hand: scores of the head's full contexts, mass off the list from the marginals."""
    table = run(pair, size)
    whole = run_full_contexts(pair)
    assert table.tokens_bimc.shape[-1] == min(K, size * DEPTHS)
    for b, temperature in enumerate((0.5, 1.0, 1.6)):
        likely_iv = np.argsort(-whole["marginal"][b], axis=-1, kind="stable")
        listed = set(likely_iv[:, :size].flatten().tolist())
        for i in range(DEPTHS):
            marginal_v = np.exp(whole["marginal"][b, i] / temperature)
            others = sum(mass for token, mass in enumerate(marginal_v) if token not in listed)
            for m in range(M if i else 1):
                mass_v = np.exp(whole["corrected"][b, i, m] / temperature)
                total = others + sum(mass_v[token] for token in listed)
                best = sorted(listed, key=lambda token: -mass_v[token])[:K]  # noqa: B023
                got = np.isfinite(table.log_probs_bimc[b, i, m])
                assert table.tokens_bimc[b, i, m][got].tolist() == best
                np.testing.assert_allclose(
                    table.log_probs_bimc[b, i, m][got], [np.log(mass_v[token] / total) for token in best], atol=1e-4
                )


def run_full_contexts(pair):
    """Logits of all marginals [b, i, v] and of all corrected contexts [b, i, m, v], one call per context."""
    _, (params, unembed, hidden_bqd, anchor_b, *_) = expand(pair, 0)
    normed_bqd = unembed.normed(hidden_bqd)
    marginal_biv = np.asarray(normed_bqd[:, 1:] @ unembed.unembed_vd.T, np.float64)
    corrected = np.zeros((BATCH, DEPTHS, M, VOCAB))
    for i in range(DEPTHS):
        candidates_bm = np.argsort(-marginal_biv[:, i - 1], axis=-1, kind="stable")[:, :M]
        for m in range(M):
            embedding = unembed.embed_vd[jnp.asarray(candidates_bm[:, m]) if i else anchor_b][:, None]
            hidden = mlp.correct(params, embedding, lambda slots, at=i + 1: slots[:, at : at + 1], hidden_bqd, normed_bqd)
            corrected[:, i, m] = (unembed.normed(hidden) @ unembed.unembed_vd.T)[:, 0]
    return {"marginal": marginal_biv, "corrected": corrected}


def test_no_logits_of_all_contexts_are_formed(pair):
    contexts = 1 + (DEPTHS - 1) * M
    for shortlist, expected in ((0, True), (2, False)):
        function, args = expand(pair, shortlist)
        text = function.lower(*args).as_text()
        assert bool(re.search(rf"tensor<{BATCH}x{contexts}x{VOCAB}x", text)) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_stay_those_of_one_token_decoding(trained, temperature):
    settings = {"max_new_tokens": 40, "temperature": temperature, "seed": 5}
    draft = {"nodes": 8, "candidates": 4, "children": 4, "shortlist": 3}
    [drafted] = drafted_as_plain(trained, [[3, 4, 5, 17, 29]], draft, **settings)
    assert drafted.tau > 1


@pytest.mark.parametrize(
    ("device", "vocab_size", "shortlist"), [("cpu", 2**14, 32), ("cpu", 2**14 - 1, 0), ("gpu", 2**14, 0), ("tpu", 2**14, 0)]
)
def test_a_cpu_shortlists_a_large_vocabulary_by_default(device, vocab_size, shortlist):
    models = RANDOM_MODEL, RANDOM_DRAFTER.layers
    verifier, layers = (replace(model, vocab_size=vocab_size) for model in models)

    def planned(**settings):
        drafter = replace(RANDOM_DRAFTER, layers=layers)
        return make_plan(tf.GenerateConfig(**settings), verifier, drafter, jnp.float32, Device(device)).draft.shortlist

    assert planned() == shortlist
    assert [planned(shortlist=asked) for asked in (0, 7)] == [0, 7]


@needs_8_devices
def test_sharded_equals_unsharded(pair):
    mesh = tf.make_mesh(2, 4)
    whole = run(pair, 3)
    with jax.set_mesh(mesh):
        function, args = expand(pair, 3)
        split = jax.tree.map(np.asarray, function(*args))
    np.testing.assert_array_equal(split.tokens_bimc, whole.tokens_bimc)
    np.testing.assert_allclose(split.log_probs_bimc, whole.log_probs_bimc, atol=1e-5)


def test_sizes_are_checked(trained):
    for size in (-1, 10**6):
        with pytest.raises(ValueError, match=f"got shortlist {size}, expected"):
            trained.generate([[3]], shortlist=size)
