"""Bodies of requests, and the forms of answers, without a server."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import treeflash_jax as tf
from treeflash_jax.serve.api_forms import ChatBody, ChatForm, CompletionBody
from treeflash_jax.serve.metrics import Metrics

CHAT = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>{"name": "add"}</tool_call>'
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}
# A tokenizer whose template has both kinds of blocks, and begins one; half a character, then "ü".
INNER = SimpleNamespace(
    chat_template="<think> <tool_call>", decode=lambda ids: {(1,): "\ufffd", (2,): "ü"}.get((*ids,), "<think>")
)


def make_form(**fields) -> ChatForm:
    return ChatForm("tiny", SimpleNamespace(inner=INNER), ChatBody(messages=CHAT, **fields))


def make_result(**fields) -> tf.Result:
    return replace(tf.Result.unanswered([5, 5, 5]), finished="stop", **fields)


@pytest.mark.parametrize("fields, expected", [
    ({}, ("Hm.", None, 1)),
    ({"response_format": {"type": "text"}}, ("Hm.", None, 1)),
    ({"tool_choice": "none"}, ("Hm.", CALL, 0)),
    ({"response_format": {"type": "json_object"}}, (None, f"Hm.</think>{CALL}", 0)),
    ({"response_format": SCHEMA}, (None, f"Hm.</think>{CALL}", 0)),
])  # fmt: skip
def test_blocks_are_read_unless_the_answer_is_json_or_may_not_call(fields, expected):
    choice = make_form(tools=TOOLS, **fields).choice(0, make_result(text=f"Hm.</think>{CALL}"))
    message = choice["message"]
    assert (message.get("reasoning_content"), message["content"], len(message.get("tool_calls", []))) == expected
    assert choice["finish_reason"] == ("tool_calls" if expected[2] else "stop")


def test_half_a_character_has_no_bytes():
    result = make_result(ids=[1, 2], log_probs=[-1.0, -2.0], top_log_probs=[[], []])
    assert [entry["bytes"] for entry in make_form(logprobs=True).entries(result, 0)] == [None, [*"ü".encode()]]


def test_top_k_is_off_in_the_form_of_other_clients():
    assert ChatBody(messages=CHAT, top_k=-1).settings()["top_k"] == 0
    assert "top_k" not in CompletionBody(prompt="Hi").settings()


def test_the_metric_of_accepted_tokens_counts_drafted_ones():
    """One round accepted nothing, one two tokens, and the last one three, of which the answer's end cut off two tokens."""
    metrics = Metrics()
    metrics.observe(make_result(ids=[1] * 7, accept_lengths=[1, 3, 2], cut=2), 1.0)
    labels = [{"depth": str(depth)} for depth in (1, 2, 3, 4)]
    counts = [metrics.registry.get_sample_value("treeflash_accepted_tokens_total", label) for label in labels]
    assert counts == [2, 2, 1, None]
