"""Reading of results, and of the pieces of a stream, from the decoding state of a scheduler.

Shape suffixes: b batch, s token slots, k likeliest tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treeflash_jax.core import sharding
from treeflash_jax.core.error_text import logger
from treeflash_jax.decoding.processors import processor_name
from treeflash_jax.decoding.state import LogProbs
from treeflash_jax.engine.answers.drawn_trees import AnsweringModel, DraftAgain
from treeflash_jax.engine.answers.results import Chunk, Finished, Result, Score
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.scheduler import Scheduler
from treeflash_jax.formats.answer_text import AnswerText

DAMAGED = "weights are damaged, or activations leave the range of the dtype; try dtype 'float32'"


@dataclass
class GrowingAnswer:
    """The part of an answer that was read so far, not yet cut at stops.

    Attributes:
      text: text of `ids`; None without a tokenizer.
      accepted: number of tokens that each round accepted.
      score: log-probabilities of the prompt; None unless requested.
      num_sent: number of tokens, and number of characters, in the chunks so far.
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


class ResultReader:
    """Reads Results and their Chunks from the state of a scheduler. No two of its requests have the same number.

    It keeps the answers so far until `forget`, so that only new tokens and rounds are converted.
    """

    def __init__(self, scheduler: Scheduler, model: AnsweringModel):
        self._scheduler, self._model = scheduler, model
        self._answers: dict[int, GrowingAnswer] = {}  # by number of the request

    def forget(self, request: Request) -> None:
        """Drops the answer to a request that is finished or cancelled."""
        self._answers.pop(request.number, None)

    def read_chunks(self, slots: Sequence[int], finished: Sequence[int]) -> list[tuple[Chunk, Result]]:
        """Returns the new piece and the result so far of each answer; `finished` lists slots of whole answers."""
        chunks = []
        for slot, result in zip(slots, self.read_results(slots), strict=True):
            answer = self._answers[self._scheduler.slots.requests[slot].number]
            text = ""
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

        Raises ValueError for NaN, in logits or in the prompt's score. Warns if an answer ended because the call's processor
        allowed no token.
        """
        scheduler = self._scheduler
        runner = scheduler.runner
        plan, clock = runner.plan, runner.clock
        results = []
        for slot, answer in zip(slots, self._read(slots), strict=True):
            request = scheduler.slots.requests[slot]
            settings = request.settings
            if answer.is_blocked:
                _explain_no_token(request, len(answer.ids), runner.weights.processor)
            if answer.score is not None and np.isnan(answer.score.log_probs[1:]).any():
                raise ValueError(f"got NaN as log-probability of a prompt's token, expected a number: {DAMAGED}")
            ids, finished = find_end(answer, settings.stop_ids, is_interrupted=scheduler.is_interrupted)
            accept_lengths, cut = cut_rounds(answer.accepted, len(ids))
            expected_lengths = answer.expected_lengths[: len(accept_lengths)]
            results.append(
                Result(
                    text="" if answer.text is None else answer.text.text,
                    ids=ids,
                    prompt_ids=request.ids,
                    builder=plan.builder,
                    accept_lengths=accept_lengths,
                    finished=finished,
                    seconds=clock.seconds,
                    compile_seconds=clock.compile_seconds,
                    tokens_per_second=len(ids) / max(clock.seconds, 1e-9),
                    log_probs=answer.log_probs[: len(ids)] if settings.wants_log_probs else None,
                    top_log_probs=answer.top_log_probs[: len(ids)] if settings.top_log_probs else None,
                    prompt_score=answer.score,
                    expected_lengths=expected_lengths if plan.shared.expected_lengths else None,
                    cut=cut,
                    reused=int(scheduler.num_reused[slot]),
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
        log_probs = state.log_probs if any(requests[slot].settings.wants_log_probs for slot in slots) else None
        arrays, log_probs, expected_bs = sharding.to_host((arrays, log_probs, state.expected_bs))
        tokens_bs, end_b, done_b, rounds_b, accepted_bs = arrays
        answers = []
        for slot in slots:
            answer = self._find_answer(requests[slot])
            tokens = slice(len(requests[slot].ids) + len(answer.ids), end_b[slot])
            ids = tokens_bs[slot, tokens].tolist()
            answer.is_done = bool(done_b[slot])
            answer.is_blocked = bool(ids) and ids[-1] >= self._model.verifier.vocab_size
            if answer.is_blocked:  # every logit for the last token was -inf or NaN, which ended its rounds
                ids.pop()
            answer.ids += ids
            if answer.text is not None:
                answer.text.extend(ids)
            settings = requests[slot].settings
            if settings.wants_log_probs:
                token_s, top_s = _read_log_probs(log_probs, slot, tokens, settings.top_log_probs)
                answer.log_probs += token_s[: len(ids)]
                answer.top_log_probs += top_s[: len(ids)]
                if settings.prompt_log_probs and answer.score is None:
                    answer.score = _read_score(requests[slot], slot, log_probs)
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


def find_end(answer: GrowingAnswer, stop_ids: Collection[int], *, is_interrupted: bool) -> tuple[list[int], Finished]:
    """Returns the token ids of an answer up to its end, and why it ended, as in `Result.finished`."""
    if answer.text is not None and answer.text.has_stop:
        return [*answer.text.ids], "stop"
    finished: Finished = "length"
    if answer.is_blocked:
        finished = "blocked"
    elif answer.ids and answer.is_done and answer.ids[-1] in stop_ids:
        finished = "stop"
    elif not answer.is_done and is_interrupted:
        finished = "interrupted"
    return [*answer.ids], finished


def cut_rounds(accepted: Sequence[int], num_ids: int) -> tuple[list[int], int]:
    """Returns `Result.accept_lengths` and `Result.cut` of an answer with this number of tokens.

    Args:
      accepted: number of tokens that each round accepted, also beyond the end of the answer.
    """
    lengths = [*accepted]
    while lengths and 1 + sum(lengths[:-1]) >= num_ids:
        lengths.pop()
    if not lengths:
        return [], 0
    cut = 1 + sum(lengths) - num_ids
    return [*lengths[:-1], lengths[-1] - cut], cut


def _read_log_probs(
    log_probs: LogProbs, slot: int, tokens: slice, num_top: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Returns the log-probabilities of tokens in a slot, and pairs of id and log-probability of the likeliest ones."""
    ids_sk, top_sk = (x_bsk[slot, tokens, :num_top].tolist() for x_bsk in (log_probs.top_ids_bsk, log_probs.top_bsk))
    top_s = [[*zip(ids_k, top_k, strict=True)] for ids_k, top_k in zip(ids_sk, top_sk, strict=True)]
    return log_probs.token_bs[slot, tokens].tolist(), top_s


def _read_score(request: Request, slot: int, log_probs: LogProbs) -> Score:
    """Returns the score of a prompt in a slot."""
    ids = request.ids
    num_top = request.settings.top_log_probs
    token_s, top_s = _read_log_probs(log_probs, slot, slice(1, len(ids)), num_top)
    return Score(ids=ids, log_probs=[None, *token_s], top_log_probs=[None, *top_s] if num_top else None)


def _explain_no_token(request: Request, index: int, processor: Any) -> None:
    """Warns that the user's processor allows no token. Raises ValueError without a processor: the logits are then NaN."""
    if processor is None:
        raise ValueError(f"got NaN as logits of token {index} of an answer, expected numbers: {DAMAGED}")
    prompt = request.number // request.settings.samples
    logger.warning(
        f"prompt {prompt}: processor {processor_name(processor)} left no logit above -inf for token {index} of the answer, "
        "which ends there; allow at least one token, for example a stop id"
    )
