"""Bodies of every protocol with one value replaced by an odd one: each is a call, or an error of the client."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import treeflash_jax as tf
from treeflash_jax.engine.call.prompts import Chat
from treeflash_jax.serve.protocols import PROTOCOLS
from treeflash_jax.serve.protocols.exchange import Exchange, Served
from treeflash_jax.serve.protocols.fields import with_numbers
from treeflash_jax.serve.protocols.template_messages import template_messages

TEXT, INPUT_TEXT = {"type": "text", "text": "a"}, {"type": "input_text", "text": "a"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}
BODIES = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [TEXT]},
                     {"role": "assistant", "content": None, "reasoning_content": "a", "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "1", "content": "a"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "response_format": SCHEMA,
        "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"a": 1},
    },
    "/v1/completions": {"prompt": ["a"], "max_tokens": 3, "n": 2, "echo": True, "logprobs": 1, "stop": "a",
                        "logit_bias": {"1": 2}, "temperature": 1},
    "/v1/responses": {
        "input": [{"role": "user", "content": [INPUT_TEXT]},
                  {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "1", "output": [INPUT_TEXT]},
                  {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
                  {"type": "reasoning", "encrypted_content": "text:YQ=="}],
        "tools": [{"type": "function"} | FUNCTION], "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"],
    },
    "/v1/messages": {
        "max_tokens": 3, "system": [TEXT],
        "messages": [{"role": "user", "content": [TEXT]},
                     {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"},
                                                       {"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [TEXT]}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool", "name": "f"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "max"},
        "thinking": {"type": "enabled"},
    },
}  # fmt: skip
ODD = [None, "", 0, float("nan"), True, [], {}, "text", "function", ["text"], {"type": "text"}, {"a": 1}, [1], 10**30]


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yields the path to every value inside a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def read(protocol: type[Exchange], body_kind: type[BaseModel], body: Any) -> None:
    call = protocol(body_kind.model_validate_json(json.dumps(body)), Served("tiny", 0)).read_call()
    call.tools.check()
    for prompt in call.prompts:
        if isinstance(prompt, Chat):
            template_messages(prompt.messages, "developer", "thinking")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_odd_value_anywhere_in_a_body_is_no_error_of_the_server(protocol):
    whole, body_kind = BODIES[protocol.path], with_numbers(protocol.body_kind, tf.GenerateConfig)
    read(protocol, body_kind, whole)
    for path in paths(whole):
        for value in ODD:
            place = body = copy.deepcopy(whole)
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            try:
                read(protocol, body_kind, body)
            except ValueError:
                pass
            except HTTPException as error:
                assert error.status_code < 500, (path, value)
            except Exception as error:
                pytest.fail(f"{path} = {value!r}: {error!r}")
