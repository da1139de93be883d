"""Prompts as users give them: a string, text to continue, a chat, or token ids; a single prompt or a list."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from treeflash_jax import chats
from treeflash_jax.checks import quoted
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.suggest import suggestion

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
KINDS = "a string, a chat (a list of messages) or a list of token ids"


class Text(str):
    """A prompt that is continued as it is, without a chat template; a plain string is a user's message.

    Example:
      >>> model.generate(tf.Text("def add("))
    """


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Returns the prompts of a call as a list, also if a single prompt was given.

    Raises:
      ValueError: neither a prompt nor a list.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    is_one = bool(items) and (isinstance(items[0], Mapping) or _is_id(items[0]))
    return [items] if is_one else items


def only(prompts: Prompt | Iterable[Prompt]) -> Prompt:
    """Returns the prompt of a call that takes a single one, given alone or in a list.

    Raises:
      ValueError: no prompt, or several.
    """
    found = as_list(prompts)
    if len(found) != 1:
        raise ValueError(
            f"got {len(found)} prompts, expected one: a stream is one answer, `generate` takes several prompts"
        )
    return found[0]


def encode_each(prompts: Sequence[Prompt], encode: Callable[[Prompt], list[int]]) -> list[list[int]]:
    """Returns the token ids of every prompt.

    Raises:
      ValueError: as `encode`; names the prompt if there are several.
    """
    encoded = []
    for index, prompt in enumerate(prompts):
        try:
            encoded.append(encode(prompt))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
    return encoded


def encode(prompt: Prompt, tokenizer: Tokenizer | None, context: int | None = None) -> list[int]:
    """Returns the token ids of one prompt.

    A string is a user's message, formatted with the chat template if the tokenizer has one; a `Text` is continued as it is.

    Args:
      prompt: a string, Text, chat or list of ids.
      tokenizer: tokenizer of the verifier; not needed for ids.
      context: context length of the verifier in tokens; text that is certainly longer is refused before it is tokenised.
        None tokenises all text.

    Raises:
      ValueError: no prompt or an empty one, text without a tokenizer, text that the tokenizer or its chat template refuses,
        or messages that hold anything but text.
    """
    if isinstance(prompt, str) and not isinstance(prompt, Text) and prompt and tokenizer and tokenizer.has_chat_template:
        prompt = [{"role": "user", "content": prompt}]
    items = prompt if isinstance(prompt, str) else _items(prompt)
    is_chat = bool(items) and isinstance(items[0], Mapping)
    if is_chat or isinstance(items, str):
        if tokenizer is None:
            raise ValueError("got text, but the verifier's folder has no tokenizer.json; give ids instead")
        ids = tokenizer.encode_chat(plain_messages(items), context) if is_chat else tokenizer.encode(items, context)
    else:
        if strange := [item for item in items if not _is_id(item)]:
            raise ValueError(f"got {type(strange[0]).__name__} among the token ids of a prompt, expected whole numbers")
        ids = [operator.index(item) for item in items]
    if not ids:
        raise ValueError("got an empty prompt, expected at least one token")
    return ids


def plain_messages(chat: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns a chat whose contents are strings: the text parts of a message, joined by line breaks.

    Raises:
      ValueError: a message has no role or content, an unknown role, or content other than text.
    """
    messages = []
    for index, message in enumerate(chat):
        at = f"message {index}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{at}: got {type(message).__name__}, expected a dict with 'role' and 'content'")
        role = message.get("role")
        if role not in ROLES:
            meant = chats.ROLES.get(str(role)) or suggestion(str(role), ROLES)
            hint = f"; did you mean {meant}?" if meant else ""
            raise ValueError(f"{at}: got role {quoted(role)}, expected one of {', '.join(ROLES)}{hint}")
        messages.append({**message, "content": _text_of(message.get("content"), at)})
    return messages


def _text_of(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise ValueError(f"{at}: got no content, expected text")
    if not isinstance(content, Sequence):
        raise ValueError(f"{at}: got content of type {type(content).__name__}, expected text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(f"{at}: got a part of type {quoted(kind)}, expected 'text': the verifier reads text alone")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{at}: got a text part without text, expected {{'type': 'text', 'text': ...}}")
        texts.append(part["text"])
    return "\n".join(texts)


def _items(prompts: Any) -> list[Any]:
    if isinstance(prompts, Mapping | Set | bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"got {type(prompts).__name__} as a prompt, expected {KINDS}")
    return list(prompts)


def _is_id(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
