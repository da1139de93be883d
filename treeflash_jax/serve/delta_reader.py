"""Reading of deltas from pieces of answers: parts of messages, and tokens with their log-probabilities."""

from collections.abc import Sequence

from treeflash_jax.engine.answers.results import Result
from treeflash_jax.formats.answer_text import AnswerText
from treeflash_jax.formats.messages import find_format
from treeflash_jax.formats.messages.message_format import Content, FunctionCall, MessageReader, Part
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.log_probs import PositionReader, TokenPosition, prompt_positions
from treeflash_jax.serve.server_call import Delta, ServerCall
from treeflash_jax.serve.worker import Piece


class TextReader(MessageReader):
    """Reads an answer that is not a message: all of its text is content."""

    def feed(self, ids: Sequence[int], text: str, *, is_last: bool = False) -> list[Part]:
        return [Content(text)] if text else []


class DeltaReader:
    """Reads the deltas of one call's answers from their pieces."""

    def __init__(self, call: ServerCall, tokenizer: Tokenizer | None):
        self._call, self._tokenizer = call, tokenizer
        self._messages: dict[int, MessageReader] = {}  # by index of the answer
        self._calling: set[int] = set()  # indices of answers that call a function
        self._positions: dict[int, PositionReader] = {}

    def read(self, piece: Piece) -> Delta:
        index, result = piece.index, piece.result
        parts: list[Part] = []
        positions: list[TokenPosition] | None = [] if self._call.wants_log_probs else None
        if index not in self._messages:
            self._messages[index] = self._message_reader(result)
            text = self._echo(index, result)
            if text:
                parts.append(Content(text))
            if positions is not None:
                self._positions[index] = PositionReader(self._tokenizer, result.prompt_ids, len(text))
                if self._call.echoes:
                    positions += prompt_positions(self._tokenizer, result.prompt_score, text)
        parts += self._messages[index].feed(piece.chunk.ids, piece.chunk.text, is_last=piece.is_last)
        if any(isinstance(part, FunctionCall) for part in parts):
            self._calling.add(index)
        if positions is not None:
            positions += self._positions[index].read(result, is_last=piece.is_last)
        finished = stop = None
        if piece.is_last:
            stop = self._find_stop(result)
            if result.finished == "length":
                finished = "length"
            elif index in self._calling:
                finished = "calls"
            else:
                finished = "stop"
        return Delta(index, parts, positions, finished, stop)

    def begins_with_prompt(self, piece: Piece) -> bool:
        """Returns whether a piece has to be read together with its prompt, which takes time for each prompt token."""
        return self._call.echoes and piece.index not in self._messages

    def _echo(self, index: int, result: Result) -> str:
        """Returns the text of a prompt to put before its answer: the text that was sent, or else the text of its ids."""
        if not self._call.echoes or self._tokenizer is None:
            return ""
        prompt = self._call.prompts[index // self._call.settings.get("samples", 1)]
        if isinstance(prompt, str):
            return str(prompt)
        return self._tokenizer.decode(result.prompt_ids, skip_special_tokens=False)

    @property
    def _stop(self) -> list[str]:
        """Stop strings of the call."""
        stop = self._call.settings.get("stop") or []
        return [stop] if isinstance(stop, str) else stop

    def _find_stop(self, result: Result) -> str | None:
        """Returns the stop string, or the special token given as one, that ended an answer; None if none did."""
        if not self._stop or self._tokenizer is None or result.finished != "stop":
            return None
        if result.ids:
            last_name = self._tokenizer.special_tokens.get(result.ids[-1])
            if last_name in self._stop:
                return last_name
        answer = AnswerText(self._tokenizer, result.prompt_ids)
        answer.extend(result.ids)
        return next((stop for stop in self._stop if answer.text.startswith(stop, len(result.text))), None)

    def _message_reader(self, result: Result) -> MessageReader:
        if not self._call.is_chat or self._tokenizer is None:
            return TextReader()
        return find_format(self._tokenizer).reader(
            result.prompt_ids, self._call.tools.functions, self._stop, has_thoughts=not self._call.has_structure
        )
