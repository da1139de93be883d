"""Heads of block drafters: trees are built from what training compares with the verifier, over a shortlist if asked."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import draw
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices
from scipy.special import log_softmax

import treeflash_jax as tf
from treeflash_jax.core import parameters
from treeflash_jax.core.devices import Device
from treeflash_jax.drafters import BlockDrafter
from treeflash_jax.drafters.block.heads import HEADS, Block, Unembed, block_head
from treeflash_jax.drafters.block.heads.candidate_selector import CandidateSelectorSizes
from treeflash_jax.drafters.block.heads.gru import GruSizes
from treeflash_jax.drafters.block.heads.path_head import PathHead
from treeflash_jax.engine.settings.plan import resolve

BATCH, V, D, DEPTHS = 3, 60, RANDOM_MODEL.hidden_size, RANDOM_DRAFTER.num_depths  # no other size is 60
DRAFTER = replace(RANDOM_DRAFTER, layers=replace(RANDOM_DRAFTER.layers, vocab_size=V))
TEMPERATURES = np.float32([1.0, 0.7, 1.6])
PATH_HEADS = [name for name, head in HEADS.items() if isinstance(head, PathHead)]
TABLES = [name for name, head in HEADS.items() if head.is_trainable and name not in PATH_HEADS]


@pytest.fixture(scope="module")
def block():
    """Random tables, hidden states of a block, and anchors."""
    table_vd, other_vd = (0.3 * draw(V, D, seed=seed) for seed in (0, 1))
    return Unembed(table_vd, other_vd, np.ones(D, np.float32), 1e-6), draw(BATCH, DEPTHS, D), np.int32([5, 40, 11])


def sized(candidates: int, children: int, shortlist: int = 0, **others) -> BlockDrafter:
    return replace(DRAFTER, candidates=candidates, children=children, shortlist=shortlist, **others)


def make_weights(name: str):
    """Returns weights without zeros, so that the token before matters."""
    specs = HEADS[name].specs(DRAFTER)
    return {key: 0.3 * draw(*spec.shape, seed=i) for i, (key, spec) in enumerate(specs.items())}


def logits(name: str, *arguments) -> np.ndarray:
    return np.asarray(jax.jit(HEADS[name].logits, static_argnums=4)(*arguments))


def expand(name: str, block, drafter: BlockDrafter, ids_z=None, params=None):
    """Returns the compiled function that gives the table of a block, over all tokens or these, and its arguments."""
    unembed, hidden_bid, anchor_b = block
    if ids_z is not None:
        unembed = unembed.replace(unembed_vd=unembed.unembed_vd[ids_z], ids_v=jnp.asarray(ids_z))
    params = make_weights(name) if params is None else params
    arguments = params, unembed, Block(hidden_bid, anchor_b, TEMPERATURES), drafter
    return jax.jit(HEADS[name].expand, static_argnums=3), arguments


def run(name: str, block, drafter: BlockDrafter, ids_z=None):
    function, arguments = expand(name, block, drafter, ids_z)
    return jax.tree.map(np.asarray, function(*arguments))


@pytest.mark.parametrize(("name", "is_listed"), [*((name, False) for name in TABLES), ("mlp", True)])
@pytest.mark.parametrize("ids_z", [None, np.arange(1, V, 2)], ids=["all", "frequent"])
def test_contexts_of_the_table_are_the_logits_that_training_sees(block, name, is_listed, ids_z):
    """With all tokens, or all of a draft vocabulary, as candidates and children, and as a shortlist."""
    unembed, hidden_bid, anchor_b = block
    params, size = make_weights(name), V if ids_z is None else ids_z.size
    sizes = {"head_sizes": CandidateSelectorSizes(V)} if name == "selector" else {}
    table = run(name, block, sized(size, size, size if is_listed else 0, **sizes), ids_z)
    _, depths, contexts, _ = table.tokens_bimc.shape
    before_bim = np.zeros((BATCH, depths, contexts), np.int32)
    before_bim[:, 0] = anchor_b[:, None]
    for depth in range(1, depths):  # the token that leads to each context
        for b in range(BATCH):
            tokens, context = table.tokens_bimc[b, depth - 1], table.next_context_bimc[b, depth - 1]
            before_bim[b, depth, context[context >= 0]] = tokens[context >= 0]
    for depth in range(depths):
        hidden_brd = np.repeat(hidden_bid[:, depth : depth + 1], contexts, axis=1)
        logits_brv = logits(name, params, unembed, before_bim[:, depth], hidden_brd, replace(DRAFTER, **sizes))
        if ids_z is not None:
            logits_brv = np.where(np.isin(np.arange(V), ids_z), logits_brv, -np.inf)
        expected = log_softmax(logits_brv / TEMPERATURES[:, None, None], axis=-1)
        got = np.full((BATCH, contexts, V), -np.inf)
        np.put_along_axis(got, table.tokens_bimc[:, depth], table.log_probs_bimc[:, depth], axis=2)
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_a_selector_compares_its_candidates_alone(block):
    """Training sees nothing that changes the scores of all candidates alike, so it does not change a tree either."""
    function, (params, *arguments) = expand("selector", block, sized(6, 6))
    shifted = params | {"following": params["following"] + 1}
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=1e-5), function(params, *arguments), function(shifted, *arguments)
    )


@pytest.mark.parametrize(("name", "prefix"), [("lowrank-rnn", 0), ("gru", 0), ("gru", 2)])
def test_lanes_along_a_path_are_the_logits_that_training_sees(block, name, prefix):
    """Normalised over the candidates after the prefix; the tokens are the marginals' candidates."""
    unembed, hidden_bid, anchor_b = block
    sizes, listed = {"head_sizes": GruSizes(D, prefix)} if name == "gru" else {}, 9
    drafter, head, params = sized(listed, listed, **sizes), HEADS[name], make_weights(name)

    @jax.jit
    def descend(params, unembed):
        expander = head.expand(params, unembed, Block(hidden_bid, anchor_b, jnp.asarray(TEMPERATURES)), drafter)
        state_bw, offers = expander.start(2), []
        for depth in range(DEPTHS):
            offers += [expander.children(jnp.int32(depth), state_bw)]
            state_bw = expander.follow_token(jnp.int32(depth), state_bw, offers[-1][0][:, [0, 1], [1, 4]])
        return offers

    offers = descend(params, unembed)
    path_biw = np.stack([tokens_bwc[:, [0, 1], [1, 4]] for tokens_bwc, _ in offers], axis=1)
    anchor_b1w = np.broadcast_to(np.asarray(anchor_b)[:, None, None], (BATCH, 1, 2))
    before_bwi = np.moveaxis(np.concatenate([anchor_b1w, path_biw[:, :-1]], axis=1), 1, 2)
    both_bmd, before_bm = np.tile(hidden_bid, (1, 2, 1)), before_bwi.reshape(BATCH, -1)
    logits_bwiv = np.reshape(logits(name, params, unembed, before_bm, both_bmd, drafter), (BATCH, 2, DEPTHS, V))
    marginal_biv = logits("marginal", {}, unembed, anchor_b, hidden_bid, drafter)
    for depth, (tokens_bwc, log_probs_bwc) in enumerate(offers):
        scores_bwv = logits_bwiv[:, :, depth] / TEMPERATURES[:, None, None]
        if depth >= prefix:
            is_off_bv = np.argsort(np.argsort(-marginal_biv[:, depth])) >= listed
            scores_bwv = np.where(is_off_bv[:, None], -np.inf, scores_bwv)
        expected = np.take_along_axis(log_softmax(scores_bwv, axis=-1), np.asarray(tokens_bwc), -1)
        np.testing.assert_allclose(log_probs_bwc, expected, atol=2e-5)
        assert (np.diff(log_probs_bwc) <= 0).all()


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head.is_trainable])
def test_a_fresh_head_drafts_from_the_marginals(block, name):
    fresh, depths = parameters.initialize(HEADS[name].specs(DRAFTER), jax.random.key(0)), DEPTHS
    if name in PATH_HEADS:
        depths = 1
    function, arguments = expand(name, block, sized(V, 5), params=fresh)

    @partial(jax.jit, static_argnums=3)
    def children(*arguments):
        expander = function(*arguments)
        return [expander.children(jnp.int32(depth), expander.start(1)) for depth in range(depths)]

    plain = run("marginal", block, sized(V, 5))
    for depth, (tokens_bwc, log_probs_bwc) in enumerate(children(*arguments)):
        np.testing.assert_array_equal(tokens_bwc[:, 0], plain.tokens_bimc[:, depth, 0])
        np.testing.assert_allclose(log_probs_bwc[:, 0], plain.log_probs_bimc[:, depth, 0], atol=2e-5)


@pytest.mark.parametrize("name", HEADS)
def test_log_probabilities_of_narrow_weights_are_in_float32(block, name):
    unembed, hidden_bid, anchor_b = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, block)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_weights(name))
    narrow = Block(hidden_bid, anchor_b, np.ones(BATCH, np.float32), hidden_bid[:, 0])

    def children(params, unembed, narrow):
        expander = HEADS[name].expand(params, unembed, narrow, sized(6, 5))
        return expander.children(jnp.int32(0), expander.start(1))

    tokens, log_probs = jax.eval_shape(children, params, unembed, narrow)
    assert (tokens.dtype, log_probs.dtype) == (jnp.int32, jnp.float32)


def test_a_short_list_keeps_the_mass_of_what_it_leaves_out(block):
    """Low rank: contexts are distributions over the vocabulary in which tokens off the list have their marginal logits."""
    unembed, hidden_bid, anchor_b = block
    function, (params, *_) = expand("lowrank", block, sized(4, 3))
    table = function(params, unembed, Block(hidden_bid, anchor_b, np.ones(BATCH, np.float32)), sized(4, 3))
    before = unembed, anchor_b[:, None], hidden_bid[:, :1], DRAFTER
    both = logits("marginal", {}, *before), logits("lowrank", params, *before)
    marginal, moved = (np.array(x[:, 0], np.float64) for x in both)
    for b in range(BATCH):
        listed = np.argsort(-marginal[b], kind="stable")[:4]
        marginal[b, listed] = moved[b, listed]
        distribution = log_softmax(marginal[b])
        best = sorted(listed, key=lambda token: -distribution[token])[:3]
        assert np.asarray(table.tokens_bimc[b, 0, 0]).tolist() == best
        np.testing.assert_allclose(table.log_probs_bimc[b, 0, 0], distribution[best], atol=2e-5)


# The second stage over a shortlist.

M, K = 5, 6


def short_list(size: int) -> BlockDrafter:
    return sized(M, K, size)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_children_are_distinct_tokens_of_the_list_with_a_distribution_of_their_own(block, size):
    """The list, and the mass off it, by hand: scores of the head's full contexts, mass off the list from the marginals."""
    table, (unembed, hidden_bid, anchor_b) = run("mlp", block, short_list(size)), block
    marginal_biv = logits("marginal", {}, unembed, anchor_b, hidden_bid, DRAFTER).astype(np.float64)
    likely_biv = np.argsort(-marginal_biv, axis=-1, kind="stable")
    anchor_b1m = np.broadcast_to(np.asarray(anchor_b)[:, None, None], (BATCH, 1, M))
    before_bx = np.concatenate([anchor_b1m, likely_biv[:, :-1, :M]], axis=1).reshape(BATCH, -1)
    hidden_bxd = np.repeat(hidden_bid, M, axis=1)
    corrected_bxv = logits("mlp", make_weights("mlp"), unembed, before_bx, hidden_bxd, DRAFTER)
    corrected_bimv = np.asarray(corrected_bxv, np.float64).reshape(BATCH, DEPTHS, M, V)
    assert table.tokens_bimc.shape[-1] == min(K, size * DEPTHS)
    for b, temperature in enumerate(TEMPERATURES):
        listed = set(likely_biv[b, :, :size].flatten().tolist())
        for i in range(DEPTHS):
            marginal_v = np.exp(marginal_biv[b, i] / temperature)
            others = np.sum(np.delete(marginal_v, [*listed]))
            for m in range(M if i else 1):
                mass_v = np.exp(corrected_bimv[b, i, m] / temperature)
                total = others + np.sum(mass_v[[*listed]])
                best = sorted(listed, key=lambda token: -mass_v[token])[:K]  # noqa: B023
                got = np.isfinite(table.log_probs_bimc[b, i, m])
                assert table.tokens_bimc[b, i, m][got].tolist() == best
                np.testing.assert_allclose(table.log_probs_bimc[b, i, m][got], np.log(mass_v[best] / total), atol=1e-4)


@pytest.mark.parametrize(
    ("device", "vocab_size", "shortlist"), [("cpu", 2**14, 32), ("cpu", 2**14 - 1, 0), ("gpu", 2**14, 0), ("tpu", 2**14, 0)]
)
def test_a_cpu_shortlists_a_large_vocabulary_by_default(device, vocab_size, shortlist):
    models = RANDOM_MODEL, RANDOM_DRAFTER.layers
    verifier, layers = (replace(model, vocab_size=vocab_size) for model in models)

    def planned(**settings):
        drafter = replace(RANDOM_DRAFTER, layers=layers)
        config = tf.GenerateConfig(builder="best-first", **settings)
        return resolve(config, verifier, drafter, dtype=jnp.float32, device=Device(device)).configured_drafter.shortlist

    assert planned() == shortlist
    assert [planned(shortlist=asked) for asked in (0, 7)] == [0, 7]


@needs_8_devices
def test_sharded_equals_unsharded(block):
    whole = run("mlp", block, short_list(3))
    with jax.set_mesh(tf.make_mesh(2, 4)):
        split = run("mlp", block, short_list(3))
    np.testing.assert_array_equal(split.tokens_bimc, whole.tokens_bimc)
    np.testing.assert_allclose(split.log_probs_bimc, whole.log_probs_bimc, atol=1e-5)


def test_heads_read_the_attributes_of_a_drafter_that_are_listed():
    sources = [path.read_text(encoding="utf-8") for path in Path(block_head.__file__).parent.glob("*.py")]
    assert {*re.findall(r"\bdrafter\.(\w+)", "".join(sources))} == {*block_head.DrafterSizes.__annotations__}
