"""Anthropic's messages: bodies and answers without a server, then over HTTP as the anthropic client reads them."""

import asyncio
import copy
import json
import logging
from dataclasses import replace
from functools import partial

import anthropic
import httpx
import jsonschema
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter
from refusals import refused
from servers import CHAT, CONTEXT, GREEDY, running
from test_limits import ask, client_of, stub_worker

from treeflash_jax.formats.messages.message_format import Call, Content, Thought
from treeflash_jax.serve.call import Delta, Tools, Usage
from treeflash_jax.serve.limits import MOST_BODY_BYTES
from treeflash_jax.serve.protocols.exchange import Served
from treeflash_jax.serve.protocols.messages import CountBody, MessagesBody, MessagesExchange
from treeflash_jax.serve.worker import QueueFull

PATH = "/v1/messages"
TEXT = {"type": "text", "text": "Hi"}
USE = {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1}}
CALLED = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
ADD_INSIDE = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
SERVERS_TOOL = {"type": "web_search_20250305", "name": "web_search"}
FORM = {"type": "json_schema", "schema": SCHEMA}
EVENT = TypeAdapter(RawMessageStreamEvent)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def exchange(**fields) -> MessagesExchange:
    return MessagesExchange(MessagesBody(**{"max_tokens": 9, "messages": CHAT} | fields), Served("tiny", 0))


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


def says(role: str, *blocks: dict) -> dict:
    return {"role": role, "content": [*blocks]}


@pytest.mark.parametrize("system, messages, expected", [
    (None, [{"role": "user", "content": "Hi"}], [says("user", TEXT)]),
    ("Be brief.", [says("user", TEXT, TEXT)], [says("system", *parts("Be brief.")), says("user", TEXT, TEXT)]),
    ([TEXT | {"cache_control": {"type": "ephemeral"}}], [{"role": "system", "content": "And good."}, says("user", TEXT)],
     [says("system", *parts("Hi", "And good.")), says("user", TEXT)]),
    ("", [says("user", TEXT), {"role": "user", "content": "b"}, {"role": "system", "content": "c"}],
     [says("user", *parts("Hi", "b", "<system-reminder>\nc\n</system-reminder>"))]),
    (None, [says("user", TEXT), says("assistant", {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                                     {"type": "redacted_thinking", "data": "x"}, TEXT, USE),
            says("user", RESULT | {"content": "2"}, TEXT)],
     [says("user", TEXT), says("assistant", TEXT) | {"reasoning_content": "Hm.", "tool_calls": [CALLED]},
      says("tool", *parts("2")) | {"tool_call_id": "a"}, says("user", TEXT)]),
    (None, [says("user", RESULT, RESULT | {"content": [TEXT], "is_error": True})],
     [says("tool") | {"tool_call_id": "a"}, says("tool", *parts("Error:", "Hi")) | {"tool_call_id": "a"}]),
    (None, [says("user", TEXT), says("assistant", USE), says("assistant", USE), says("user", TEXT)],
     [says("user", TEXT), says("assistant") | {"tool_calls": [CALLED, CALLED]}, says("user", TEXT)]),
])  # fmt: skip
def test_messages_become_a_chat(system, messages, expected):
    [chat] = exchange(system=system, messages=messages).call().prompts
    assert chat.messages == expected and not chat.continued


@pytest.mark.parametrize("fields, tools, settings, template", [
    ({}, Tools(), {"max_new_tokens": 9}, {}),
    ({"tools": [ADD, ADD | {"type": "custom", "strict": True}]},
     Tools([ADD_INSIDE, {"type": "function", "function": ADD_INSIDE["function"] | {"strict": True}}]), {}, {}),
    ({"tools": [ADD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
     Tools([ADD_INSIDE], is_parallel=False), {}, {}),
    ({"tools": [ADD, SERVERS_TOOL], "tool_choice": {"type": "any"}}, Tools([ADD_INSIDE], is_forced=True), {}, {}),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}},
     Tools([ADD_INSIDE], frozenset(["add"]), is_forced=True), {}, {}),
    ({"tools": [ADD], "tool_choice": {"type": "none"}}, Tools(), {}, {}),
    ({"stop_sequences": ["a"], "seed": 3, "metadata": {"user_id": "x"}}, Tools(), {"stop": ["a"], "seed": 3}, {}),
    ({"output_config": {"format": FORM, "effort": "max"}}, Tools(), {"schema": json.dumps(SCHEMA)},
     {"reasoning_effort": "high"}),
    ({"output_format": FORM}, Tools(), {"schema": json.dumps(SCHEMA)}, {}),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Tools(), {}, {"enable_thinking": True}),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, Tools(), {},
     {"enable_thinking": True, "reasoning_effort": "low"}),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1}}, Tools(), {},
     {"enable_thinking": False, "a": 1}),
    ({"context_management": {"edits": []}, "n": 1, "mcp_servers": []}, Tools(), {"samples": 1}, {}),
])  # fmt: skip
def test_bodies_become_calls(fields, tools, settings, template):
    call = exchange(**fields).call()
    call.tools.check()
    assert replace(call.tools, described=[*call.tools.described]) == replace(tools, described=[*tools.described])
    assert call.settings == {"max_new_tokens": 9} | settings and call.prompts[0].template == template
    assert call.ends_with_context and call.num_answers == 1 and call.num_top is None and not call.streams


@pytest.mark.parametrize("fields, words", [
    ({"messages": [says("user", TEXT, IMAGE)]}, "got messages.0.content.1.type 'image', expected one of text, tool_result"),
    ({"messages": [says("user", {"type": "document"})]}, "this model reads text only"),
    ({"messages": [says("user", RESULT | {"content": [IMAGE]})]}, "got messages.0.content.0.content.0.type 'image'"),
    ({"messages": [says("user", USE)]}, "got messages.0.content.0.type 'tool_use'"),
    ({"messages": [says("user", {"type": "tool_result"})]}, "got messages.0.content.0.tool_use_id None, expected a text"),
    ({"messages": [says("assistant", USE | {"input": "x"})]}, "got messages.0.content.0.input 'x', expected an object"),
    ({"messages": [says("assistant", {"type": "server_tool_use"})]}, "got messages.0.content.0.type 'server_tool_use'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "got messages.0.role 'tool', expected 'user', 'assistant' or"),
    ({"messages": [{"role": "user"}]}, "got messages.0.content None, expected a text or a list of blocks"),
    ({"messages": [says("user", {"type": "text"})]}, "got messages.0.content.0.text None"),
    ({"messages": [{"role": "user", "content": [1]}]}, "got messages.0.content.0.type 'int'"),
    ({"messages": [says("user", TEXT), says("assistant", TEXT, USE)]}, "expected a user's message at the end, or text"),
    ({"messages": [says("user", TEXT), {"role": "assistant", "content": ""}]}, "expected a user's message at the end"),
    ({"system": [IMAGE]}, "got system.0.type 'image'"),
    ({"n": 2}, "got n 2, expected 1"),
    ({"tools": [{"input_schema": {}}]}, "got tools.0.name None"),
    ({"tools": [{"name": "add"}]}, "got tools.0.input_schema None"),
    ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "got tool_choice.name None"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "got tool_choice 'sub', expected one of tools: add"),
    ({"tools": [SERVERS_TOOL], "tool_choice": {"type": "any"}}, "got tool_choice that demands a call, but no tools"),
    ({"output_format": FORM, "output_config": {"format": FORM}}, "got output_format {"),
    ({"output_config": {"format": FORM}, "guided_regex": "a"}, "got output_config.format {"),
    ({"chat_template_kwargs": {"tokenize": True}}, "got chat_template_kwargs ['tokenize']"),
    ({"container": "x"}, "got container 'x', expected none: it is not supported"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields, words):
    refused(lambda: exchange(**fields).call().tools.check(), words)


def test_what_is_ignored_is_in_the_log(caplog):
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    with caplog.at_level(logging.WARNING, "treeflash_jax"):
        exchange(thinking=thinking, context_management={"edits": [1]}, tools=[SERVERS_TOOL, SERVERS_TOOL]).call()
    assert caplog.messages == [
        f"{PATH}: thinking.budget_tokens is ignored", f"{PATH}: thinking.display is ignored",
        f"{PATH}: context_management is ignored", f"{PATH}: tools of type 'web_search_20250305' are left out",
    ]  # fmt: skip


def stream(answer: MessagesExchange, *deltas: Delta, usage: Usage) -> list[dict]:
    """Returns the data of a stream's events, checked against the client's types."""
    events = [*answer.begin(Usage(usage.prompt_tokens, 0, 0)), *(event for delta in deltas for event in answer.add(delta))]
    events += answer.end(usage)
    for event in events:
        assert event.name == EVENT.validate_python(event.data, strict=True).type
    return [event.data for event in events]


def gather(events: list[dict]) -> dict:
    """Returns the message that a client makes of the events of a stream, with each block between its start and stop."""
    message, texts = copy.deepcopy(events[0]["message"]), {}
    fields = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    is_open = False
    for event in events[1:-2]:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        assert is_open != (event["type"] == "content_block_start")
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            texts[event["index"]] = texts.get(event["index"], "") + event["delta"]["partial_json"]
        elif event["type"] == "content_block_delta":
            name = fields[event["delta"]["type"]]
            message["content"][-1][name] += event["delta"][name]
    for index, text in texts.items():
        message["content"][index]["input"] = json.loads(text)
    assert not is_open and [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message["usage"] |= events[-2]["usage"]
    return message | events[-2]["delta"]


PARTS = [Thought("Let me"), Thought(" see."), Content("So"), Content(": "), Call("add", '{"x": 1}', "a"),
         Call("add", "[2]", "b"), Content("Done")]  # fmt: skip


@pytest.mark.parametrize("groups", [[PARTS], [[part] for part in PARTS], [PARTS[:3], [], PARTS[3:]]])
def test_whole_answers_and_streams_have_the_same_blocks(groups):
    usage = Usage(prompt_tokens=7, answer_tokens=5, cached_tokens=3)
    answer = exchange()
    whole = answer.whole([Delta(0, PARTS, None, "calls")], usage)
    Message.model_validate(whole, strict=True)
    deltas = [Delta(0, group) for group in groups[:-1]] + [Delta(0, groups[-1], None, "calls")]
    events = stream(answer, *deltas, usage=usage)
    assert events[0]["message"]["usage"]["input_tokens"] == 7 and gather(events) == whole
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": "unsigned"}, {"type": "text", "text": "So: "}, USE,
        USE | {"id": "b", "input": {"input": [2]}}, {"type": "text", "text": "Done"},
    ]  # fmt: skip
    assert whole["stop_reason"] == "tool_use" and whole["model"] == "tiny" and whole["id"].startswith("msg_")
    assert whole["usage"] == {
        "input_tokens": 4, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0, "output_tokens": 5,
    }  # fmt: skip


@pytest.mark.parametrize("delta, num_tokens, reason, stop", [
    (Delta(0, [], None, "stop"), 3, "end_turn", None),
    (Delta(0, [Content("a")], None, "stop", "x"), 3, "stop_sequence", "x"),
    (Delta(0, [], None, "length"), 9, "max_tokens", None), (Delta(0, [], None, "calls", "x"), 3, "tool_use", None),
    (Delta(0, [], None, "length"), 8, "model_context_window_exceeded", None),
])  # fmt: skip
def test_endings(delta, num_tokens, reason, stop):
    usage = Usage(3, num_tokens, 0)
    whole = exchange().whole([delta], usage)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    answer = exchange()
    assert gather(stream(answer, delta, usage=usage)) | {"id": 0} == whole | {"id": 0}


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
    assert exchange().count(3) == {"input_tokens": 3} and CountBody(messages=CHAT).max_tokens == 1
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
