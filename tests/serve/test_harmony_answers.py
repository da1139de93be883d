"""Answers in channels, over HTTP: the tiny model with a tokenizer of bytes and harmony's tokens."""

import json

import harmony_tokenizer
import jsonschema
import openai
import pytest
from answers import slow
from servers import CHAT, running, with_tokenizer

TOKENIZER = harmony_tokenizer.make()
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 23]}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(tiny):
    ends = tuple(TOKENIZER.inner.convert_tokens_to_ids(["<|call|>", "<|return|>"]))
    with running(with_tokenizer(tiny, TOKENIZER, ends)) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=600, max_retries=0)


@pytest.mark.parametrize("fields, finish", [
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_calls"),
    slow({"response_format": FORM}, "stop"),
    slow({"tools": TOOLS, "response_format": FORM}, None),
])  # fmt: skip
def test_calls_and_content_follow_their_schemas_behind_thoughts(client, fields, finish):
    """A random model rarely ends its thoughts, so they are biased to be short: by their end."""
    [end] = TOKENIZER.inner.convert_tokens_to_ids(["<|end|>"])
    given = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 200,
        "logit_bias": {str(end): 5},
        "temperature": 1.5,
        **fields,
    }
    thoughts = 0
    for seed in range(2):
        [choice] = client.chat.completions.create(**given, seed=seed).choices
        pieces = [piece.choices[0] for piece in client.chat.completions.create(**given, seed=seed, stream=True)]
        message, calls = choice.message, choice.message.tool_calls or []
        thoughts += bool(getattr(message, "reasoning_content", None))
        for name in "content", "reasoning_content":
            assert "".join(getattr(piece.delta, name, None) or "" for piece in pieces) == (
                getattr(message, name, None) or ""
            )
        streamed = [call.function.arguments for piece in pieces for call in piece.delta.tool_calls or []]
        assert streamed == [call.function.arguments for call in calls]
        assert choice.finish_reason == pieces[-1].finish_reason and finish in (None, choice.finish_reason)
        jsonschema.validate(json.loads(calls[0].function.arguments if calls else message.content), SCHEMA)
        assert [call.function.name for call in calls] == ["add"] * (choice.finish_reason == "tool_calls")
    assert thoughts
