"""Turns messages of Anthropic's API into OpenAI's chat messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treeflash_jax.core.checks import expect

BLOCKS = {
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool": ("text",),
    "user": ("text", "tool_result"),
}  # kinds of blocks by the role of their message; blocks of "tool" are inside a tool's result
REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # the form that Claude Code uses in a user's message


def join_blocks(system: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages of a chat. Results of tools become separate messages; neighbours of the same role are joined.

    Later messages of the system become the user's text in the form REMINDER, because many chat templates refuse them
    anywhere but at the beginning.

    Args:
      system: a text or blocks; None for no system message.

    Raises ValueError for other roles, and for blocks other than text, thoughts, calls and results.
    """
    chat: list[dict[str, Any]] = []
    for number, block in enumerate(_read_blocks(system or [], "system", "system")):
        _add_block(chat, "system", block, f"system.{number}")
    for index, message in enumerate(messages):
        place = f"messages.{index}"
        role = message.get("role")
        expect(role in ("user", "assistant", "system"), f"{place}.role", role, "'user', 'assistant' or 'system'")
        blocks = _read_blocks(message.get("content"), role, f"{place}.content")
        if role == "system" and chat and chat[-1]["role"] != "system":
            role = "user"
            blocks = [{"type": "text", "text": REMINDER.format(block["text"])} for block in blocks]
        for number, block in enumerate(blocks):
            _add_block(chat, role, block, f"{place}.content.{number}")
    return chat


def _add_block(chat: list[dict[str, Any]], role: str, block: Mapping[str, Any], place: str) -> None:
    kind = block["type"]
    if kind == "tool_result":
        content = block.get("content")
        parts = [] if content is None else _read_blocks(content, "tool", f"{place}.content")
        if block.get("is_error"):
            parts = [{"type": "text", "text": "Error:"}, *parts]
        id = _read(block, "tool_use_id", str, place)
        chat.append({"role": "tool", "tool_call_id": id, "content": parts})
        return
    if not chat or chat[-1]["role"] != role:
        chat.append({"role": role, "content": []})
    message = chat[-1]
    if kind == "text":
        message["content"].append({"type": "text", "text": block["text"]})
    elif kind == "thinking":
        message["reasoning_content"] = message.get("reasoning_content", "") + _read(block, "thinking", str, place)
    elif kind == "tool_use":
        arguments = json.dumps(_read(block, "input", dict, place), ensure_ascii=False)
        function = {"name": _read(block, "name", str, place), "arguments": arguments}
        call = {"id": _read(block, "id", str, place), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _read_blocks(content: Any, role: str, place: str) -> list[Mapping[str, Any]]:
    """Returns the blocks of a message's content. Raises ValueError for a kind of block that the role may not have."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    expect(isinstance(content, list), place, content, "a text or a list of blocks")
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        expected = f"one of {', '.join(BLOCKS[role])}"
        if kind in ("image", "document"):
            expected += ": this model reads text only"
        expect(kind in BLOCKS[role], f"{place}.{number}.type", kind, expected)
        if kind == "text":
            _read(block, "text", str, f"{place}.{number}")
    return content


def _read(block: Mapping[str, Any], name: str, kind: type, place: str) -> Any:
    """Returns the value of a block's field. Raises ValueError if the value has another type."""
    value = block.get(name)
    expect(isinstance(value, kind), f"{place}.{name}", value, "an object" if kind is dict else "a text")
    return value
