"""Calls in the form of a model: what its template gets, and what its answers may be."""

import copy
import json

import pytest
from refusals import refused
from servers import CHAT, with_tools

from treeflash_jax.serve.call_reader import model_prompts, model_settings
from treeflash_jax.serve.protocols.chat_completions import ChatBody, ChatExchange
from treeflash_jax.serve.protocols.exchange import Served
from treeflash_jax.serve.protocols.template_messages import template_messages
from treeflash_jax.serve.server_call import ServerCall

ADD = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": ADD}}
STRICT = {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}
GOOD = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
BAD = GOOD.replace("1", "3")


def make_call(**fields) -> ServerCall:
    return ChatExchange(ChatBody(messages=CHAT, **fields), Served("tiny", 0)).read_call()


@pytest.mark.parametrize("fields, answers", [
    ({"tools": [TOOL]}, None),
    ({"tools": [STRICT], "tool_choice": "none"}, None),
    ({"tools": [TOOL], "parallel_tool_calls": False},
     {"Hi.": True, GOOD: True, f"Hi. {BAD}": True, f"{GOOD} Hi.": False, f"{GOOD}\n{GOOD}": False, "<tool_call>": False}),
    ({"tools": [STRICT]}, {"Hi.": True, f"Hi. {GOOD} So {GOOD}": True, BAD: False, f"Hi. {GOOD}\n{BAD}": False, "": True}),
    ({"tools": [TOOL], "tool_choice": "required"},
     {GOOD: True, f"{GOOD}\n{GOOD}": True, "Hi.": False, BAD: False, f" {GOOD}": False, "": False}),
    ({"tools": [TOOL], "guided_choice": ["a"]}, {GOOD: True, "a": True, BAD: False, "b": False}),
    ({"tools": [STRICT], "guided_choice": ["a"]}, {GOOD: True, "a": True, BAD: False, "b": False, f"a{GOOD}": False}),
    ({"tools": [TOOL], "tool_choice": "required", "guided_choice": ["a"]}, {GOOD: True, "a": False}),
])  # fmt: skip
def test_answers_have_the_calls_that_a_request_allows(tiny, fields, answers):
    """`answers` maps texts to whether they may be an answer; None: no constraint."""
    model, call = with_tools(tiny), make_call(**fields)
    prompts = model_prompts(call, model.tokenizer)
    settings = model_settings(call, model.tokenizer, [model.encode(prompts[0])])
    if answers is None:
        assert settings == {}
        return
    [request] = model.prepare(prompts, **settings).requests
    table = request.automaton
    for text, is_allowed in answers.items():
        state = 0
        for token in [*model.tokenizer.encode(text), model.stop_ids[0]] if text else [model.stop_ids[0]]:
            state = table.next_qc[state, table.class_v[token]] if state >= 0 else state
        assert (state >= 0) == is_allowed, text


def test_what_a_template_lacks_is_mended_or_refused(tiny):
    model = with_tools(tiny)
    [chat] = model_prompts(make_call(tools=[TOOL], enable_thinking=True, reasoning_effort="low"), model.tokenizer)
    assert chat.tools == [TOOL] and chat.template == {"enable_thinking": True, "reasoning_effort": "low"}
    text = model.tokenizer.render(chat.messages, **chat.arguments)
    assert "Tools: add" in text and text.endswith("<think>\n")
    refused(
        lambda: model_prompts(make_call(tools=[TOOL]), tiny.tokenizer), "got tools, but the chat template of this model"
    )
    model.tokenizer.inner.chat_template = "{{ tools }}"
    refused(
        lambda: model_prompts(make_call(tools=[TOOL], tool_choice="required"), model.tokenizer),
        "got tool_choice that demands a call, but this model writes calls in a format that is not read here",
    )
    assert model_prompts(make_call(tools=[TOOL]), model.tokenizer)[0].tools == [TOOL]
    call = make_call(tools=[STRICT])
    assert model_settings(call, model.tokenizer, [[1]]) == {}


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize("message, expected", [
    ({"role": "developer", "content": "Be short."}, {"role": "system", "content": "Be short."}),
    ({"role": "assistant"}, {"role": "assistant", "content": ""}),
    ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
    ({"role": "tool", "tool_call_id": "a", "content": None}, {"role": "tool", "tool_call_id": "a", "content": ""}),
    ({"role": "assistant", "content": "x", "reasoning_content": "Hm"}, {"role": "assistant", "content": "x", "key": "Hm"}),
    ({"role": "assistant", "content": "x", "reasoning": "Hm"}, {"role": "assistant", "content": "x", "key": "Hm"}),
    ({"role": "assistant", "content": "x", "reasoning_content": "Hm", "reasoning": "H"},
     {"role": "assistant", "content": "x", "key": "Hm"}),
    ({"role": "user", "content": None}, {"role": "user", "content": None}),
])  # fmt: skip
def test_messages_are_mended(message, expected):
    before = copy.deepcopy(message)
    assert template_messages([message], "system", "key") == [expected] and message == before
    if message["role"] == "developer":
        assert template_messages([message], "developer", "key") == [message]


@pytest.mark.parametrize("arguments, expected", [
    ('{"x": 1}', {"x": 1}), ("", {}), (None, {}), ({"x": 1}, {"x": 1}), ("{", "{"), ("missing", "missing"),
])  # fmt: skip
def test_arguments_of_earlier_calls_are_objects(arguments, expected):
    call = json.loads(json.dumps(CALL))
    call["function"]["arguments"] = arguments
    if arguments == "missing":
        del call["function"]["arguments"]
        expected = {}
    [message] = template_messages([{"role": "assistant", "tool_calls": [call, 5, {"function": 1}]}], "", "key")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": expected}
    assert message["tool_calls"][1:] == [5, {"function": 1}]


def test_a_chat_with_calls_and_results_is_rendered(tiny):
    model = with_tools(tiny)
    messages = [*CHAT, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "a", "content": "3"}]
    [chat] = model_prompts(ChatExchange(ChatBody(messages=messages), Served("t", 0)).read_call(), model.tokenizer)
    text = model.tokenizer.render(chat.messages, **chat.arguments)
    assert (
        '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>' in text and "<|im_start|>tool\n3<|im_end|>" in text
    )
