"""Reads thoughts and calls between tags in the growing text of an answer."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from treeflash_jax.formats.messages.message_format import (
    Content,
    Function,
    FunctionCall,
    MessageReader,
    Part,
    Thought,
    join_parts,
    make_function_call,
    parse_object,
    parse_value,
)
from treeflash_jax.formats.string_schemas import allows_strings

THINK, CALL, BARE = ("<think>", "</think>"), ("<tool_call>", "</tool_call>"), ("<function=", "</function>")
TAGS = *THINK, *CALL, *BARE
CALL_ENDS = dict([CALL, BARE])
TAG = re.compile(f"({'|'.join(TAGS)})")
TAG_STARTS = {tag[:size] for tag in TAGS for size in range(1, len(tag))}
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", flags=re.DOTALL)  # calls of Qwen3-Coder and Qwen3.5
STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*+'  # string of JSON without the quote at its end
UNFINISHED_STRING = re.compile(  # beginning of a JSON object, up to some place inside a string
    rf"\s*\{{(?:[\s\d.eE+\-:,\[\]{{}}]|true|false|null|{STRING}\"(?=\s*[:,\]}}]))*+{STRING}"
)
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?((?:(?!</?parameter\b).)*)</parameter>\s*", flags=re.DOTALL)


class TagReader(MessageReader):
    """Parses a growing text at its tags.

    A call becomes a part when its block ends. A block that cannot be parsed, or does not end, stays text. Thoughts can only
    be at the beginning. Calls inside thoughts, and <function=NAME> without <tool_call> around it, are parsed as well. If
    thoughts end inside a block that is no call, the tag at its start was only mentioned.
    """

    def __init__(self, *, reads_thoughts: bool, functions: Sequence[Function], begins_in_thought: bool = False):
        self._functions = functions
        self._kind: type[Content] | type[Thought] | None = None if reads_thoughts else Content  # None: either may begin
        self._tag = ""  # the last tag, while only white space follows it
        if begins_in_thought:
            self._kind, self._tag = Thought, THINK[0]
        self._held = ""  # end of the text that may become a tag
        self._pending: list[str] = []  # the block of a call so far, or white space that thoughts may follow
        self._string_tag = 0  # index of the last tag that is inside a string of the block's JSON; 0: none is

    def feed(self, ids: Sequence[int], text: str, *, is_last: bool = False) -> list[Part]:
        pieces, self._held = split_at_tags(self._held + text)
        if is_last:
            pieces.append(self._held)
        parts = [part for piece in pieces for part in self._read(piece)]
        while is_last and self._pending:
            parts += self._release()
        return join_parts(parts)

    def _read(self, piece: str) -> list[Part]:
        """Reads a tag, or a text without tags."""
        if self._pending and self._pending[0] in CALL_ENDS:
            return self._read_in_call(piece)
        if piece in CALL_ENDS and self._functions:
            parts = self._release()
            self._pending, self._string_tag = [piece], 0
            return parts
        if piece == THINK[0] and self._kind is None:
            self._kind, self._tag, self._pending = Thought, piece, []
            return []
        if piece == THINK[1] and self._kind is Thought:
            self._kind, self._tag = Content, piece
            return []
        if piece == CALL[1] and self._tag in CALL_ENDS.values():
            return []
        self._pending.append(piece)
        return [] if self._kind is None and piece.isspace() else self._release()

    def _read_in_call(self, piece: str) -> list[Part]:
        self._pending.append(piece)
        ends_call = piece == CALL_ENDS[self._pending[0]]
        ends_thoughts = piece == THINK[1] and self._kind is Thought
        if not ends_call and not ends_thoughts:
            return []
        text = "".join(self._pending[self._string_tag + 1 : -1])
        if self._string_tag:
            text = '{"' + text  # in place of what comes before, which is not read again
        if UNFINISHED_STRING.fullmatch(text):
            self._string_tag = len(self._pending) - 1
            return []
        call = self._parse_call() if ends_call else None
        if call is None:
            return self._release()
        self._pending, self._tag = [], piece
        return [call]

    def _release(self) -> list[Part]:
        """Returns the pending pieces as text. If the end of thoughts is among them, reads again from there on."""
        pieces, self._pending = self._pending, []
        end = pieces.index(THINK[1]) if self._kind is Thought and THINK[1] in pieces else len(pieces)
        text = "".join(pieces[:end])
        if self._tag:
            text = text.lstrip()
        parts: list[Part] = []
        if text:
            parts.append(Thought(text) if self._kind is Thought else Content(text))
            self._tag = ""
        if text.strip() and self._kind is None:
            self._kind = Content
        return parts + [part for piece in pieces[end:] for part in self._read(piece)]

    def _parse_call(self) -> FunctionCall | None:
        """Returns the call in the pending block; None if it cannot be parsed."""
        text = "".join(self._pending if self._pending[0] == BARE[0] else self._pending[1:-1])
        match = FUNCTION.fullmatch(text)
        return _read_json(text) if match is None else _read_function(*match.groups(), self._functions)


def split_at_tags(text: str) -> tuple[list[str], str]:
    """Returns the tags of a text and the texts between them, in order, and an end of the text that may become a tag."""
    before, bracket, after = text.rpartition("<")
    unfinished = bracket + after if bracket + after in TAG_STARTS else ""
    pieces = TAG.split(before if unfinished else text)
    return [piece for piece in pieces if piece], unfinished


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
