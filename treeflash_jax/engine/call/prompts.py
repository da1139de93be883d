"""Prompts of a call (a string, text to continue, a chat, or token ids) and chats of prompt and training files."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from treeflash_jax.core.checks import coerce, expect, hint
from treeflash_jax.core.error_text import LONGEST_VALUE, clipped, quoted
from treeflash_jax.formats.text_limit import TextLimit
from treeflash_jax.formats.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Names of the roles user and assistant in ShareGPT and related data sets.
OTHER_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}
RECORD_KEYS = ("conversations", "messages", "turns", "prompt")
RECORD_FORMS = "'conversations' or 'messages' (a list of messages), 'turns' (a list of texts) or 'prompt' (a text)"


class Text(str):
    """A prompt that is continued as it is, without a chat template; a plain string is a user's message.

    Example:
      >>> model.generate(tf.Text("def add("))
    """


@dataclass(frozen=True)
class Chat:
    """A chat with tools, template arguments or a last message to continue. A plain list of messages has none of these.

    Example:
      >>> model.generate(tf.Chat(messages, tools=[get_weather]))
      >>> model.generate(tf.Chat([*messages, {"role": "assistant", "content": "It is"}], continued=True))

    Attributes:
      tools: tools described to the chat template: JSON schemas as in OpenAI's API, or functions with types and a docstring.
      continued: whether the answer continues the last message, instead of being a new one.
      template: further arguments of the chat template; they override those of `tf.load`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] = ()
    continued: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `Tokenizer.render`."""
        arguments = {**self.template, "tools": list(self.tools) or None}
        if self.continued:
            arguments |= {"add_generation_prompt": False, "continue_final_message": True}
        return arguments


Prompt = str | Chat | Sequence[int] | Sequence[Mapping[str, Any]]


def parse_ids(text: str) -> list[int]:
    """Parses a text of token ids such as "3 4 5", the value of the option --prompt-ids."""
    return coerce(list[int], text.replace(",", " ").split(), "--prompt-ids", from_text=True)


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Returns one or several prompts as a list. Raises ValueError for anything else."""
    if isinstance(prompts, str | Chat):
        return [prompts]
    items = _items(prompts)
    is_one = bool(items) and (isinstance(items[0], Mapping) or _is_id(items[0]))
    return [items] if is_one else items


def encode_each(prompts: Sequence[Prompt], tokenizer: Tokenizer | None, limit: TextLimit | None = None) -> list[list[int]]:
    """Returns the token ids of every prompt. Errors are those of `encode`, and name the prompt if there are several."""
    encoded = []
    for index, prompt in enumerate(prompts):
        try:
            encoded.append(encode(prompt, tokenizer, limit))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
    return encoded


def encode(prompt: Prompt, tokenizer: Tokenizer | None, limit: TextLimit | None = None) -> list[int]:
    """Returns the token ids of one prompt.

    A string is a user's message, formatted with the chat template if the tokenizer has one; a `Text` is continued as it is.
    An assistant's message with tool calls needs no content, if the chat template takes it.

    Args:
      tokenizer: tokenizer of the verifier; not needed for ids.
      limit: limit on the length of a text, checked before it is encoded. For a chat, the text that its template writes
        counts, since templates may leave some of its texts out.

    Raises ValueError for no prompt, an empty prompt, text without a tokenizer or beyond the limit, text that the tokenizer
    or its chat template rejects, or messages with content other than text.
    """
    if isinstance(prompt, str) and not isinstance(prompt, Text) and prompt and tokenizer and tokenizer.has_chat_template:
        prompt = [{"role": "user", "content": prompt}]
    chat = prompt if isinstance(prompt, Chat) else Chat(prompt)
    items = prompt if isinstance(prompt, str) else _items(chat.messages)
    is_chat = bool(items) and isinstance(items[0], Mapping)
    if is_chat or isinstance(items, str):
        if tokenizer is None:
            raise ValueError("got text, but the verifier's folder has no tokenizer.json; give ids instead")
        text = tokenizer.render(plain_messages(items), **chat.arguments) if is_chat else items
        if limit is not None:
            limit.check(text)
        ids = tokenizer.encode_texts([text], add_special_tokens=False)[0] if is_chat else tokenizer.encode(text)
    else:
        if strange := [item for item in items if not _is_id(item)]:
            raise ValueError(f"got {type(strange[0]).__name__} among the token ids of a prompt, expected whole numbers")
        ids = [int(item) for item in items]
    if not ids:
        raise ValueError("got an empty prompt, expected at least one token")
    return ids


def plain_messages(chat: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns a chat with strings as contents: the text parts of each message, joined by line breaks.

    Raises ValueError if a message has no role, neither content nor tool calls, an unknown role, or content other than text.
    """
    messages = []
    for index, message in enumerate(chat):
        at = f"message {index}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{at}: got {type(message).__name__}, expected a dict with 'role' and 'content'")
        role = message.get("role")
        ending = hint(OTHER_ROLES.get(str(role), str(role)), ROLES)
        expect(role in ROLES, "role", role, f"one of {', '.join(ROLES)}{ending}", at)
        content = message.get("content")
        if content is not None or not message.get("tool_calls"):
            message = {**message, "content": _join_text(content, at)}
        messages.append(dict(message))
    return messages


def read_messages(record: Any) -> list[dict[str, str]]:
    """Returns the messages of one record of a prompt or training file, with the role names of `ROLES`.

    The forms are {"messages": [{"role", "content"}, ...]} (OpenAI), the same under "conversations" or with the keys "from"
    and "value" (SpecForge, ShareGPT), {"turns": [text, ...]} (the user's turns: benchmarks answer each of them, commands
    and training only the first), and {"prompt": text} or {"prompt": [messages]}. Raises ValueError for any other form, and
    if there is no message.
    """
    if not isinstance(record, dict):
        raise ValueError(f"got {type(record).__name__}, expected an object; in it, {RECORD_FORMS}")
    key = next((key for key in RECORD_KEYS if record.get(key) is not None), None)
    value = None if key is None else record[key]
    if key == "prompt" and isinstance(value, str):
        value = [value]
    if key in ("turns", "prompt") and isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        if not all(value):
            raise ValueError(f"got an empty text in {key!r}, expected text")
        return [{"role": "user", "content": turn} for turn in value]
    if key == "turns":
        raise ValueError(f"got turns {quoted(value)}, expected a list of one or more texts")
    if not isinstance(value, list) or not value:
        keys = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"got keys {clipped(keys, LONGEST_VALUE)}, expected {RECORD_FORMS}")
    messages = []
    for message in value:
        fields = message if isinstance(message, dict) else {}
        role = fields.get("role", fields.get("from"))
        content = fields.get("content", fields.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("got a message without role and content, expected strings under both")
        messages.append({"role": OTHER_ROLES.get(role, role), "content": content})
    return messages


def _join_text(content: Any, at: str) -> str:
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
            raise ValueError(f"{at}: got a part of type {quoted(kind)}, expected 'text': the verifier reads text only")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{at}: got a text part without text, expected {{'type': 'text', 'text': ...}}")
        texts.append(part["text"])
    return "\n".join(texts)


def _items(prompts: Any) -> list[Any]:
    is_scalar = not isinstance(prompts, Iterable) or getattr(prompts, "shape", None) == ()  # arrays without axes too
    if is_scalar or isinstance(prompts, Mapping | Set | bytes):
        expected = "a string, a chat (a list of messages) or a list of token ids"
        raise ValueError(f"got {type(prompts).__name__} as a prompt, expected {expected}")
    items = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)  # arrays have tolist
    return [item.item() if getattr(item, "shape", None) == () else item for item in items]  # and their items may be arrays


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
