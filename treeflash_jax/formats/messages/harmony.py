"""Harmony, the form of gpt-oss: messages with channels, recipients and ends, each marked by a token of its own.

<|start|>assistant<|channel|>analysis<|message|>...<|end|>, then the same with channel final and <|return|>, or with channel
commentary, a recipient to=functions.NAME and <|call|>. Source: OpenAI, "OpenAI Harmony Response Format".
"""

import re
from collections.abc import Sequence
from typing import Any

from treeflash_jax.formats.answer_text import AnswerText
from treeflash_jax.formats.messages.message_format import (
    Content,
    Demands,
    Function,
    MessageFormat,
    MessageReader,
    Part,
    Tag,
    Thought,
    any_text,
    const,
    either,
    join_parts,
    make_call,
    sequence,
)

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL_END, RETURN = "<|call|>", "<|return|>"
NEXT = f"{END}{START}assistant"
NAMESPACE = "functions."


class Harmony(MessageFormat):
    """Answers in channels: analysis is thoughts, commentary to functions is calls, everything else is content."""

    thoughts_key = "thinking"

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of the ends of calls and answers; early files lack the former."""
        names = self.tokenizer.special_tokens
        return tuple(id for id, name in names.items() if name in (CALL_END, RETURN))

    @classmethod
    def fits(cls, template: str) -> bool:
        return START in template and CHANNEL in template

    def reader(
        self, prompt_ids: Sequence[int], functions: Sequence[Function], stop: Sequence[str], *, has_thoughts: bool
    ) -> MessageReader:
        return ChannelReader(self.tokenizer, prompt_ids, stop)

    def answer_tag(self, prompt_ids: Sequence[int], demands: Demands) -> Tag:
        """A message has one call; the model ends it, with a token that ends the answer."""
        header = self._header(prompt_ids)
        content = demands.content or any_text()
        if header is None or CHANNEL in header:  # a text to continue
            return content
        answers = [self._call_tag(function) for function in demands.functions]
        if not demands.is_forced:
            preamble = sequence(const(f"{CHANNEL}commentary{MESSAGE}"), any_text(), const(NEXT))
            answers += [sequence(preamble, tag) for tag in answers]
            answers.append(sequence(const(f"{CHANNEL}final{MESSAGE}"), content))
        answer = either(*answers)
        return either(answer, sequence(const(f"{CHANNEL}analysis{MESSAGE}"), any_text(), const(NEXT), answer))

    def _call_tag(self, function: Function) -> Tag:
        begin = f"{CHANNEL}commentary to={NAMESPACE}{function.name} <|constrain|>json{MESSAGE}"
        content = {"type": "json_schema", "json_schema": function.parameters} if function.is_strict else any_text()
        return sequence(const(begin), content)

    def _header(self, prompt_ids: Sequence[int]) -> str | None:
        """Returns the part of a message's header that the prompt has; None after a whole header, and without any."""
        text = self.tokenizer.inner.decode(prompt_ids[-16:])
        header = text.rpartition(START)[2]
        return header if START in text and MESSAGE not in header else None


class ChannelReader(MessageReader):
    """Reads channels token by token; a message that the prompt has begun belongs to the answer."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stop: Sequence[str]):
        self.num_calls = 0
        self._tokenizer, self._stop = tokenizer, stop
        markers = {name: id for id, name in tokenizer.special_tokens.items()}
        self._start, self._message = markers.get(START), markers.get(MESSAGE)
        self._ends = {markers.get(name) for name in (END, CALL_END, RETURN)}
        self._header: list[int] | None = None  # its tokens; None inside a message
        self._channel, self._recipient = "final", None
        self._begin_text()
        starts = [at for at, id in enumerate(prompt_ids) if id == self._start]
        if starts:
            for id in prompt_ids[starts[-1] :]:
                self._read(id)
        self._begin_text(prompt_ids)

    def feed(self, ids: Sequence[int], text: str, *, is_last: bool = False) -> list[Part]:
        parts = [part for id in ids for part in self._read(id)]
        if is_last and self._header is None:
            parts += self._end_message(is_whole=False)
        return join_parts(parts)

    def _read(self, id: int) -> list[Part]:
        if id == self._start:
            self._header = []
        elif self._header is not None and id == self._message:
            self._read_header()
        elif self._header is not None:
            self._header.append(id)
        elif id in self._ends:
            parts = self._end_message(is_whole=True)
            self._header = []
            return parts
        elif id not in self._tokenizer.special_tokens:
            self._text.extend([id])
            return self._new_text(self._text.certain_text)
        return []

    def _read_header(self) -> None:
        header = self._tokenizer.inner.decode(self._header)
        channel = re.search(rf"{re.escape(CHANNEL)}\s*(\w+)", header)
        recipient = re.search(r"to=([^\s<]+)", header)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else None
        self._header = None
        self._begin_text()

    def _begin_text(self, before: Sequence[int] = ()) -> None:
        self._text, self._num_sent = AnswerText(self._tokenizer, before, self._stop), 0

    def _new_text(self, text: str) -> list[Part]:
        if self._recipient is not None and self._recipient.startswith(NAMESPACE):
            return []
        new, self._num_sent = text[self._num_sent :], max(len(text), self._num_sent)
        kind = Thought if self._channel == "analysis" else Content
        return [kind(new)] if new else []

    def _end_message(self, *, is_whole: bool) -> list[Part]:
        text = self._text.text
        if self._recipient is None or not self._recipient.startswith(NAMESPACE):
            return self._new_text(text)
        if not is_whole:
            return [Content(text)] if text else []
        self.num_calls += 1
        return [make_call(self._recipient.removeprefix(NAMESPACE), text.strip())]
