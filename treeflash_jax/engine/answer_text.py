"""Text of an answer that grows token by token."""

from collections.abc import Sequence

from treeflash_jax.formats.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"  # stands for the bytes of an unfinished character


class AnswerText:
    """Text of a growing answer, up to its first stop string.

    New tokens are decoded together with those of the last piece of text, so that the tokenizer keeps the space before a
    word, and a character of several tokens waits for the last of them. The time grows with the number of tokens.

    Attributes:
      ids: tokens so far; none after the one that completes a stop string.
      has_stop: whether the text was cut before a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.ids: list[int] = []
        self.has_stop = False
        self._tokenizer, self._stop = tokenizer, stop
        self._text = ""  # of the tokens up to `_end`
        self._start = self._end = 0  # tokens of the last piece of text

    @property
    def text(self) -> str:
        """The whole text, with any half character at its end."""
        return self._text if self.has_stop else self._text + self._next_piece()

    @property
    def certain_text(self) -> str:
        """The text that later tokens cannot change: without half a character or the start of a stop string at its end."""
        starts = [size for stop in self._stop for size in range(1, len(stop)) if self._text.endswith(stop[:size])]
        return self._text[: len(self._text) - max(starts, default=0)]

    def extend(self, ids: Sequence[int]) -> None:
        """Adds tokens; with stop strings one by one, up to the one that completes a stop string."""
        size = 1 if self._stop else max(1, len(ids))
        for first in range(0, len(ids), size):
            if self.has_stop:
                return
            self.ids += ids[first : first + size]
            self._add_piece(self._next_piece())

    def _next_piece(self) -> str:
        """Returns the text of the tokens after `_end`."""
        before = self._tokenizer.decode(self.ids[self._start : self._end])
        return self._tokenizer.decode(self.ids[self._start :])[len(before) :]

    def _add_piece(self, piece: str) -> None:
        if not piece or piece.endswith(REPLACEMENT_CHARACTER):
            return
        searched = max(0, len(self._text) + 1 - max(map(len, self._stop), default=0))
        self._text += piece
        self._start, self._end = self._end, len(self.ids)
        found = [at for stop in self._stop if (at := self._text.find(stop, searched)) >= 0]
        if found:
            self._text, self.has_stop = self._text[: min(found)], True
