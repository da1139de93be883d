"""Acceptance rules: exact losslessness by enumeration, the controls that must fail, reach, identities, numerics.

The oracle (acceptance_oracle.py) is proven first; the library then runs its own builders and walks on every draft and every
side of every coin (acceptance_cases.py).
"""

from functools import cache, partial

import acceptance_cases as cases
import acceptance_oracle as oracle
import acceptance_toys as toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import slow, slow_unless
from refusals import refused
from scipy import special

from treeflash_jax import acceptance, trees
from treeflash_jax.acceptance import RULES, check_lossless, default_rule
from treeflash_jax.trees import TreeShape
from treeflash_jax.trees.sampled.proposal import DETERMINISTIC, WITH_REPLACEMENT, WITHOUT_REPLACEMENT

CASES = {
    "one path": cases.paths_case(3, 1),
    "paths": cases.paths_case(5, 2),
    "delayed": cases.paths_case(4, 2, trunk=1),
    "without-replacement": cases.without_replacement_case(6, 2),
    "skeleton": cases.skeleton_case(7, 0.34),
    "skeleton, no child left": cases.skeleton_case(7, 0.67),
}
SIZES = {"full": (0, 3, 2, 3), "truncated": (3, 4, 2, 3), "top-p": (5, 4, 2, 3, 0.8)}  # seed, v, depths, children, top-p
LOSSLESS = [
    (name, rule) for name, case in CASES.items() for rule in RULES if case.distribution in RULES[rule].distributions
]
TESTED = [pair for pair in LOSSLESS if pair[1] != "sample-and-match"]  # its walk has no coins; equality is test_lossless


@cache
def world(seed: int, vocabulary: int, depths: int, children: int, top_p: float = 1.0, **ends) -> cases.World:
    p = toys.random_verifier(seed, vocabulary, depths + 1)
    return cases.World(vocabulary, depths, p, toys.random_drafter(seed, p, vocabulary, depths, children, **ends), top_p)


def error(distribution: np.ndarray, p) -> float:
    return np.abs(distribution - oracle.continuations(p, (), distribution.ndim)).max()


def oracle_error(here: cases.World, draft, rule) -> float:
    return error(oracle.distribution_for(draft, rule, here.p, here.vocabulary, here.depths + 1), here.p)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "rule"), LOSSLESS)
def test_the_oracle_is_lossless(name, rule, size):
    here = world(*SIZES[size])
    draft = partial(CASES[name].draft, here.drafter, depths=here.depths)
    assert oracle_error(here, draft, oracle.RULES[rule]) < 1e-12


@pytest.mark.parametrize("rule", [
    "recursive", "naive-tree", slow("k-sequential"), "traversal", "multi-path-block",
])  # fmt: skip
def test_the_oracle_is_lossless_on_three_paths_and_three_levels(rule):
    here = world(1, 3, 3, 3, ends=0.0)
    for branches in (3, 2):
        draft = partial(toys.draft_paths, here.drafter, num_nodes=7, branches=branches, depths=3)
        assert oracle_error(here, draft, oracle.RULES[rule]) < 1e-12


def test_broken_rules_fail_the_same_test():
    """Greedy nodes tested as samples, early stops, the chosen path under plain q, unrenormalised siblings, re-ranking."""
    here = world(0, 3, 2, 3, ends=0.0)
    distribution = partial(here.drafter.distribution, goes_on=False)
    one = partial(toys.draft_paths, here.drafter, num_nodes=3, branches=1, depths=2)
    two = partial(toys.draft_paths, here.drafter, num_nodes=5, branches=2, depths=2)

    def greedy(run):
        drawn = oracle.Tree()
        for node in toys.best_first(here.drafter, 4):
            if node:
                drawn.add(node[:-1], node[-1], distribution(node[:-1]))
        return drawn

    def unrenormalised(run):
        drawn = toys.draft_without_replacement(here.drafter, run, [0, 0, 1, 1])
        return oracle.Tree({node: [(x, distribution(node)) for x, _ in draws] for node, draws in drawn.draws.items()})

    def reranked(run):
        drawn = two(run).draws.items()
        return oracle.Tree({node: sorted(draws, key=lambda d, at=node: -distribution(at)[d[0]]) for node, draws in drawn})

    broken = {
        "greedy nodes": (greedy, oracle.recursive),
        "stops early": (one, partial(oracle.block, stops_early=True)),
        "plain q": (two, partial(oracle.multi_path_block, plain=True)),
        "unrenormalised": (unrenormalised, oracle.recursive),
        "re-ranked": (reranked, oracle.recursive),
    }
    errors = {name: oracle_error(here, *pair) for name, pair in broken.items()}
    assert min(errors.values()) > 0.005, errors


@pytest.mark.parametrize("size", ["full", pytest.param("top-p", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "rule"), TESTED)
def test_the_library_is_lossless(float64, name, rule, size):
    here = world(*SIZES[size])
    assert error(cases.library_distribution(here, CASES[name], rule), here.p) < 1e-12


LISTED = (1, 2, 1), (0, 2, 1), (2, 1, 0)  # trees for a selector to choose from: trunk, branches, length
CHOSEN = [slow_unless(rule == "k-sequential", rule) for name, rule in TESTED if name == "delayed"]


@pytest.mark.parametrize("rule", CHOSEN)
def test_two_rounds_are_lossless_whatever_a_selector_chooses(float64, rule):
    """The second round after a single token has the tree of that token's number: an arbitrary function of the text."""
    p = toys.random_verifier(8, 3, 4)

    def after(token: int | None) -> cases.World:
        below = p if token is None else lambda node: p((token, *node))
        return cases.World(3, 2, below, toys.random_drafter(8, below, 3, 2, 3))

    totals = cases.library_round(after(None), cases.selected_case(LISTED, 2), rule)
    single, totals[()] = totals[()], np.zeros(3)
    distribution = oracle.finished(totals, p, 3, 3)
    for token in (0, 1):
        following = cases.library_distribution(after(token), cases.selected_case(LISTED, token), rule)
        distribution[token] += single[token] * following.sum(axis=-1)
    assert (single[:2] > 0.1).all() and single[2] < 1e-12
    assert error(distribution, p) < 1e-12


@pytest.mark.parametrize("kind", [WITH_REPLACEMENT, DETERMINISTIC])
def test_the_library_is_lossy_under_a_wrong_distribution(float64, monkeypatch, kind):
    """Siblings drawn without replacement, tested as with it: q is not renormalised; or drawn nodes tested as fixed ones."""
    here, build = world(0, 3, 2, 3, ends=0.0), cases.World.build

    def wrong(self, case, noise):
        built, proposal = build(self, case, noise)
        return built, proposal.replace(kind_bx=jnp.full_like(proposal.kind_bx, kind))

    monkeypatch.setattr(cases.World, "build", wrong)
    monkeypatch.setattr(cases, "assert_same_tree", lambda *_: None)
    assert error(cases.library_distribution(here, CASES["without-replacement"], "recursive"), here.p) > 0.005


# Random trees of up to 64 nodes.

DEPTHS, VOCABULARY, CHILDREN, NODES = 5, 24, 8, 64
LARGE = {
    "one path": ("paths", 6, TreeShape(branches=1)),
    "two paths": ("paths", 11, TreeShape(branches=2)),
    "paths": ("paths", 64, TreeShape(branches=12)),
    "delayed": ("delayed", 64, TreeShape(branches=20, trunk=2)),
    "without-replacement": ("without-replacement", 64, TreeShape(branches=3)),
    "skeleton": ("skeleton", 64, TreeShape(skeleton=0.3)),
    "leaves": ("skeleton", 40, TreeShape(skeleton=0.6, leaves=True)),
    "fixed": ("skeleton", 64, TreeShape(skeleton=1.0)),
}


@partial(jax.jit, static_argnames=("builder", "nodes", "shape", "padded_nodes"))
def grow(builder: str, nodes: int, shape: TreeShape, table, key_b, padded_nodes: int):
    noise = trees.draw_noise(key_b, table, nodes)
    inputs = trees.TreeInputs(table, jnp.zeros(len(key_b), jnp.int32), nodes, shape, noise)
    return cases.padded(*trees.BUILDERS[builder].build(inputs), padded_nodes)


@cache
def forest(*names: str):
    """Two trees of each of these kinds in one batch, with verifier logits for their nodes."""
    rng = np.random.default_rng(5)
    shape = (2, DEPTHS, 6, CHILDREN)
    log_probs = special.log_softmax(2 * rng.normal(size=(*shape[:3], VOCABULARY)), axis=-1).astype(np.float32)
    order = np.argsort(-log_probs, axis=-1)[..., :CHILDREN].astype(np.int32)
    next_context = np.where(rng.random(shape) < 0.2, -1, rng.integers(0, 6, shape))
    next_context[:, -1] = -1
    table = trees.TransitionTable(order, np.take_along_axis(log_probs, order, axis=-1), next_context.astype(np.int32))
    grown = [grow(*LARGE[name], table, jax.random.split(jax.random.key(i), 2), NODES) for i, name in enumerate(names)]
    drawn, proposal = jax.tree.map(lambda *x: np.concatenate(x), *grown)
    q = np.zeros((*drawn.tokens_bn.shape, VOCABULARY + 1), np.float32)  # the last place is that of NO_TOKEN
    np.put_along_axis(q, np.minimum(proposal.support_bnc, VOCABULARY), np.exp(proposal.log_q_bnc), axis=-1)
    q = q[..., :VOCABULARY]
    return drawn, proposal, np.log(q + 0.02) + 1.2 * rng.normal(size=q.shape).astype(np.float32)


@partial(jax.jit, static_argnames="rule")
def find_reach(rule: str, drawn, proposal, logits):
    return RULES[rule].reach_probabilities(drawn, proposal, cases.target_distribution(logits))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_reach_probabilities_of_large_trees_are_the_oracles(rule):
    drawn, proposal, logits = forest(*LARGE)
    got_bn = np.asarray(find_reach(rule, drawn, proposal, logits))
    p_bnv = np.asarray(jax.nn.softmax(np.asarray(logits, np.float64), axis=-1), np.float64)
    p_bnv /= p_bnv.sum(-1, keepdims=True)
    checked = 0
    for i, (builder, _, sizes) in enumerate(LARGE.values()):
        if trees.BUILDERS[builder].distribution_for(sizes) not in RULES[rule].distributions:
            continue
        for b in (2 * i, 2 * i + 1):
            prefixes, seen, _ = cases.read(drawn, proposal, b, VOCABULARY)
            p = {prefix: p_bnv[b, node] for node, prefix in enumerate(prefixes)}
            expected = oracle.reach_probabilities(oracle.RULES[rule], seen, p.__getitem__)
            np.testing.assert_allclose(got_bn[b, : len(prefixes)], [expected[prefix] for prefix in prefixes], atol=1e-5)
            assert not got_bn[b, len(prefixes) :].any()
            checked += len(prefixes)
    assert checked > 10 and (rule != "traversal" or checked > 400)


def test_rules_that_are_equal_on_one_path_or_on_fixed_nodes():
    """One-hot proposals: no rule accepts more or less than the verifier's mass on each node."""
    grown = forest("one path", "fixed")
    reach = {rule: np.asarray(find_reach(rule, *grown)) for rule in RULES}
    for rules in (("block", "traversal", "multi-path-block"), ("rejection", "recursive", "naive-tree", "k-sequential")):
        for rule in rules[1:]:
            np.testing.assert_allclose(reach[rule][:2], reach[rules[0]][:2], atol=2e-6)
    assert (reach["block"][:2].sum(1) != reach["rejection"][:2].sum(1)).all()
    assert (grown[1].kind_bx[-2:] == DETERMINISTIC).all()
    for rule in ("recursive", "naive-tree", "traversal"):
        np.testing.assert_allclose(reach[rule][-2:], reach["sample-and-match"][-2:], atol=2e-6)


# One level or two over one shared node, for identities and numerics.

SMALL = {name: CASES[name] for name in ("one path", "paths", "delayed")}
SMALL |= {"without-replacement": cases.without_replacement_case(5, 4), "skeleton": cases.skeleton_case(6, 0.4)}
SMALL_LOSSLESS = [(name, rule) for name, rule in TESTED if name in SMALL]
COINS = np.concatenate([[0.0, 1 - 2**-24], np.random.default_rng(0).random(510)]).astype(np.float32)
P = np.array([0.5, 0.3, 0.1, 0.06, 0.04])
GUMBEL = np.random.default_rng(1).gumbel(size=(len(COINS), len(P))).astype(np.float32)


@cache
def small_trees(name: str, q: tuple[float, ...]):
    """Trees from the node `q` at both depths."""
    case, q = SMALL[name], np.asarray(q, np.float32)
    order = np.argsort(-q, kind="stable")
    with np.errstate(divide="ignore"):
        log_q = np.log(q[order])
    next_context = np.array([0, -1], np.int32)[:, None, None]
    table = (np.broadcast_to(x, (len(COINS), 2, 1, len(q))) for x in (order.astype(np.int32), log_q, next_context))
    key_b = jax.random.split(jax.random.key(0), len(COINS))
    return grow(case.builder, case.nodes, case.shape, trees.TransitionTable(*table), key_b, 7)


def small(name: str, q, logits_v):
    """Trees of `small_trees`, logits that all nodes share, one coin for all tests of a tree, and noise."""
    logits = np.broadcast_to(logits_v.astype(np.float32), (len(COINS), 7, len(q)))
    return *small_trees(name, tuple(q)), logits, np.broadcast_to(COINS[:, None], (len(COINS), 6)), GUMBEL


@partial(jax.jit, static_argnames="rule")
def taken_by(rule: str, drawn, proposal, logits, coins, gumbel, temperature, top_p):
    target = cases.target_distribution(logits, temperature, top_p)
    noise = acceptance.Noise(jnp.zeros((*gumbel.shape[:1], 3, gumbel.shape[1])), coins, gumbel)
    taken = RULES[rule].accept(drawn, proposal, target, noise)
    return RULES[rule].reach_probabilities(drawn, proposal, target), taken.length_b, taken.bonus_b


# Of several paths multi-path-block takes the one p favours most; where p = q that order is arbitrary.
@pytest.mark.parametrize(("name", "rule"), [pair for pair in SMALL_LOSSLESS if pair != ("paths", "multi-path-block")])
def test_equal_distributions_accept_everything(name, rule):
    inputs = small(name, P, np.log(P))
    reach_bn, length_b, _ = map(np.asarray, taken_by(rule, *inputs, 1.0, 1.0))
    depth_bn = np.asarray(inputs[0].depth_bn)
    np.testing.assert_allclose(np.sum(reach_bn * (depth_bn == 1), axis=1), 1.0, atol=1e-6)
    # A sampled child and, where it is rejected, the deterministic one: skeleton trees end below the latter.
    assert np.all(length_b == depth_bn.max(1) + 1 if name != "skeleton" else length_b >= 2)


@pytest.mark.parametrize(("name", "rule"), SMALL_LOSSLESS)
def test_peaked_nodes_exhausted_proposals_and_cut_tokens(name, rule):
    """Reaching is a probability, and no coin makes the walk accept or emit a token that the verifier gives no chance."""
    peaked = np.array([1 - 1e-7, 2e-8, 2e-8, 3e-8, 3e-8])
    certain = np.array([1.0, 0, 0, 0, 0])
    few, disjoint = np.array([0.7, 0.3, 0, 0, 0]), np.array([0, 0, 0.5, 0.3, 0.2])  # fewer tokens than siblings
    with np.errstate(divide="ignore"):
        verifiers = peaked, certain, few, disjoint, P
        pairs = [(q, np.log(p), top_p) for q in (peaked, certain, few, P) for p in verifiers for top_p in (1.0, 0.7)]
    for q, logits, top_p in pairs:
        drawn, *others = small(name, q, logits)
        reach_bn, length_b, bonus_b = (np.asarray(x) for x in taken_by(rule, drawn, *others, 1.0, top_p))
        assert np.isfinite(reach_bn).all() and reach_bn.min() >= 0 and reach_bn.max() <= 1 + 1e-5
        order = np.argsort(-logits, kind="stable")
        likeliest = oracle.normalised(np.exp(logits[order]))
        possible = order[(np.cumsum(likeliest) - likeliest < top_p) & (likeliest > 0)]
        assert np.isin(bonus_b, possible).all()
        impossible = ~np.isin(drawn.tokens_bn, possible) & np.asarray(drawn.valid_bn)
        assert not reach_bn[:, 1:][impossible[:, 1:]].any()
        if (length_b > 1).any():  # an accepted first token has a chance
            first = np.asarray(drawn.depth_bn) == 1
            assert (reach_bn * first).sum(1)[length_b > 1].min() > 0


@pytest.mark.parametrize(("name", "rule"), SMALL_LOSSLESS)
def test_greedy_keeps_the_likeliest_path_and_emits_the_argmax(name, rule):
    inputs = small(name, np.array([0.4, 0.3, 0.2, 0.1, 0]), np.log(P))
    reach_bn, length_b, bonus_b = (np.asarray(x) for x in taken_by(rule, *inputs, 0.0, 1.0))
    assert (bonus_b == 0).all()
    tree = jax.tree.map(np.asarray, inputs[0])
    is_other_bnu = trees.ancestor_mask(tree.parent_bn, 2) & (tree.tokens_bn != 0)[:, None]  # the root has token 0
    best_bn = tree.valid_bn & ~np.any(is_other_bnu, axis=-1)
    np.testing.assert_allclose(reach_bn, best_bn, atol=1e-6)
    np.testing.assert_array_equal(length_b, best_bn.sum(1))


@pytest.mark.parametrize("spare", [1e-6, 1e-25])
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_later_siblings_of_a_confident_drafter(rule, spare):
    """Two draws without replacement from q = (1 - spare, 0.75 spare, 0.25 spare): token 0, then 1 or 2."""
    second_b1, ones_bx = jnp.array([[1], [2]]), jnp.ones((2, 2), jnp.int32)
    tokens_bn = jnp.concatenate([jnp.zeros((2, 2), jnp.int32), second_b1], axis=1)
    drawn = trees.DraftTree(tokens_bn, 0 * tokens_bn, jnp.array([[0, 1, 1]] * 2), 0.0 * tokens_bn, tokens_bn >= 0)
    log_q_bnc = jnp.full((2, 3, 3), -jnp.inf).at[:, 0].set(np.log([1 - spare, 0.75 * spare, 0.25 * spare]))
    proposal = trees.Proposal(
        jnp.broadcast_to(jnp.arange(3), (2, 3, 3)), log_q_bnc, ones_bx.cumsum(1), tokens_bn[:, 1:],
        ones_bx * WITHOUT_REPLACEMENT, depths=1,
    )  # fmt: skip
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.3, 0.5, 0.2])), (2, 3, 3))
    np.testing.assert_allclose(find_reach(rule, drawn, proposal, logits), [[1, 0.3, 2 / 3], [1, 0.3, 0.7]], atol=1e-5)


@jax.jit
def read_target(logits_bnv, temperature_b, top_k_b, top_p_b, node_b, token_bc, mass_bc):
    """Log-probabilities of all tokens at the first nodes, and the residual at others after tokens of these masses."""
    target = cases.target_distribution(logits_bnv, temperature_b, top_p_b, top_k_b)
    log_p = target.gather(jnp.broadcast_to(jnp.arange(logits_bnv.shape[-1]), logits_bnv.shape))
    return log_p[:, 0], target.residual(node_b, token_bc, mass_bc)


@pytest.mark.parametrize("temperature", [1e-3, 0.2])
def test_probabilities_at_low_temperature(temperature):
    rng = np.random.default_rng(0)
    logits = (38 + rng.random((64, 1, 1)) - temperature * rng.exponential(2, (64, 1, 8))).astype(np.float32)
    expected = special.softmax((logits - logits.max(axis=-1, keepdims=True)) / temperature, axis=-1)
    node_b, token_b1, mass_b1 = np.zeros(64, np.int32), np.zeros((64, 1), np.int32), expected[:, 0, :1]
    log_p, everything_bv = read_target(logits, temperature, 0, 1.0, node_b, token_b1, mass_b1)
    np.testing.assert_allclose(np.exp(log_p), expected[:, 0], atol=1e-6)
    np.testing.assert_allclose(np.exp(everything_bv), expected[:, 0], atol=1e-6)


def test_a_node_with_nothing_left_is_the_verifiers_distribution():
    def residual(logits_v, tokens: list[int]) -> np.ndarray:
        logits = np.broadcast_to(np.asarray(logits_v, np.float32), (1, 2, len(logits_v)))
        nothing = np.zeros((1, len(tokens)), np.float32)
        return special.softmax(read_target(logits, 1.0, 0, 1.0, np.array([1]), np.array([tokens]), nothing)[1][0])

    np.testing.assert_allclose(residual(np.log(P), [0, 1, 2, 3, 4]), P, atol=1e-6)
    np.testing.assert_allclose(residual(np.log(P), [4, 1]), oracle.normalised(P * [1, 0, 1, 1, 0]), atol=1e-6)
    negligible = [0.0, -1.0, -140.0]
    np.testing.assert_allclose(residual(negligible, [0, 1]), special.softmax(negligible), atol=1e-6)


def test_lossy_combinations_are_refused_with_the_reason():
    lossy = {"block": "paths", "k-sequential": "skeleton", "multi-path-block": "delayed", "rejection": "paths"}
    for rule, distribution in lossy.items():
        words = f"acceptance '{rule}' with a tree of distribution '{distribution}', expected"
        refused(partial(check_lossless, rule, distribution), words, RULES[rule].needs, "sample-and-match")
    for rule in RULES:
        check_lossless(rule, "one path")
        if rule != "sample-and-match":
            refused(partial(check_lossless, rule, "deterministic"), "lossless here: sample-and-match")


def test_the_default_rule_follows_from_the_distribution():
    assert [default_rule(name) for name in ("deterministic", "one path")] == ["sample-and-match", "block"]
    refused(partial(default_rule, "pairs"), "got a tree of distribution 'pairs'", "an acceptance rule")


@jax.jit
def sample_target(logits_bnv, temperature, top_k, top_p, noise_bnv):
    return cases.target_distribution(logits_bnv, temperature, top_p, top_k).sample(noise_bnv)


@pytest.mark.parametrize("top_k, top_p", [(1, 1.0), (0, 1e-6), (2, 0.3)])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_the_token_at_the_cut_is_kept(top_k, top_p, temperature):
    """Filters that leave one token leave all of the mass on it, in whatever a rule reads of a node."""
    rng = np.random.default_rng(0)
    logits = rng.permuted(np.tile(np.arange(96.0), (8, 1)), axis=1)[:, None].astype(jnp.bfloat16)
    best, noise = np.argmax(logits[:, 0], axis=-1), 100 * rng.gumbel(size=logits.shape).astype(np.float32)
    np.testing.assert_array_equal(sample_target(logits, temperature, top_k, top_p, noise)[:, 0], best)
    nothing = np.zeros((8, 1), np.float32)
    for context in read_target(logits, temperature, top_k, top_p, np.zeros(8, np.int32), (best[:, None] + 1) % 96, nothing):
        np.testing.assert_allclose(np.exp(context), np.eye(96)[best], atol=1e-6)


def test_nodes_of_one_batch_have_filters_of_their_own():
    """Number of tokens that each node keeps, of p = (1/2, 1/4, ...) at temperature 1."""
    logits = np.broadcast_to(-np.log(2) * np.arange(12), (6, 1, 12)).astype(np.float32)
    temperature, top_p = np.array([[1, 0.5, 2, 1, 1, 0], [0.9, 0.9, 0.9, 1, 1, 0.9]], np.float32)
    nothing = np.zeros(6, np.int32), np.zeros((6, 1), np.int32), np.zeros((6, 1), np.float32)
    log_p = np.asarray(read_target(logits, temperature, np.array([0, 0, 0, 3, 0, 3]), top_p, *nothing)[0])
    np.testing.assert_array_equal(np.isfinite(log_p).sum(axis=1), [4, 2, 7, 3, 12, 1])
    np.testing.assert_allclose(np.exp(log_p).sum(axis=1), 1, atol=1e-6)
