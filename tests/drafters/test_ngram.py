"""n-gram drafting: its trees against a plain search of the text, and rounds without a draft. See test_every_drafter.py."""

import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import draw, make_pair, prefilled
from conftest import RANDOM_MODEL
from draft_trees import grow, paths
from refusals import refused

import treeflash_jax as tf
from treeflash_jax import trees
from treeflash_jax.decoding import loops
from treeflash_jax.drafters import Inputs, NgramDrafter
from treeflash_jax.drafters.ngram_drafter import LONGER, OLDER, UNSEEN, Continuations
from treeflash_jax.drafters.ngram_join import HALF, JoinedExpander, join_ngrams
from treeflash_jax.engine.answers.results import LOW_TAU_QUESTION
from treeflash_jax.formats import model_files

MATCHES = 6
CONFIG = NgramDrafter(longest=4, shortest=2, num_depths=5, matches=MATCHES)
ONE_LAYER = replace(RANDOM_MODEL, num_layers=1)
JOINED = NgramDrafter(shortest=1, matches=MATCHES)


def inputs(texts: list[list[int]], depths: int, temperature: float = 1.0) -> Inputs:
    tokens_bs = np.zeros((len(texts), 48), np.int32)
    for b, text in enumerate(texts):
        tokens_bs[b, : len(text)] = text
    length_b, temperature_b = np.int32([len(text) for text in texts]), np.full(len(texts), temperature, np.float32)
    return Inputs({}, None, None, None, temperature_b, depths, tokens_bs, length_b)


def continuations(text: list[int], config: NgramDrafter = CONFIG) -> list[tuple[float, list[int]]]:
    """Weight and tokens of every match that is followed, found by a search of the text."""
    got = []
    for at in range(1, len(text)):
        length = 0
        while length < min(config.longest, at) and text[at - 1 - length] == text[-1 - length]:
            length += 1
        if length >= config.shortest:
            after = list(text)
            while len(after) < at + config.num_depths:  # at the end of the text it repeats itself
                after.append(after[len(after) - len(text) + at])
            got.append((length, at, after[at : at + config.num_depths]))
    best = sorted(got, key=lambda result: result[:2], reverse=True)[:MATCHES]
    return [(LONGER ** (result[0] - best[0][0]) * OLDER**rank, result[2]) for rank, result in enumerate(best)]


def distribution(matches: list[tuple[float, list[int]]], path: tuple[int, ...], temperature: float) -> dict[int, float]:
    """Probabilities of the tokens that follow a path."""
    weights: dict[int, float] = {}
    for weight, tokens in matches:
        if tuple(tokens[: len(path)]) == path:
            weights[tokens[len(path)]] = weights.get(tokens[len(path)], 0) + weight ** (1 / temperature)
    total = sum(weights.values()) + UNSEEN ** (1 / temperature)
    return {token: weight / total for token, weight in weights.items()}


@partial(jax.jit, static_argnames="num_nodes")
def build(tokens_bs, length_b, temperature_b, anchor_b, num_nodes: int):
    given = Inputs({}, None, None, None, temperature_b, CONFIG.num_depths, tokens_bs, length_b)
    return grow("best-first", CONFIG.draft(given), anchor_b, num_nodes)


def grown(texts: list[list[int]], temperature: float, num_nodes: int):
    """Returns the trees of some texts, in NumPy."""
    given = inputs(texts, CONFIG.num_depths, temperature)
    anchor_b = np.int32([text[-1] for text in texts])
    return jax.tree.map(np.asarray, build(given.tokens_bs, given.length_b, given.temperature_b, anchor_b, num_nodes))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_trees_hold_what_followed_earlier(temperature):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, size, rng.integers(1, 44)).tolist() for size in (2, 2, 3, 3, 4, 6) * 6]
    built, sizes = grown(texts, temperature, 9), set()
    for b, text in enumerate(texts):
        matches, drafted = continuations(text), paths(built, b)
        everything = {tuple(result[:depth]) for _, result in matches for depth in range(1, CONFIG.num_depths + 1)}
        for path, log_prob in zip(drafted, built.log_prob_bn[b], strict=False):
            steps = [distribution(matches, path[:depth], temperature)[token] for depth, token in enumerate(path)]
            np.testing.assert_allclose(log_prob, np.sum(np.log(steps)), atol=1e-5)
        assert len({*drafted}) == len(drafted) == 1 + min(8, len(everything)), "siblings are distinct"
        sizes.add(len(drafted))
    assert {1, 9} < sizes, "texts without a match and with many"


def test_a_level_computes_its_children_once(monkeypatch):
    calls, children, ngrams = [], Continuations.children, CONFIG.draft(inputs([[1, 2, 3, 1, 2]], CONFIG.num_depths))
    monkeypatch.setattr(Continuations, "children", lambda *args: calls.append(args) or children(*args))
    jax.make_jaxpr(lambda ngrams: grow("best-first", ngrams, np.int32([2]), 9).tokens_bn)(ngrams)
    assert len(calls) == 2, "of the anchor, and of a level"


def test_low_drafter_temperatures_keep_the_likeliest_continuations():
    """Weights that all underflow would be NaN, which a search ranks first."""
    text = [1, 2, 3, 9, 8, 7, 5, 2, 3, 4, 6, 1, 2, 3]
    for temperature in (0.05, 0.01, 1e-3, 1e-5):
        tree = grown([text], temperature, 8)
        assert np.isfinite(np.where(tree.valid_bn, tree.log_prob_bn, 0)).all()
        assert tree.tokens_bn[0, :4].tolist() == [3, 9, 8, 7], temperature


def test_a_chain_that_follows_no_path_is_not_joined(tiny):
    refused(lambda: tiny.plan(tf.GenerateConfig(builder="chain", ngrams=8)), "ngrams 8", "with builder 'chain'")
    assert tiny.plan(tf.GenerateConfig(builder="walk", ngrams=8)).configured_drafter.ngrams == 8


def test_a_table_is_joined_by_what_followed_earlier():
    """Probabilities below a path, against the mixture written out; what the table cannot continue, n-grams may."""
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 1, 2, 3]  # after 1 2 3: 4; after 2 3: 5; after 3: 6
    table = trees.TransitionTable(
        tokens_bimc=jnp.array([[[[4, 7]], [[9, 8]]]]),
        log_probs_bimc=jnp.log(jnp.array([[[[0.5, 0.25]], [[0.75, 0.125]]]])),
        next_context_bimc=jnp.array([[[[0, -1]], [[-1, -1]]]]),
    )
    given = inputs([text], 2)
    join = jax.jit(lambda tokens_bs: join_ngrams(table, replace(given, tokens_bs=tokens_bs), MATCHES))
    joined = join(given.tokens_bs)

    @jax.jit
    def children(joined, depth, state):
        tokens_bwc, log_probs_bwc = joined.children(depth, state)
        return tokens_bwc, log_probs_bwc, joined.continues_below(depth, state, tokens_bwc)

    matches = continuations(text, JOINED)

    def assert_mixture(depth: int, state, path: tuple[int, ...], p: dict[int, float], length: int) -> tuple[list, list]:
        """Compares with table `p` and n-grams of this length; returns the tokens, and whether each continues."""
        arrays = children(joined, jnp.int32(depth), state)
        tokens, log_probs, is_open = (np.asarray(x)[0, 0] for x in arrays)
        assert [*log_probs] == sorted(log_probs, reverse=True), "likeliest first"
        kept = np.isfinite(log_probs)
        q, share = distribution(matches, path, 1.0), length**2 / (length**2 + HALF**2)
        assert sorted(tokens[kept]) == sorted({*p, *q}), "distinct"
        expected = [(1 - share) * p.get(token, 0) + share * q.get(token, 0) for token in tokens[kept].tolist()]
        np.testing.assert_allclose(np.exp(log_probs[kept]), expected, rtol=1e-5)
        return tokens[kept].tolist(), is_open[kept].tolist()

    tokens, is_open = assert_mixture(0, joined.start(1), (), {4: 0.5, 7: 0.25}, 3)
    assert dict(zip(tokens, is_open, strict=True)) == {4: True, 5: True, 6: True, 7: False}
    for token, p, length in ((4, {9: 0.75, 8: 0.125}, 4), (5, {}, 3)):  # only the n-grams continue below 5
        state = joined.follow_token(jnp.int32(0), joined.start(1), jnp.array([[token]]))
        assert not any(assert_mixture(1, state, (token,), p, length)[1])


def test_no_probability_is_rounded_above_1():
    """16 matches with the same token, of many weights, alone and joined with a drafter that is certain of this token."""
    weight_bm = draw(64, 16) * 2
    tokens, lengths, unseen = jnp.ones((64, 16, 1), jnp.int32), jnp.full((64, 16), 2), jnp.full(64, -1e3)
    certain = trees.TransitionTable(tokens[:, :1, None], jnp.zeros((64, 1, 1, 1)), tokens[:, :1, None] * 0)
    ngrams = Continuations(tokens, lengths, weight_bm, unseen)
    for expander in (ngrams, JoinedExpander(certain, ngrams)):
        log_prob_b = expander.children(jnp.int32(0), expander.start(1))[1][:, 0, 0]
        assert -1e-5 < log_prob_b.min() and log_prob_b.max() == 0


def test_without_a_match_the_verifier_reads_only_the_anchor():
    """A round has two passes to choose from: one over the tree, one over a single token of each sequence."""
    model = make_pair(ONE_LAYER, NgramDrafter())
    plan, state = prefilled(model, [[1, 2]], nodes=8)
    text = loops.decode.lower(model.weights, state, jnp.int32(1), plan=plan).as_text()
    found = re.findall(r"dot_general .* -> tensor<(?:(?:1x)?(\d+)x64|64x(\d+))xf32>", text)  # up, gate and vocabulary
    products = [wide or narrow for wide, narrow in found]
    assert {*products} == {"1", "8"} and products.count("1") == products.count("8")


def test_ngram_is_a_name_of_a_drafter(tmp_path):
    model = tf.load("tiny", drafter="ngram")
    assert (model.drafter, model.weights.drafter) == (NgramDrafter(), {})
    (tmp_path / "config.json").write_text(json.dumps({"ngram_config": {"longest": 3, "num_nodes": 6}}))
    assert model_files.load_drafter(tmp_path) == (replace(NgramDrafter(), longest=3, num_nodes=6), {})
    for wrong in ({"longest": 0}, {"longest": 2, "shortest": 3}):
        (tmp_path / "config.json").write_text(json.dumps({"ngram_config": wrong}))
        refused(lambda: model_files.load_drafter(tmp_path), next(iter(reversed(wrong))))


def test_rounds_without_a_draft_are_no_reason_to_warn(caplog):
    model = make_pair(ONE_LAYER, NgramDrafter())
    text = model.generate([[1, 2]], max_new_tokens=60, stop_ids=(), nodes=8, batch_size=3, temperature=2.0)[0]
    assert len(text.accept_lengths) > 50 and text.tau < 1.2
    assert LOW_TAU_QUESTION not in caplog.text
