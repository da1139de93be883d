"""Turns a growing answer into output items of the Responses API, and into the events that report their growth."""

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from treeflash_jax.formats.messages.message_format import FunctionCall, Part, Thought
from treeflash_jax.serve.log_probs import TokenPosition
from treeflash_jax.serve.protocols.response_items import encode_thoughts
from treeflash_jax.serve.server_call import Delta

TEXT, THOUGHT = "output_text", "reasoning_text"  # parts of messages and of reasoning items


class ResponseOutput:
    """Turns new pieces of an answer into events, each a name and its fields. One item is open at a time.

    Args:
      encodes_thoughts: whether reasoning items also have their text in `encrypted_content`.

    Attributes:
      items: the items so far; the last one may be open.
    """

    def __init__(self, *, encodes_thoughts: bool):
        self.items: list[dict[str, Any]] = []
        self._encodes_thoughts = encodes_thoughts
        self._is_open = False
        self._positions = PositionsOfText()

    def add(self, delta: Delta) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the events of a new piece. At the end of the answer, the last item is closed, too."""
        self._positions.add(delta.positions or [])
        for part in delta.parts:
            if isinstance(part, FunctionCall):
                yield from self._close("completed")
                yield from self._add_call(part)
            else:
                yield from self._add_text(part)
        if delta.finished:
            if not self.items:
                yield from self._open_text("message")
            yield from self._close("incomplete" if delta.finished == "length" else "completed")

    def _add_text(self, part: Part) -> Iterator[tuple[str, dict[str, Any]]]:
        kind = "reasoning" if isinstance(part, Thought) else "message"
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open_text(kind)
        [content] = self.items[-1]["content"]
        content["text"] += part.text
        entries = [entry(position) for position in self._positions.take(part.text)]
        log_probs = {}
        if kind == "message":
            content["logprobs"] += entries
            log_probs = {"logprobs": entries}
        yield self._of_content("delta", delta=part.text, **log_probs)

    def _open_text(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if kind == "message":
            item: dict[str, Any] = {"id": _new_id("msg"), "type": kind, "status": "in_progress", "role": "assistant"}
            content: dict[str, Any] = {"type": TEXT, "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": _new_id("rs"), "type": kind, "status": "in_progress", "summary": []}
            content = {"type": THOUGHT, "text": ""}
        self.items.append(item | {"content": []})
        self._is_open = True
        yield self._of_item("added")
        self.items[-1]["content"] = [content]
        yield self._of_part("added")

    def _close(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        [content] = item["content"]
        item["status"] = status
        if item["type"] == "reasoning" and self._encodes_thoughts:
            item["encrypted_content"] = encode_thoughts(content["text"])
        log_probs = {"logprobs": content["logprobs"]} if item["type"] == "message" else {}
        yield self._of_content("done", text=content["text"], **log_probs)
        yield self._of_part("done")
        yield self._of_item("done")

    def _add_call(self, call: FunctionCall) -> Iterator[tuple[str, dict[str, Any]]]:
        item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress", "call_id": call.id}
        self.items.append(item | {"name": call.name, "arguments": ""})
        yield self._of_item("added")
        yield self._event("function_call_arguments.delta", delta=call.arguments)
        self.items[-1] |= {"arguments": call.arguments, "status": "completed"}
        yield self._event("function_call_arguments.done", name=call.name, arguments=call.arguments)
        yield self._of_item("done")

    def _of_item(self, verb: str) -> tuple[str, dict[str, Any]]:
        return f"response.output_item.{verb}", {"output_index": len(self.items) - 1, "item": {**self.items[-1]}}

    def _of_part(self, verb: str) -> tuple[str, dict[str, Any]]:
        [content] = self.items[-1]["content"]
        return self._event(f"content_part.{verb}", content_index=0, part=deepcopy(content))

    def _of_content(self, verb: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        [content] = self.items[-1]["content"]
        return self._event(f"{content['type']}.{verb}", content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        return f"response.{kind}", {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


class PositionsOfText:
    """Finds the tokens of each text in an answer. Tokens between texts, such as tags, belong to no text."""

    def __init__(self):
        self._positions: deque[tuple[int, int, TokenPosition]] = deque()  # remaining ones, with their begin and end
        self._text = ""  # remaining text
        self._begin = 0  # number of characters before the remaining text

    def add(self, positions: Sequence[TokenPosition]) -> None:
        for position in positions:
            begin = end = self._begin + len(self._text)
            if position.token.bytes is not None:  # special tokens have no text
                self._text += position.token.text
                end += len(position.token.text)
                self._positions.append((begin, end, position))

    def take(self, text: str) -> list[TokenPosition]:
        """Returns the positions of the next text and drops those before it. The tokens of the text must have been added."""
        start = self._begin + max(0, self._text.find(text))
        end = start + len(text)
        taken = []
        while self._positions and self._positions[0][0] < end:
            token_begin, token_end, position = self._positions.popleft()
            if token_end > start or token_begin == token_end == start:  # a part of a character has no text
                taken.append(position)
        self._text = self._text[end - self._begin :]
        self._begin = end
        return taken


def entry(position: TokenPosition) -> dict[str, Any]:
    """Returns the log-probabilities of a position in OpenAI's form. Special tokens have no bytes."""
    tokens = [token.entry() | {"bytes": token.bytes or []} for token in (position.token, *position.top)]
    return tokens[0] | {"top_logprobs": tokens[1:]}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"
