"""Extending the server: a protocol of one class, defined here and registered, works without an edit to the package."""

import json

import httpx
import pytest
from servers import running

import treeflash_jax as tf
from treeflash_jax.formats.messages.message_format import Content
from treeflash_jax.serve.protocols import PROTOCOLS
from treeflash_jax.serve.protocols.exchange import Event, Exchange
from treeflash_jax.serve.protocols.fields import Body
from treeflash_jax.serve.server_call import ServerCall


class GenerateBody(Body):
    inputs: str
    max_tokens: int = 8


class GenerateExchange(Exchange):
    """Hugging Face's text-generation-inference: POST /generate."""

    path, body_kind, id = "/generate", GenerateBody, "generate"

    def read_call(self):
        settings = self.body.settings()
        return ServerCall(prompts=[tf.Text(self.body.inputs)], settings=settings, streams=bool(self.body.stream))

    def response(self, answers, usage):
        return {"generated_text": answers[0].text(Content), "details": {"generated_tokens": usage.answer_tokens}}

    def begin(self, usage):
        return ()

    def add(self, delta):
        yield Event({"token": {"text": delta.text(Content)}, "finish_reason": delta.finished})

    def end(self, usage):
        return ()

    @classmethod
    def error(cls, status, message, *, param=None, code=None):
        return {"error": message, "error_type": str(status)}


@pytest.fixture(scope="module")
def url(tiny):
    PROTOCOLS.append(GenerateExchange)
    try:
        with running(tiny) as server:
            yield f"{server.url}/generate"
    finally:
        PROTOCOLS.remove(GenerateExchange)


def test_a_protocol_is_a_class_and_an_entry(tiny, url):
    body = {"inputs": "Sam has 2", "temperature": 0, "guided_regex": "[a-c]{9}"}
    [expected] = tiny.generate(tf.Text("Sam has 2"), max_new_tokens=8, pattern="[a-c]{9}")
    answer = httpx.post(url, json=body, timeout=600).json()
    assert answer == {"generated_text": expected.text, "details": {"generated_tokens": len(expected.ids)}}
    lines = httpx.post(url, json=body | {"stream": True}, timeout=600).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["token"]["text"] for event in events) == expected.text and events[-1]["finish_reason"] == "length"
    refused = httpx.post(url, json={"inputs": "x", "temperature": -1}, timeout=600)
    assert refused.status_code == 400
    assert refused.json() == {"error": "got temperature -1.0, expected at least 0", "error_type": "400"}
