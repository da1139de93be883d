"""Results of generation, read from the state of a batch: answers with statistics, and pieces of a stream."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from typing import Any

import jax
import numpy as np

from treeflash_jax.core import sharding
from treeflash_jax.core.checks import warn, whole
from treeflash_jax.decoding.processors import processor_name
from treeflash_jax.decoding.state import LogProbs
from treeflash_jax.engine.answers.drawn_trees import DraftAgain, DrawnTree
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.scheduler import Scheduler
from treeflash_jax.formats.answer_text import AnswerText

LOW_TAU, LOW_TAU_ROUNDS = 1.2, 50
DAMAGED = "weights are damaged, or activations leave the range of the dtype; try dtype 'float32'"


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
      text: the answer without special tokens, up to a stop string, as it follows the prompt's text (a space before its
        first word stays); empty without a tokenizer.
      ids: generated token ids, the stop token included.
      builder: builder of the draft trees, as in GenerateConfig; "none" if nothing was drafted.
      accept_lengths: number of tokens that each round added to the answer: the accepted ones and the bonus token, which the
        verifier itself chooses after them. The first token comes from prefill and is not counted, so that
        `1 + sum(accept_lengths) == len(ids)`.
      cut: number of tokens that the last round accepted beyond the end of the answer (a stop or `max_new_tokens`).
        Published acceptance counts include them; `accept_lengths` and `tau` do not.
      finished: "stop" (a stop id or string), "length" (the limit; also of an unfinished answer in pieces of a stream),
        "blocked" (a processor allowed no token), or "interrupted" (Ctrl-C).
      seconds: decoding time of the call, prefill included, `compile_seconds` excluded; from `generate_each`, until this
        answer.
      compile_seconds: time spent compiling, and running new programs once on nothing, until this answer.
      tokens_per_second: generated tokens of all answers of the call over `seconds`; from `generate_each` and `stream`,
        tokens of this answer.
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
    finished: str
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
        """Formats the text first, and six numbers of every list."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.repr}
        values["tau"] = round(self.tau, 2)
        show = lambda value: reprlib.repr(value) if isinstance(value, list) else repr(value)  # noqa: E731
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
        """Drafts the tree of a round again, by default of the one that accepted most; `print` draws it.

        A steered drafter reads the answer without its earlier shifts: its tree may differ from the one that was verified.

        Args:
          round_index: number of the round, from 0.

        Raises ValueError if there is none, or the model that drafted it is gone.
        """
        if self.builder == "none":
            raise ValueError("this answer was decoded one token at a time: it has no draft trees")
        if not self.accept_lengths:
            raise ValueError("this answer has no rounds: its only token came from the prefill")
        if self.draft_again is None:
            raise ValueError("this is a copy of a result, without the model that drafts; the original draws its trees")
        if round_index is None:
            round_index = max(range(len(self.accept_lengths)), key=self.accept_lengths.__getitem__)
        round_index = whole(round_index, "round", most=len(self.accept_lengths) - 1)
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


@dataclass
class GrowingAnswer:
    """Everything read so far of an answer that grows, before any cut.

    Attributes:
      text: text of `ids`; None without a tokenizer.
      accepted: number of tokens that each round accepted.
      score: log-probabilities of the prompt; None unless requested.
      num_sent: numbers of tokens and of characters in the chunks so far.
    """

    text: AnswerText | None
    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    expected_lengths: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    score: Score | None = None
    num_sent: tuple[int, int] = (0, 0)
    is_done: bool = False
    is_blocked: bool = False


class Reader:
    """Reads Results and their Chunks from the state of a scheduler, whose requests have different numbers.

    What was read before is kept until `forget`: only new tokens and rounds are converted.
    """

    def __init__(self, scheduler: Scheduler, model: Any):
        self._scheduler, self._model = scheduler, model
        self._answers: dict[int, GrowingAnswer] = {}  # by number of the request

    def forget(self, request: Request) -> None:
        """Frees what is kept of a request that is finished or cancelled."""
        self._answers.pop(request.number, None)

    def read_chunks(self, slots: Sequence[int], finished: Sequence[int]) -> list[tuple[Chunk, Result]]:
        """Returns the new piece and the result so far of each answer; `finished` lists slots of whole answers."""
        chunks = []
        for slot, result in zip(slots, self.read_results(slots), strict=True):
            answer, text = self._answers[self._scheduler.slots.requests[slot].number], ""
            if answer.text is not None:
                text = result.text if slot in finished else answer.text.certain_text
            num_ids, num_characters = answer.num_sent
            answer.num_sent = len(result.ids), len(text)
            rounds = len(result.accept_lengths)
            chunks.append((Chunk(ids=result.ids[num_ids:], text=text[num_characters:], rounds=rounds), result))
        return chunks

    def find_stopped(self, slots: Sequence[int]) -> list[int]:
        """Returns the slots whose answers contain a stop string."""
        requests = self._scheduler.slots.requests
        slots = [slot for slot in slots if requests[slot].settings.stop and self._model.tokenizer]
        return [slot for slot, answer in zip(slots, self._read(slots), strict=True) if answer.text.has_stop]

    def read_results(self, slots: Sequence[int]) -> list[Result]:
        """Returns the answers so far in these slots.

        Raises ValueError for NaN logits. Warns of an answer that the processor of the call ends.
        """
        scheduler = self._scheduler
        runner, plan, clock = scheduler.runner, scheduler.runner.plan, scheduler.runner.clock
        results = []
        for slot, answer in zip(slots, self._read(slots), strict=True):
            request, text, ids = scheduler.slots.requests[slot], answer.text, [*answer.ids]
            if answer.is_blocked:
                finished = "blocked"
                _explain_no_token(request, len(ids), runner.weights.processor)
            elif ids and answer.is_done and ids[-1] in request.settings.stop_ids:
                finished = "stop"
            else:
                finished = "interrupted" if not answer.is_done and scheduler.is_interrupted else "length"
            if text is not None and text.has_stop:
                ids, finished = [*text.ids], "stop"
            accepted = [*answer.accepted]
            while accepted and 1 + sum(accepted[:-1]) >= len(ids):
                accepted.pop()
            cut = 1 + sum(accepted) - len(ids) if accepted else 0
            results.append(
                Result(
                    text="" if text is None else text.text,
                    ids=ids,
                    prompt_ids=request.ids,
                    builder=plan.builder,
                    accept_lengths=[*accepted[:-1], accepted[-1] - cut] if accepted else [],
                    finished=finished,
                    seconds=clock.seconds,
                    compile_seconds=clock.compile_seconds,
                    tokens_per_second=len(ids) / max(clock.seconds, 1e-9),
                    log_probs=answer.log_probs[: len(ids)] if plan.shared.log_probs else None,
                    top_log_probs=answer.top_log_probs[: len(ids)] if plan.shared.top_log_probs else None,
                    prompt_score=answer.score,
                    expected_lengths=answer.expected_lengths[: len(accepted)] if plan.shared.expected_lengths else None,
                    cut=cut,
                    reused=int(scheduler.reused[slot]),
                    draft_again=DraftAgain(self._model, scheduler, request) if plan.drafts else None,
                )
            )
        return results

    def _read(self, slots: Sequence[int]) -> list[GrowingAnswer]:
        """Returns the answers in these slots after adding their new tokens and rounds."""
        if not slots:  # reading the state copies it to the host
            return []
        state, requests = self._scheduler.state, self._scheduler.slots.requests
        arrays = (state.tokens_bs, state.end_b, state.done_b, state.rounds_b, state.accepted_bs)
        arrays, log_probs, expected_bs = sharding.to_host((arrays, state.log_probs, state.expected_bs))
        tokens_bs, end_b, done_b, rounds_b, accepted_bs = arrays
        answers = []
        for slot in slots:
            answer = self._find_answer(requests[slot])
            tokens = slice(len(requests[slot].ids) + len(answer.ids), end_b[slot])
            ids = tokens_bs[slot, tokens].tolist()
            answer.is_done = bool(done_b[slot])
            answer.is_blocked = bool(ids) and ids[-1] >= self._model.verifier.vocab_size
            if answer.is_blocked:  # no logit of the last token was above -inf, and rounds ended there
                ids.pop()
            answer.ids += ids
            if answer.text is not None:
                answer.text.extend(ids)
            if log_probs is not None:
                token_s, ids_sk, top_sk = (x[slot, tokens][: len(ids)].tolist() for x in jax.tree.leaves(log_probs))
                answer.log_probs += token_s
                answer.top_log_probs += ([*zip(*pair, strict=True)] for pair in zip(ids_sk, top_sk, strict=True))
                if requests[slot].settings.prompt_log_probs and answer.score is None:
                    answer.score = _read_score(requests[slot].ids, slot, log_probs)
            rounds = slice(len(answer.accepted), rounds_b[slot])
            answer.accepted += accepted_bs[slot, rounds].tolist()
            if expected_bs is not None:
                answer.expected_lengths += expected_bs[slot, rounds].tolist()
            answers.append(answer)
        return answers

    def _find_answer(self, request: Request) -> GrowingAnswer:
        if request.number not in self._answers:
            tokenizer = self._model.tokenizer
            text = None if tokenizer is None else AnswerText(tokenizer, request.ids, request.settings.stop)
            self._answers[request.number] = GrowingAnswer(text)
        return self._answers[request.number]


def _read_score(ids: list[int], slot: int, log_probs: LogProbs) -> Score:
    """Returns the score of a prompt in a slot. Raises ValueError for NaN."""
    token_s, ids_sk, top_sk = (x_bs[slot, 1 : len(ids)].tolist() for x_bs in jax.tree.leaves(log_probs))
    if np.isnan(token_s).any():
        raise ValueError(f"got NaN as log-probability of a prompt's token, expected a number: {DAMAGED}")
    top = None
    if log_probs.top_bsk.shape[-1]:
        top = [None, *([*zip(*pair, strict=True)] for pair in zip(ids_sk, top_sk, strict=True))]
    return Score(ids=ids, log_probs=[None, *token_s], top_log_probs=top)


def _explain_no_token(request: Request, index: int, processor: Any) -> None:
    """Warns that the user's processor allows no token. Raises ValueError without one: the logits are NaN."""
    if processor is None:
        raise ValueError(f"got NaN as logits of token {index} of an answer, expected numbers: {DAMAGED}")
    prompt = request.number // request.settings.samples
    warn(
        f"prompt {prompt}: processor {processor_name(processor)} left no logit above -inf for token {index} of the answer, "
        "which ends there; allow at least one token, for example a stop id"
    )


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
        warn(
            f"tau is {tau:.2f} over {len(rounds)} rounds, expected above {LOW_TAU}: a drafter that was trained for another "
            "verifier, revision or prompt format looks like this"
        )
