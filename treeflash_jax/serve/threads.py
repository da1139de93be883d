"""Daemon threads beside the event loop, for functions that would block it."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Runs functions in up to `most` threads at a time.

    A cancelled task ends at once. Its thread ends with its function, and counts as running until then. The threads are
    daemons, because threads of an executor would delay the end of the process.

    Attributes:
      busy: number of running threads.
    """

    def __init__(self, most: int):
        self.busy = 0
        self._free = asyncio.Semaphore(most)

    async def run(self, function: Callable[[], T]) -> T:
        """Returns the function's result; raises what it raises."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def end(result: Any, error: BaseException | None) -> None:
            self.busy -= 1
            self._free.release()
            if future.done():  # it was cancelled
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as reason:
                error = reason
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, result, error)

        self.busy += 1
        try:
            threading.Thread(target=work, name="treeflash request", daemon=True).start()
        except Exception as error:  # for example, the system allows no more threads
            end(None, error)
        return await future
