"""What one client sends, waits for or leaves does not hold up others; with a worker without a model."""

import asyncio
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import h11
import httpx
import pytest
from stub_worker import StubRequestMaker, client_of, listening, stub_worker

from treeflash_jax.constraints.compile_bytes import Run
from treeflash_jax.serve import call_reader, limits
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.call_reader import COMPILING, READING, CallReader
from treeflash_jax.serve.constraint_compiler import ConstraintCompiler
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.protocols import responses
from treeflash_jax.serve.server_call import Tools
from treeflash_jax.serve.threads import Threads

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


async def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_the_work_of_one_client_stops_no_other():
    """While as many prompts are encoded as there are threads less one."""
    ends, encoding = threading.Event(), []

    def encode(prompts: list[str]) -> list[list[int]]:
        if prompts[0] == "slow":
            encoding.append(threading.current_thread())
            ends.wait(60)
        return [[1]]

    async def run() -> None:
        async with client_of(stub_worker(request_maker=StubRequestMaker(encode=encode), _limit=99)) as http:
            slow = [asyncio.create_task(http.post("/v1/completions", json={"prompt": "slow"})) for _ in range(READING - 1)]
            fast = await asyncio.wait_for(http.post("/v1/completions", json={"prompt": "fast"}), 30)
            slow += [asyncio.create_task(http.post("/v1/completions", json={"prompt": "slow"})) for _ in range(30)]
            await until(lambda: len(encoding) >= READING)
            await asyncio.sleep(0.2)
            assert len(encoding) == READING
            for path in ("/health", "/metrics"):
                assert (await asyncio.wait_for(http.get(path), 30)).status_code == 200
            assert fast.status_code == 200 and not any(task.done() for task in slow)
            ends.set()
            assert {response.status_code for response in await asyncio.gather(*slow)} == {200}

    try:
        asyncio.run(run())
    finally:
        ends.set()


def test_a_thread_that_cannot_start_blocks_no_later_one(monkeypatch):
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        threads = Threads(1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await threads.run(int)
        assert threads.busy == 0 and await asyncio.wait_for(threads.run(int), 10) == 0

    asyncio.run(run())


@pytest.mark.parametrize("place, name", [
    (responses, "read_response_tools"), (responses, "offered_tools"), (Tools, "check"), (CallReader, "check_model"),
    (call_reader, "model_settings"), (StubRequestMaker, "make_requests"),
])  # fmt: skip
def test_reading_a_body_stops_no_other_client(monkeypatch, place, name):
    begins, ends, waited, step = threading.Event(), threading.Event(), [], getattr(place, name)

    def slow_step(*args: Any, **settings: Any) -> Any:
        begins.set()
        waited.append(ends.wait(30))
        return step(*args, **settings)

    async def run() -> None:
        async with client_of(stub_worker()) as http:
            slow = asyncio.create_task(http.post("/v1/responses", json={"input": "a"}))
            await until(begins.is_set)
            assert (await http.get("/health")).status_code == 200
            ends.set()
            assert (await slow).status_code == 200

    monkeypatch.setattr(place, name, slow_step)
    asyncio.run(run())
    assert waited == [True]


def test_schemas_are_compiled_once_and_a_few_at_a_time():
    ends, running, counts, most = threading.Event(), set(), Counter(), []

    def compile(schema: str, run: Run) -> str:
        running.add(schema)
        counts[schema] += 1
        most.append(len(running))
        ends.wait(60)
        running.remove(schema)
        return schema.upper()

    async def run() -> None:
        compiler = ConstraintCompiler(compile, COMPILING)
        tasks = [asyncio.create_task(compiler.compile(schema)) for schema in "abcabca"]
        await until(lambda: len(running) == COMPILING)
        ends.set()
        assert await asyncio.gather(*tasks) == [*"ABCABCA"]

    asyncio.run(run())
    assert counts == {"a": 1, "b": 1, "c": 1} and max(most) == COMPILING


def test_a_compilation_ends_with_its_last_client():
    started = []

    def compile(schema: str, run: Run) -> None:
        if schema == "wrong":
            raise ValueError("no schema")
        started.append(schema)
        started.append(run(SLEEP, input=b"", capture_output=True).returncode)

    async def run() -> None:
        compiler = ConstraintCompiler(compile, 1)
        first, second, other = (asyncio.create_task(compiler.compile(schema)) for schema in ("long", "long", "wrong"))
        while not started:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0.1)
        assert not second.done() and started == ["long"], "the second client waits"
        second.cancel()
        with pytest.raises(ValueError, match="no schema"):  # its turn, once the process has ended
            await asyncio.wait_for(other, 30)
        assert started[1] < 0

    asyncio.run(run())


def test_what_a_client_left_is_not_prepared_further():
    """Over HTTP: a schema is being compiled when the connection is closed."""
    compiling, left = threading.Event(), threading.Event()

    def compile(schema: str, run: Run) -> None:
        compiling.set()
        run(SLEEP, input=b"", capture_output=True)
        left.set()

    with listening(make_app(stub_worker(request_maker=StubRequestMaker(compile=compile)), Metrics())) as port:
        form = {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}
        with pytest.raises(httpx.ReadTimeout):
            url = f"http://127.0.0.1:{port}/v1/completions"
            httpx.post(url, json={"prompt": "a", "response_format": form}, timeout=httpx.Timeout(60, read=1))
        assert compiling.wait(30) and left.wait(30)


def test_slow_clients_are_cut_off(monkeypatch):
    """Half of the headers, of the body, or nothing; more bytes give no more time. A slow answer is none of this."""
    monkeypatch.setattr(limits, "REQUEST_SECONDS", dict.fromkeys(limits.REQUEST_SECONDS, 0.5))

    def encode(prompts: list[str]) -> list[list[int]]:
        time.sleep(1.5)
        return [[1]]

    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with listening(make_app(stub_worker(request_maker=StubRequestMaker(encode=encode)), Metrics())) as port:
        url = f"http://127.0.0.1:{port}"
        clients = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3)]
        for client, start in zip(clients, (b"", head, head + b"\r\n{"), strict=True):
            client.sendall(start)
            for _ in range(3 if start else 0):
                time.sleep(0.1)
                client.sendall(b"a")
        assert [client.recv(100) for client in clients] == [b""] * 3
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 200


@pytest.mark.slow
def test_a_connection_waits_for_the_next_request_of_an_agent():
    with listening(make_app(stub_worker(), Metrics())) as port:
        with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as client:
            for pause in (0, max(limits.REQUEST_SECONDS[h11.IDLE], 5) + 1):  # uvicorn's own limit is 5 seconds
                time.sleep(pause)
                client.request("GET", "/health")
                with client.getresponse() as response:
                    assert response.status == 200 and response.read() and not response.will_close
