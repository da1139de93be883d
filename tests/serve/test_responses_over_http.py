"""The Responses API over HTTP, as the openai client reads it: answers are those of chats."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest
from openai.types.responses import Response
from response_events import ADD, EVENTS, FUNCTION, PARAMETERS, replayed, without_ids
from servers import CHAT, GREEDY, running

from treeflash_jax.formats.tokenizer import Tokenizer

TEXT = "Sam has 2 cats and 3 dogs. How many animals?"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def create(client: openai.OpenAI, **fields: Any) -> Response:
    """A response, whole and from a stream, which are the same but for ids."""
    fields = {"model": "tiny", "input": TEXT, "max_output_tokens": 20} | GREEDY | fields
    whole = client.responses.create(**fields)
    Response.model_validate(whole.model_dump(by_alias=True), strict=True)
    events = [
        event.model_dump(by_alias=True, exclude_unset=True) for event in client.responses.create(**fields, stream=True)
    ]
    for event in events:
        EVENTS[event["type"]].model_validate(event, strict=True)
    assert without_ids(replayed(events)) == without_ids(whole.model_dump(by_alias=True, exclude_unset=True)["output"])
    if whole.status == "completed":  # the client's helper knows no other
        with client.responses.stream(**fields) as stream:
            assert stream.get_final_response().output_text == whole.output_text
    return whole


def test_answers_are_those_of_chats(server, client):
    def chat(messages: list[dict[str, str]]) -> Any:
        return client.chat.completions.create(model="tiny", messages=messages, max_tokens=20, **GREEDY)

    first, expected = create(client), chat(CHAT)
    assert first.output_text == expected.choices[0].message.content
    assert first.usage.input_tokens == expected.usage.prompt_tokens and first.status == "incomplete"
    answer = {"role": "assistant", "content": first.output_text}
    more = {"role": "user", "content": "And how many legs?"}
    system = {"role": "system", "content": "Count."}
    expected = chat([*CHAT, answer, more]).choices[0].message.content
    given = [*CHAT, *first.model_dump()["output"], more]
    assert create(client, input=given).output_text == expected
    second = create(client, input="And how many legs?", previous_response_id=first.id)
    assert second.output_text == expected and second.previous_response_id == first.id
    reference = {"type": "item_reference", "id": first.output[0].id}
    assert create(client, input=[*CHAT, reference, more]).output_text == expected
    told = create(client, input="And?", previous_response_id=second.id, instructions="Count.")
    whole = [system, *CHAT, answer, more, {"role": "assistant", "content": expected}, {"role": "user", "content": "And?"}]
    assert told.output_text == chat(whole).choices[0].message.content


def test_stored_responses_are_shown_and_deleted(client):
    first = client.responses.create(model="tiny", input="Hi", max_output_tokens=3, **GREEDY)
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(
        model="tiny", input="And?", max_output_tokens=3, previous_response_id=first.id, **GREEDY
    )
    client.responses.delete(first.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"got response '{first.id}', .* last 1000 and 64 MiB of them, "):
            ask(first.id)
    for fields in ({"previous_response_id": first.id}, {"input": [{"type": "item_reference", "id": first.output[0].id}]}):
        with pytest.raises(openai.NotFoundError) as refusal:
            client.responses.create(model="tiny", **{"input": "x"} | fields)
        assert refusal.value.param in ("previous_response_id", "input.0.id")
    assert client.responses.create(model="tiny", input="x", max_output_tokens=3, previous_response_id=second.id).output
    unkept = client.responses.create(model="tiny", input="Hi", max_output_tokens=3, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


class Person(pydantic.BaseModel):
    tall: bool


def test_answers_follow_a_schema(client):
    answer = client.responses.parse(model="tiny", input=TEXT, text_format=Person, **GREEDY)
    assert isinstance(answer.output_parsed, Person)
    form = {"type": "json_schema", "name": "x", "schema": {"enum": [17]}}
    assert create(client, text={"format": form}).output_text == "17"
    entries = create(client, include=["message.output_text.logprobs"], top_logprobs=2).output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == create(client).output_text and len(entries[0].top_logprobs) == 2


@pytest.fixture(scope="module")
def tool_client(tiny) -> Iterator[openai.OpenAI]:
    """A client of `tiny` with a template that has tools and calls."""
    model = copy.copy(tiny)
    model.tokenizer = Tokenizer(copy.deepcopy(tiny.tokenizer.inner))
    model.tokenizer.inner.chat_template = TEMPLATE
    with running(model) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=600, max_retries=0)


@pytest.mark.slow
def test_a_forced_call_and_its_result(tool_client):
    given = {"tools": [ADD, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "add"}}
    first = create(tool_client, max_output_tokens=60, **given)
    [call] = first.output
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    assert (call.type, call.name, call.status, first.status) == ("function_call", "add", "completed", "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    answers = [
        create(tool_client, input=[result], previous_response_id=first.id, tools=[ADD]),
        create(tool_client, input=[{"role": "user", "content": TEXT}, call.model_dump(), result], tools=[ADD]),
    ]
    function = {"name": "add", "arguments": call.arguments}
    chat = [*CHAT, {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "3"}]  # fmt: skip
    expected = tool_client.chat.completions.create(model="tiny", messages=chat, max_tokens=20, tools=[FUNCTION], **GREEDY)
    assert {answer.output_text for answer in answers} == {expected.choices[0].message.content}
    assert {answer.usage.input_tokens for answer in answers} == {expected.usage.prompt_tokens}


@pytest.mark.parametrize("change, words", [
    ({"tools": [ADD]}, "got tools, but the chat template of this model has no place for them"),
    ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "got tool_choice that demands a call, but no tools"),
    ({"tool_choice": {"type": "function", "name": "mul"}, "tools": [ADD]}, "got tool_choice 'mul', expected one of tools"),
    ({"max_output_tokens": 0}, "got max_output_tokens 0, expected at least 1"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type: "),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "lizard"}}}}, "lizard"),
    ({"metadata": {"a": 1}}, "metadata.a: "), ({"input": None}, "input"), ({"input": []}, "got an empty prompt"),
    ({"include": "x"}, "include: "),
])  # fmt: skip
def test_wrong_requests_are_errors_of_one_line(server, change, words):
    response = httpx.post(f"{server.url}/v1/responses", json={"model": "tiny", "input": "Hi"} | change, timeout=600)
    reason = response.json()["error"]
    assert response.status_code == 400 and words in reason["message"] and "\n" not in reason["message"], reason
    assert reason["type"] == "invalid_request_error"
