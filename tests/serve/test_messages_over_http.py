"""Anthropic's messages over HTTP, as the anthropic client reads them: answers are those of chats, and errors."""

import asyncio
import copy
import json
from functools import partial

import anthropic
import httpx
import jsonschema
import pytest
from anthropic.types import Message, MessageTokensCount
from message_blocks import ADD, EVENT, FORM, IMAGE, PATH, SCHEMA, TEXT, gather, parts, says
from pydantic import BaseModel
from servers import CHAT, CONTEXT, GREEDY, running
from stub_worker import ask, client_of, stub_worker

from treeflash_jax.serve.limits import MOST_BODY_BYTES
from treeflash_jax.serve.worker import QueueFull

TEMPLATE = """{% if tools %}<|im_start|>system
<tool_call>{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def server(tiny):
    """A server of the pair `tiny` with a chat template that has tools."""
    model = copy.copy(tiny)
    model.tokenizer = copy.copy(tiny.tokenizer)
    model.tokenizer.inner = copy.deepcopy(tiny.tokenizer.inner)
    model.tokenizer.inner.chat_template = TEMPLATE
    with running(model) as server:
        yield server


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="any", timeout=600, max_retries=0)


GIVEN = {"model": "tiny", "messages": CHAT, "max_tokens": 20}
MORE = {"extra_body": GREEDY}  # newer clients have no argument for the temperature


def raw_events(server, **fields) -> list[dict]:
    text = httpx.post(f"{server.url}{PATH}?beta=true", json=GIVEN | GREEDY | fields | {"stream": True}, timeout=600).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    return events


def test_messages_are_the_answers_of_chats(server, claude, client):
    """Whole, as a stream, as the client's own stream, and of a system with blocks."""
    brief = "Be brief. " * 20
    chat = [{"role": "system", "content": f"{brief}\nCount."}, *CHAT]
    expected = client.chat.completions.create(**GIVEN | GREEDY | {"messages": chat})
    fields = {"system": parts(brief, "Count.")}
    whole = claude.messages.create(**GIVEN, **MORE, **fields)
    Message.model_validate(whole.model_dump(), strict=True)
    [block] = whole.content
    assert block.text == expected.choices[0].message.content and whole.stop_reason == "max_tokens"
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert whole.usage.output_tokens == 20 and whole.usage.cache_read_input_tokens > 0
    events = raw_events(server, **fields)
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert len(events) > 8
    changing = {"id": 0, "usage": 0}
    assert gather(events) | changing == json.loads(whole.to_json()) | changing
    with claude.messages.stream(**GIVEN, **MORE, **fields) as growing:
        assert "".join(growing.text_stream) == block.text
        final = growing.get_final_message()
    assert final.content[0].text == block.text and final.stop_reason == "max_tokens"
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert final.usage.output_tokens == 20


def test_stops_prefills_and_the_end_of_the_context(claude, client):
    text = claude.messages.create(**GIVEN, **MORE).content[0].text
    stop = text[len(text) // 2 :][:3]
    stopped = claude.messages.create(**GIVEN, **MORE, stop_sequences=["never", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]
    begun = [*CHAT, {"role": "assistant", "content": "Sam has"}]
    chat = client.chat.completions.create(
        **GIVEN | GREEDY | {"messages": begun}, extra_body={"continue_final_message": True, "add_generation_prompt": None}
    )
    assert claude.messages.create(**GIVEN | {"messages": begun}, **MORE).content[0].text == chat.choices[0].message.content
    never_ends = {"extra_body": {"ignore_eos": True}}
    filled = claude.messages.create(**GIVEN | {"max_tokens": 32_000}, timeout=600, **never_ends)
    assert filled.stop_reason == "model_context_window_exceeded"
    usage = filled.usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == CONTEXT


@pytest.mark.slow
def test_a_forced_call_and_its_result(server, claude):
    """The constraint makes the answer a call; its result goes back with it."""
    given = GIVEN | {"max_tokens": 60, "tools": [ADD, ADD | {"name": "sub"}]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "sub"}):
        choice = choice | {"disable_parallel_tool_use": True}
        whole = claude.messages.create(**given, tool_choice=choice)
        Message.model_validate(whole.model_dump(), strict=True)
        [use] = whole.content
        assert use.type == "tool_use" and use.name in ("add", "sub") and whole.stop_reason == "tool_use"
        assert use.name == choice.get("name", use.name)
        jsonschema.validate(use.input, SCHEMA)
        message = gather(raw_events(server, **given, temperature=1, tool_choice=choice))
        [streamed] = message["content"]
        jsonschema.validate(streamed["input"], SCHEMA)
        assert streamed["type"] == "tool_use" and message["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": parts("3"), "is_error": True}
    chat = [*CHAT, {"role": "assistant", "content": whole.content}, says("user", result, TEXT)]
    answer = claude.messages.create(**given | {"messages": chat}, tool_choice={"type": "none"})
    assert answer.content[0].type == "text" and answer.stop_reason in ("end_turn", "max_tokens")


class Number(BaseModel):
    x: bool


def test_answers_follow_a_schema(claude):
    assert isinstance(claude.messages.parse(**GIVEN, **MORE, output_format=Number).parsed_output.x, bool)
    given = GIVEN | {"output_config": {"format": FORM}}
    jsonschema.validate(json.loads(claude.messages.create(**given).content[0].text), SCHEMA)


def test_tokens_are_counted(server, claude):
    for fields in ({}, {"system": "Be brief."}, {"tools": [ADD]}):
        count = claude.messages.count_tokens(model="tiny", messages=CHAT, **fields)
        MessageTokensCount.model_validate(count.model_dump(), strict=True)
        usage = claude.messages.create(**GIVEN | {"max_tokens": 1} | fields).usage
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    long = [{"role": "user", "content": "cat " * 500}]
    assert claude.messages.count_tokens(model="tiny", messages=long).input_tokens > CONTEXT
    paths = httpx.get(f"{server.url}/openapi.json").json()
    schema = paths["paths"]["/v1/messages/count_tokens"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$ref"].removeprefix("#/components/schemas/") in paths["components"]["schemas"]


@pytest.mark.parametrize("change, kind, name, words, is_counted", [
    ({"temperature": -1}, anthropic.BadRequestError, "invalid_request_error", "got temperature -1.0", False),
    ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "got max_tokens 0, expected at least 1", False),
    ({"max_tokens": None}, anthropic.BadRequestError, "invalid_request_error", "max_tokens: ", False),
    ({"stop_sequences": [""]}, anthropic.BadRequestError, "invalid_request_error", "got stop_sequences ", False),
    ({"messages": [{"role": "user", "content": "cat " * 500}]}, anthropic.BadRequestError, "invalid_request_error",
     f"expected at most {CONTEXT} together", False),
    ({"messages": [says("user", IMAGE)]}, anthropic.BadRequestError, "invalid_request_error", "reads text only", True),
    ({"model": "claude-x"}, anthropic.NotFoundError, "not_found_error", "got model 'claude-x', expected 'tiny'", True),
    ({"system": "x" * MOST_BODY_BYTES}, anthropic.APIStatusError, "request_too_large", "over 4,194,304", True),
])  # fmt: skip
def test_errors_have_the_form_of_the_client(claude, change, kind, name, words, is_counted):
    calls = [partial(claude.messages.create, **GIVEN, extra_body=change, stream=streams) for streams in (False, True)]
    if is_counted:
        calls += [partial(claude.messages.count_tokens, model="tiny", messages=CHAT, extra_body=change)]
    for call in calls:
        with pytest.raises(kind) as failure:
            call()
        check_error(failure.value.body, name, words)


def check_error(body: dict, name: str, words: str) -> None:
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == name
    assert words in body["error"]["message"] and "\n" not in body["error"]["message"]


BODY = {"messages": CHAT, "max_tokens": 5}


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_keys_and_hosts_are_checked_in_the_form_of_messages(path):
    async def run() -> None:
        async with client_of(stub_worker(), key="secret", hosts={"127.0.0.1"}) as http:
            for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
                headers |= {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
                assert (await http.post(f"{path}?beta=true", json=BODY, headers=headers)).status_code == 200
            for headers in ({"x-api-key": "other"}, {}):
                response = await http.post(path, json=BODY, headers=headers)
                assert response.status_code == 401
                check_error(response.json(), "authentication_error", "got no valid API key")
            response = await http.post(path, json=BODY, headers={"host": "evil.example"})
            assert response.status_code == 403
            check_error(response.json(), "permission_error", "got Host 'evil.example'")
            response = await http.get(path)
            assert response.status_code == 405
            check_error(response.json(), "invalid_request_error", "Method Not Allowed")
            response = await http.post(
                path, content=b"{", headers={"x-api-key": "secret", "content-type": "application/json"}
            )
            check_error(response.json(), "invalid_request_error", "JSON")

    asyncio.run(run())


def test_errors_of_a_busy_and_of_a_broken_server():
    def refuse(submission) -> None:
        raise QueueFull("full")

    response = ask(stub_worker(submit=refuse), BODY, PATH)
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    check_error(response.json(), "rate_limit_error", "full")
    response = ask(stub_worker(error=RuntimeError("lost")), BODY, PATH)
    assert response.status_code == 503
    check_error(response.json(), "overloaded_error", "decoding ended")
    broken = stub_worker(submit=lambda submission: submission.pieces.put_nowait(RuntimeError("the device is lost")))
    response = ask(broken, BODY, PATH)
    assert response.status_code == 500
    check_error(response.json(), "api_error", "the device is lost")
    name, data = ask(broken, BODY | {"stream": True}, PATH).text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    check_error(json.loads(data.removeprefix("data: ")), "api_error", "the device is lost")
