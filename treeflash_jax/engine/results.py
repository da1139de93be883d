"""Results of generation, read from the state of a batch: answers with statistics, pieces of a stream, drawn trees."""

import reprlib
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from html import escape

import numpy as np

from treeflash_jax.core import sharding
from treeflash_jax.core.checks import whole
from treeflash_jax.core.clock import Clock
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.engine.batching import BatchDecoder, make_batch, round_capacity
from treeflash_jax.engine.requests import Request
from treeflash_jax.formats.tokenizer import Tokenizer

LOW_TAU, LOW_TAU_ROUNDS = 1.2, 50


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """An answer and its statistics.

    Attributes:
      text: the answer without special tokens, up to a stop string; None without a tokenizer.
      ids: generated token ids, the stop token included.
      builder: builder of the draft trees, as in GenerateConfig; "none" if nothing was drafted.
      accept_lengths: number of tokens that each round added to the answer: the accepted ones and the bonus token, which the
        verifier itself chooses after them. The first token comes from prefill and is not counted, so that
        `1 + sum(accept_lengths) == len(ids)`.
      cut: number of tokens that the last round accepted beyond the end of the answer (a stop or `max_new_tokens`).
        Published acceptance counts include them; `accept_lengths` and `tau` do not.
      finished: "stop" (a stop id or string), "length", or "interrupted" (Ctrl-C).
      seconds: decoding time of the call, prefill included, compilation excluded; from `generate_each`, until this answer.
      compile_seconds: time spent compiling until this answer.
      tokens_per_second: generated tokens of all answers of the call over `seconds`; from `generate_each` and `stream`,
        tokens of this answer.
      log_probs: log-probability of every generated token under the verifier (temperature 1, unprocessed); None unless
        requested.
      expected_lengths: expected number of tokens committed by each round, given its tree and before any cut; None unless
        requested.
    """

    text: str | None
    ids: list[int]
    prompt_ids: list[int]
    builder: str
    accept_lengths: list[int]
    finished: str
    seconds: float = 0.0
    compile_seconds: float = 0.0
    tokens_per_second: float = 0.0
    log_probs: list[float] | None = None
    expected_lengths: list[float] | None = None
    cut: int = 0
    draft_again: Callable[[int], "DrawnTree"] | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def unanswered(prompt_ids: list[int], *, has_text: bool) -> "Result":
        """Returns the result of a prompt that was not started before Ctrl-C: no tokens, marked "interrupted"."""
        text = "" if has_text else None
        return Result(text=text, ids=[], prompt_ids=prompt_ids, builder="none", accept_lengths=[], finished="interrupted")

    @property
    def tau(self) -> float:
        """Block efficiency: mean number of tokens that a round added to the answer, bonus included; 1 without rounds."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 1.0

    @property
    def accepted_before_cut(self) -> list[int]:
        """`accept_lengths` with the cut added to the last round, as in published code and in `expected_lengths`."""
        return [*self.accept_lengths[:-1], self.accept_lengths[-1] + self.cut] if self.accept_lengths else []

    def __repr__(self) -> str:
        """Formats the text first, and six numbers of every list."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.repr}
        values["tau"] = round(self.tau, 2)
        show = lambda value: reprlib.repr(value) if isinstance(value, list) else repr(value)  # noqa: E731
        shown = (f"{name}={show(value)}" for name, value in values.items() if value is not None or name == "text")
        return f"Result({', '.join(shown)})"

    def _repr_html_(self) -> str:
        """Formats the answer and a table of its statistics, for notebooks."""
        answer = self.text if self.text is not None else " ".join(map(str, self.ids))
        statistics = {"tokens": len(self.ids), "rounds": len(self.accept_lengths), "tau": f"{self.tau:.2f}"}
        statistics |= {"tokens/s": f"{self.tokens_per_second:.0f}", "builder": self.builder, "finished": self.finished}
        heads = "".join(f"<th>{escape(name)}</th>" for name in statistics)
        values = "".join(f"<td>{escape(str(value))}</td>" for value in statistics.values())
        return (
            f'<div><pre style="white-space: pre-wrap">{escape(answer)}</pre>'
            f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{values}</tr></tbody></table></div>"
        )

    def tree(self, round_index: int | None = None) -> "DrawnTree":
        """Drafts the tree of a round again, by default of the one that accepted most; `print` draws it.

        With steering, trees also depend on earlier rounds, which are not repeated: from the second round on, the tree may
        then differ from the one that was verified.

        Args:
          round_index: number of the round, from 0.

        Raises ValueError if there is none.
        """
        if self.builder == "none":
            raise ValueError("this answer was decoded one token at a time: it has no draft trees")
        if not self.accept_lengths:
            raise ValueError("this answer has no rounds: its only token came from the prefill")
        if self.draft_again is None:
            raise ValueError("this is a copy of a result, without the model that drafts; the original draws its trees")
        if round_index is None:
            round_index = max(range(len(self.accept_lengths)), key=self.accept_lengths.__getitem__)
        return self.draft_again(whole(round_index, "round", most=len(self.accept_lengths) - 1))


class _DraftAgain(partial):
    """Holds the model: a copy of a Result, or its pickle, has None instead."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Results(list[Result]):
    """A list of answers, displayed by notebooks."""

    def _repr_html_(self) -> str:
        return "".join(result._repr_html_() for result in self)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a streamed answer.

    Attributes:
      ids: token ids since the last chunk.
      text: text since the last chunk that later tokens cannot change.
      rounds: number of rounds so far.
    """

    ids: list[int]
    text: str
    rounds: int


@dataclass(frozen=True)
class Reader:
    """Reads Results from the state of a batch.

    Attributes:
      decoder: decoder of the batch.
      tokenizer: tokenizer of the verifier; results have no text without it.
    """

    decoder: BatchDecoder
    tokenizer: Tokenizer | None

    def read(self, slots: Sequence[int]) -> list[Result]:
        """Returns the answers so far in these slots of the batch. Raises ValueError for NaN logits."""
        state, clock, runner = self.decoder.state, self.decoder.clock, self.decoder.runner
        arrays = (state.tokens_bs, state.end_b, state.done_b, state.rounds_b, state.accepted_bs)
        arrays, optional = sharding.to_host((arrays, (state.log_probs_bs, state.expected_bs)))
        results = []
        for slot in slots:
            tokens_s, end, done, rounds, accepted_s = (array[slot] for array in arrays)
            log_probs, expected = (None if array is None else array[slot].tolist() for array in optional)
            request = self.decoder.slots.held[slot]
            ids, accepted = tokens_s[request.length : end].tolist(), accepted_s[:rounds].tolist()
            self._check(ids)
            is_stopped = done and ids[-1] in request.stop_ids
            ids, text, accepted, has_stop = self._until_stop(request, ids, accepted)
            finished = "interrupted" if not done and self.decoder.is_interrupted else "length"
            cut = 1 + sum(accepted) - len(ids) if accepted else 0
            drafted = runner, self.tokenizer, request, ids, accepted
            result = Result(
                text=text,
                ids=ids,
                prompt_ids=request.ids,
                builder=runner.plan.builder,
                accept_lengths=[*accepted[:-1], accepted[-1] - cut] if accepted else [],
                finished="stop" if is_stopped or has_stop else finished,
                seconds=clock.seconds,
                compile_seconds=clock.compile_seconds,
                tokens_per_second=len(ids) / max(clock.seconds, 1e-9),
                log_probs=log_probs and log_probs[request.length :][: len(ids)],
                expected_lengths=expected and expected[: len(accepted)],
                cut=cut,
                draft_again=_DraftAgain(draw_tree, *drafted) if runner.plan.drafts else None,
            )
            results.append(result)
        return results

    def _check(self, ids: list[int]) -> None:
        """Raises ValueError for an id outside the vocabulary, which means that no logit was above -inf."""
        outside = [index for index, id in enumerate(ids) if id >= self.decoder.runner.plan.verifier.vocab_size]
        if outside:
            raise ValueError(
                f"got NaN as logits of token {outside[0]} of an answer, expected numbers: weights are damaged, or "
                "activations leave the range of the dtype; try dtype 'float32'"
            )

    def has_stop(self, request: Request, ids: list[int]) -> bool:
        """Returns True if the text of tokens contains a stop string of their request."""
        text = (self._text(ids) or "") if request.settings.stop else ""
        return any(stop in text for stop in request.settings.stop)

    def certain(self, request: Request, text: str) -> str:
        """Removes the end of a growing text that may still change: half a character, or the start of a stop string."""
        starts = [size for stop in request.settings.stop for size in range(1, len(stop)) if text.endswith(stop[:size])]
        return text[: min(len(text.rstrip("\ufffd")), len(text) - max(starts, default=0))]

    def _until_stop(
        self, request: Request, ids: list[int], accepted: list[int]
    ) -> tuple[list[int], str | None, list[int], bool]:
        """Cuts tokens, text and accept lengths at the first stop string; the last value is true if there is one."""
        if not self.has_stop(request, ids):
            return ids, self._text(ids), accepted, False
        ids = ids[: bisect_left(range(len(ids)), True, key=lambda count: self.has_stop(request, ids[:count]))]
        while accepted and 1 + sum(accepted[:-1]) >= len(ids):
            accepted = accepted[:-1]
        text = self._text(ids)  # with later tokens, it might contain another stop string, before this one
        return ids, text[: min(text.index(stop) for stop in request.settings.stop if stop in text)], accepted, True

    def _text(self, ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(ids)


def draw_tree(
    runner: Runner, tokenizer: Tokenizer | None, request: Request, ids: list[int], accepted: list[int], round_index: int
) -> "DrawnTree":
    """Drafts the tree of a round of an answer again, and marks the path that was accepted in it."""
    start = 1 + sum(accepted[:round_index])
    *before, anchor = request.ids + ids[:start]
    runner = replace(runner, clock=Clock())
    sizes = {"batch_size": 1, "capacity": round_capacity(len(before) + runner.plan.path_length + 1)}
    batch = make_batch([replace(request, ids=before)], **sizes, dtype=runner.weights.dtype, mesh=runner.mesh)
    tree = runner.draft(batch, len(before), anchor)
    tokens, parents, log_probs, valid = (
        np.asarray(x)[0] for x in (tree.tokens_bn, tree.parent_bn, tree.log_prob_bn, tree.valid_bn)
    )
    count, path = int(valid.sum()), [0]
    *drafted, bonus = [*ids[start:], None][: accepted[round_index]]  # None: the answer was cut within the round
    for token in drafted:
        path += [n for n in range(1, count) if parents[n] == path[-1] and tokens[n] == token]

    def label(token: int) -> str:
        return str(token) if tokenizer is None else repr(tokenizer.inner.decode([token]))

    return DrawnTree(
        labels=[label(int(token)) for token in tokens[:count]],
        parents=parents[:count].tolist(),
        probabilities=np.exp(log_probs[:count]).tolist(),
        accepted=[node in path for node in range(count)],
        bonus="the cut" if bonus is None else f"bonus {label(bonus)}",
    )


def with_totals(results: Sequence[Result]) -> list[Result]:
    """Replaces times and speed of single answers by those of the whole call."""
    totals = {name: max(getattr(result, name) for result in results) for name in ("seconds", "compile_seconds")}
    speed = sum(len(result.ids) for result in results) / max(totals["seconds"], 1e-9)
    return [replace(result, **totals, tokens_per_second=speed) for result in results]


def warn_of_low_tau(results: Sequence[Result]) -> None:
    """Warns if drafted rounds commit so few tokens that the drafter may belong to another verifier."""
    rounds = [length for result in results for length in result.accepted_before_cut]
    tau = sum(rounds) / len(rounds) if rounds else 1.0
    if len(rounds) >= LOW_TAU_ROUNDS and tau < LOW_TAU:
        warnings.warn(
            f"tau is {tau:.2f} over {len(rounds)} rounds, expected above {LOW_TAU}: a drafter that was trained for another "
            "verifier, revision or prompt format looks like this",
            stacklevel=3,
        )


@dataclass(frozen=True, kw_only=True)
class DrawnTree:
    """A draft tree as text.

    Attributes:
      labels: text of each node's token, the anchor first.
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
            lines.append(escape(indent) + (f'<b style="color: #1a7f37">{label}</b>' if self.accepted[node] else label))
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
