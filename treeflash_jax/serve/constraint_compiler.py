"""Compilation of constraints beside the event loop, which ends when no client waits for it."""

import asyncio
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from subprocess import PIPE
from typing import Any

from treeflash_jax.constraints.compile_bytes import Run
from treeflash_jax.serve.threads import Threads


class ConstraintCompiler:
    """Compiles constraints, a few at a time and each once. A compilation is stopped when no client waits for it."""

    def __init__(self, compile: Callable[[Hashable, Run], Any], most: int):
        self.threads = Threads(most)
        self._compile = compile
        self._tasks: dict[Hashable, asyncio.Task] = {}
        self._waiting: Counter[Hashable] = Counter()

    async def compile(self, constraint: Hashable) -> Any:
        """Returns a constraint's automaton. Raises ValueError as `compile_constraint`."""
        if constraint not in self._tasks:
            self._tasks[constraint] = asyncio.create_task(self._run(constraint))
        task = self._tasks[constraint]
        self._waiting[constraint] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[constraint] -= 1
            if not self._waiting[constraint]:
                del self._waiting[constraint], self._tasks[constraint]
                task.cancel()

    async def _run(self, constraint: Hashable) -> Any:
        process = StoppableProcess()
        try:
            return await self.threads.run(lambda: self._compile(constraint, process.run))
        finally:
            process.stop()


class StoppableProcess:
    """Runs a process as `subprocess.run` does, until `stop` is called."""

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
