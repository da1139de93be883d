"""Results of generation: answers with statistics, and pieces of a stream."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from typing import Literal

from treeflash_jax.core.checks import integer
from treeflash_jax.core.error_text import logger
from treeflash_jax.engine.answers.drawn_trees import DraftAgain, DrawnTree

Finished = Literal["stop", "length", "blocked", "interrupted"]
LOW_TAU, LOW_TAU_ROUNDS = 1.2, 50
LOW_TAU_QUESTION = "was the drafter trained for another verifier, revision or prompt format?"


@dataclass(frozen=True, kw_only=True)
class Score:
    """Log-probabilities of the tokens of a prompt under the verifier (temperature 1, unprocessed).

    Attributes:
      ids: token ids of the prompt.
      log_probs: log-probability of every token after those before it; None for the first.
      top_log_probs: the likeliest tokens in the place of every token, as pairs of id and log-probability by decreasing
        probability; None for the first. None altogether unless requested.
    """

    ids: list[int]
    log_probs: list[float | None]
    top_log_probs: list[list[tuple[int, float]] | None] | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """An answer and its statistics.

    Attributes:
      text: the answer without special tokens, up to a stop string. It continues the prompt's text, so a space before its
        first word stays. Empty without a tokenizer.
      ids: generated token ids, the stop token included.
      builder: builder of the draft trees, as in GenerateConfig; "none" if nothing was drafted.
      accept_lengths: number of tokens that each round added to the answer: the accepted ones, and the bonus token that the
        verifier chooses after them. The first token comes from prefill and is not counted, so that
        `1 + sum(accept_lengths) == len(ids)`.
      cut: number of tokens that the last round accepted beyond the end of the answer (a stop or `max_new_tokens`).
        Published acceptance counts include them; `accept_lengths` and `tau` do not.
      finished: "stop" (a stop id or string), "length" (the limit; also of an unfinished answer in pieces of a stream),
        "blocked" (a processor allowed no token), or "interrupted" (Ctrl-C).
      seconds: decoding time of the call, prefill included, `compile_seconds` excluded. With `generate_each`, the time ends
        with this answer.
      compile_seconds: time until this answer that was spent on compiling, and on first runs of new programs without data.
      tokens_per_second: generated tokens of all answers of the call, divided by `seconds`. With `generate_each` and
        `stream`, only the tokens of this answer count.
      log_probs: log-probability of every generated token under the verifier (temperature 1, unprocessed); None unless
        requested.
      top_log_probs: the likeliest tokens in the place of every generated token, as pairs of id and log-probability by
        decreasing probability; None unless requested.
      expected_lengths: expected number of tokens committed by each round, given its tree and before any cut; None unless
        requested.
      prompt_score: log-probabilities of the prompt's tokens; None unless requested.
      reused: number of prompt tokens whose caches an earlier answer had left (`Session`, or a server).
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    builder: str
    accept_lengths: list[int]
    finished: Finished
    seconds: float = 0.0
    compile_seconds: float = 0.0
    tokens_per_second: float = 0.0
    log_probs: list[float] | None = None
    top_log_probs: list[list[tuple[int, float]]] | None = None
    prompt_score: Score | None = None
    expected_lengths: list[float] | None = None
    cut: int = 0
    reused: int = 0
    draft_again: DraftAgain | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def unanswered(prompt_ids: list[int]) -> "Result":
        """Returns the result of a prompt that was not started before Ctrl-C: no tokens, marked "interrupted"."""
        return Result(text="", ids=[], prompt_ids=prompt_ids, builder="none", accept_lengths=[], finished="interrupted")

    @property
    def tau(self) -> float:
        """Block efficiency: mean number of tokens that a round added to the answer, bonus included; 1 without rounds."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 1.0

    @property
    def accepted_before_cut(self) -> list[int]:
        """`accept_lengths` with the cut added to the last round, as in published code and in `expected_lengths`."""
        return [*self.accept_lengths[:-1], self.accept_lengths[-1] + self.cut] if self.accept_lengths else []

    def __repr__(self) -> str:
        """Formats the text first. Long lists are shortened."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.repr}
        values["tau"] = round(self.tau, 2)

        def show(value: object) -> str:
            return reprlib.repr(value) if isinstance(value, list) else repr(value)

        shown = (f"{name}={show(value)}" for name, value in values.items() if value is not None)
        return f"Result({', '.join(shown)})"

    def _repr_html_(self) -> str:
        """Formats the answer and a table of its statistics, for notebooks."""
        answer = self.text or " ".join(map(str, self.ids))
        statistics = {"tokens": len(self.ids), "rounds": len(self.accept_lengths), "tau": f"{self.tau:.2f}"}
        statistics |= {"tokens/s": f"{self.tokens_per_second:.0f}", "builder": self.builder, "finished": self.finished}
        heads = "".join(f"<th>{escape(name)}</th>" for name in statistics)
        values = "".join(f"<td>{escape(str(value))}</td>" for value in statistics.values())
        return (
            f'<div><pre style="white-space: pre-wrap">{escape(answer)}</pre>'
            f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{values}</tr></tbody></table></div>"
        )

    def tree(self, round_index: int | None = None) -> DrawnTree:
        """Drafts the tree of a round again; `print` draws it.

        A steered drafter no longer has the shifts of earlier rounds, so its tree may differ from the one that was verified.

        Args:
          round_index: number of the round, from 0; None: the round that accepted most tokens.

        Raises ValueError if there is no such round, or if the model that drafted the tree is gone.
        """
        if self.builder == "none":
            raise ValueError("this answer was decoded one token at a time: it has no draft trees")
        if not self.accept_lengths:
            raise ValueError("this answer has no rounds: its only token came from the prefill")
        if self.draft_again is None:
            raise ValueError("this is a copy of a result, without the model that drafts; the original draws its trees")
        if round_index is None:
            round_index = max(range(len(self.accept_lengths)), key=self.accept_lengths.__getitem__)
        round_index = integer(round_index, "round", most=len(self.accept_lengths) - 1)
        return self.draft_again(self.ids, self.accepted_before_cut, round_index)


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


def with_totals(results: Sequence[Result]) -> list[Result]:
    """Replaces the times and the speed of each answer by those of the whole call."""
    totals = {name: max(getattr(result, name) for result in results) for name in ("seconds", "compile_seconds")}
    speed = sum(len(result.ids) for result in results) / max(totals["seconds"], 1e-9)
    return [replace(result, **totals, tokens_per_second=speed) for result in results]


def warn_of_low_tau(results: Sequence[Result]) -> None:
    """Warns if drafted rounds commit so few tokens that the drafter may belong to another verifier."""
    rounds = [length for result in results for length in result.accepted_before_cut]
    tau = sum(rounds) / len(rounds) if rounds else 1.0
    if len(rounds) >= LOW_TAU_ROUNDS and tau < LOW_TAU:
        logger.warning(f"tau is {tau:.2f} over {len(rounds)} rounds, expected above {LOW_TAU}: {LOW_TAU_QUESTION}")
