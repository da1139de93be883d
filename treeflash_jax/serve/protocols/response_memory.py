"""Memory of the last responses of the Responses API, from which later requests may continue."""

import json
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

MOST_RESPONSES = 1000
MOST_MEMORY_BYTES = 64 * 2**20


class Stored(NamedTuple):
    """A response and the conversation up to its end, stored as JSON, so that every read makes new objects.

    Attributes:
      items: all items of the conversation, without instructions.
      output_ids: ids of the response's items.
    """

    response: bytes
    items: bytes
    output_ids: frozenset[str]

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class ResponseMemory:
    """Stores responses by id in this process. It drops the oldest if they are too many or too large. Threads share it."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_MEMORY_BYTES):
        self._most, self._most_bytes = most, most_bytes
        self._responses: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def add(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Adds a response whose id is new. One that is larger than the memory is not stored."""
        ids = frozenset(item["id"] for item in response["output"])
        stored = Stored(_encode(response), _encode(items), ids)
        if stored.size > self._most_bytes:
            return
        with self._lock:
            self._responses[response["id"]] = stored
            self._size += stored.size
            while len(self._responses) > self._most or self._size > self._most_bytes:
                self._size -= self._responses.popitem(last=False)[1].size

    def response(self, id: str) -> bytes | None:
        stored = self._responses.get(id)
        return None if stored is None else stored.response

    def items(self, id: str) -> list[dict[str, Any]] | None:
        """Returns the items of the conversation up to the end of a response; None if it is not stored."""
        stored = self._responses.get(id)
        return None if stored is None else json.loads(stored.items)

    def item(self, id: str) -> dict[str, Any] | None:
        """Returns an item of a response; None if no stored response has it."""
        with self._lock:
            matches = [stored for stored in self._responses.values() if id in stored.output_ids]
        for stored in matches:
            for item in json.loads(stored.response)["output"]:
                if item["id"] == id:
                    return item
        return None

    def delete(self, id: str) -> bool:
        """Drops a response, and returns whether it was stored. Later responses of the same conversation stay."""
        with self._lock:
            stored = self._responses.pop(id, None)
            if stored is not None:
                self._size -= stored.size
        return stored is not None


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
