"""The Responses API without a server: bodies become calls, answers become items and events of the client's types."""

import copy
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import toy_tokenizers
from openai.types.responses import Response
from refusals import refused
from response_events import ADD, EVENTS, FUNCTION, replayed, without_ids

import treeflash_jax as tf
from treeflash_jax.core.error_text import LONGEST_MESSAGE, warn
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.formats.answer_text import AnswerText
from treeflash_jax.formats.messages.message_format import Content, FunctionCall, Part, Thought
from treeflash_jax.serve.delta_reader import DeltaReader
from treeflash_jax.serve.protocols.exchange import MOST_NOTES, Event, Served
from treeflash_jax.serve.protocols.fields import with_numbers
from treeflash_jax.serve.protocols.response_items import encode_thoughts
from treeflash_jax.serve.protocols.responses import ResponsesBody, ResponsesExchange
from treeflash_jax.serve.server_call import Delta, ServerCall, Tools, Usage
from treeflash_jax.serve.worker import Piece

SUB = {"type": "function", "name": "sub"}
CALL_ITEM = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def exchange_of(served: Served | None = None, **fields: Any) -> ResponsesExchange:
    body = with_numbers(ResponsesBody, tf.GenerateConfig).model_validate({"input": "Hi"} | fields, strict=True)
    return ResponsesExchange(body, served or Served("tiny", 0))


def call_of(**fields: Any) -> ServerCall:
    return exchange_of(**fields).read_call()


def messages_of(items: Any, **fields: Any) -> list[dict[str, Any]]:
    return call_of(input=items, **fields).prompts[0].messages


def text(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": x} for x in texts]}


def thought(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]} | more


TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
OTHER_CALL = {**TOOL_CALL, "id": "c2"}


@pytest.mark.parametrize("items, expected", [
    ("Hi", [{"role": "user", "content": "Hi"}]),
    ([text("user", "a", "b"), {"role": "assistant", "content": "c"}], [
        {"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]),
    ([text("developer", "a"), text("system", "b"), text("user", "c"), text("developer", "d")], [
        {"role": "developer", "content": "a\n\nb"}, {"role": "user", "content": "c"},
        {"role": "developer", "content": "d"}]),
    ([text("user", "a"), thought("Hm."), text("assistant", "b"), CALL_ITEM, {**CALL_ITEM, "call_id": "c2"}, OUTPUT_ITEM,
      {**OUTPUT_ITEM, "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]}, thought("So."),
      text("assistant", "7")], [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "Hm.", "tool_calls": [TOOL_CALL, OTHER_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"}, {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "assistant", "content": "7", "reasoning_content": "So."}]),
    ([text("assistant", "a"), CALL_ITEM, text("assistant", "b")], [
        {"role": "assistant", "content": "ab", "tool_calls": [TOOL_CALL]}]),
    ([text("assistant", "a"), text("assistant", "b"), thought("c"), CALL_ITEM], [
        {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": None, "reasoning_content": "c", "tool_calls": [TOOL_CALL]}]),
    ([thought("", content=None, encrypted_content=encode_thoughts("Hm. é")), text("assistant", "a")], [
        {"role": "assistant", "content": "a", "reasoning_content": "Hm. é"}]),
    ([thought("", content=None, encrypted_content="gAAAA"), text("assistant", "a")], [
        {"role": "assistant", "content": "a", "reasoning_content": ""}]),
])  # fmt: skip
def test_items_become_messages(items, expected):
    before = copy.deepcopy(items)
    assert messages_of(items) == expected and items == before
    system = {"role": "system", "content": "Be brief."}
    if expected[0]["role"] == "developer":
        expected = [{"role": "system", "content": "Be brief.\n\n" + expected[0]["content"]}, *expected[1:]]
        assert messages_of(items, instructions="Be brief.") == expected
    else:
        assert messages_of(items, instructions="Be brief.") == [system, *expected]


@pytest.mark.parametrize("fields, expected", [
    ({}, Tools([FUNCTION])),
    ({"tool_choice": "none"}, Tools()),
    ({"tool_choice": "required"}, Tools([FUNCTION], is_forced=True)),
    ({"parallel_tool_calls": False}, Tools([FUNCTION], is_parallel=False)),
    ({"tool_choice": {"type": "function", "name": "add"}},
     Tools([FUNCTION], frozenset(["add"]), is_forced=True, is_parallel=False)),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}},
     Tools([FUNCTION], frozenset(["add"]))),
    ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}, SUB]}},
     Tools([FUNCTION], frozenset(["sub"]), is_forced=True)),
    ({"tools": [{"type": "web_search"}, SUB | {"strict": True, "parameters": None}, {"type": "namespace", "tools": []}]},
     Tools([{"type": "function", "function": {"name": "sub", "strict": True}}])),
])  # fmt: skip
def test_tools_and_choices(fields, expected):
    assert call_of(**{"tools": [ADD]} | fields).tools == expected


def test_tools_that_openai_runs_are_left_out_with_one_line(caplog):
    for _ in range(2):
        call_of(tools=[{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "web_search"}, ADD])
    lines = ["/v1/responses: tools of type 'custom', 'web_search' are left out"]
    assert [record.message for record in caplog.records] == lines


def test_types_of_tools_do_not_fill_the_log(caplog):
    """Regression: `warn` forgets after 1,024 texts, so clients could make it repeat warnings of the process."""
    served = Served("tiny", 0)
    warn("once")
    for number in range(110):
        exchange_of(served, tools=[{"type": f"{number} {i} {'x' * 100}"} for i in range(10)])
    warn("once")
    assert len(caplog.messages) == 1 + MOST_NOTES and caplog.messages.count("once") == 1
    assert len("".join(served.noted)) <= MOST_NOTES * LONGEST_MESSAGE, "texts that are kept are clipped"


@pytest.mark.parametrize("fields, expected", [
    ({"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3, "truncation": "disabled", "background": False},
     {"max_new_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3}),
    ({"text": {"format": {"type": "text"}, "verbosity": "low"}, "n": 1}, {"samples": 1}),
    ({"text": {"format": {"type": "json_object"}}}, {"schema": '{"type": "object"}'}),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}}}, {"schema": '{"const": 1}'}),
    ({"structured_outputs": {"choice": ["x"]}, "top_k": 4}, {"choices": ["x"], "top_k": 4}),
])  # fmt: skip
def test_settings(fields, expected):
    call = call_of(**fields)
    assert call.settings == expected and not call.wants_log_probs and not call.streams
    assert call.sent_names["max_new_tokens"] == "max_output_tokens"


def test_template_arguments_and_log_probabilities():
    chat = call_of(reasoning={"effort": "low", "summary": "auto"}, chat_template_kwargs={"x": 1}).prompts[0]
    assert (
        chat.template == {"reasoning_effort": "low", "x": 1}
        and call_of(reasoning={"effort": None}).prompts[0].template == {}
    )
    for given, top in ({"stream": True}, 0), ({"top_logprobs": 3}, 3):
        settings = call_of(include=["message.output_text.logprobs"], **given).settings
        assert settings == {"log_probs": True, "top_log_probs": top}


IMAGE = {"type": "input_image", "image_url": "x"}


@pytest.mark.parametrize("fields, words", [
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "got input.0.content.0.type 'input_image', expected input_text"),
    ({"input": [text("user", "a"), {"role": "user", "content": [{"type": "input_file"}]}]}, "got input.1.content.0.type"),
    ({"input": [{**OUTPUT_ITEM, "output": [IMAGE]}]}, "got input.0.output.0.type 'input_image'"),
    ({"input": [{"role": "tool", "content": "a"}]}, "got input.0.role 'tool'"),
    ({"input": [{"role": "user"}]}, "got input.0.content None"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "got input.0.content.0.text None"),
    ({"input": [{"type": "web_search_call"}]}, "got input.0.type 'web_search_call', expected message, reasoning"),
    ({"input": [{"type": ["a"], "role": "user", "content": "a"}]}, "got input.0.type ['a']"),
    ({"input": [{**CALL_ITEM, "arguments": {}}]}, "got input.0.arguments {}, expected a text"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "got input.0.call_id None"),
    ({"input": [thought("", content=["a"])]}, "got input.0.content ['a']"),
    ({"input": [thought("", content=None, encrypted_content="text:/w==")]}, "got input.0.encrypted_content 'text:/w=='"),
    ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "got tools.0.name None"),
    ({"tools": [SUB, SUB | {"parameters": "x"}]}, "got tools.1.parameters 'x', expected a schema"),
    ({"tool_choice": "any"}, "got tool_choice 'any'"),
    ({"tool_choice": {"type": "web_search"}}, "got tool_choice {'type': 'web_search'}, expected 'none', 'auto'"),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "got tool_choice.name None"),
    ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "got tool_choice.mode None"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["add"]}}, "got tool_choice.tools ['add']"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "got text.format.schema None"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "got regex and text.format.schema ['a'"),
    ({"top_logprobs": 2}, "got top_logprobs 2, expected include"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "got top_logprobs 21, expected 0 to 20"),
    ({"n": 2}, "got n 2, expected 1"),
    ({"background": True}, "got background True, expected none: it is not supported"),
    ({"conversation": "conv_1"}, "got conversation 'conv_1'"), ({"prompt": {"id": "x"}}, "got prompt {'id': 'x'}"),
    ({"truncation": "auto"}, "got truncation 'auto'"), ({"max_tokens": 5}, "got max_tokens 5"),
    ({"reasoning_effort": "low"}, "got reasoning_effort 'low'"),
    ({"chat_template_kwargs": {"tokenize": True}}, "got chat_template_kwargs ['tokenize']"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(fields, words):
    refused(lambda: call_of(**fields), words)


def checked(event: Event) -> dict[str, Any]:
    """Returns the fields of an event that has the form of the client's own type."""
    data = json.loads(event.encode().decode().partition("data: ")[2])
    assert event.name == data["type"]
    EVENTS[event.name].model_validate(data, strict=True)
    return data


def in_pieces(parts: list[Part], draw: random.Random) -> list[list[Part]]:
    """Cuts the texts of parts, and the list of all pieces, at random places."""
    pieces: list[Part] = []
    for part in parts:
        if isinstance(part, FunctionCall):
            pieces.append(part)
            continue
        cuts = sorted(draw.sample(range(1, len(part.text)), draw.randrange(min(3, len(part.text)))))
        pieces += [type(part)(part.text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(part.text)], strict=True)]
    groups: list[list[Part]] = [[]]
    for piece in pieces:
        groups += [[]] * (draw.random() < 0.6)
        groups[-1] = [*groups[-1], piece]
    return groups


def test_streams_have_the_items_of_whole_answers():
    """Random parts in random pieces; every event has the form of the client's own type."""
    statuses = set()
    for seed in range(150):
        draw = random.Random(seed)
        kinds = [draw.choice([Thought, Content, FunctionCall]) for _ in range(draw.randrange(5))]
        parts = [
            FunctionCall("add", '{"a": 1}') if kind is FunctionCall else kind("word " * draw.randint(1, 3))
            for kind in kinds
        ]
        finished = draw.choice(["length", "calls" if FunctionCall in kinds else "stop"])
        usage = Usage(3, 4, 2)
        whole = exchange_of(include=["reasoning.encrypted_content"]).response([Delta(0, parts, finished=finished)], usage)
        exchange = exchange_of(include=["reasoning.encrypted_content"], stream=True)
        events = [*exchange.begin(Usage(3, 0, 0))]
        groups = in_pieces(parts, draw)
        for number, group in enumerate(groups):
            events += exchange.add(Delta(0, group, finished=finished if number == len(groups) - 1 else None))
        events = [*map(checked, [*events, *exchange.end(usage)])]
        last = events[-1]["response"]
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == f"response.{last['status']}"
        assert replayed(events) == last["output"] and without_ids(last["output"]) == without_ids(whole["output"])
        assert {**last, "id": 0, "output": 0, "created_at": 0, "completed_at": 0} == {
            **whole, "id": 0, "output": 0, "created_at": 0, "completed_at": 0}  # fmt: skip
        Response.model_validate(whole, strict=True)
        assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 2 and whole["usage"]["total_tokens"] == 7
        assert whole["status"] == ("incomplete" if finished == "length" else "completed")
        assert [part.id for part in parts if isinstance(part, FunctionCall)] == [
            item["call_id"] for item in whole["output"] if item["type"] == "function_call"]  # fmt: skip
        encoded = [item.get("encrypted_content") for item in whole["output"] if item["type"] == "reasoning"]
        texts = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "reasoning"]
        assert encoded == [*map(encode_thoughts, texts)]
        statuses |= {item["status"] for item in whole["output"]}
    assert statuses == {"completed", "incomplete"}


def test_fields_of_the_request_come_back():
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "tools": [ADD, {"type": "mcp"}], "temperature": 0.5,
              "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False, "max_output_tokens": 4,
              "reasoning": {"effort": "low"}, "store": False, "top_p": 0.5,
              "text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}, "strict": True}}}  # fmt: skip
    response = exchange_of(**fields).response([Delta(0, [Content("1")], finished="stop")], Usage(1, 1, 0))
    Response.model_validate(response, strict=True)
    same = "instructions metadata temperature tool_choice parallel_tool_calls max_output_tokens store top_p".split()
    assert {name: response[name] for name in same} == {name: fields[name] for name in same}
    assert response["tools"] == [ADD | {"strict": False}] and response["reasoning"] == {"effort": "low", "summary": None}
    assert response["text"] == {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}}


def test_a_failure_ends_a_stream():
    served = Served("tiny", 0)
    exchange = exchange_of(served, stream=True)
    exchange.read_call()
    events = [*exchange.begin(Usage(1, 0, 0)), *exchange.add(Delta(0, [Content("a")])), exchange.failure("lost")]
    last = [checked(event) for event in events][-1]
    assert last["type"] == "response.failed" and last["sequence_number"] == len(events) - 1
    assert last["response"]["error"] == {"code": "server_error", "message": "lost"}
    assert last["response"]["status"] == "failed"
    with pytest.raises(Exception, match="404: .*got previous_response_id"):
        exchange_of(served, previous_response_id=exchange.id).read_call()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_log_probabilities_are_those_of_the_messages_tokens(size):
    """Neither tags nor thoughts have some, in pieces of any size; a character of several tokens does."""
    tokenizer = toy_tokenizers.byte_fallback()
    tokenizer.inner.chat_template = "<think> <tool_call> tools"
    texts = [
        "<think>",
        "▁river",
        "</think>",
        "\n",
        "▁of",
        "<end>",
        "é",
        "s",
        '<tool_call>{"name": "add"}</tool_call>',
        "<end>",
    ]
    ids = [id for text in texts for id in ([tokenizer.inner.convert_tokens_to_ids(text)] if text == "<end>" else
           toy_tokenizers.ids_of(tokenizer, text))]  # fmt: skip
    exchange = exchange_of(include=["message.output_text.logprobs"], top_logprobs=1, tools=[SUB])
    reader = DeltaReader(exchange.read_call(), tokenizer)
    answer, sent, deltas = AnswerText(tokenizer, [1]), 0, []
    for end in range(size, len(ids) + size, size):
        is_last = end >= len(ids)
        answer.extend(ids[end - size : end])
        grown = answer.text if is_last else answer.certain_text
        log_probs = {"log_probs": [-1.0] * len(ids[:end]), "top_log_probs": [[(id, -1.0)] for id in ids[:end]]}
        result = Result(
            text=grown, ids=ids[:end], prompt_ids=[1], builder="none", accept_lengths=[1], finished="stop", **log_probs
        )
        deltas.append(reader.read(Piece(0, Chunk(ids=ids[end - size : end], text=grown[sent:], rounds=1), result, is_last)))
        sent = len(grown)
    events = [*exchange.begin(Usage(1, 0, 0)), *(event for delta in deltas for event in exchange.add(delta))]
    output = replayed([*map(checked, [*events, *exchange.end(Usage(1, 1, 0))])])
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    [content] = output[1]["content"]
    assert [entry["token"] for entry in content["logprobs"]] == [" of", "", "é", "s"] and content["text"].strip() == "ofés"
    assert b"".join(bytes(entry["bytes"]) for entry in content["logprobs"]) == " ofés".encode()
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content["logprobs"])


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", [
    '"tools": [{"type": "function", "name": "add", "parameters": {"minimum": NUMBER}}]',
    '"text": {"format": {"type": "json_schema", "schema": {"description": NUMBER}}}',
    '"tool_choice": {"type": "function", "name": "add", "x": NUMBER}',
])  # fmt: skip
def test_numbers_that_json_lacks_are_refused(field, number):
    """The response repeats these fields, so that it could not be written."""
    body = f'{{"input": "Hi", {field.replace("NUMBER", number)}}}'
    exchange = ResponsesExchange(
        with_numbers(ResponsesBody, tf.GenerateConfig).model_validate_json(body), Served("tiny", 0)
    )
    refused(exchange.read_call, "got NaN or an infinite number")


def test_an_answer_of_nothing_is_an_empty_message():
    response = exchange_of().response([Delta(0, [], finished="stop")], Usage(1, 0, 0))
    assert [item["type"] for item in response["output"]] == ["message"] and response["output"][0]["content"][0][
        "text"
    ] == ""
    assert SimpleNamespace(**response).status == "completed"
