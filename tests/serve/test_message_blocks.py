"""Blocks of thoughts and calls in the text of an answer."""

import json
import time

import pytest

from treeflash_jax.serve.message_blocks import BlockParser

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": "ü"}}\n</tool_call>'
PARSED = ("add", {"x": 1, "y": "ü"})
PARAMETERS = {"properties": {"x": {"type": "integer"}, "y": {"type": "string"}, "z": {"type": "array"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
CODER = """<tool_call>
<function=add>
<parameter=x>
1
</parameter>
<parameter=y>
2
</parameter>
<parameter=z>
a [
b
</parameter>
</function>
</tool_call>"""
UNENDED = CODER.replace("</parameter>\n<parameter=y", "<parameter=y")


def parse(text: str, size: int, **how) -> tuple[str, str, list]:
    """Returns content, reasoning and calls of a text that comes in pieces of `size` characters."""
    parser = BlockParser(**{"reads_thoughts": True, "tools": TOOLS} | how)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.feed("", is_last=True)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [*range(parser.num_calls)]
    parsed = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    content, reasoning = ("".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content"))
    return content, reasoning, parsed


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text, how, expected", [
    ("1 < 2, <b> and <tool", {}, ("1 < 2, <b> and <tool", "", [])),
    (f"Let me see. {CALL}\n{CALL}", {}, ("Let me see. ", "", [PARSED, PARSED])),
    (f"<think>\nHm.</think>\n\nSo: {CALL}", {}, ("So: ", "Hm.", [PARSED])),
    ("Hm.\n</think>\n\nYes", {"begins_in_thought": True}, ("Yes", "Hm.\n", [])),
    ("<think>Hm", {}, ("", "Hm", [])),
    (f"So: {CODER}\n{CALL}", {}, ("So: ", "", [("add", {"x": 1, "y": "2", "z": "a [\nb"}), PARSED])),
    (CODER.replace("add", "less"), {}, ("", "", [("less", {"x": "1", "y": "2", "z": "a [\nb"})])),
    (CODER, {"tools": [{"type": "function"}, *TOOLS]}, ("", "", [("add", {"x": 1, "y": "2", "z": "a [\nb"})])),
    (UNENDED, {}, (UNENDED, "", [])),
    (CALL.replace("1", "NaN"), {}, (CALL.replace("1", "NaN"), "", [])),
    ("<tool_call>add</tool_call> no", {}, ("<tool_call>add</tool_call> no", "", [])),
    ('<tool_call>{"name": "add"', {}, ('<tool_call>{"name": "add"', "", [])),
    (f"<think>x</think>{CALL}", {"reads_thoughts": False, "tools": []}, (f"<think>x</think>{CALL}", "", [])),
])  # fmt: skip
def test_blocks_are_fields_of_the_message(text, how, expected, size):
    assert parse(text, size, **how) == expected


@pytest.mark.parametrize("schema, value", [
    (True, "1"), ({"type": ["string", "null"]}, "1"), ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1"),
    ({"enum": ["1"]}, "1"), ({"type": ["integer", "null"]}, 1), ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 1),
])  # fmt: skip
def test_values_are_texts_where_their_schema_allows_one(schema, value):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"x": schema}}}}]
    call = "<tool_call><function=add><parameter=x>1</parameter></function></tool_call>"
    assert parse(call, 1000, tools=tools) == ("", "", [("add", {"x": value})])


HALF, WHOLE = '"\\ud83d"', '"\\ud83d\\ude00"'


@pytest.mark.parametrize("text, expected", [
    (f'{{"name": {HALF}, "arguments": {{"x": {HALF}, "y": [{WHOLE}]}}}}', ("\ufffd", {"x": "\ufffd", "y": ["😀"]})),
    (f'{{"name": "add", "arguments": {{{HALF}: {{{HALF}: "x"}}}}}}', ("add", {"\ufffd": {"\ufffd": "x"}})),
    (f'{{"name": "add", "arguments": {HALF}}}', ("add", "\ufffd")),
    (f"<function=add><parameter=z>[{HALF}]</parameter></function>", ("add", {"z": ["\ufffd"]})),
])  # fmt: skip
def test_half_a_character_of_a_call_is_replaced(text, expected):
    """JSON's \\ud83d without its other half is in no UTF-8: the answer could not be sent."""
    parser = BlockParser(reads_thoughts=False, tools=TOOLS)
    deltas = parser.feed(f"<tool_call>{text}</tool_call>", is_last=True)
    [call] = json.loads(json.dumps(deltas, ensure_ascii=False).encode())[0]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == expected


def test_damaged_calls_are_read_in_linear_time():
    began = time.thread_time()
    text = f"<tool_call><function=add>{'<parameter=x>' * 4000}</function></tool_call>"
    assert parse(text, len(text)) == (text, "", [])
    assert time.thread_time() - began < 1
