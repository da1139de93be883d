"""`Slots`, the owner of slot numbers, and the requests that hold slots."""

from collections.abc import Sequence

from treeflash_jax.engine.call.requests import Request


class Slots:
    """Owner of all slot numbers. Slot s is row s of every array of the decoding state.

    A slot is free, reserved for a request whose prompt is being read, or held by a request whose answer is being decoded.

    Attributes:
      size: number of slots.
      free: free slots, the longest free first.
      requests: request of each slot that is held.
    """

    def __init__(self, size: int):
        self.size = size
        self.free = [*range(size)]
        self.requests: dict[int, Request] = {}
        self._reserved: set[int] = set()

    def reserve(self, preferred: Sequence[int | None]) -> list[int]:
        """Reserves a slot for each entry of `preferred`: that slot if it is free, else the one that is free the longest."""
        reserved = []
        for slot in preferred:
            if slot not in self.free:
                slot = self.free[0]
            self.free.remove(slot)
            reserved.append(slot)
        self._reserved |= {*reserved}
        return reserved

    def hold(self, slot: int, request: Request) -> None:
        """Gives a reserved slot to its request. Raises KeyError for any other slot."""
        self._reserved.remove(slot)
        self.requests[slot] = request

    def release(self, slots: Sequence[int]) -> None:
        """Frees slots that are reserved or held. Raises KeyError for a slot that is already free."""
        for slot in slots:
            if slot in self.requests:
                del self.requests[slot]
            else:
                self._reserved.remove(slot)
            self.free.append(slot)
