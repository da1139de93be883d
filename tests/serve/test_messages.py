"""Anthropic's messages without a server: bodies become calls, answers become blocks and events of the client's types."""

import json
import logging
from dataclasses import replace

import pytest
from anthropic.types import Message
from message_blocks import ADD, EVENT, FORM, IMAGE, PATH, SCHEMA, TEXT, gather, parts, says
from refusals import refused
from servers import CHAT

from treeflash_jax.formats.messages.message_format import Content, FunctionCall, Thought
from treeflash_jax.serve.protocols.exchange import Served
from treeflash_jax.serve.protocols.messages import CountBody, MessagesBody, MessagesExchange
from treeflash_jax.serve.server_call import Delta, Tools, Usage

USE = {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1}}
CALLED = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
ADD_INSIDE = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
SERVERS_TOOL = {"type": "web_search_20250305", "name": "web_search"}


def exchange(**fields) -> MessagesExchange:
    return MessagesExchange(MessagesBody(**{"max_tokens": 9, "messages": CHAT} | fields), Served("tiny", 0))


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
    [chat] = exchange(system=system, messages=messages).read_call().prompts
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
    call = exchange(**fields).read_call()
    call.tools.check()
    assert replace(call.tools, described=[*call.tools.described]) == replace(tools, described=[*tools.described])
    assert call.settings == {"max_new_tokens": 9} | settings and call.prompts[0].template == template
    assert call.ends_with_context and call.num_answers == 1 and not call.wants_log_probs and not call.streams


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
    ({"output_format": FORM, "output_config": {"format": FORM}}, "got output_config.format and output_format ["),
    ({"output_config": {"format": FORM}, "guided_regex": "a"}, "got guided_regex and output_config.format ['a'"),
    ({"chat_template_kwargs": {"tokenize": True}}, "got chat_template_kwargs ['tokenize']"),
    ({"container": "x"}, "got container 'x', expected none: it is not supported"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields, words):
    refused(lambda: exchange(**fields).read_call().tools.check(), words)


def test_what_is_ignored_is_in_the_log(caplog):
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    with caplog.at_level(logging.WARNING, "treeflash_jax"):
        exchange(thinking=thinking, context_management={"edits": [1]}, tools=[SERVERS_TOOL, SERVERS_TOOL]).read_call()
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


PARTS = [Thought("Let me"), Thought(" see."), Content("So"), Content(": "), FunctionCall("add", '{"x": 1}', "a"),
         FunctionCall("add", "[2]", "b"), Content("Done")]  # fmt: skip


@pytest.mark.parametrize("groups", [[PARTS], [[part] for part in PARTS], [PARTS[:3], [], PARTS[3:]]])
def test_whole_answers_and_streams_have_the_same_blocks(groups):
    usage = Usage(prompt_tokens=7, answer_tokens=5, cached_tokens=3)
    answer = exchange()
    whole = answer.response([Delta(0, PARTS, None, "calls")], usage)
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
    whole = exchange().response([delta], usage)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    answer = exchange()
    assert gather(stream(answer, delta, usage=usage)) | {"id": 0} == whole | {"id": 0}


def test_a_count_takes_no_limit_of_tokens():
    assert exchange().count(3) == {"input_tokens": 3} and CountBody(messages=CHAT).max_tokens == 1
