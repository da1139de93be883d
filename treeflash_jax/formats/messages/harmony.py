"""Harmony, the format of gpt-oss: messages with channels, recipients and ends, each marked by a special token.

<|start|>assistant<|channel|>analysis<|message|>...<|end|>, then the same with channel final and <|return|>, or with channel
commentary, a recipient to=functions.NAME and <|call|>. Source: OpenAI, "OpenAI Harmony Response Format".
"""

import re
from collections.abc import Sequence

from treeflash_jax.formats.messages import tags
from treeflash_jax.formats.messages.message_format import (
    Content,
    Demands,
    Function,
    MessageFormat,
    MessageReader,
    Part,
    Tag,
    Thought,
    TokenReader,
    make_function_call,
)
from treeflash_jax.formats.tokenizer import Tokenizer

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL_END, RETURN = "<|call|>", "<|return|>"
ENDS = (END, CALL_END, RETURN)
NEXT = f"{END}{START}assistant"
NAMESPACE = "functions."


class Harmony(MessageFormat):
    """Answers in channels: analysis is thoughts, commentary to functions is calls, and everything else is content."""

    stop_names = (CALL_END, RETURN)  # early files lack CALL_END
    thoughts_key = "thinking"

    @classmethod
    def fits(cls, template: str) -> bool:
        return START in template and CHANNEL in template

    def reader(
        self, prompt_ids: Sequence[int], functions: Sequence[Function], stop: Sequence[str], *, has_thoughts: bool
    ) -> MessageReader:
        return HarmonyReader(self.tokenizer, prompt_ids, stop, reads_calls=bool(functions))

    def answer_tag(self, prompt_ids: Sequence[int], demands: Demands) -> Tag:
        """Returns the structural tag of the answer. A message has one call. The token at its end ends the answer."""
        header = self._header(prompt_ids)
        content = demands.content or tags.any_text()
        if header is None or CHANNEL in header:  # the prompt is a text to continue
            return content
        answers = [self._call_tag(function) for function in demands.functions]
        if not demands.is_forced:
            preamble = tags.sequence(tags.const(f"{CHANNEL}commentary{MESSAGE}"), tags.any_text(), tags.const(NEXT))
            answers += [tags.sequence(preamble, tag) for tag in answers]
            answers.append(tags.sequence(tags.const(f"{CHANNEL}final{MESSAGE}"), content))
        answer = tags.either(*answers)
        thoughts = tags.const(f"{CHANNEL}analysis{MESSAGE}"), tags.any_text(), tags.const(NEXT)
        return tags.either(answer, tags.sequence(*thoughts, answer))

    def _call_tag(self, function: Function) -> Tag:
        begin = f"{CHANNEL}commentary to={NAMESPACE}{function.name} <|constrain|>json{MESSAGE}"
        return tags.sequence(tags.const(begin), tags.arguments(function))

    def _header(self, prompt_ids: Sequence[int]) -> str | None:
        """Returns the part of a message's header that is in the prompt; None if the prompt has a whole header or none."""
        text = self.tokenizer.decode(prompt_ids[-16:], skip_special_tokens=False)
        header = text.rpartition(START)[2]
        return header if START in text and MESSAGE not in header else None


class HarmonyReader(TokenReader):
    """Parses channels token by token. A message that the prompt has begun belongs to the answer."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str], *, reads_calls: bool):
        super().__init__(tokenizer, (START, MESSAGE, *ENDS), stop)
        self._reads_calls = reads_calls
        self._header: list[int] | None = None  # tokens of the header; None inside a message
        self._channel = "final"
        self._recipient: str | None = None
        message_starts = [position for position, id in enumerate(prompt_ids) if self._markers.get(id) == START]
        if message_starts:
            for id in prompt_ids[message_starts[-1] :]:
                self._read(id)
        self._begin_text(prompt_ids)

    def _read(self, id: int) -> list[Part]:
        marker = self._markers.get(id)
        if marker == START:
            self._header = []
        elif self._header is not None and marker == MESSAGE:
            self._read_header(self._header)
        elif self._header is not None:
            self._header.append(id)
        elif marker in ENDS:
            parts = self._end_message(is_whole=True)
            self._header = []
            return parts
        else:
            return self._extend_text(id)
        return []

    def _end(self) -> list[Part]:
        return self._end_message(is_whole=False) if self._header is None else []

    def _read_header(self, ids: list[int]) -> None:
        header = self._tokenizer.decode(ids, skip_special_tokens=False)
        channel = re.search(rf"{re.escape(CHANNEL)}\s*(\w+)", header)
        recipient = re.search(r"to=([^\s<]+)", header)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else None
        self._header = None
        self._begin_text()

    def _new_parts(self, text: str) -> list[Part]:
        if self._is_call():
            return []
        return self._send_new(text, Thought if self._channel == "analysis" else Content)

    def _end_message(self, *, is_whole: bool) -> list[Part]:
        text = self._text.text
        if not self._is_call():
            return self._new_parts(text)
        call = make_function_call(self._recipient.removeprefix(NAMESPACE), text.strip()) if is_whole else None
        if call is not None:
            return [call]
        return [Content(text)] if text else []

    def _is_call(self) -> bool:
        return self._reads_calls and self._recipient is not None and self._recipient.startswith(NAMESPACE)
