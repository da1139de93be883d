"""Thoughts and calls between tags in the text of an answer."""

import json
import time

import pytest

from treeflash_jax.formats.messages.message_format import Content, Function, FunctionCall, Thought
from treeflash_jax.formats.messages.tag_reader import TagReader

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": "ü"}}\n</tool_call>'
PARSED = ("add", {"x": 1, "y": "ü"})
PARAMETERS = {"properties": {"x": {"type": "integer"}, "y": {"type": "string"}, "z": {"type": "array"}}}
FUNCTIONS = [Function("add", PARAMETERS)]
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
    """Returns content, thoughts and calls of a text that comes in pieces of `size` characters."""
    reader = TagReader(**{"reads_thoughts": True, "functions": FUNCTIONS} | how)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    if len(pieces) > 1:
        pieces.append("")
    parts = [part for piece in pieces[:-1] for part in reader.feed([], piece)] + reader.feed([], pieces[-1], is_last=True)
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, FunctionCall)]
    content, thoughts = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Content, Thought))
    return content, thoughts, calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text, how, expected", [
    ("1 < 2, <b> and <tool", {}, ("1 < 2, <b> and <tool", "", [])),
    (f"Let me see. {CALL}\n{CALL}", {}, ("Let me see. ", "", [PARSED, PARSED])),
    (f"<think>\nHm.</think>\n\nSo: {CALL}", {}, ("So: ", "Hm.", [PARSED])),
    ("Hm.\n</think>\n\nYes", {"begins_in_thought": True}, ("Yes", "Hm.\n", [])),
    ("<think>Hm", {}, ("", "Hm", [])),
    (f'<think>So <tool_call>{{"name": "a</think>\n\nYes: {CALL}', {}, ("Yes: ", 'So <tool_call>{"name": "a', [PARSED])),
    ('<think>So <tool_call>{"name": "a', {}, ("", 'So <tool_call>{"name": "a', [])),
    (f"So: {CODER}\n{CALL}", {}, ("So: ", "", [("add", {"x": 1, "y": "2", "z": "a [\nb"}), PARSED])),
    (CODER.replace("add", "less"), {}, ("", "", [("less", {"x": "1", "y": "2", "z": "a [\nb"})])),
    (CODER, {"functions": [Function("f", {"properties": 1}), *FUNCTIONS]},
     ("", "", [("add", {"x": 1, "y": "2", "z": "a [\nb"})])),
    (UNENDED, {}, (UNENDED, "", [])),
    (CALL.replace("1", "NaN"), {}, (CALL.replace("1", "NaN"), "", [])),
    ("<tool_call>add</tool_call> no", {}, ("<tool_call>add</tool_call> no", "", [])),
    ('<tool_call>{"name": "add"', {}, ('<tool_call>{"name": "add"', "", [])),
    (f"<think>x</think>{CALL}", {"reads_thoughts": False, "functions": []}, (f"<think>x</think>{CALL}", "", [])),
    # What models write besides.
    (CALL.replace("arguments", "parameters"), {}, ("", "", [PARSED])),
    ('<tool_call>{"name": "add"}</tool_call>', {}, ("", "", [("add", {})])),
    ('<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', {}, ("", "", [("add", {"x": 1})])),
    ("<tool_call>{'name': 'add', 'arguments': {'x': True, 'y': None}}</tool_call>", {},
     ("", "", [("add", {"x": True, "y": None})])),
    (CODER.replace("a [\nb", "[True, 'b']"), {}, ("", "", [("add", {"x": 1, "y": "2", "z": [True, "b"]})])),
    (CODER.replace("<tool_call>\n", "So: ") + " Yes", {}, ("So: Yes", "", [("add", {"x": 1, "y": "2", "z": "a [\nb"})])),
    (CODER.replace("<tool_call>", "").replace("</tool_call>", CALL), {},
     ("\n", "", [("add", {"x": 1, "y": "2", "z": "a [\nb"}), PARSED])),
    (f"Hm. {CALL} So.</think>Yes", {"begins_in_thought": True}, ("Yes", "Hm. So.", [PARSED])),
    (f"<think>Hm. {CALL}", {}, ("", "Hm. ", [PARSED])),
    ("<think>A <tool_call> is</think>Yes", {}, ("Yes", "A <tool_call> is", [])),
    ("It begins with <think> and ends with </think>.", {}, ("It begins with <think> and ends with </think>.", "", [])),
    ("<think>Hm</think>A <think> and a </tool_call>", {}, ("A <think> and a </tool_call>", "Hm", [])),
    ('<tool_call>{"name": "add", "arguments": {"y": "</tool_call>"}}</tool_call>', {},
     ("", "", [("add", {"y": "</tool_call>"})])),
    (' \n<think>Hm</think>Yes', {}, ("Yes", "Hm", [])),
    # Quotes around tags: strings of JSON alone hold them.
    ('<tool_call>{"name": "add", "arguments": {"y": "a\\" </tool_call>\\\\", "x": 1}}</tool_call>', {},
     ("", "", [("add", {"y": 'a" </tool_call>\\', "x": 1})])),
    *[(f"<tool_call>{block}</tool_call>So: {CALL}", {}, (f"<tool_call>{block}</tool_call>So: ", "", [PARSED]))
      for block in ('{"name": "5" tall"}', "{'name': 'say \"hi}", 'add "x', '{"name": x "y', '<function=add>"hi')],
    (f'<tool_call>{{"name": "</tool_call>\n</tool_call>{CALL}', {},
     ('<tool_call>{"name": "</tool_call>\n</tool_call>', "", [PARSED])),
    ("<tool_call>{'name': 'add', 'arguments': {'y': '\"hi'}}</tool_call>", {}, ("", "", [("add", {"y": '"hi'})])),
    (CODER.replace("2", "it's 5\""), {}, ("", "", [("add", {"x": 1, "y": "it's 5\"", "z": "a [\nb"})])),
])  # fmt: skip
def test_tags_make_parts(text, how, expected, size):
    assert parse(text, size, **how) == expected


@pytest.mark.parametrize("schema, value", [
    (True, "1"), ({"type": ["string", "null"]}, "1"), ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1"),
    ({"enum": ["1"]}, "1"), ({"$ref": "#/properties/x"}, "1"), ({"enum": 1, "oneOf": 1, "$ref": 1}, "1"),
    ({"$ref": "#/no/schema"}, "1"), ({"type": ["integer", "null"]}, 1),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 1),
])  # fmt: skip
def test_values_are_texts_where_their_schema_allows_one(schema, value):
    functions = [Function("add", {"properties": {"x": schema}})]
    call = "<tool_call><function=add><parameter=x>1</parameter></function></tool_call>"
    assert parse(call, 1000, functions=functions) == ("", "", [("add", {"x": value})])


def test_values_are_texts_where_their_schema_is_nested_too_deeply():
    schema = {}
    for _ in range(10_000):
        schema = {"anyOf": [schema]}
    call = "<tool_call><function=add><parameter=x>1</parameter></function></tool_call>"
    assert parse(call, 1000, functions=[Function("add", {"properties": {"x": schema}})]) == ("", "", [("add", {"x": "1"})])


HALF, WHOLE = '"\\ud83d"', '"\\ud83d\\ude00"'


@pytest.mark.parametrize("text, expected", [
    (f'{{"name": {HALF}, "arguments": {{"x": {HALF}, "y": [{WHOLE}]}}}}', ("\ufffd", {"x": "\ufffd", "y": ["😀"]})),
    (f'{{"name": "add", "arguments": {{{HALF}: {{{HALF}: "x"}}}}}}', ("add", {"\ufffd": {"\ufffd": "x"}})),
    (f'{{"name": "add", "arguments": {HALF}}}', ("add", "\ufffd")),
    (f"<function=add><parameter=z>[{HALF}]</parameter></function>", ("add", {"z": ["\ufffd"]})),
])  # fmt: skip
def test_half_a_character_of_a_call_is_replaced(text, expected):
    """JSON's \\ud83d without its other half is in no UTF-8: the answer could not be sent."""
    reader = TagReader(reads_thoughts=False, functions=FUNCTIONS)
    [call] = reader.feed([], f"<tool_call>{text}</tool_call>", is_last=True)
    assert json.loads(json.dumps(call.arguments, ensure_ascii=False).encode()) == call.arguments
    assert (call.name, json.loads(call.arguments)) == expected


@pytest.mark.parametrize("text", [
    f"<tool_call><function=add>{'<parameter=x>' * 16000}</function></tool_call>",
    f"<tool_call><function=add>{'<parameter=' * 16000}</function></tool_call>",
    '<tool_call>{"x": "' + 16000 * "</tool_call>",
    '<tool_call>{"x": [' + 16000 * '"</tool_call>", ',
])  # fmt: skip
@pytest.mark.parametrize("size", [8, 1_000_000])
def test_damaged_calls_are_read_in_linear_time(text, size):
    began = time.thread_time()
    assert parse(text, size) == (text, "", [])
    assert time.thread_time() - began < 1
