"""Draft trees against a heap: 3,000 random tables in one compiled program, every corner case among them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import slow_unless
from draft_trees import best_first as heap_search
from draft_trees import eagle_2, grow, paths

from treeflash_jax import trees
from treeflash_jax.decoding.automaton import Automaton, ConstrainedExpander
from treeflash_jax.drafters.ngram_drafter import Continuations

TABLES, DEPTHS, CONTEXTS, CHILDREN, VOCAB = 512, 4, 5, 4, 23
KINDS = ("plain", "ties", "certain", "leaves", "missing", "exhausted")


build = jax.jit(grow, static_argnums=(0, 3), static_argnames="lanes")
best_first = partial(build, "best-first")


def random_tables(kind: str, seed: int = 0, contexts: int = CONTEXTS, children: int = CHILDREN) -> trees.TransitionTable:
    """B tables, each context with distinct tokens and log-probabilities in decreasing order."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    shape = (TABLES, DEPTHS, contexts, children)
    log_probs = -np.sort(rng.exponential(1.0, shape)).astype(np.float32)
    if kind in ("ties", "leaves"):  # few distinct values: most scores occur several times
        log_probs = np.round(log_probs * 2) / 2 - np.float32(0.5)
    if kind == "certain":  # a child of probability 1 ties its parent
        log_probs[..., 1:] = np.minimum(log_probs[..., 1:], -0.25)
        log_probs[..., 0] = np.where(rng.random(shape[:3]) < 0.6, 0.0, log_probs[..., 0])
        log_probs = -np.sort(-log_probs.round(1))
    if kind in ("missing", "exhausted"):  # contexts end early, some before they begin
        present = rng.integers(0, children + 1 if kind == "missing" else 3, shape[:3])
        log_probs = np.where(np.arange(children) < present[..., None], log_probs, -np.inf)
    tokens = rng.permuted(np.broadcast_to(np.arange(1, VOCAB), (*shape[:3], VOCAB - 1)), axis=-1)[..., :children]
    ends = {"leaves": 0.7, "exhausted": 0.8}.get(kind, 0.1)
    next_row = np.where(rng.random(shape) < ends, -1, rng.integers(0, contexts, shape))
    next_row[:, -1] = -1
    return trees.TransitionTable(*(jnp.asarray(x) for x in (tokens.astype(np.int32), log_probs, next_row.astype(np.int32))))


def anchors(seed: int = 9) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(1, VOCAB, TABLES), jnp.int32)


def children(table, path: tuple[int, ...]) -> list[tuple[int, np.float32]]:
    """Tokens and log-probabilities after a path of one table, likeliest first; none if the branch has ended."""
    tokens_imc, log_probs_imc, next_context_imc = table
    context = 0
    for depth, token in enumerate(path):
        context = next_context_imc[depth, context, np.argmax(tokens_imc[depth, context] == token)]
        if context < 0:
            return []
    at = len(path), context
    return [(int(token), log_p) for token, log_p in zip(tokens_imc[at], log_probs_imc[at], strict=True) if log_p > -np.inf]


def assert_documented(built: trees.DraftTree, anchor_b: jax.Array) -> None:
    """Root, padding and order of a tree are those in the docstring of DraftTree."""
    tokens, parent, depth, log_prob, valid = map(np.asarray, jax.tree.leaves(built))
    assert [x.dtype for x in (tokens, parent, depth)] == 3 * [np.int32] and log_prob.dtype == np.float32
    np.testing.assert_array_equal(tokens[:, 0], anchor_b)
    assert valid[:, 0].all() and not parent[:, 0].any() and not depth[:, 0].any() and not log_prob[:, 0].any()
    assert (np.diff(valid.astype(int), axis=1) <= 0).all(), "padding is a tail"
    assert not tokens[~valid].any() and not parent[~valid].any() and not depth[~valid].any()
    assert np.isneginf(log_prob[~valid]).all() and np.isfinite(log_prob[valid]).all()
    assert (log_prob[:, 1:] <= log_prob[:, :-1]).all(), "decreasing probability"
    assert (depth[:, 1:][valid[:, 1:]] >= 1).all()


# Tables with missing children have no ties, as plain ones.
HEAPS = [*(slow_unless(kind != "plain", kind, 14) for kind in KINDS), ("missing", 2), ("missing", 1)]


@pytest.mark.parametrize(("kind", "budget"), HEAPS)
def test_best_first_is_the_heap(kind, budget):
    tables, anchor_b = random_tables(kind), anchors()
    built = best_first(tables, anchor_b, budget)
    assert_documented(built, anchor_b)
    arrays = [*map(np.asarray, jax.tree.leaves(tables))]
    log_prob_bn = np.asarray(built.log_prob_bn)
    sizes = set()
    for b in range(TABLES):
        search = partial(heap_search, partial(children, [x[b] for x in arrays]))
        everything, expected, got = search(), search(budget), paths(built, b)
        scores = log_prob_bn[b, : len(got)]
        assert len(set(got)) == len(got), "siblings are distinct"
        assert [everything[path] for path in got] == scores.tolist(), "a node scores the sum along its path"
        assert sorted(scores) == sorted(expected.values())
        if len(set(everything.values())) == len(everything):  # no ties: there is one best set
            assert set(got) == set(expected)
        sizes.add(len(got))
    assert (sizes == {budget}) == (kind in ("plain", "ties", "certain") or budget == 1)
    if budget == 14:  # ties, children of probability 1 and exhausted tables occur
        assert kind != "ties" or np.mean(log_prob_bn[:, 1:] == log_prob_bn[:, :-1]) > 0.3
        assert kind != "certain" or np.mean(log_prob_bn[:, 1] == 0) > 0.3
        assert kind != "exhausted" or (min(sizes) == 1 and len(sizes) > 4)


@pytest.mark.parametrize("budget", [1, 3, DEPTHS + 4])
@pytest.mark.parametrize("kind", ["plain", "leaves", "missing"])
def test_walk_takes_the_likeliest_child(kind, budget):
    tables, anchor_b = random_tables(kind), anchors()
    built = build("walk", tables, anchor_b, budget)
    assert built.tokens_bn.shape == (TABLES, min(budget, DEPTHS + 1))
    assert_documented(built, anchor_b)
    arrays = [*map(np.asarray, jax.tree.leaves(tables))]
    for b in range(TABLES):
        walked, score = [], np.float32(0)
        while len(walked) < min(budget - 1, DEPTHS) and (offered := children([x[b] for x in arrays], walked)):
            walked.append(offered[0][0])
            score += offered[0][1]
        assert paths(built, b) == [tuple(walked[:i]) for i in range(len(walked) + 1)]
        assert built.log_prob_bn[b, len(walked)] == score


def test_a_chain_follows_the_automaton_of_a_constraint():
    """Regression: it stayed in the root's state, so that later tokens were those allowed at the start of an answer."""
    table, anchor_b = random_tables("plain", children=12), anchors()
    rng = np.random.default_rng(1)
    next_bqc = rng.integers(-1, 4, (TABLES, 4, VOCAB)).astype(np.int32)
    next_bqc[:, :, VOCAB // 2 :] = -1
    class_bv = np.broadcast_to(np.arange(VOCAB, dtype=np.int32), (TABLES, VOCAB))
    root_b = rng.integers(0, 4, TABLES).astype(np.int32)
    constrained = ConstrainedExpander(table, Automaton(jnp.asarray(next_bqc), jnp.asarray(class_bv)), jnp.asarray(root_b))
    chain, walk = (build(name, constrained, anchor_b, DEPTHS + 1) for name in ("chain", "walk"))
    jax.tree.map(np.testing.assert_array_equal, chain, walk)
    for b in range(TABLES):
        state = root_b[b]
        for token in paths(chain, b)[-1]:
            state = next_bqc[b, state, token]
            assert state >= 0
    assert np.mean(np.asarray(chain.valid_bn).sum(axis=1)) > 3


def test_allowed_children_of_tiny_probability_share_it():
    """Regression: below exp(-87), their sum was zero in float32, and they kept their log-probabilities."""
    log_probs_c = jnp.array([-1e-9, -200.0, -200.0 - np.log(3), -jnp.inf])
    tokens_bimc = jnp.arange(4)[None, None, None]
    table = trees.TransitionTable(tokens_bimc, log_probs_c[None, None, None], jnp.full_like(tokens_bimc, -1))
    automaton = Automaton(jnp.array([[[-1, 0, 0, 0], [-1, -1, -1, -1]]]), jnp.arange(4)[None])
    for state, expected in ((0, [0.75, 0.25, 0, 0]), (1, [0, 0, 0, 0])):
        constrained = ConstrainedExpander(table, automaton, jnp.array([state]))
        _, shared_bwc = constrained.children(jnp.int32(0), constrained.start(1))
        np.testing.assert_allclose(jnp.exp(shared_bwc[0, 0]), expected, atol=1e-5)


def test_a_chain_of_ngrams_follows_its_path():
    """Regression: after a token, it took those behind other matches, which continue another token."""
    matches_bmi = jnp.asarray([[[1, 2, 3], [4, 5, 6], [7, 5, 6]]])
    ngrams = Continuations(matches_bmi, jnp.asarray([[9, 8, 8]]), jnp.asarray([[0.0, -0.1, -0.1]]), jnp.asarray([-2.0]))
    assert build("chain", ngrams, jnp.asarray([0], jnp.int32), 4).tokens_bn.tolist() == [[0, 1, 2, 3]]


def test_ancestor_mask():
    parent_bn = np.asarray(best_first(random_tables("exhausted"), anchors(), 14).parent_bn)
    mask_bnn = np.asarray(jax.jit(partial(trees.ancestor_mask, max_depth=DEPTHS))(parent_bn))
    steps_bnn = np.eye(14)[parent_bn] + np.eye(14)  # to the parent, or none
    np.testing.assert_array_equal(mask_bnn, np.linalg.matrix_power(steps_bnn, DEPTHS) > 0)


def test_the_mask_takes_few_dependent_gathers():
    """A chain of 15 keeps XLA's GPU compiler busy for minutes, until memory runs out."""
    program = jax.make_jaxpr(trees.ancestor_mask, static_argnums=1)(jnp.zeros((1, 64), jnp.int32), 15)
    assert 0 < str(program).count("name=pick") <= 8


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_form_builds_the_same_trees(kind, monkeypatch):
    """Levels unrolled, and sorts instead of top-k."""
    table, anchor_b = random_tables(kind), anchors()
    ours = best_first(table, anchor_b, 12)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    plain = jax.jit(partial(grow, "best-first", num_nodes=12))(table, anchor_b)
    jax.tree.map(np.testing.assert_array_equal, plain, ours)


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_few_lanes_grow_the_tree_of_eagle_2(lanes):
    """Tables without ties; a branch that ends keeps its lane, as nodes of the last level do in the published code."""
    table, anchor_b, nodes = random_tables("plain"), anchors(), 12
    built = best_first(table, anchor_b, nodes, lanes=lanes)
    assert_documented(built, anchor_b)
    arrays = [*map(np.asarray, jax.tree.leaves(table))]
    for b in range(64):
        expected = eagle_2(partial(children, [x[b] for x in arrays]), DEPTHS, nodes, lanes)
        assert set(paths(built, b)[1:]) == set(expected)


def test_as_many_lanes_as_nodes_is_the_search_without_lanes():
    table, anchor_b = random_tables("ties"), anchors()
    whole, wide = (best_first(table, anchor_b, 12, lanes=lanes) for lanes in (None, 11))
    jax.tree.map(np.testing.assert_array_equal, wide, whole)
