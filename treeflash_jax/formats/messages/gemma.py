"""Gemma 4's messages: turns, a channel of thoughts, and calls in Gemma's notation, between special tokens.

An answer is <|channel>thought, a line break, ...<channel|>, then content, or calls
<|tool_call>call:NAME{key:value}<tool_call|>. Keys are not quoted, and strings are between two <|"|>. Arguments that a
schema constrains are JSON, which the reader also accepts.
Source: Google, "Gemma 4 prompt formatting" and "Function calling with Gemma 4".
"""

import json
import re
from collections.abc import Sequence

from treeflash_jax.formats.messages import tags
from treeflash_jax.formats.messages.message_format import (
    Content,
    Demands,
    Function,
    FunctionCall,
    MessageFormat,
    MessageReader,
    Part,
    Tag,
    Thought,
    TokenReader,
    make_function_call,
    parse_object,
)
from treeflash_jax.formats.tokenizer import Tokenizer

TURN = "<|turn>", "<turn|>"
CHANNEL = "<|channel>", "<channel|>"
CALL = "<|tool_call>", "<tool_call|>"
RESPONSE = "<|tool_response>", "<tool_response|>"
QUOTE = '<|"|>'
ENDS = dict([CHANNEL, CALL])
THOUGHT = f"{CHANNEL[0]}thought\n"
NAMED = re.compile(r"\s*call:\s*([^\s{]+)\s*(\{.*\})\s*", flags=re.DOTALL)
ARGUMENTS = {  # tag of any text with strings in Gemma's notation
    "type": "triggered_tags",
    "triggers": [QUOTE],
    "tags": [{"begin": QUOTE, "content": tags.any_text(), "end": QUOTE}],
}
KEY = re.compile(r'"(?:[^"\\]|\\.)*"|([^\s,:{}\[\]"]+)(?=\s*:)')  # a string of JSON, or a key without quotes


class Gemma(MessageFormat):
    """Answers with a channel of thoughts. After calls, a model ends its answer and waits for their results."""

    stop_names = (TURN[1], RESPONSE[0])
    thoughts_key = "reasoning"

    def __init__(self, tokenizer: Tokenizer, template: str):
        super().__init__(tokenizer, template)
        self.writes_calls = CALL[0] in template

    @classmethod
    def fits(cls, template: str) -> bool:
        return TURN[0] in template and TURN[1] in template

    def reader(
        self, prompt_ids: Sequence[int], functions: Sequence[Function], stop: Sequence[str], *, has_thoughts: bool
    ) -> MessageReader:
        return GemmaReader(self.tokenizer, prompt_ids, functions if self.writes_calls else (), stop)

    def answer_tag(self, prompt_ids: Sequence[int], demands: Demands) -> Tag:
        answer = tags.content_or_calls(demands, [*map(self._call_tag, demands.functions)], CALL[0], "")
        thoughts = tags.any_text(CHANNEL[1]), tags.const(CHANNEL[1])
        before = self.tokenizer.decode(prompt_ids[-16:], skip_special_tokens=False)
        if before.rfind(CHANNEL[0]) > before.rfind(CHANNEL[1]):  # the prompt has begun thoughts
            return tags.sequence(*thoughts, answer)
        if before.endswith((f"{TURN[0]}model\n", RESPONSE[1])):
            return tags.either(answer, tags.sequence(tags.const(THOUGHT), *thoughts, answer))
        return answer  # the prompt is a text to continue, or has closed thoughts

    def _call_tag(self, function: Function) -> Tag:
        content = tags.arguments(function, default=ARGUMENTS)
        return {"type": "tag", "begin": f"{CALL[0]}call:{function.name}", "content": content, "end": CALL[1]}


class GemmaReader(TokenReader):
    """Parses an answer token by token. A channel or call that the prompt has begun belongs to the answer.

    A call that cannot be parsed, or does not end, is content. So are all calls if there are no functions.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], functions: Sequence[Function], stop: Sequence[str]):
        super().__init__(tokenizer, (TURN[0], *CHANNEL, *CALL), stop)
        self._functions = functions
        turn_starts = [position for position, id in enumerate(prompt_ids) if self._markers.get(id) == TURN[0]]
        self._enter(None)
        if turn_starts:
            for id in prompt_ids[turn_starts[-1] + 1 :]:
                self._read(id)
        self._begin_text(prompt_ids)

    def _read(self, id: int) -> list[Part]:
        marker = self._markers.get(id)
        if marker in (CHANNEL[0], CALL[0]) and self._block != CALL[0]:
            parts = self._leave()
            self._enter(marker)
            return parts
        if marker is not None and marker == ENDS.get(self._block):
            parts = self._leave(is_whole=True)
            self._enter(None)
            return parts
        if self._block == CALL[0]:
            self._call_ids.append(id)
            return []
        return self._extend_text(id)

    def _end(self) -> list[Part]:
        return self._leave()

    def _enter(self, block: str | None) -> None:
        """Begins a channel, a call, or content (None)."""
        self._block = block
        self._call_ids: list[int] = []
        self._has_name = block != CHANNEL[0]  # a channel's name is its first line
        self._begin_text()

    def _leave(self, is_whole: bool = False) -> list[Part]:
        """Ends a block; returns the end of its text, or the call."""
        if self._block != CALL[0]:
            return self._new_parts(self._text.text)
        text = self._tokenizer.decode(self._call_ids, skip_special_tokens=False)
        call = _read_call(text) if is_whole and self._functions else None
        if call is not None:
            return [call]
        end = CALL[1] if is_whole else ""
        return [Content(CALL[0] + text + end)]

    def _new_parts(self, text: str) -> list[Part]:
        if not self._has_name:
            name, line, _ = text.partition("\n")
            if not line:
                return []
            self._has_name = True
            self._num_sent = len(name) + 1
        return self._send_new(text, Content if self._block is None else Thought)


def _read_call(text: str) -> FunctionCall | None:
    """Returns the call between two tokens; None if it cannot be parsed."""
    match = NAMED.fullmatch(text)
    if match is None:
        return None
    json_text = ""
    for index, piece in enumerate(match[2].split(QUOTE)):
        is_string = index % 2 == 1
        json_text += json.dumps(piece) if is_string else KEY.sub(_quoted, piece)
    arguments = parse_object(json_text)
    return None if arguments is None else make_function_call(match[1], arguments)


def _quoted(match: re.Match) -> str:
    return match[0] if match[1] is None else json.dumps(match[1])
