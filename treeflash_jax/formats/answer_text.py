"""`AnswerText`: decodes an answer token by token, holds back unfinished characters, and ends at the first stop string."""

import os
from collections.abc import Sequence
from contextlib import suppress

from treeflash_jax.formats.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"  # stands for the bytes of an unfinished character
CONTEXT = 8  # number of tokens at a prompt's end
MOST_UNFINISHED = 4  # most tokens of an unfinished character: 3 bytes and a special token


class AnswerText:
    """Text of a growing answer, up to its first stop string.

    New tokens are decoded together with the tokens of the last piece of text (at first, the last tokens of the prompt). The
    tokenizer then keeps the space before a word, and prompt plus answer read as if they were decoded together. A character
    of several tokens appears with the last of them. The total time is linear in the number of tokens.

    Attributes:
      ids: tokens so far, up to the token that completes a stop string.
      has_stop: whether the text was cut before a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()):
        self.ids: list[int] = []
        self.has_stop = False
        self._tokenizer, self._stop = tokenizer, stop
        self._text = ""  # the answer without an unfinished character at its end
        self._half = self._prompt_half = ""  # unfinished characters at the ends of answer and prompt
        size = CONTEXT
        while True:  # until the text of the prompt's last tokens begins with a whole character
            self._window: list[int] = []  # tokens of the last piece
            self._window_text = ""
            self._pending = [*prompt_ids[-size:]]  # tokens after that piece
            text = self._take_piece()
            if size >= len(prompt_ids) or (text and not text.startswith(REPLACEMENT_CHARACTER)):
                break
            size *= 2
        self._half, self._prompt_half = "", self._half

    @property
    def text(self) -> str:
        """The whole text, including an unfinished character at its end."""
        return self._text + self._half

    @property
    def certain_text(self) -> str:
        """The text that later tokens cannot change: without half a character or the start of a stop string at its end."""
        starts = [size for stop in self._stop for size in range(1, len(stop)) if self._text.endswith(stop[:size])]
        return self._text[: len(self._text) - max(starts, default=0)]

    def extend(self, ids: Sequence[int]) -> None:
        """Adds tokens, up to the token that completes a stop string."""
        size = 1 if self._stop else max(1, len(ids))
        for first in range(0, len(ids), size):
            if self.has_stop:
                return
            self.ids += ids[first : first + size]
            self._pending += ids[first : first + size]
            searched = max(0, len(self._text) + 1 - max(map(len, self._stop), default=0))
            self._text += self._take_piece()
            starts = [at for stop in self._stop if (at := self._text.find(stop, searched)) >= 0]
            if starts:
                self._text = self._text[: min(starts)]
                self._half = ""
                self.has_stop = True

    def next_token(self, token: int) -> tuple[str, bytes | None]:
        """Returns the text that a token would add to the answer, and the bytes of the token.

        A character of several tokens is the text of the last of them. The texts of the others end with
        REPLACEMENT_CHARACTER. The text of a special token is its name, and its bytes are None. For a part of a character,
        bytes are None as well if the tokenizer does not state which bytes its tokens stand for.
        """
        tokenizer = self._tokenizer
        if token in tokenizer.special_tokens:
            return tokenizer.special_tokens[token], None
        text = self._read([*self._pending, token])
        if not (self._half or self._prompt_half or text.endswith(REPLACEMENT_CHARACTER)):
            return text, text.encode()
        with suppress(ValueError):
            return text, tokenizer.token_bytes.get(token, tokenizer.decode([token]).encode())
        return text, None

    def _take_piece(self) -> str:
        """Returns the text after the last piece, up to the last token that ends a character; "" if there is none."""
        piece = ""
        for count in range(len(self._pending), max(0, len(self._pending) - MOST_UNFINISHED), -1):
            text = self._read(self._pending[:count])
            if text and not text.endswith(REPLACEMENT_CHARACTER):
                piece, self._prompt_half = text, ""
                self._window, self._pending = self._pending[:count], self._pending[count:]
                self._window_text = self._tokenizer.decode(self._window)
                break
        self._half = self._read(self._pending) if self._pending else ""
        return piece

    def _read(self, ids: list[int]) -> str:
        """Returns the text of tokens that follow the last piece, except the part that is already in the prompt's text."""
        text = self._tokenizer.decode(self._window + ids)
        if text.startswith(self._window_text):
            text = text[len(self._window_text) :]
        else:  # if the last of several characters is unfinished, ByteFallback replaces the bytes of all
            text = self._tokenizer.decode(ids)
        return text[len(os.path.commonprefix([text, self._prompt_half])) :]
