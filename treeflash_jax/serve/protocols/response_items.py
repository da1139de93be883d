"""Turns items of OpenAI's Responses API into chat messages. All items of one turn of the assistant become one message."""

import base64
from collections.abc import Sequence
from typing import Any

from treeflash_jax.core.checks import expect, refusal

TEXTS = ("input_text", "output_text", "text")  # parts of messages that are text
ITEMS = "message, reasoning, function_call, function_call_output or item_reference"
ENCODED = "text:"  # beginning of this server's `encrypted_content`, before the text of the thoughts in base64


def join_items(items: Sequence[dict[str, Any]], instructions: str | None = None) -> list[dict[str, Any]]:
    """Returns the messages of a conversation.

    Instructions, and messages of the system and of developers at the beginning, become one message, because many chat
    templates read only the first message of the system.

    Args:
      items: checked items.
      instructions: text before all items.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind == "message" and item["role"] != "assistant":
            text = _text(item["content"])
            if len(messages) == 1 and {messages[0]["role"], item["role"]} <= {"system", "developer"}:
                messages[0]["content"] += f"\n\n{text}"
            else:
                messages.append({"role": item["role"], "content": text})
        else:
            _add_to_turn(_turn(messages, kind), kind, item)
    return messages


def _turn(messages: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Returns the assistant's message to which an item belongs: the last one, or a new one if that is complete."""
    last = messages[-1] if messages else {}
    has_ended = last.get("content") is not None and "tool_calls" not in last and kind != "function_call"
    if last.get("role") != "assistant" or has_ended:
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _add_to_turn(message: dict[str, Any], kind: str, item: dict[str, Any]) -> None:
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        message.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif kind == "reasoning":
        message["reasoning_content"] = message.get("reasoning_content", "") + _thoughts(item)
    else:
        message["content"] = (message["content"] or "") + _text(item["content"])


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _thoughts(item: dict[str, Any]) -> str:
    """Returns the thoughts of a reasoning item; "" if it only has a summary, or content that another server encrypted."""
    if item.get("content"):
        return "".join(part["text"] for part in item["content"])
    encoded = item.get("encrypted_content") or ""
    if not encoded.startswith(ENCODED):
        return ""
    return base64.b64decode(encoded.removeprefix(ENCODED)).decode()


def encode_thoughts(text: str) -> str:
    """Returns thoughts in the form of `encrypted_content`, which clients without stored thoughts send back."""
    return ENCODED + base64.b64encode(text.encode()).decode()


def check_item(item: dict[str, Any], place: str) -> None:
    """Raises ValueError for an item of an unsupported kind, or without a field that it needs."""
    kind = item.get("type", "message")
    if kind == "message":
        expect(item.get("role") in ("user", "assistant", "system", "developer"), f"{place}.role", item.get("role"),
               "user, assistant, system or developer")  # fmt: skip
        _check_text(item.get("content"), f"{place}.content")
    elif kind == "function_call":
        _check_strings(item, place, "call_id", "name", "arguments")
    elif kind == "function_call_output":
        _check_strings(item, place, "call_id")
        _check_text(item.get("output"), f"{place}.output")
    elif kind == "reasoning":
        parts = item.get("content") or []
        encoded = item.get("encrypted_content")
        are_texts = isinstance(parts, list) and all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in parts)
        expect(are_texts, f"{place}.content", parts, "a list of reasoning_text parts")
        expect(encoded is None or isinstance(encoded, str), f"{place}.encrypted_content", encoded, "a text")
        try:
            _thoughts(item)
        except ValueError:
            raise refusal(f"{place}.encrypted_content", encoded, "what this server has written") from None
    elif kind == "item_reference":
        _check_strings(item, place, "id")
    else:
        raise refusal(f"{place}.type", kind, ITEMS)


def _check_strings(item: dict[str, Any], place: str, *names: str) -> None:
    for name in names:
        expect(isinstance(item.get(name), str), f"{place}.{name}", item.get(name), "a text")


def _check_text(content: Any, place: str) -> None:
    """Raises ValueError for content other than a text or a list of parts with text."""
    if isinstance(content, str):
        return
    expect(isinstance(content, list), place, content, "a text or a list of parts")
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        expect(kind in TEXTS, f"{place}.{number}.type", kind, "input_text or output_text: the model reads text only")
        expect(isinstance(part.get("text"), str), f"{place}.{number}.text", part.get("text"), "a text")
