"""Log-probabilities of tokens in the forms of OpenAI's API. A token's text depends on the tokens before it."""

from typing import Any, NamedTuple

from treeflash_jax.engine.answers.results import Result, Score
from treeflash_jax.formats.answer_text import REPLACEMENT_CHARACTER, AnswerText
from treeflash_jax.formats.tokenizer import Tokenizer

LEAST_LOG_PROB = -9999.0  # in place of -inf, which JSON does not have


class Token(NamedTuple):
    """A token at its position in a text. `text` is "" if the token is only a part of a character that a later token ends.

    The first token of a prompt has no log-probability.
    """

    id: int
    text: str
    bytes: list[int] | None
    log_prob: float | None

    def entry(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.log_prob, "bytes": self.bytes}


class TokenPosition(NamedTuple):
    """Position of a token in a text: the number of characters before it, the token, and the likeliest ones, if known."""

    offset: int
    token: Token
    top: list[Token] | None


class PositionReader:
    """Reads the positions of one growing answer. Without a tokenizer, the text of a token is its id.

    Args:
      offset: number of characters before the answer.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: list[int], offset: int = 0):
        self._answer = AnswerText(tokenizer, prompt_ids) if tokenizer else None
        self._offset = offset
        self._length = 0  # tokens read so far

    def read(self, result: Result | Score, *, is_last: bool) -> list[TokenPosition]:
        """Returns the new positions of an answer. `is_last` is True if none will follow."""
        positions = []
        for number in range(self._length, len(result.ids)):
            ends = is_last and number == len(result.ids) - 1
            token = self._token(result.ids[number], result.log_probs[number], ends)
            pairs = result.top_log_probs[number] if result.top_log_probs else []
            top = None if token.log_prob is None else [self._token(*pair, ends) for pair in pairs]
            offset = len(self._answer.certain_text) if self._answer else 0
            positions.append(TokenPosition(self._offset + offset, token, top))
            if self._answer:
                self._answer.extend([token.id])
        self._length = len(result.ids)
        return positions

    def _token(self, id: int, log_prob: float | None, ends: bool) -> Token:
        text, data = self._answer.next_token(id) if self._answer else (str(id), None)
        if text.endswith(REPLACEMENT_CHARACTER) and not ends:
            text = ""
        log_prob = None if log_prob is None else max(log_prob, LEAST_LOG_PROB)
        return Token(id, text, None if data is None else [*data], log_prob)


def prompt_positions(tokenizer: Tokenizer | None, score: Score, text: str) -> list[TokenPosition]:
    """Returns the positions of a prompt. Special tokens take up characters only if the prompt's text contains them."""
    offset = 0
    positions = []
    for position in PositionReader(tokenizer, []).read(score, is_last=True):
        positions.append(position._replace(offset=min(offset, len(text))))
        name = position.token.text
        if position.token.bytes is not None or text.startswith(name, offset):
            offset += len(name)
    return positions


def chat_form(positions: list[TokenPosition]) -> dict[str, Any]:
    """Returns the log-probabilities of a chat's answer."""
    content = [x.token.entry() | {"top_logprobs": [token.entry() for token in x.top]} for x in positions]
    return {"content": content, "refusal": None}


def completion_form(positions: list[TokenPosition]) -> dict[str, Any]:
    """Returns the log-probabilities of a completion."""
    return {
        "tokens": [position.token.text for position in positions],
        "token_logprobs": [position.token.log_prob for position in positions],
        "top_logprobs": [None if position.top is None else _by_text(position) for position in positions],
        "text_offset": [position.offset for position in positions],
    }


def _by_text(position: TokenPosition) -> dict[str, float]:
    """Returns the log-probabilities of the likeliest tokens, by text.

    If several tokens have the same text, it belongs to the answer's token, or else to the likeliest one. The others are
    named by id, such as "token_id:5".
    """
    owners = {"": None, position.token.text: position.token.id}  # "" (a part of a character) belongs to no token
    log_probs = {}
    for token in position.top:
        is_owner = owners.setdefault(token.text, token.id) == token.id
        log_probs[token.text if is_owner else f"token_id:{token.id}"] = token.log_prob
    return log_probs
