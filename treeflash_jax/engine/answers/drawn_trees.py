"""Draft trees of an answer, drafted again and drawn as text.

Shape suffixes: b batch, n tree nodes, s token slots.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from treeflash_jax.core import sharding
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import Weights
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.batching import make_batch
from treeflash_jax.engine.schedule.prefill import Prefill
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.schedule.scheduler import Scheduler
from treeflash_jax.formats.answer_text import REPLACEMENT_CHARACTER, AnswerText
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import DraftTree


class AnsweringModel(Protocol):
    """The attributes of a `TreeFlash` that its answers read; `TreeFlash` describes them."""

    verifier: ModelConfig
    weights: Weights
    tokenizer: Tokenizer | None
    mesh: Mesh | None


class DraftAgain:
    """Drafts trees of an answer again. Holds the model weakly; copies and pickles become None.

    Arrays have the sizes that the answer's scheduler used. All trees of the answer then share one program, and a scheduler
    of a single prompt has already compiled the program that reads it.
    """

    def __init__(self, model: AnsweringModel, scheduler: Scheduler, request: Request):
        runner = scheduler.runner
        self._model = weakref.ref(model)
        self._request = request
        self._plan = runner.plan
        self._can_cut = runner.can_cut
        self._tree_selector = runner.weights.tree_selector
        self._sizes = scheduler.sizes
        self._capacity = scheduler.state.capacity

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __call__(self, ids: list[int], accepted: list[int], round_index: int) -> "DrawnTree":
        """Drafts the tree of a round, and marks the path that was accepted in it.

        Args:
          ids: tokens of the answer.
          accepted: number of tokens that each round accepted.

        Raises ValueError if the model is gone.
        """
        model = self._model()
        if model is None:
            raise ValueError("the model that drafted this answer is gone; keep it in a variable to draw trees")
        start = 1 + sum(accepted[:round_index])  # after the anchor
        tree = self._draft(model, ids[:start], accepted[:round_index])
        committed = ids[start : start + accepted[round_index]]
        is_cut = len(committed) < accepted[round_index]  # the answer ends within the round
        drafted = committed if is_cut else committed[:-1]
        bonus = None if is_cut else committed[-1]
        return _draw(tree, self._request.ids + ids[: start - 1], drafted, bonus, model.tokenizer)

    def _draft(self, model: AnsweringModel, ids: list[int], accepted: list[int]) -> DraftTree:
        """Returns the draft tree whose root is the last of an answer's first tokens, `ids`.

        Args:
          accepted: number of tokens that each earlier round accepted.
        """
        plan, mesh = self._plan, model.mesh
        request = replace(self._request, ids=self._request.ids + ids[:-1])
        weights = model.weights.replace(tree_selector=self._tree_selector)
        runner = Runner(plan, weights, mesh, can_cut=self._can_cut)
        batch = make_batch([request], self._sizes, capacity=self._capacity, dtype=weights.dtype, mesh=mesh)

        def fill(value: int) -> jax.Array:
            return sharding.place(jnp.full(batch.length_b.shape, value, jnp.int32), mesh)

        if plan.configured_drafter.reads_tokens:  # the drafter must read the anchor, too
            state = Prefill(runner, batch, first_b=fill(ids[-1])).read_all()
        else:  # uses the program that reads any prompt
            state = Prefill(runner, batch).read_all()
            state = state.replace(tokens_bs=state.tokens_bs.at[0, len(request.ids)].set(ids[-1]))
        if plan.shape.selector is not None:
            accepted_bs = state.accepted_bs.at[:, : len(accepted)].set(jnp.asarray(accepted, jnp.int32))
            state = state.replace(accepted_bs=accepted_bs, rounds_b=state.rounds_b + len(accepted))
        if request.automaton is not None:  # prefill begins with the state of an empty answer
            state = state.replace(automaton_b=fill(request.automaton.follow(ids)))
        return runner.call(loops.draft, weights, state, plan=plan)


def _draw(
    tree: DraftTree, before: list[int], drafted: Sequence[int], bonus: int | None, tokenizer: Tokenizer | None
) -> "DrawnTree":
    """Returns the first tree of a batch as text.

    Args:
      before: tokens of prompt and answer before the tree.
      drafted: accepted tokens below the root.
      bonus: the token after them; None if the answer was cut before it.
    """
    count = int(np.asarray(tree.valid_bn)[0].sum())
    tokens = np.asarray(tree.tokens_bn)[0, :count]
    parents = np.asarray(tree.parent_bn)[0, :count]
    log_probs = np.asarray(tree.log_prob_bn)[0, :count]
    path = [0]
    for token in drafted:
        path += [node for node in range(1, count) if parents[node] == path[-1] and tokens[node] == token]

    def tokens_before(node: int) -> list[int]:
        above = []
        while node > 0:
            node = parents[node]
            above.append(int(tokens[node]))
        return before + above[::-1]

    if bonus is None:
        end = "the cut"
    else:
        end = f"bonus {_read_token(tokenizer, [*before, int(tokens[0]), *drafted], bonus)}"
    return DrawnTree(
        labels=[_read_token(tokenizer, tokens_before(node), int(tokens[node])) for node in range(count)],
        parents=parents.tolist(),
        probabilities=np.exp(log_probs).tolist(),
        accepted=[node in path for node in range(count)],
        bonus=end,
    )


def _read_token(tokenizer: Tokenizer | None, before: list[int], token: int) -> str:
    """Returns the text that a token adds to the tokens before it, or its bytes if it is only a part of a character."""
    if tokenizer is None:
        return str(token)
    text, data = AnswerText(tokenizer, before).next_token(token)
    return repr(data if data and text.endswith(REPLACEMENT_CHARACTER) else text)


@dataclass(frozen=True, kw_only=True)
class DrawnTree:
    """A draft tree as text.

    Attributes:
      labels: text that each node's token adds to its parent's, or bytes if it is only a part of a character; the anchor
        comes first.
      parents: index of each node's parent; 0 for the anchor.
      probabilities: drafted probability of the path from the anchor to each node.
    """

    labels: Sequence[str]
    parents: Sequence[int]
    probabilities: Sequence[float]
    accepted: Sequence[bool]
    bonus: str

    def __str__(self) -> str:
        return "\n".join(f"{indent}{self._label(node)}" for node, indent in self._lines())

    def _repr_html_(self) -> str:
        """Formats the same text for notebooks, with accepted nodes in green."""
        lines = []
        for node, indent in self._lines():
            label = escape(self._label(node))
            if self.accepted[node]:
                label = f'<b style="color: #1a7f37">{label}</b>'
            lines.append(escape(indent) + label)
        return '<pre style="line-height: 1.2">' + "\n".join(lines) + "</pre>"

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yields the nodes from top to bottom, each with the branches drawn before it."""
        children: dict[int, list[int]] = {}
        for node in range(1, len(self.labels)):
            children.setdefault(self.parents[node], []).append(node)

        def below(node: int, indent: str) -> Iterator[tuple[int, str]]:
            for child in children.get(node, []):
                last = child == children[node][-1]
                yield child, indent + ("└─" if last else "├─")
                yield from below(child, indent + ("   " if last else "│  "))

        yield 0, ""
        yield from below(0, "")

    def _label(self, node: int) -> str:
        if node == 0:
            return f"{self.labels[0]}   (anchor; {len(self.labels)} nodes, accepted nodes marked ●, then {self.bonus})"
        return f"{'●' if self.accepted[node] else ' '} {self.labels[node]}  {self.probabilities[node]:.2f}"
