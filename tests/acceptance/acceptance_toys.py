"""Toy verifiers and drafters over few tokens, and trees drawn from their nodes as the definitions of the builders say."""

import itertools
from dataclasses import dataclass

import draft_trees
import numpy as np
from acceptance_oracle import Distribution, Prefix, Run, Tree, normalised


@dataclass
class Context:
    """Children of a prefix, likeliest first: tokens, log-probabilities, and which of them have a node of their own."""

    tokens: list[int]
    log_probs: np.ndarray
    continues: list[bool]


@dataclass
class Drafter:
    contexts: dict[Prefix, Context]
    vocabulary: int

    def distribution(self, node: Prefix | None, goes_on: bool, without: tuple[int, ...] = ()) -> np.ndarray | None:
        """q after a prefix: the node over tokens that go on if the tree does; None if nothing can be drawn."""
        context = self.contexts.get(node)
        if context is None:
            return None
        free = [i for i, t in enumerate(context.tokens) if np.isfinite(context.log_probs[i]) and t not in without]
        onward = [i for i in free if context.continues[i]]
        admitted = onward if goes_on and onward else free
        distribution = np.zeros(self.vocabulary)
        for i in admitted:
            distribution[context.tokens[i]] = np.exp(context.log_probs[i])
        return distribution / distribution.sum() if admitted else None


def draw(tree: Tree, run: Run, at: list[Prefix | None], above: int, distribution: np.ndarray | None, kind: str) -> None:
    """Draws the next place below the place `above`, and appends its prefix to the list; None: no node."""
    if distribution is None:
        at.append(None)
        return
    token = run.choose(distribution)
    tree.places.append((above, len(at), token, kind))
    at.append(tree.add(at[above], token, distribution))


def draft_paths(drafter: Drafter, run: Run, num_nodes: int, branches: int, depths: int, trunk: int = 0) -> Tree:
    tree, at, lanes = Tree(), [()], [0]
    levels = min(trunk + (num_nodes - 1 - trunk) // branches, depths)
    for level in range(levels):
        if level == trunk:
            lanes = lanes * branches
        for lane, above in enumerate(lanes):
            draw(tree, run, at, above, drafter.distribution(at[above], goes_on=level < levels - 1), "own")
            lanes[lane] = len(at) - 1
    return tree


def draft_without_replacement(drafter: Drafter, run: Run, parents: list[int]) -> Tree:
    """`parents` of places 1, 2, ...; siblings in the order of their places."""
    tree, at = Tree(), [()]
    children = {place: [i + 1 for i, above in enumerate(parents) if above == place] for place in range(len(parents) + 1)}
    for above in parents:
        distribution = drafter.distribution(at[above], goes_on=any(children[child] for child in children[above]))
        if distribution is not None:
            distribution[[earlier for earlier, _ in tree.draws.get(at[above], [])]] = 0
            distribution = normalised(distribution) if distribution.any() else None
        draw(tree, run, at, above, distribution, "shared")
    return tree


def best_first(drafter: Drafter, count: int) -> dict[Prefix, float]:
    """The root and the `count` likeliest other prefixes with their probabilities, in decreasing order."""

    def children(node: Prefix):
        context = drafter.contexts.get(node)
        return zip(context.tokens, context.log_probs, strict=True) if context else ()

    return {node: np.exp(score) for node, score in draft_trees.best_first(children, count + 1).items()}


def draft_skeleton(drafter: Drafter, run: Run, num_nodes: int, skeleton: float, depths: int, reach: float = 0.6) -> Tree:
    fixed = round(skeleton * (num_nodes - 1))
    kept = best_first(drafter, fixed)
    places = {node: place for place, node in enumerate(kept)}
    children = {node: [other for other in kept if other and other[:-1] == node] for node in kept}
    scores = []
    for node, mass in kept.items():
        spare = mass - sum(kept[child] for child in children[node])
        if node in drafter.contexts and len(children[node]) < len(drafter.contexts[node].tokens):
            scores += [(-spare * reach**j, j, places[node], node) for j in range(depths - len(node)) if spare > 1e-12]
    chosen = sorted(scores)[: num_nodes - 1 - fixed]
    length = {node: sum(other == node for *_, other in chosen) for node in kept}
    tree, at = Tree(), [*kept, *[None] * (fixed + 1 - len(kept))]
    for _, j, _, start in chosen:
        without = tuple(child[-1] for child in children[start]) if j == 0 else ()
        distribution = drafter.distribution(at[places[start]], j + 1 < length[start], without)
        draw(tree, run, at, places[start], distribution, "shared")
        places[start] = len(at) - 1  # the end of the chain
    for node in kept:
        if node:
            tree.add(node[:-1], node[-1], np.eye(drafter.vocabulary)[node[-1]])
    return tree


def random_verifier(seed: int, vocabulary: int, depth: int, scale: float = 1.5) -> Distribution:
    rng = np.random.default_rng(seed)
    contexts = {
        node: normalised(np.exp(scale * rng.normal(size=vocabulary)))
        for length in range(depth + 1)
        for node in itertools.product(range(vocabulary), repeat=length)
    }
    return contexts.__getitem__


def random_drafter(seed: int, p: Distribution, vocabulary: int, depths: int, children: int, *, ends=0.2) -> Drafter:
    """Nodes near p, truncated to `children` tokens, some of them without a node of their own."""
    rng = np.random.default_rng([seed, 1])
    contexts: dict[Prefix, Context] = {}
    nodes: list[Prefix] = [()]
    for node in nodes:  # level by level
        q = normalised(p(node) * np.exp(rng.normal(size=vocabulary)))
        tokens = np.argsort(-q, kind="stable")[:children].tolist()
        goes_on = [bool(len(node) + 1 < depths and rng.random() > ends) for _ in tokens]
        contexts[node] = Context(tokens, np.log(q[tokens]), goes_on)
        nodes += sorted((*node, token) for token, goes in zip(tokens, goes_on, strict=True) if goes)
    return Drafter(contexts, vocabulary)
