"""Verifiers and drafters of few tokens: every draft of every builder and rule, by the oracle and by the library."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from unittest import mock

import acceptance_oracle as oracle
import acceptance_toys as toys
import draft_trees
import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import acceptance, trees
from treeflash_jax.acceptance.target import TargetDistribution
from treeflash_jax.trees import TransitionTable, TreeShape
from treeflash_jax.trees.sampled.proposal import DETERMINISTIC, WITH_REPLACEMENT
from treeflash_jax.trees.sampled.tree_selector import TreeSelectorConfig
from treeflash_jax.trees.sampled.without_replacement import best_outline

FORCED = 1e3  # noise that outweighs any log-probability
NODES, BATCH = 7, 1024  # of the enumerations, so that all share their compiled rules
PADDING = {"tokens_bn": 0, "parent_bn": 0, "depth_bn": 0, "log_prob_bn": -jnp.inf, "valid_bn": False}


@dataclass(frozen=True)
class Case:
    """A builder with its sizes, and the same tree drawn by the oracle."""

    builder: str
    nodes: int
    shape: TreeShape
    draft: Callable[..., oracle.Tree]  # of a drafter, a run and `depths`
    choice: int | None = None  # index of the tree that a selector chose

    @property
    def distribution(self) -> str:
        return trees.BUILDERS[self.builder].distribution_for(self.shape)


def paths_case(nodes: int, branches: int, trunk: int = 0) -> Case:
    draft = partial(toys.draft_paths, num_nodes=nodes, branches=branches, trunk=trunk)
    return Case("delayed" if trunk else "paths", nodes, TreeShape(branches=branches, trunk=trunk), draft)


def selected_case(listed: tuple[tuple[int, int, int], ...], choice: int) -> Case:
    config, (trunk, branches, length) = TreeSelectorConfig(trees=listed, rule="any", pair="any"), listed[choice]
    draft = partial(toys.draft_paths, num_nodes=1 + trunk + branches * length, branches=branches, trunk=trunk)
    return Case("delayed", config.num_nodes, TreeShape(selector=config), draft, choice)


def without_replacement_case(nodes: int, branches: int) -> Case:
    def draft(drafter, run, depths):
        return toys.draft_without_replacement(drafter, run, best_outline(nodes - 1, branches, depths)[0])

    return Case("without-replacement", nodes, TreeShape(branches=branches), draft)


def skeleton_case(nodes: int, skeleton: float) -> Case:
    draft = partial(toys.draft_skeleton, num_nodes=nodes, skeleton=skeleton)
    return Case("skeleton", nodes, TreeShape(skeleton=skeleton), draft)


@dataclass(frozen=True, eq=False)
class World:
    """A verifier and a drafter over a tiny vocabulary; p is what top-p leaves of the verifier's distribution."""

    vocabulary: int
    depths: int
    unfiltered: oracle.Distribution
    drafter: toys.Drafter
    top_p: float = 1.0

    # Worlds live as long as the tests.
    @cache  # noqa: B019
    def p(self, node: oracle.Prefix) -> np.ndarray:
        distribution = self.unfiltered(node)
        order = np.argsort(-distribution)
        kept = order[: 1 + int(np.sum(np.cumsum(distribution[order]) < self.top_p))]
        return oracle.normalised(np.where(np.isin(np.arange(len(distribution)), kept), distribution, 0))

    def drafts(self, case: Case) -> list[tuple[float, oracle.Tree]]:
        runs = oracle.outcomes(partial(case.draft, self.drafter, depths=self.depths))
        return [(run.probability, tree) for run, tree in runs]

    def table(self, batch: int) -> TransitionTable:
        """The drafter as a transition table: node (depth, places of the children along the prefix)."""
        children = max(len(context.tokens) for context in self.drafter.contexts.values())
        shape = (self.depths, children ** (self.depths - 1), children)
        tokens = np.broadcast_to(np.arange(children), shape).astype(np.int32)  # astype copies
        log_probs, next_context = np.full(shape, -np.inf), np.full(shape, -1, np.int32)
        for node, context in self.drafter.contexts.items():
            at = 0
            for i, token in enumerate(node):
                at = at * children + self.drafter.contexts[node[:i]].tokens.index(token)
            here = len(node), at, slice(len(context.tokens))
            tokens[here], log_probs[here] = context.tokens, context.log_probs
            next_context[here] = [at * children + i if goes else -1 for i, goes in enumerate(context.continues)]
        return TransitionTable(*(np.broadcast_to(x, (batch, *x.shape)) for x in (tokens, log_probs, next_context)))

    def noise(self, case: Case, drafts: list[tuple[float, oracle.Tree]]) -> np.ndarray:
        """Gumbel noise [b, n, c] that makes the library draw what the oracle drew."""
        children = max(len(context.tokens) for context in self.drafter.contexts.values())
        noise = np.zeros((len(drafts), case.nodes, children))
        for b, (_, tree) in enumerate(drafts):
            node_prefix, drawn = {0: ()}, Counter()
            for above, place, token, kind in tree.places:
                node = node_prefix.get(above)
                if node is None:  # a deterministic node of a skeleton
                    node = list(toys.best_first(self.drafter, round(case.shape.skeleton * (case.nodes - 1))))[above]
                node_prefix[place] = (*node, token)
                context = place if kind == "own" else above
                noise[b, context, self.drafter.contexts[node].tokens.index(token)] = FORCED * (1 - 0.1 * drawn[context])
                drawn[context] += 1
        return noise

    def build(self, case: Case, noise: np.ndarray):
        anchor_b = np.zeros(noise.shape[0], np.int32)
        choice_b = None if case.choice is None else np.full_like(anchor_b, case.choice)

        @jax.jit
        def build(table, noise, choice_b):
            inputs = trees.TreeInputs(table, anchor_b, case.nodes, case.shape, noise, choice_b)
            return trees.BUILDERS[case.builder].build(inputs)

        return build(self.table(len(noise)), noise, choice_b)


def read(tree, proposal, b: int, vocabulary: int):
    """Reads a tree of the library as the oracle's: prefixes of the nodes, draws, and (node, j) of each draw."""
    tokens, parent = (np.asarray(x)[b] for x in (tree.tokens_bn, tree.parent_bn))
    prefixes = draft_trees.paths(tree, b)
    support, log_q, nodes, slots, kinds = (np.asarray(x)[b] for x in jax.tree.leaves(proposal))
    read, names = oracle.Tree(), []
    for node, slot, kind in zip(nodes, slots, kinds, strict=True):
        if node == 0:
            names.append(None)
            continue
        above = prefixes[parent[node]]
        q = np.zeros(vocabulary)
        q[support[parent[node]]] = np.exp(log_q[parent[node]].astype(float))
        before = read.draws.get(above, [])
        if kind == DETERMINISTIC:
            q = np.eye(vocabulary)[tokens[node]]
        elif kind != WITH_REPLACEMENT:
            q[[token for token, _ in before]] = 0
            q /= q.sum()
        assert support[parent[node], slot] == tokens[node]
        names.append((above, len(before)))
        read.add(above, int(tokens[node]), q)
    return prefixes, read, names


def target_distribution(logits_bnv, temperature=1.0, top_p=1.0, top_k=0) -> TargetDistribution:
    """The verifier's distribution under settings that are given for the batch, or for each sequence."""
    wide, shape = jnp.promote_types(logits_bnv.dtype, jnp.float32), logits_bnv.shape[:1]
    settings = jnp.asarray(temperature, wide), jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, wide)
    return acceptance.target_distribution(logits_bnv, *(jnp.broadcast_to(value, shape) for value in settings))


def node_logits(p: oracle.Distribution, prefixes: list[oracle.Prefix], nodes: int) -> np.ndarray:
    logits = [np.log(p(prefix)) for prefix in prefixes]
    return np.stack(logits + [logits[0]] * (nodes - len(logits)))


@partial(jax.jit, static_argnames="nodes")
def padded(tree, proposal, nodes: int):
    """Pads a tree and its proposal to `nodes` nodes: all cases share the compiled rules."""
    missing = nodes - tree.tokens_bn.shape[1]

    def pad(x, value, axis=1):
        return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=value)

    batch, _, children = proposal.support_bnc.shape
    support_bnc = jnp.broadcast_to(jnp.arange(children, dtype=jnp.int32), (batch, missing, children))
    tree = type(tree)(*(pad(getattr(tree, name), value) for name, value in PADDING.items()))
    return tree, proposal.replace(
        support_bnc=jnp.concatenate([proposal.support_bnc, support_bnc], axis=1),
        log_q_bnc=pad(proposal.log_q_bnc, -jnp.inf),
        node_bx=pad(proposal.node_bx, 0),
        slot_bx=pad(proposal.slot_bx, 0),
        kind_bx=pad(proposal.kind_bx, WITH_REPLACEMENT),
    )


@partial(jax.jit, static_argnames="rule")
def accepted(rule: str, tree, proposal, logits_bnv, coins_bx, top_p):
    """What is accepted under given coins: the last accepted nodes, and the distributions of the token after them."""
    target, residuals, residual = target_distribution(logits_bnv, top_p=top_p), [], TargetDistribution.residual

    def recorded(*arguments):
        residuals.append(residual(*arguments))
        return residuals[-1]

    (batch, _, vocabulary), zeros = logits_bnv.shape, partial(jnp.zeros, dtype=coins_bx.dtype)
    noise = acceptance.Noise(zeros((batch, proposal.depths + 1, vocabulary)), coins_bx, zeros((batch, vocabulary)))
    with mock.patch.object(TargetDistribution, "residual", recorded):
        taken = acceptance.RULES[rule].accept(tree, proposal, target, noise)
    [residual_bv] = residuals
    last_b1 = jnp.take_along_axis(taken.path_bp, taken.length_b[:, None] - 1, axis=1)
    return last_b1[:, 0], jax.nn.softmax(residual_bv, axis=-1)


def library_distribution(world: World, case: Case, rule: str) -> np.ndarray:
    """The distribution of the first tokens by the library's own builder and walk."""
    return oracle.finished(library_round(world, case, rule), world.p, world.vocabulary, world.depths + 1)


def library_round(world: World, case: Case, rule: str, edge: float = 1e-9) -> dict[oracle.Prefix, np.ndarray]:
    """P(last accepted node, token after it) by the library's own builder and walk.

    Every draft is forced through the noise, and every coin is put just inside both edges of the threshold that the oracle
    has for it: a threshold that is off by more than `edge` shows.
    """
    drafts = world.drafts(case)
    tree, proposal = world.build(case, world.noise(case, drafts))
    places, coins, chances, prefixes_of = [], [], [], []
    totals: dict[oracle.Prefix, np.ndarray] = {}
    for b, (probability, drafted) in enumerate(drafts):
        prefixes, seen, names = read(tree, proposal, b, world.vocabulary)
        assert_same_tree(seen, drafted)
        thresholds: dict = {}
        for run, _ in oracle.outcomes(lambda run, drafted=drafted: oracle.RULES[rule](drafted, world.p, run)):
            thresholds |= run.thresholds
        index = {name: x for x, name in enumerate(names) if name is not None}
        if rule == "traversal":
            index = {prefix: node - 1 for node, prefix in enumerate(prefixes)}
        elif rule in ("block", "multi-path-block"):
            index = {prefix: len(prefix) - 1 for prefix in prefixes}
        sides = [
            [(max(a - edge, 0.0), a)] * int(a > 0) + [(min(a + edge, 1 - 1e-12), 1 - a)] * int(a < 1)
            for a in thresholds.values()
        ]
        for cell in itertools.product(*sides):
            coin_x = np.full(NODES - 1, 0.5)
            for name, (coin, _) in zip(thresholds, cell, strict=True):
                coin_x[index[name]] = coin
            places.append(b)
            coins.append(coin_x)
            chances.append(probability * np.prod([share for _, share in cell]))
        prefixes_of.append(prefixes)
    places = np.asarray(places)
    logits = np.stack([node_logits(world.unfiltered, prefixes, NODES) for prefixes in prefixes_of])
    whole = *jax.tree.map(np.asarray, padded(tree, proposal, NODES)), logits
    for at in range(0, len(places), BATCH):
        b_here, chances_here = places[at : at + BATCH], chances[at : at + BATCH]
        full = np.resize(np.arange(at, at + len(b_here)), BATCH)
        inputs = jax.tree.map(lambda x, b=places[full]: x[b], whole)
        last_b, following_bv = accepted(rule, *inputs, np.stack(coins)[full], world.top_p)
        walks = b_here, chances_here, np.asarray(last_b), np.asarray(following_bv)
        for b, chance, last, following in zip(*walks, strict=False):
            prefix = prefixes_of[b][last]
            totals[prefix] = totals.get(prefix, 0) + chance * following
    return totals


def assert_same_tree(seen: oracle.Tree, expected: oracle.Tree) -> None:
    assert seen.draws.keys() == expected.draws.keys()
    for node, draws in expected.draws.items():
        assert [token for token, _ in seen.draws[node]] == [token for token, _ in draws]
        for (_, q), (_, wanted) in zip(seen.draws[node], draws, strict=True):
            np.testing.assert_allclose(q, wanted, atol=1e-12 if q.dtype == np.float64 else 1e-6)
