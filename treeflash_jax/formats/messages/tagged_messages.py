"""Thoughts and calls between tags, as in Qwen's templates: <think> and <tool_call>, around JSON or <function=NAME>."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

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
    make_function_call,
    parse_object,
    parse_value,
)
from treeflash_jax.formats.string_schemas import allows_strings
from treeflash_jax.formats.tokenizer import Tokenizer

THINK, CALL, BARE = ("<think>", "</think>"), ("<tool_call>", "</tool_call>"), ("<function=", "</function>")
LINES = {"type": "regex", "pattern": "\n{0,2}"}  # line breaks between thoughts and answer
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", flags=re.DOTALL)  # calls of Qwen3-Coder and Qwen3.5
STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*+'  # string of JSON without the quote at its end
UNFINISHED_STRING = re.compile(  # beginning of a JSON object, up to some place inside a string
    rf"\s*\{{(?:[\s\d.eE+\-:,\[\]{{}}]|true|false|null|{STRING}\"(?=\s*[:,\]}}]))*+{STRING}"
)
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?((?:(?!</?parameter\b).)*)</parameter>\s*", flags=re.DOTALL)


class TaggedMessages(MessageFormat):
    """Answers with tags. Without tags in the template, an answer is plain text: this format fits every template."""

    def __init__(self, tokenizer: Tokenizer, template: str):
        super().__init__(tokenizer, template)
        self.writes_calls = CALL[0] in template
        self._has_thoughts = THINK[0] in template or THINK[1] in template

    @classmethod
    def fits(cls, template: str) -> bool:
        return True

    def reader(
        self, prompt_ids: Sequence[int], functions: Sequence[Function], stop: Sequence[str], *, has_thoughts: bool
    ) -> MessageReader:
        begins_in_thought = self._has_thoughts and self._begins_in_thought(prompt_ids)
        functions = functions if self.writes_calls else ()
        return TagReader(
            reads_thoughts=has_thoughts and self._has_thoughts, functions=functions, begins_in_thought=begins_in_thought
        )

    def answer_tag(self, prompt_ids: Sequence[int], demands: Demands) -> Tag:
        answer = tags.content_or_calls(demands, [*map(self._call_tag, demands.functions)], CALL[0], "\n")
        if self._begins_in_thought(prompt_ids):
            answer = tags.sequence(tags.any_text(THINK[1]), tags.const(THINK[1]), LINES, answer)
        return answer

    def _begins_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Returns whether the prompt has opened thoughts, as some chat templates do."""
        return self.tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False).rstrip().endswith(THINK[0])

    def _call_tag(self, function: Function) -> Tag:
        if BARE[0] in self.template:
            begin, end = f"{CALL[0]}\n{BARE[0]}{function.name}>\n", f"{BARE[1]}\n{CALL[1]}"
            content = tags.arguments(function, "qwen_xml_parameter")
        else:
            begin, end = f'{CALL[0]}\n{{"name": {json.dumps(function.name)}, "arguments": ', f"}}\n{CALL[1]}"
            content = tags.arguments(function)
        return {"type": "tag", "begin": begin, "content": content, "end": end}


class TagReader(MessageReader):
    """Splits a growing text at its tags.

    A call becomes a part when its block ends. A block that cannot be parsed, or does not end, stays text. Thoughts can only
    be at the beginning. Calls inside thoughts, and <function=NAME> without <tool_call> around it, are parsed as well.
    """

    def __init__(self, *, reads_thoughts: bool, functions: Sequence[Function], begins_in_thought: bool = False):
        self._functions = functions
        self._reads_thoughts = reads_thoughts
        self._block = THINK if begins_in_thought else None
        self._around: tuple[str, str] | None = None  # block around a call's block
        self._buffer = ""
        self._searched = 0  # number of leading characters of the buffer in which the block does not end
        self._is_start = begins_in_thought  # whether a part begins after a tag: its leading white space is dropped
        self._is_behind_call = False

    def feed(self, ids: Sequence[int], text: str, *, is_last: bool = False) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._read_block(parts):
            pass
        if self._block in (CALL, BARE):
            if is_last and self._around is THINK and THINK[1] in self._buffer:
                self._leave_thoughts(parts)
                parts += self.feed([], "", is_last=True)
            elif is_last:
                text = self._block[0] + self._buffer
                self._block = self._around
                parts += self._text(text)
        else:
            end = len(self._buffer) if is_last else self._find_certain_end()
            parts += self._text(self._buffer[:end])
            self._buffer = self._buffer[end:]
        return parts

    def _tags(self) -> list[str]:
        """Returns the tags that can begin or end a block here."""
        if self._block in (CALL, BARE):
            if self._around is THINK:
                return [self._block[1], THINK[1]]  # the second ends thoughts that only mention calls
            return [self._block[1]]
        names = [CALL[0], BARE[0]] if self._functions else []
        if self._block is THINK:
            names.append(THINK[1])
        elif self._reads_thoughts:
            names.append(THINK[0])
        if self._is_behind_call:
            names.append(CALL[1])
        return names

    def _read_block(self, parts: list[Part]) -> bool:
        """Reads up to the next tag. Returns False if there is none."""
        positions = {tag: self._buffer.find(tag, self._searched) for tag in self._tags()}
        positions = {tag: position for tag, position in positions.items() if position >= 0}
        if not positions:
            if self._block in (CALL, BARE):
                self._searched = max(self._searched, len(self._buffer) - len(CALL[1]))
            return False
        tag = min(positions, key=positions.get)
        before = self._buffer[: positions[tag]]
        after = self._buffer[positions[tag] + len(tag) :]
        if self._block in (CALL, BARE):
            if not self._end_call(before, tag, parts):
                return True
        elif tag not in (THINK[0], CALL[1]):
            parts += self._text(before)
            self._enter(tag)
        elif before.strip():  # neither at the beginning nor right after a call
            parts += self._text(before + tag)
        elif tag == THINK[0]:
            self._enter(tag)
        self._buffer, self._searched = after, 0
        return True

    def _end_call(self, before: str, tag: str, parts: list[Part]) -> bool:
        """Ends the block of a call at a tag. Returns False if the text does not go on right after the tag."""
        call = None if tag == THINK[1] else self._call(before)
        if call is None and UNFINISHED_STRING.fullmatch(before):  # so the tag is text
            quote = self._buffer.find('"', len(before))  # the string does not end before it
            self._searched = quote if quote >= 0 else len(self._buffer)
            return False
        if call is None and self._around is THINK and THINK[1] in before + tag:
            self._leave_thoughts(parts)
            return False
        text = self._block[0] + before + tag
        self._block = self._around
        parts += self._text(text) if call is None else [call]
        self._is_start = self._is_behind_call = call is not None
        return True

    def _leave_thoughts(self, parts: list[Part]) -> None:
        """Ends thoughts at their first end in the block of a call, which they only mention."""
        before, _, self._buffer = self._buffer.partition(THINK[1])
        text = self._block[0] + before
        self._block = THINK
        parts += self._text(text)
        self._is_behind_call = False
        self._enter(THINK[1])
        self._searched = 0

    def _enter(self, tag: str) -> None:
        """Continues after a tag that is not inside a call."""
        if tag in (CALL[0], BARE[0]):
            self._around = self._block
            self._block = CALL if tag == CALL[0] else BARE
        else:
            self._block = THINK if tag == THINK[0] else None
            self._reads_thoughts, self._is_start = False, True

    def _find_certain_end(self) -> int:
        """Returns the number of leading characters that cannot be the start of a tag."""
        end = len(self._buffer)
        for tag in self._tags():
            for size in range(1, len(tag)):
                if self._buffer.endswith(tag[:size]):
                    end = min(end, len(self._buffer) - size)
        is_before_thoughts = self._reads_thoughts and self._block is None and not self._buffer[:end].strip()
        return 0 if is_before_thoughts else end

    def _text(self, text: str) -> list[Part]:
        if self._is_start:
            text = text.lstrip()
        if not text:
            return []
        self._is_start = self._is_behind_call = False
        if self._block is THINK:
            return [Thought(text)]
        self._reads_thoughts &= not text.strip()
        return [Content(text)]

    def _call(self, text: str) -> FunctionCall | None:
        """Returns the call in a block; None if it cannot be parsed."""
        if self._block is BARE:
            text = BARE[0] + text + BARE[1]
        match = FUNCTION.fullmatch(text)
        return _read_json(text) if match is None else _read_function(*match.groups(), self._functions)


def _read_json(text: str) -> FunctionCall | None:
    call = parse_object(text)
    if call is None or "name" not in call:
        return None
    return make_function_call(call["name"], call.get("arguments", call.get("parameters")))


def _read_function(name: str, text: str, functions: Sequence[Function]) -> FunctionCall | None:
    """Returns a call; None if there is anything but parameters.

    A value is JSON if `allows_strings` rules out text and it can be parsed, otherwise text.
    """
    if PARAMETER.sub("", text).strip():
        return None
    schema = next((x.parameters for x in functions if x.name == name), None)
    read_references: dict[str, bool] = {}
    arguments: dict[str, Any] = {key: value.removesuffix("\n") for key, value in PARAMETER.findall(text)}
    for key, value in arguments.items():
        with suppress(ValueError, RecursionError):  # of a value, or of a schema that is nested too deeply
            if not allows_strings(_get(schema, "properties", key), schema, read_references):
                arguments[key] = parse_value(value)
    return make_function_call(name, arguments)


def _get(value: Any, *keys: str) -> Any:
    """Returns the value at a path of keys in a client's JSON; None if a value on the path is missing or no object."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
