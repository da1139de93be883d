"""Daemon threads beside the event loop, which encode, make requests and compile schemas until their client goes away."""

import asyncio
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from subprocess import PIPE
from typing import Any, TypeVar

from treeflash_jax.constraints import compile_bytes

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
        threading.Thread(target=work, name="treeflash request", daemon=True).start()
        return await future


class Compiler:
    """Compiles constraints, a few at a time and each once. A compilation is stopped when no client waits for it."""

    def __init__(self, compile: Callable[[Hashable], Any], most: int):
        self.threads = Threads(most)
        self._compile = compile
        self._tasks: dict[Hashable, asyncio.Task] = {}
        self._waiting: Counter[Hashable] = Counter()

    async def compile(self, constraint: Hashable) -> None:
        """Returns when a constraint is compiled. Raises ValueError as `compile_constraint`."""
        if constraint not in self._tasks:
            self._tasks[constraint] = asyncio.create_task(self._run(constraint))
        task = self._tasks[constraint]
        self._waiting[constraint] += 1
        try:
            await asyncio.shield(task)
        finally:
            self._waiting[constraint] -= 1
            if not self._waiting[constraint]:
                del self._waiting[constraint], self._tasks[constraint]
                task.cancel()

    async def _run(self, constraint: Hashable) -> None:
        process = _Stoppable()

        def compile() -> None:
            compile_bytes.RUN.set(process.run)  # applies to this thread only
            self._compile(constraint)

        try:
            await self.threads.run(compile)
        finally:
            process.stop()


class _Stoppable:
    """Runs processes as `subprocess.run` does, until `stop` is called."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._is_stopped = False
        self._lock = threading.Lock()

    def run(self, command: list[str], *, input: bytes, capture_output: bool) -> subprocess.CompletedProcess:
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the client is gone")
            self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        with self._process as process:
            output, errors = process.communicate(input)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()
