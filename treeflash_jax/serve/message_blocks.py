"""Blocks in the text of an answer, in the form of Qwen's templates: <think> becomes reasoning, <tool_call> a call."""

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from treeflash_jax.core.checks import parse_json
from treeflash_jax.formats.tokenizer import THOUGHTS

THINK, CALL = THOUGHTS, ("<tool_call>", "</tool_call>")
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", flags=re.DOTALL)  # calls of Qwen3-Coder and Qwen3.5
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?((?:(?!</?parameter\b).)*)</parameter>\s*", flags=re.DOTALL)
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, as JSON's \\ud800 gives it: no UTF-8 has it


class BlockParser:
    """Splits a growing text into the fields of a message: content, reasoning_content and tool_calls.

    A call is sent when its block ends; a block that does not parse, or does not end, stays text.

    Args:
      tools: tools that the answer may call, as in OpenAI's API; without any, blocks of calls stay text.

    Attributes:
      num_calls: number of calls so far.
    """

    def __init__(self, *, reads_thoughts: bool, tools: Sequence[dict[str, Any]], begins_in_thought: bool = False):
        self.num_calls = 0
        self._tools = tools
        self._blocks = [THINK] * reads_thoughts + [CALL] * bool(tools)
        self._block = THINK if begins_in_thought else None
        self._buffer = ""
        self._is_start = begins_in_thought  # of a part after a marker, whose white space is dropped

    def feed(self, text: str, *, is_last: bool = False) -> list[dict[str, Any]]:
        """Returns what the text adds, as deltas of a streamed message."""
        self._buffer += text
        deltas: list[dict[str, Any]] = []
        while self._read_block(deltas):
            pass
        if is_last and self._block is CALL:
            deltas += self._text(CALL[0] + self._buffer)
        elif self._block is not CALL:
            end = len(self._buffer) if is_last else self._certain()
            deltas += self._text(self._buffer[:end])
            self._buffer = self._buffer[end:]
        return deltas

    def _markers(self) -> list[str]:
        return [start for start, _ in self._blocks] if self._block is None else [self._block[1]]

    def _read_block(self, deltas: list[dict[str, Any]]) -> bool:
        """Reads up to the next marker; returns False if there is none."""
        at = {self._buffer.find(marker): marker for marker in self._markers() if marker in self._buffer}
        if not at:
            return False
        marker = at[min(at)]
        before, self._buffer = self._buffer[: min(at)], self._buffer[min(at) + len(marker) :]
        part = self._call(before) if self._block is CALL else self._text(before)
        self._is_start = self._block is not CALL or "tool_calls" in part[0]
        self._block = None if self._block else next(block for block in self._blocks if block[0] == marker)
        deltas += part
        return True

    def _certain(self) -> int:
        """Returns the number of characters that cannot be the start of a marker."""
        sizes = [size for marker in self._markers() for size in range(1, len(marker))]
        starts = {marker[:size] for marker in self._markers() for size in sizes}
        held = max((len(start) for start in starts if self._buffer.endswith(start)), default=0)
        return len(self._buffer) - held

    def _text(self, text: str) -> list[dict[str, Any]]:
        if self._is_start:
            text = text.lstrip()
        if not text:
            return []
        self._is_start = False
        return [{"reasoning_content" if self._block is THINK else "content": text}]

    def _call(self, text: str) -> list[dict[str, Any]]:
        try:
            match = FUNCTION.fullmatch(text)
            call = parse_json(text) if match is None else _read_function(*match.groups(), self._tools)
            arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False, allow_nan=False)
            texts = {"name": str(call["name"]), "arguments": arguments}
            function = {name: SURROGATE.sub("\ufffd", text) for name, text in texts.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return [{"content": CALL[0] + text + CALL[1]}]
        self.num_calls += 1
        entry = {
            "index": self.num_calls - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": function,
        }
        return [{"tool_calls": [entry]}]


def _read_function(name: str, text: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a call. A value is JSON if its parameter cannot be a string and it parses, otherwise a text.

    Raises ValueError if there is anything but parameters.
    """
    if PARAMETER.sub("", text).strip():
        raise ValueError("got text outside of parameters")
    functions = [_get(tool, "function") for tool in tools]
    schemas = next((_get(x, "parameters", "properties") for x in functions if _get(x, "name") == name), None)
    arguments: dict[str, Any] = {key: value.removesuffix("\n") for key, value in PARAMETER.findall(text)}
    for key, value in arguments.items():
        if not _may_be_string(_get(schemas, key)):
            with suppress(ValueError):
                arguments[key] = parse_json(value)
    return {"name": name, "arguments": arguments}


def _may_be_string(schema: Any) -> bool:
    """Returns whether values of a JSON schema may be strings, as they may without a type."""
    kinds, alternatives = _get(schema, "type"), _get(schema, "anyOf")
    if isinstance(alternatives, list):
        return any(map(_may_be_string, alternatives))
    return kinds is None or kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _get(value: Any, *keys: str) -> Any:
    """Returns what a client's JSON has below these keys; None if anything on the way is missing or no object."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
