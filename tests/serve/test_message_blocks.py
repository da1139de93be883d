"""Blocks of thoughts and calls in the text of an answer."""

import json

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
    ("<tool_call>add</tool_call> no", {}, ("<tool_call>add</tool_call> no", "", [])),
    ('<tool_call>{"name": "add"', {}, ('<tool_call>{"name": "add"', "", [])),
    (f"<think>x</think>{CALL}", {"reads_thoughts": False, "tools": []}, (f"<think>x</think>{CALL}", "", [])),
])  # fmt: skip
def test_blocks_are_fields_of_the_message(text, how, expected, size):
    assert parse(text, size, **how) == expected
