"""Log-probabilities of tokens in the forms of OpenAI's API. A token's text depends on the tokens before it."""

from typing import Any, NamedTuple

from treeflash_jax.engine.answers.results import Result, Score
from treeflash_jax.formats.answer_text import REPLACEMENT_CHARACTER, AnswerText
from treeflash_jax.formats.tokenizer import Tokenizer

LEAST = -9999.0  # in place of -inf, which JSON does not have


class Token(NamedTuple):
    """A token at its place in a text. `text` is "" if the token is only a part of a character that a later token ends.

    The first token of a prompt has no log-probability.
    """

    id: int
    text: str
    bytes: list[int] | None
    log_prob: float | None

    def entry(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.log_prob, "bytes": self.bytes}


class Place(NamedTuple):
    """A place in a text: the number of characters before it, the token there, and the likeliest tokens, if known."""

    offset: int
    token: Token
    top: list[Token] | None


class PlaceReader:
    """Reads the places of one growing answer. Without a tokenizer, the text of a token is its id.

    Args:
      top: number of likeliest tokens to read in each place.
      offset: number of characters before the answer.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: list[int], top: int, offset: int = 0):
        self._answer = AnswerText(tokenizer, prompt_ids) if tokenizer else None
        self._top, self._offset = top, offset
        self._length = 0  # tokens read so far

    def read(self, result: Result | Score, *, is_last: bool) -> list[Place]:
        """Returns the new places of an answer. `is_last` is True if none will follow."""
        places = []
        for number in range(self._length, len(result.ids)):
            ends = is_last and number == len(result.ids) - 1
            token = self._token(result.ids[number], result.log_probs[number], ends)
            pairs = result.top_log_probs[number]
            top = None if pairs is None else [self._token(*pair, ends) for pair in pairs[: self._top]]
            offset = len(self._answer.certain_text) if self._answer else 0
            places.append(Place(self._offset + offset, token, top))
            if self._answer:
                self._answer.extend([token.id])
        self._length = len(result.ids)
        return places

    def _token(self, id: int, log_prob: float | None, ends: bool) -> Token:
        text, data = self._answer.next_token(id) if self._answer else (str(id), None)
        if text.endswith(REPLACEMENT_CHARACTER) and not ends:
            text = ""
        log_prob = None if log_prob is None else max(log_prob, LEAST)
        return Token(id, text, None if data is None else [*data], log_prob)


def prompt_places(tokenizer: Tokenizer | None, score: Score, text: str, top: int) -> list[Place]:
    """Returns the places of a prompt. Special tokens take up characters only if the prompt's text contains them."""
    offset, places = 0, []
    for place in PlaceReader(tokenizer, [], top).read(score, is_last=True):
        places.append(place._replace(offset=min(offset, len(text))))
        name = place.token.text
        if place.token.bytes is not None or text.startswith(name, offset):
            offset += len(name)
    return places


def chat_form(places: list[Place]) -> dict[str, Any]:
    """Returns the log-probabilities of a chat's answer."""
    content = [place.token.entry() | {"top_logprobs": [token.entry() for token in place.top]} for place in places]
    return {"content": content, "refusal": None}


def completion_form(places: list[Place]) -> dict[str, Any]:
    """Returns the log-probabilities of a completion."""
    return {
        "tokens": [place.token.text for place in places],
        "token_logprobs": [place.token.log_prob for place in places],
        "top_logprobs": [None if place.top is None else _by_text(place) for place in places],
        "text_offset": [place.offset for place in places],
    }


def _by_text(place: Place) -> dict[str, float]:
    """Returns the log-probabilities of the likeliest tokens, by text.

    If several tokens have the same text, it belongs to the answer's token, or else to the likeliest one. The others are
    named by id, such as "token_id:5".
    """
    owners = {"": None, place.token.text: place.token.id}  # "" (a part of a character) belongs to no token
    log_probs = {}
    for token in place.top:
        is_owner = owners.setdefault(token.text, token.id) == token.id
        log_probs[token.text if is_owner else f"token_id:{token.id}"] = token.log_prob
    return log_probs
