"""Calls of functions that a request demands, and what templates and clients leave out, over HTTP."""

import json

import httpx
import jsonschema
import openai
import pytest
from answers import slow
from openai.types.chat import ChatCompletion
from servers import CHAT, running, with_tools

ADD = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "why": {"enum": ["a", "b"]}}}
ADD |= {"required": ["x", "why"], "additionalProperties": False}
SAY = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 3}}, "required": ["text"]}
SCHEMAS = {"add": ADD, "say": SAY}


def make_tool(name: str, **more) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], **more}}


TOOLS = [make_tool("add"), make_tool("say")]


@pytest.fixture(scope="module")
def server(tiny):
    with running(with_tools(tiny)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=600, max_retries=0)


def check_calls(calls: list, names: set[str]) -> None:
    for call in calls:
        assert call.function.name in names and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice, names, is_one", [
    slow("required", {"add", "say"}, False),
    ({"type": "function", "function": {"name": "say"}}, {"say"}, True),
    slow({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "add"}}]}}, {"add"}, False),
])  # fmt: skip
def test_a_demanded_call_is_made(client, choice, names, is_one):
    """Whole, streamed, and after thoughts; the tiny model would never write one."""
    given = {
        "model": "tiny",
        "messages": CHAT,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 150,
        "temperature": 1.0,
    }
    for seed in range(2):
        given |= {"seed": seed, "parallel_tool_calls": seed == 0}
        answer = client.chat.completions.create(**given)
        ChatCompletion.model_validate(answer.model_dump(), strict=True)
        [choice] = answer.choices
        check_calls(choice.message.tool_calls, names)
        if is_one or seed:
            assert len(choice.message.tool_calls) == 1 and choice.message.content is None
            assert choice.finish_reason == "tool_calls"
        pieces = [*client.chat.completions.create(**given, stream=True)]
        streamed = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or []]
        assert [call.index for call in streamed] == [*range(len(streamed))]
        assert [call.function for call in streamed] == [
            openai.types.chat.chat_completion_chunk.ChoiceDeltaToolCallFunction(**call.function.model_dump())
            for call in choice.message.tool_calls
        ]
        assert pieces[-1].choices[0].finish_reason == choice.finish_reason
    thoughtful = client.chat.completions.create(**given | {"max_tokens": 200}, extra_body={"enable_thinking": True})
    message = thoughtful.choices[0].message
    assert message.reasoning_content
    if thoughtful.choices[0].finish_reason != "length":
        check_calls(message.tool_calls, names)


def test_answers_follow_a_schema_or_call(client):
    schema = {"type": "object", "properties": {"age": {"enum": [3, 17]}}, "required": ["age"]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    kinds = set()
    for seed in range(3):
        given = {"model": "tiny", "messages": CHAT, "tools": TOOLS, "response_format": form, "seed": seed}
        [choice] = client.chat.completions.create(**given, temperature=2.0, max_tokens=150).choices
        if choice.finish_reason == "length":
            continue
        if choice.message.tool_calls:
            check_calls(choice.message.tool_calls, {"add", "say"})
        else:
            jsonschema.validate(json.loads(choice.message.content), schema)
        kinds.add(choice.finish_reason)
    assert kinds and kinds <= {"tool_calls", "stop"}


@pytest.mark.parametrize("change, words", [
    ({"tool_choice": "required", "tools": []}, "got tool_choice that demands a call, but no tools to call"),
    ({"tool_choice": {"type": "function", "function": {"name": "less"}}},
     "got tool_choice 'less', expected one of tools: add, say"),
    ({"tool_choice": {"type": "custom"}}, "got tool_choice {'type': 'custom'}, expected 'none', 'auto'"),
    ({"tool_choice": "always"}, "got tool_choice 'always', expected 'none', 'auto'"),
    ({"tools": [{"type": "function"}]}, "got tools.0 {'type': 'function'}, expected a function with a name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "got tools.0.function.parameters []"),
    ({"tools": [{"type": "function", "function": {"name": "a\nb"}}]}, "got name of a tool 'a\\nb', expected one"),
    ({"tools": [{"type": "function", "function": {"name": "</tool_call>"}}]}, "got name of a tool '</tool_call>'"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/x"}}}]},
     "got tools '{"),
    ({"functions": [{"name": "a"}]}, "got functions [{'name': 'a'}], expected none: it is not supported"),
    ({"tools": [make_tool("add")], "tool_choice": "required", "max_tokens": 2, "guided_regex": "a", "regex": "b"},
     "expected one of them"),
])  # fmt: skip
def test_wrong_tools_are_errors_of_one_line(server, change, words):
    response = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": CHAT, "tools": TOOLS} | change, timeout=600
    )
    assert response.status_code == 400 and words in response.json()["error"]["message"]
    assert "\n" not in response.json()["error"]["message"]
