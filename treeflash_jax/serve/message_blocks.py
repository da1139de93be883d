"""Blocks in the text of an answer, in the form of Qwen's templates: <think> becomes reasoning, <tool_call> a call."""

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
FUNCTION = re.compile(r"\s*<function=(.+?)>(.*)</function>\s*", flags=re.DOTALL)  # calls of Qwen3-Coder and Qwen3.5
PARAMETER = re.compile(r"<parameter=(.+?)>\n?(.*?)\n?</parameter>", flags=re.DOTALL)


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
            call = json.loads(text) if match is None else self._read_function(*match.groups())
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}
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

    def _read_function(self, name: str, text: str) -> dict[str, Any]:
        """Returns a call; values are texts for parameters of type string and unknown ones, otherwise JSON if they parse."""
        functions = [tool["function"] for tool in self._tools if tool["function"]["name"] == name]
        schemas = functions[0].get("parameters", {}).get("properties", {}) if functions else {}
        arguments: dict[str, Any] = {}
        for key, value in PARAMETER.findall(text):
            arguments[key] = value
            if schemas.get(key, {"type": "string"}).get("type") != "string":
                with suppress(ValueError):
                    arguments[key] = json.loads(value)
        return {"name": name, "arguments": arguments}
