"""The process of the server: its port, its signals and its end."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
from answers import slow
from refusals import refused
from servers import CHAT, wait_for
from stub_worker import stub_worker

import treeflash_jax as tf
from treeflash_jax.cli.commands import main
from treeflash_jax.engine import loading
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.options import ServeOptions
from treeflash_jax.serve.process import allowed_hosts, bind, read_key, serve

STUB = Path(__file__).parent / "stub_server.py"
SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 100_000}}  # takes minutes to compile


@contextmanager
def stub(work: str, grace: int) -> Iterator[tuple[subprocess.Popen, list[str]]]:
    """The server of `stub_server.py` once it works on a request; yields its process and, later, the lines of its answer."""
    command = [sys.executable, str(STUB), work, str(grace)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    try:
        url = re.search(r"serving stub at (\S+)", next(line for line in process.stderr if "serving" in line))[1]

        def ask() -> None:
            body = {"prompt": "a", "stream": True}
            if work == "schema":
                body["response_format"] = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
            try:
                lines.extend(httpx.post(f"{url}/completions", json=body, timeout=60).text.splitlines())
            except httpx.HTTPError as error:
                lines.append(repr(error))

        client = threading.Thread(target=ask)
        client.start()
        assert process.stdout.readline() == "working\n"
        yield process, lines
        client.join()
    finally:
        process.kill()
        process.wait()


def compilers(process: subprocess.Popen) -> list[int]:
    """Returns the numbers of the processes that compile schemas for a server."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == process.pid and b"compiler.compile_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def test_a_page_needs_a_tokenizer():
    model = stub_worker().model
    options = ServeOptions(port=0, ui=True)
    refused(lambda: serve(lambda: model, tf.GenerateConfig(), options), "got --ui with a verifier without tokenizer.json")


@pytest.mark.parametrize("work", ["answer", *(slow(work) for work in ("schema", "requests", "dispatch"))])
def test_a_signal_ends_the_process_within_the_grace(work):
    """In one line, whatever it is doing; the client gets an error."""
    with stub(work, grace=1) as (process, lines):
        if work == "schema":
            wait_for(lambda: compilers(process))
        [*children] = compilers(process)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM and time.monotonic() - begin < 10
        assert process.stderr.read() == "treeflash: ended with 1 requests unfinished\n"
        wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 5)
    assert "the server ends" in "".join(lines)


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once():
    with stub("schema", grace=60) as (process, lines):
        wait_for(lambda: compilers(process))
        [child] = compilers(process)
        time.sleep(0.5)  # until it has asked to end with its parent
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.wait(10) == -signal.SIGINT
        wait_for(lambda: not Path(f"/proc/{child}").exists(), 5)
        assert process.stderr.read() == ""


def test_a_supervisor_sees_that_decoding_ended():
    with stub("error", grace=60) as (process, lines):
        assert process.wait(30) == 1
        *_, line = process.stderr.read().splitlines()
        assert line == "treeflash: error: decoding ended: the device is lost"
    assert "the server ends" in "".join(lines)


def test_an_answer_that_is_submitted_while_the_server_ends_is_ended():
    """`end` runs after `submit`, before the code that waits for the submission."""
    worker = stub_worker()
    app = make_app(worker, Metrics())
    answers = app.state.answers
    worker.submit = lambda _: asyncio.get_running_loop().call_soon(answers.end)

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            return await asyncio.wait_for(http.post("/v1/completions", json={"prompt": "a"}), 10)

    response = asyncio.run(post())
    assert response.status_code == 503 and "the server ends" in response.text and answers.num_unfinished == 1


@pytest.mark.parametrize("options, names", [
    ({}, {"localhost", "127.0.0.1", "[::1]"}),
    ({"host": "::1"}, {"localhost", "127.0.0.1", "[::1]"}),
    ({"allowed_hosts": ["My.Example"]}, {"localhost", "127.0.0.1", "[::1]", "my.example"}),
    ({"allowed_hosts": ["[FD00::1]", "fd00:0::2"]}, {"localhost", "127.0.0.1", "[::1]", "[fd00::1]", "[fd00::2]"}),
    ({"host": "0.0.0.0"}, None),
    ({"host": "0.0.0.0", "allowed_hosts": ["a"]}, {"localhost", "127.0.0.1", "[::1]", "0.0.0.0", "a"}),
])  # fmt: skip
def test_other_names_are_refused_if_only_this_machine_is_served(options, names):
    assert allowed_hosts(ServeOptions(**options)) == names


@pytest.mark.parametrize("host", ["example.org:8443", "[::1]:8000", "https://example.org"])
def test_a_name_that_no_client_can_send_is_refused(host):
    options = ServeOptions(allowed_hosts=[host])
    refused(lambda: allowed_hosts(options), f"got --allowed-hosts '{host}', expected a name without")


def test_a_key_is_the_content_of_a_readable_file(tmp_path):
    path = tmp_path / "key"
    refused(lambda: read_key(str(path)), f"got --api-key-file {path} (No such file", "expected a readable file with a key")
    for content, words in (
        (b"\xff", "(not UTF-8)"),
        (b" \n", "a key of ASCII characters"),
        ("schlüssel".encode(), "a key of ASCII characters"),
    ):
        path.write_bytes(content)
        refused(lambda: read_key(str(path)), "--api-key-file", words)
    path.write_text("secret\n")
    assert read_key(str(path)) == "secret"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_taken_before_it_listens(host):
    try:
        listener = bind(host, 0)
    except ValueError:
        pytest.skip("needs IPv6")
    with listener, socket.socket(listener.family) as other:
        address = listener.getsockname()
        assert other.connect_ex(address) != 0, "nobody listens"
        refused(lambda: bind(host, address[1]), f"--port {address[1]}", "in use", "expected")
        listener.listen()
        assert other.connect_ex(address) == 0


def test_port_and_key_are_checked_before_the_model_is_loaded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(loading, "load", lambda **_: pytest.fail("loaded"))
    with bind("127.0.0.1", 0) as taken:
        for option, value in (("--port", taken.getsockname()[1]), ("--api-key-file", tmp_path / "none")):
            assert main(["serve", "--verifier", "tiny", option, str(value)]) == 2
            assert f"{option} {value}" in capsys.readouterr().err


@contextmanager
def command(*options: str, port: int = 0):
    """The server as a process; yields it and its URL."""
    words = f"serve --verifier tiny --dtype float32 --nodes 4 --context 512 --port {port}".split()
    process = subprocess.Popen([sys.executable, "-m", "treeflash_jax", *words, *options], stderr=subprocess.PIPE, text=True)
    try:
        yield process, re.search(r"serving tiny at (\S+)", next(line for line in process.stderr if "serving" in line))[1]
    finally:
        process.kill()


@pytest.mark.slow
def test_the_command_ends_with_its_last_answer():
    with command("--slots", "1", "--grace", "60") as (process, url):
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 200, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=600) as response:
            events = response.iter_lines()
            assert json.loads(next(events).removeprefix("data: "))["object"] == "chat.completion.chunk"
            process.send_signal(signal.SIGTERM)
            *_, last = [line for line in events if line]
        assert last == "data: [DONE]" and process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/models")


@pytest.mark.slow
def test_many_clients_lose_nothing_and_memory_stays_flat():
    """64 clients for a minute; then the process is killed, and another one takes its port."""

    def resident() -> int:
        return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def ask(number: int) -> int:
        """Returns the number of answers that one client got."""
        rng, client, count = (
            random.Random(number),
            openai.OpenAI(base_url=url, api_key="any", timeout=600, max_retries=0),
            0,
        )
        while time.monotonic() < end:
            chat = [{"role": "user", "content": "cat " * rng.randint(1, 80)}]
            given = {"model": "tiny", "messages": chat, "max_tokens": rng.randint(1, 24), "seed": rng.randint(0, 9)}
            if rng.random() < 0.5:
                *_, last = client.chat.completions.create(**given, stream=True)
                assert last.choices[0].finish_reason in ("stop", "length")
            else:
                answer = client.chat.completions.create(**given)
                assert 0 < answer.usage.completion_tokens <= given["max_tokens"]
            count += 1
        return count

    with command("--slots", "8") as (process, url):
        end = time.monotonic() + 60
        with ThreadPoolExecutor(64) as pool:
            counts = [pool.submit(ask, number) for number in range(64)]
            time.sleep(20)
            early = resident()
            total = sum(count.result() for count in counts)
        assert total > 64 and resident() < 1.1 * early
        text = httpx.get(f"{url.removesuffix('/v1')}/metrics").text
        assert "treeflash_running 0.0\n" in text and "treeflash_waiting 0.0\n" in text
        assert sum(map(float, re.findall(r"answers_total{.*} (\S+)", text))) == total
        process.kill()
        process.wait()
        with command("--slots", "8", port=httpx.URL(url).port) as (_, again):
            assert again == url and httpx.get(f"{url}/models").json()["data"][0]["id"] == "tiny"
