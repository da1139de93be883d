"""Log-probabilities of tokens in the forms of OpenAI's API. Every token is read in its place, behind those before it."""

from typing import Any, NamedTuple

from treeflash_jax.engine.answers.results import Result
from treeflash_jax.formats.answer_text import REPLACEMENT_CHARACTER, AnswerText
from treeflash_jax.formats.tokenizer import Tokenizer

LEAST = -9999.0  # in place of -inf, which JSON does not have


class Token(NamedTuple):
    """A token in its place; `text` is "" for a part of a character that a later token ends."""

    id: int
    text: str
    bytes: list[int] | None
    log_prob: float

    def entry(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.log_prob, "bytes": self.bytes}


class Place(NamedTuple):
    """A place in an answer: the characters of text before it, its token, and the likeliest tokens there."""

    offset: int
    token: Token
    top: list[Token]


class PlaceReader:
    """Reads the places of one growing answer; without a tokenizer, the text of a token is its id.

    Args:
      top: number of likeliest tokens to read in each place.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: list[int], top: int):
        self._answer = AnswerText(tokenizer, prompt_ids) if tokenizer else None
        self._top = top
        self._length = 0  # tokens read so far

    def read(self, result: Result, *, is_last: bool) -> list[Place]:
        """Returns the places that are new in an answer; `is_last` says that none will follow."""
        places = []
        for number in range(self._length, len(result.ids)):
            ends = is_last and number == len(result.ids) - 1
            token = self._token(result.ids[number], result.log_probs[number], ends)
            top = [self._token(*pair, ends) for pair in result.top_log_probs[number][: self._top]]
            places.append(Place(len(self._answer.certain_text) if self._answer else 0, token, top))
            if self._answer:
                self._answer.extend([token.id])
        self._length = len(result.ids)
        return places

    def _token(self, id: int, log_prob: float, ends: bool) -> Token:
        text, data = self._answer.next_token(id) if self._answer else (str(id), None)
        if text.endswith(REPLACEMENT_CHARACTER) and not ends:
            text = ""
        return Token(id, text, None if data is None else [*data], max(log_prob, LEAST))


def chat_form(places: list[Place]) -> dict[str, Any]:
    """Returns the log-probabilities of a chat's answer."""
    content = [place.token.entry() | {"top_logprobs": [token.entry() for token in place.top]} for place in places]
    return {"content": content, "refusal": None}


def completion_form(places: list[Place]) -> dict[str, Any]:
    """Returns the log-probabilities of a completion."""
    return {
        "tokens": [place.token.text for place in places],
        "token_logprobs": [place.token.log_prob for place in places],
        "top_logprobs": [_by_text(place) for place in places],
        "text_offset": [place.offset for place in places],
    }


def _by_text(place: Place) -> dict[str, float]:
    """Returns log-probabilities by text, that of the answer's token or else of the likeliest; others by "token_id:5"."""
    owners = {"": None, place.token.text: place.token.id}  # the text of a part of a character names none
    log_probs = {}
    for token in place.top:
        is_owner = owners.setdefault(token.text, token.id) == token.id
        log_probs[token.text if is_owner else f"token_id:{token.id}"] = token.log_prob
    return log_probs
