"""What the server refuses before it works, and what it does beside other work; most of it with a worker without a model."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import h11
import httpx
import hypothesis
import pydantic
import pytest
import schemathesis
from answers import slow_unless
from hypothesis import HealthCheck, strategies
from refusals import refused
from servers import CHAT, CONTEXT, LIMIT

import treeflash_jax as tf
from treeflash_jax.constraints import compile_bytes
from treeflash_jax.constraints.compilation import NAMES
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve import limits
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.call_reader import COMPILING, READING
from treeflash_jax.serve.limits import parse_body
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.options import ServeOptions
from treeflash_jax.serve.process import Server
from treeflash_jax.serve.protocols.chat_completions import ChatBody
from treeflash_jax.serve.protocols.completions import CompletionBody
from treeflash_jax.serve.request_maker import Constraint, RequestMaker
from treeflash_jax.serve.threads import Compiler
from treeflash_jax.serve.worker import Piece, QueueFull, Submission, Worker

JSON = {"content-type": "application/json"}


class StubRequestMaker:
    """Makes a request of each prompt without a model; methods may be replaced."""

    config, context, text_limit = tf.GenerateConfig(), 64, None

    def __init__(self, **methods: Callable[..., Any]):
        vars(self).update(methods)

    def encode(self, prompts: list[Any]) -> list[list[int]]:
        return [[1]] * len(prompts)

    def find_constraints(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[Constraint]:
        return [Constraint(kind, str(settings[kind])) for kind in NAMES if kind in settings]

    def compile(self, constraint: Constraint) -> None:
        pass

    def make_requests(self, prompts: list[list[int]], samples: int = 1, **settings: Any) -> list[Any]:
        return [object()] * len(prompts) * samples


def stub_worker(**more: Any) -> SimpleNamespace:
    """A worker that gives each prompt the answer "yes"."""

    def submit(submission: Submission) -> None:
        for index in range(len(submission.requests)):
            result = Result(text="yes", ids=[5], prompt_ids=[1], builder="none", accept_lengths=[1], finished="length")
            submission.pieces.put_nowait(Piece(index, Chunk(ids=[5], text="yes", rounds=1), result, True))

    worker = SimpleNamespace(
        model=SimpleNamespace(names=("tiny",), tokenizer=None), request_maker=StubRequestMaker(), error=None,
        _limit=4, _num_unfinished=0, submit=submit, cancel=lambda submission: submission.pieces.put_nowait(None),
    )  # fmt: skip
    worker.check_room = partial(Worker.check_room, worker)
    vars(worker).update(more)
    return worker


def client_of(worker: SimpleNamespace, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(make_app(worker, Metrics(), **options))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60)


def ask(worker: SimpleNamespace, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    async def post() -> httpx.Response:
        async with client_of(worker) as http:
            return await http.post(path, json=body)

    return asyncio.run(post())


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


@pytest.mark.parametrize("body", [
    {"prompt": ["a", "b", "c"], "n": 2}, {"prompt": "a", "n": 5}, {"prompt": [[1], [2], [3], [4], [5]]},
    {"prompt": [1, 2, 3], "n": 128},
])  # fmt: skip
def test_answers_are_counted_before_anything_is_encoded(body):
    encoded = []
    worker = stub_worker(request_maker=StubRequestMaker(encode=encoded.append))
    response = ask(worker, body)
    assert response.status_code == 400 and "got number of answers" in message(response)
    worker._num_unfinished = 4
    response = ask(worker, {"prompt": "a"})
    assert response.status_code == 429 and "besides 4" in message(response)
    assert encoded == []


def test_what_cannot_fit_is_refused_before_it_is_encoded(tiny, monkeypatch):
    maker = RequestMaker(tiny, tf.GenerateConfig(), context=8, schema_states=0)
    worker, limit = stub_worker(model=tiny, request_maker=maker), maker.text_limit
    assert maker.encode([tf.Text("a" * limit.most_bytes)]), "may fit"

    def encode(*_: Any, **__: Any) -> None:
        pytest.fail("encoded")

    monkeypatch.setattr(Tokenizer, "encode_texts", encode)
    long = "a" * (limit.most_bytes + 1)
    for prompt in (long, [long, "a"]):
        assert f"got a text of {len(long)} bytes" in message(ask(worker, {"prompt": prompt}))
    chat = {"messages": [{"role": "user", "content": "a" * 300}, {"role": "user", "content": "b" * 300}]}
    assert "got a text of " in message(ask(worker, chat, "/v1/chat/completions"))
    assert "got 9 prompt tokens, expected at most 8" in message(ask(worker, {"prompt": [5] * 9}))


@pytest.mark.parametrize("kind, body", [
    (CompletionBody, {"prompt": [5] * 10**5 + ["a"]}), (CompletionBody, {"prompt": [["a"]] * 10**5}),
    (CompletionBody, {"prompt": "a", "stop": [1] * 10**5}), (ChatBody, {"messages": [1] * 10**5}),
    (ChatBody, {"messages": CHAT, "tools": [1] * 10**5}),
])  # fmt: skip
def test_one_error_of_a_body_is_enough(kind, body):
    with pytest.raises(pydantic.ValidationError) as refusal:
        parse_body(kind, JSON["content-type"], json.dumps(body).encode(), 10**6)
    assert refusal.value.error_count() < 10


def test_bodies_are_json_without_millions_of_lists():
    few, many = (json.dumps({"prompt": [[1]] * n}).encode() for n in (10, 200_000))
    assert len(parse_body(CompletionBody, "application/json; charset=utf-8", few, 100).prompts()) == 10
    refused(lambda: parse_body(CompletionBody, "application/json", many, 100), "200,002 brackets", "at most 65,636")
    refused(lambda: parse_body(CompletionBody, "text/plain", few, 100), "got content-type 'text/plain'")
    text = json.dumps({"prompt": "[" * 70_000}).encode()
    assert len(parse_body(CompletionBody, "application/json", text, 70_000).prompts()) == 1


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


def test_schemas_are_compiled_once_and_a_few_at_a_time():
    ends, running, counts, most = threading.Event(), set(), Counter(), []

    def compile(schema: str) -> None:
        running.add(schema)
        counts[schema] += 1
        most.append(len(running))
        ends.wait(60)
        running.remove(schema)

    async def run() -> None:
        compiler = Compiler(compile, COMPILING)
        tasks = [asyncio.create_task(compiler.compile(schema)) for schema in "abcabca"]
        await until(lambda: len(running) == COMPILING)
        ends.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert counts == {"a": 1, "b": 1, "c": 1} and max(most) == COMPILING


def test_a_compilation_ends_with_its_last_client():
    started = []

    def compile(schema: str) -> None:
        if schema == "wrong":
            raise ValueError("no schema")
        started.append(schema)
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        run = compile_bytes.RUN.get()(sleep, input=b"", capture_output=True)
        started.append(run.returncode)

    async def run() -> None:
        compiler = Compiler(compile, 1)
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
    assert compile_bytes.RUN.get() is subprocess.run


def test_what_a_client_left_is_not_prepared_further():
    """Over HTTP: a schema is being compiled when the connection is closed."""
    compiling, left = threading.Event(), threading.Event()

    def compile(schema: str) -> None:
        compiling.set()
        compile_bytes.RUN.get()([sys.executable, "-c", "import time; time.sleep(60)"], input=b"", capture_output=True)
        left.set()

    with listening(make_app(stub_worker(request_maker=StubRequestMaker(compile=compile)), Metrics())) as port:
        form = {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}
        with pytest.raises(httpx.ReadTimeout):
            url = f"http://127.0.0.1:{port}/v1/completions"
            httpx.post(url, json={"prompt": "a", "response_format": form}, timeout=httpx.Timeout(60, read=1))
        assert compiling.wait(30) and left.wait(30)


class listening:
    """Serves an application at a free port."""

    def __init__(self, app: Any):
        self.server = Server(app, grace=1)

    def __enter__(self) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()
        return listener.getsockname()[1]

    def __exit__(self, *_: Any) -> None:
        self.server.should_exit = True
        self.thread.join()


def test_slow_clients_are_cut_off(monkeypatch):
    """Half of the headers, of the body, or nothing; more bytes give no more time. A slow answer is none of this."""
    monkeypatch.setattr(limits, "SECONDS", {state: 0.5 for state in limits.SECONDS})

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
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            for pause in (0, max(limits.SECONDS[h11.IDLE], 5) + 1):  # uvicorn's own limit is 5 seconds
                time.sleep(pause)
                client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 200")


def raw(port: int, request: str) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(request.replace("\n", "\r\n").encode())
        return b"".join(iter(partial(client.recv, 4096), b"")).decode()


def test_a_length_beside_chunks_is_refused():
    """Once; what follows is no request of its own."""
    both = "POST /v1/completions HTTP/1.1\nHost: a\nContent-Length: 5\nTransfer-Encoding: chunked\n\n0\n\n"
    with listening(make_app(stub_worker(), Metrics())) as port:
        answer = raw(port, both + "GET /health HTTP/1.1\nHost: a\n\n")
    assert answer.startswith("HTTP/1.1 400") and "got Content-Length beside Transfer-Encoding" in answer
    assert answer.count("HTTP/1.1") == 1


def test_other_hosts_are_refused():
    async def run() -> None:
        async with client_of(stub_worker(), hosts={"localhost", "[::1]"}) as http:
            for host, status in {
                "localhost": 200,
                "LOCALHOST:81": 200,
                "[::1]:9": 200,
                "evil.example": 403,
                "[::2]": 403,
            }.items():
                response = await http.get("/health", headers={"host": host})
                assert response.status_code == status, host
            assert "got Host '[::2]', expected one of [::1], localhost" in message(response)
        async with client_of(stub_worker()) as http:
            assert (await http.get("/health", headers={"host": "any.example"})).status_code == 200

    asyncio.run(run())


def test_the_id_of_a_model_is_no_path(tmp_path):
    folder = tmp_path / "Qwen3-4B"
    folder.mkdir()
    worker = stub_worker()
    worker.model.names = (str(folder), "none")

    async def run() -> None:
        async with client_of(worker) as http:
            [card] = (await http.get("/v1/models")).json()["data"]
            assert card["id"] == "Qwen3-4B"
            for name, status in {"Qwen3-4B": 200, str(folder): 200, "tiny": 404}.items():
                response = await http.post("/v1/completions", json={"prompt": "a", "model": name})
                assert response.status_code == status
            assert str(tmp_path) not in response.text

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_that_cannot_be_written_is_an_error_of_the_server(path):
    """Half a character, which UTF-8 does not have."""

    def submit(submission: Submission) -> None:
        result = Result(text="half \udc80", ids=[5], prompt_ids=[1], builder="none", accept_lengths=[1], finished="length")
        submission.pieces.put_nowait(Piece(0, Chunk(ids=[5], text="half \udc80", rounds=1), result, True))

    worker, body = stub_worker(submit=submit), {"prompt": "a", "messages": CHAT}
    whole = ask(worker, body, path)
    assert whole.status_code == 500 and message(whole) == "the answer could not be written (UnicodeEncodeError)"
    events = (
        ask(worker, body | {"stream": True, "stream_options": {"include_usage": True}}, path).text.strip().split("\n\n")
    )
    assert json.loads(events[-1].removeprefix("data: "))["error"] == whole.json()["error"]
    good = ask(stub_worker(), body | {"stream": True}, path).text.strip()
    assert good.endswith("data: [DONE]") and "error" not in good


def test_a_key_is_checked():
    """For all but /health, whose answer says nothing."""

    async def run() -> None:
        async with client_of(stub_worker(), key="secret") as http:
            for path in ("/v1/models", "/metrics", "/openapi.json"):
                for header, status in {"Bearer secret": 200, "Bearer other": 401, "secret": 401, "Bearer ": 401}.items():
                    assert (await http.get(path, headers={"authorization": header})).status_code == status
                assert (await http.get(path)).status_code == 401
            assert (await http.get("/health")).status_code == 200

    asyncio.run(run())


EVERY_CHECK = [*HealthCheck]
GOOD = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5},
    "/v1/responses": {"input": CHAT},
}


@pytest.fixture(scope="module")
def api(tiny):
    """The API of a server that reads requests, and whose queue is full."""

    def refuse(call) -> None:
        raise QueueFull("full")

    options = ServeOptions(slots=2, context=CONTEXT, queue=LIMIT - 2, schema_states=256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "_warm_up", lambda worker, draws: None)  # nothing is decoded
        real = Worker(tiny, tf.GenerateConfig(nodes=4), Metrics(), options)
    worker = stub_worker(model=tiny, submit=refuse, request_maker=real.request_maker, check_room=real.check_room)
    return schemathesis.openapi.from_asgi("/openapi.json", make_app(worker, Metrics()))


@pytest.mark.parametrize("examples", [20, slow_unless(False, 200)])
@pytest.mark.parametrize("path", GOOD)
def test_random_bodies_are_refused_or_queued(api, path, examples):
    """Bodies of the API's own schema: never an error of the server, and one line each."""
    statuses = set()

    @hypothesis.settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck]
    )
    @hypothesis.given(case=api[path]["POST"].as_strategy(), is_good=strategies.booleans())
    def check(case, is_good: bool) -> None:
        if isinstance(case.body, dict):
            for name in ("model", "previous_response_id"):  # unknown ones have status 404
                case.body.pop(name, None)
            case.body |= GOOD[path] if is_good else {}
        response = case.call()
        message = response.json()["error"]["message"]
        assert response.status_code in (400, 429) and "\n" not in message, message
        statuses.add(response.status_code)

    check()
    assert statuses == {400, 429}


def test_other_pages_may_call_if_their_origin_is_allowed():
    async def preflight(**options: Any) -> httpx.Headers:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        async with client_of(stub_worker(), **options) as http:
            return (await http.options("/v1/chat/completions", headers=headers)).headers

    assert "access-control-allow-origin" not in asyncio.run(preflight())
    assert "access-control-allow-origin" not in asyncio.run(preflight(origins=["https://b.example"]))
    for origins in ["https://a.example", "https://b.example"], ["*"]:
        assert asyncio.run(preflight(origins=origins))["access-control-allow-origin"] in (origins[0], "https://a.example")


def test_a_model_has_the_names_that_it_was_given():
    async def name_of(model: str) -> tuple[int, str]:
        async with client_of(stub_worker(), names=["large", "small"]) as http:
            assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["large", "small"]
            response = await http.post("/v1/completions", json={"prompt": "a", "model": model})
            return response.status_code, response.json().get("model")

    assert [asyncio.run(name_of(model)) for model in ("small", "tiny", "x")] == [
        (200, "large"),
        (200, "large"),
        (404, None),
    ]


def test_ignored_fields_are_logged_once(caplog):
    worker = stub_worker()
    for _ in range(2):
        assert ask(worker, {"prompt": "a", "my_new_field": 1, "user": "x"}).status_code == 200
    assert sum("my_new_field" in record.message for record in caplog.records) == 1


def test_keys_are_bearers_or_x_api_key():
    async def status(**headers: str) -> int:
        async with client_of(stub_worker(), key="secret") as http:
            return (await http.get("/v1/models", headers=headers)).status_code

    given = [
        {"authorization": "Bearer secret"},
        {"x-api-key": "secret"},
        {"x-api-key": "no"},
        {"authorization": "secret"},
        {},
    ]
    assert [asyncio.run(status(**headers)) for headers in given] == [200, 200, 401, 401, 401]
