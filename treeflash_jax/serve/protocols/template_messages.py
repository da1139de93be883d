"""Turns messages of clients into the form that chat templates expect: OpenAI's chat messages with gaps filled in."""

from collections.abc import Mapping, Sequence
from typing import Any

from treeflash_jax.core.json_files import parse_json


def template_messages(messages: Sequence[Mapping[str, Any]], template: str, thoughts_key: str) -> list[dict[str, Any]]:
    """Returns messages for a chat template.

    Missing content becomes an empty text, arguments of calls become objects, and earlier thoughts get the key that the
    template reads. The role of developers becomes "system" if the template does not know it.

    Args:
      template: the chat template.
      thoughts_key: key of thoughts in the template.
    """
    plain = []
    for message in messages:
        message = dict(message)
        if message.get("role") == "developer" and "developer" not in template:
            message["role"] = "system"
        if message.get("content") is None and message.get("role") in ("assistant", "tool"):
            message["content"] = ""
        reasoning = message.pop("reasoning", None)
        thoughts = message.pop("reasoning_content", None) or reasoning
        if isinstance(thoughts, str) and thoughts:
            message[thoughts_key] = thoughts
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        plain.append(message)
    return plain


def _plain_call(call: Any) -> Any:
    """Returns a call whose arguments are an object, as templates expect, instead of JSON text or nothing."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except ValueError:
            pass  # the template gets the text unchanged
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
