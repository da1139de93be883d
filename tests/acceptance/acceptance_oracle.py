"""Acceptance rules in NumPy, written from their definitions, with every draw and every coin enumerated.

Distributions are vectors over the whole vocabulary and residuals are formed in full: there are no supports, scalars or
arrays of nodes. A prefix (a tuple of tokens) names a node. Randomness goes through `choose` and `coin`, which `outcomes`
replays until every possible run was seen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

Prefix = tuple[int, ...]
Distribution = Callable[[Prefix], np.ndarray]


class Run:
    """One run: choices made so far are replayed, the next one is the first possible, the others are noted."""

    def __init__(self, prefix: tuple[int, ...], todo: list[tuple[int, ...]]):
        self.prefix, self.todo = prefix, todo
        self.trail: list[int] = []
        self.probability = 1.0
        self.intervals: dict = {}
        self.thresholds: dict = {}

    def choose(self, distribution) -> int:
        distribution = np.asarray(distribution, float)
        at = len(self.trail)
        if at < len(self.prefix):
            chosen = self.prefix[at]
        else:
            possible = np.flatnonzero(distribution > 0)
            chosen = int(possible[0])
            self.todo.extend((*self.trail, int(other)) for other in possible[1:])
        self.trail.append(chosen)
        self.probability *= distribution[chosen]
        return chosen

    def coin(self, name, threshold: float) -> bool:
        """Returns True if the uniform `name` is below the threshold. Equal names share a uniform."""
        self.thresholds[name] = threshold
        low, high = self.intervals.get(name, (0.0, 1.0))
        share = min(max((threshold - low) / (high - low), 0.0), 1.0)
        below = self.choose([share, 1 - share]) == 0
        cut = min(max(threshold, low), high)
        self.intervals[name] = (low, cut) if below else (cut, high)
        return below


def outcomes(run: Callable[[Run], object]) -> Iterator[tuple[Run, object]]:
    """Every run of positive probability, with its result."""
    todo: list[tuple[int, ...]] = [()]
    while todo:
        answer = Run(todo.pop(), todo)
        result = run(answer)
        yield answer, result


@dataclass
class Tree:
    """A drafted tree: the draws at every node in the order of their tests, each with the distribution it had.

    `places` names the draws, so that the library's can be forced: (place of the parent, place, token, kind).
    """

    draws: dict[Prefix, list[tuple[int, np.ndarray]]] = field(default_factory=dict)
    places: list[tuple[int, int, int, str]] = field(default_factory=list)

    def add(self, node: Prefix, token: int, distribution: np.ndarray) -> Prefix:
        self.draws.setdefault(node, []).append((int(token), np.asarray(distribution, float)))
        return (*node, int(token))

    @property
    def nodes(self) -> set[Prefix]:
        return {()} | {(*node, token) for node, draws in self.draws.items() for token, _ in draws}


# Rules: (tree, p, coin) -> (last accepted node, distribution of the token after it).


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def normalised(x: np.ndarray) -> np.ndarray:
    return x / x.sum()


def sample_and_match(tree: Tree, p: Distribution, run: Run):
    node: Prefix = ()
    while True:
        children = {token for token, _ in tree.draws.get(node, [])}
        token = run.choose(p(node))
        if token not in children:
            return node, np.eye(len(p(node)))[token]
        node = (*node, token)


def rejection(tree: Tree, p: Distribution, run: Run):
    node: Prefix = ()
    while node in tree.draws:
        [(token, q)] = tree.draws[node]
        if not run.coin((node, 0), min(1, p(node)[token] / q[token])):
            return node, normalised(relu(p(node) - q))
        node = (*node, token)
    return node, p(node)


def recursive(tree: Tree, p: Distribution, run: Run):
    node: Prefix = ()
    while True:
        r = p(node)
        for j, (token, q) in enumerate(tree.draws.get(node, [])):
            if run.coin((node, j), min(1, r[token] / q[token])):
                node = (*node, token)
                break
            r = normalised(relu(r - q))
        else:
            return node, r


def naive_tree(tree: Tree, p: Distribution, run: Run):
    """Tests child by child whether it is the token y ~ [p - q]+."""
    node: Prefix = ()
    while True:
        r = p(node)
        for j, (token, q) in enumerate(tree.draws.get(node, [])):
            if run.coin((node, j), min(1, r[token] / (q[token] if j == 0 else 1))):
                node = (*node, token)
                break
            r = normalised(relu(r - q) if j == 0 else np.where(np.arange(len(r)) == token, 0, r))
        else:
            return node, r


def k_sequential(tree: Tree, p: Distribution, run: Run):
    node: Prefix = ()
    while True:
        draws, here = tree.draws.get(node, []), p(node)
        if not draws:
            return node, here
        k, q = len(draws), draws[0][1]
        low, high = 1.0, float(k)
        for _ in range(60):
            rho = (low + high) / 2
            beta = np.minimum(here / rho, q).sum()
            low, high = (rho, high) if 1 - (1 - beta) ** k > rho * beta else (low, rho)
        used = np.minimum(here / high, q)
        beta = used.sum()
        for j, (token, _) in enumerate(draws):
            if run.coin((node, j), min(1, here[token] / (high * q[token]))):
                node = (*node, token)
                break
        else:
            return node, normalised(relu(here - used * (1 - (1 - beta) ** k) / beta))


def verify_block(path: Prefix, distributions: list[np.ndarray], p: Distribution, run: Run, *, stops_early: bool = False):
    """Block verification of a path whose i-th token has distribution distributions[i]."""
    w = [1.0]
    for i, token in enumerate(path):
        w.append(min(1.0, w[-1] * p(path[:i])[token] / distributions[i][token]))
    h = [1.0]
    for i in range(1, len(path)):
        left = relu(w[i] * p(path[:i]) - distributions[i]).sum()
        h.append(1.0 if w[i] >= 1 else left / (left + 1 - w[i]))
    h.append(w[-1])
    kept = 0
    if stops_early:  # the broken control
        while kept < len(path) and run.coin(path[: kept + 1], h[kept + 1]):
            kept += 1
    else:
        kept = next((i for i in range(len(path), 0, -1) if run.coin(path[:i], h[i])), 0)
    if kept == len(path):
        return path, p(path)
    return path[:kept], normalised(relu(w[kept] * p(path[:kept]) - distributions[kept]))


def only_path(tree: Tree) -> tuple[Prefix, list[np.ndarray]]:
    node, distributions = (), []
    while node in tree.draws:
        [(token, distribution)] = tree.draws[node]
        distributions.append(distribution)
        node = (*node, token)
    return node, distributions


def block(tree: Tree, p: Distribution, run: Run, **control):
    return verify_block(*only_path(tree), p, run, **control)


def multi_path_block(tree: Tree, p: Distribution, run: Run, *, plain: bool = False):
    paths = len(tree.draws.get((), []))
    node, distributions, before, mass = (), [], 0.0, 1.0
    while node in tree.draws:
        q = tree.draws[node][0][1]
        ratio = np.where(q > 0, p(node) / np.where(q > 0, q, 1), np.inf)
        order = np.argsort(ratio, kind="stable")
        place = np.argsort(order)
        below = np.array([q[order[: place[x]]].sum() for x in range(len(q))])
        y, z = mass * below, mass * q
        distribution = ((before + y + z) ** paths - (before + y) ** paths) / ((before + mass) ** paths - before**paths)
        token = max((token for token, _ in tree.draws[node]), key=lambda x: place[x])
        distributions.append(q if plain else distribution)
        before, mass, node = before + y[token], mass * q[token], (*node, token)
    return verify_block(node, distributions, p, run)


def traversal(tree: Tree, p: Distribution, run: Run):
    weight: dict[Prefix, float] = {(): 1.0}
    residual: dict[Prefix, np.ndarray] = {(): p(())}

    def visit(node: Prefix):
        for token, q in tree.draws.get(node, []):
            child = (*node, token)
            if child not in weight:  # a duplicate is tested again, and has nothing left
                weight[child] = min(1.0, weight[node] * residual[node][token] / q[token])
                residual[child] = p(child)
                if got := visit(child):
                    return got
            left = relu(weight[node] * residual[node] - q)
            mass = left.sum()
            lost = 1 - weight[node]
            residual[node] = left / mass if mass > 0 else p(node)
            weight[node] = mass / (mass + lost) if mass + lost > 0 else 1.0
        return (node, residual[node]) if node == () or run.coin(node, weight[node]) else None

    return visit(())


EVERY = sample_and_match, rejection, recursive, naive_tree, k_sequential, block, traversal, multi_path_block
RULES = {rule.__name__.replace("_", "-"): rule for rule in EVERY}


def reach_probabilities(rule: Callable, tree: Tree, p: Distribution) -> dict[Prefix, float]:
    """P(the accepted path passes each node)."""
    passed = dict.fromkeys(tree.nodes, 0.0)
    for run, (last, _) in outcomes(lambda run: rule(tree, p, run)):
        for depth in range(len(last) + 1):
            passed[last[:depth]] += run.probability
    return passed


# Losslessness: the distribution of the first tokens, the verifier finishing what a round left open.


def continuations(p: Distribution, node: Prefix, tokens: int) -> np.ndarray:
    """P(next `tokens` tokens | node), one axis a token."""
    if tokens == 0:
        return np.ones(())
    distribution = p(node)
    return np.stack([distribution[x] * continuations(p, (*node, x), tokens - 1) for x in range(len(distribution))])


def finished(totals: dict[Prefix, np.ndarray], p: Distribution, vocabulary: int, tokens: int) -> np.ndarray:
    """The distribution of the first tokens, given P(last node, token after it) of a round; p draws the others."""
    distribution = np.zeros((vocabulary,) * tokens)
    for last, following in totals.items():
        for token in np.flatnonzero(following):
            out = (*last, int(token))
            distribution[out] += following[token] * continuations(p, out, tokens - len(out))
    return distribution


def distribution_for(
    draft: Callable[[Run], Tree], rule: Callable, p: Distribution, vocabulary: int, tokens: int
) -> np.ndarray:
    """The distribution of the first tokens, every draft and every coin enumerated."""
    totals: dict[Prefix, np.ndarray] = {}
    for drafted, tree in outcomes(draft):
        for run, (last, following) in outcomes(lambda run, tree=tree: rule(tree, p, run)):
            totals[last] = totals.get(last, 0) + drafted.probability * run.probability * following
    return finished(totals, p, vocabulary, tokens)
