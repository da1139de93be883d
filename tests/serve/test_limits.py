"""What the server refuses before it works, in one line; most of it with a worker without a model."""

import asyncio
import json
import logging
import socket
from functools import partial
from typing import Any

import httpx
import hypothesis
import pydantic
import pytest
import schemathesis
from answers import slow
from hypothesis import HealthCheck, strategies
from refusals import refused
from servers import CHAT, CONTEXT, LIMIT
from stub_worker import StubRequestMaker, ask, client_of, listening, message, stub_worker

import treeflash_jax as tf
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.limits import parse_body
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.options import ServeOptions
from treeflash_jax.serve.protocols.chat_completions import ChatBody
from treeflash_jax.serve.protocols.completions import CompletionBody
from treeflash_jax.serve.request_maker import RequestMaker
from treeflash_jax.serve.worker import Piece, QueueFull, Submission, Worker

JSON = {"content-type": "application/json"}


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


@pytest.mark.parametrize("path, kind", [("/v1/completions", "server_error"), ("/v1/messages", "api_error")])
def test_an_unexpected_error_has_the_form_of_the_protocol_and_is_logged_once(path, kind, caplog, monkeypatch):
    def fail(prompts: list[Any]) -> None:
        raise OSError("no such device")

    worker = stub_worker(request_maker=StubRequestMaker(encode=fail))
    with listening(make_app(worker, Metrics())) as port:
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
        body = {"prompt": "a", "messages": CHAT, "max_tokens": 5}
        response = httpx.post(f"http://127.0.0.1:{port}{path}", json=body)
    error = response.json()["error"]
    assert response.status_code == 500 and error["type"] == kind
    assert error["message"] == "the request failed (OSError); see the server's log"
    [logged] = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert isinstance(logged, OSError)


def test_an_operator_can_see_where_a_refusal_comes_from(caplog):
    def encode(prompts: list[str]) -> list[list[int]]:
        return [[int(prompts[0])]]

    async def run() -> None:
        async with client_of(stub_worker(request_maker=StubRequestMaker(encode=encode))) as http:
            assert (await http.post("/v1/completions", json={"prompt": "five"})).status_code == 400

    caplog.set_level(logging.DEBUG, "treeflash_jax")
    asyncio.run(run())
    [record] = (record for record in caplog.records if record.exc_info)
    assert "invalid literal for int() with base 10: 'five'" in str(record.exc_info[1])


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
        patch.setattr(Worker, "_warm_up", lambda worker, draws_trees: None)  # nothing is decoded
        real = Worker(tiny, tf.GenerateConfig(nodes=4), Metrics(), options)
    worker = stub_worker(model=tiny, submit=refuse, request_maker=real.request_maker, check_room=real.check_room)
    return schemathesis.openapi.from_asgi("/openapi.json", make_app(worker, Metrics()))


@pytest.mark.parametrize("examples", [20, slow(200)])
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


def test_ignored_fields_are_logged_once(caplog):
    worker = stub_worker()
    for _ in range(2):
        assert ask(worker, {"prompt": "a", "my_new_field": 1, "user": "x"}).status_code == 200
    assert sum("my_new_field" in record.message for record in caplog.records) == 1
