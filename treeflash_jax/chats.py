"""Chats in the JSON forms in use: what a line of a prompt file or of a training file may hold."""

from __future__ import annotations

from typing import Any

KEYS = ("conversations", "messages", "turns", "prompt")
EXPECTED = "expected 'conversations' or 'messages' (a list of messages), 'turns' (a list of texts) or 'prompt' (a text)"
# Other names of the roles user and assistant, as ShareGPT and its relatives write them.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}


def parse(raw: Any) -> list[dict[str, str]]:
    """The messages of one record, with role names system, user, assistant, and so on; texts are left as they are.

    The forms are {"messages": [{"role", "content"}, ...]} (OpenAI), the same under "conversations" or with the keys "from"
    and "value" (SpecForge, ShareGPT), {"turns": [text, ...]} (the user's turns; the model's own answers come in between),
    and {"prompt": text} or {"prompt": [messages]}.

    Raises:
      ValueError: anything else, or no message at all.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"got {type(raw).__name__}, expected an object; in it, {EXPECTED.removeprefix('expected ')}")
    key = next((key for key in KEYS if raw.get(key) is not None), None)
    found = None if key is None else raw[key]
    if key == "prompt" and isinstance(found, str):
        found = [found]
    if key in ("turns", "prompt") and isinstance(found, list) and found and all(isinstance(turn, str) for turn in found):
        if not all(found):
            raise ValueError(f"got an empty text in {key!r}, expected one or more that are not")
        return [{"role": "user", "content": turn} for turn in found]
    if key == "turns":
        raise ValueError(f"got turns {found!r}, expected a list of one or more texts")
    if not isinstance(found, list) or not found:
        raise ValueError(f"got keys {', '.join(map(repr, raw)) or 'none'}, {EXPECTED}")
    return [_message(message) for message in found]


def _message(raw: Any) -> dict[str, str]:
    role = raw.get("role", raw.get("from")) if isinstance(raw, dict) else None
    content = raw.get("content", raw.get("value")) if isinstance(raw, dict) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("got a message without role and content, expected strings under both")
    return {"role": ROLES.get(role, role), "content": content}
