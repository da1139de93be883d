"""Gemma's channel of thoughts and its calls, read token by token, and the tags that constrain them."""

import json

import gemma_tokenizer
import pytest

from treeflash_jax.constraints.compilation import Constraint, compile_constraint
from treeflash_jax.formats.messages import find_format
from treeflash_jax.formats.messages.gemma import Gemma
from treeflash_jax.formats.messages.message_format import Content, Demands, Function, FunctionCall, Thought

TOKENIZER = gemma_tokenizer.make()
PROMPT = "<|turn>user\nHi<turn|>\n<|turn>model\n"
CLOSED = PROMPT + "<|channel>thought\n<channel|>"
OPEN = PROMPT + "<|channel>thought\n"
THOUGHT = "<|channel>thought\nHm, <final>é.<channel|>"
CALL = '<|tool_call>call:add{x:1,name:<|"|>a "b", {c:1}<|"|>,deep:{y:[true,null,<|"|>z<|"|>]}}<tool_call|>'
ARGUMENTS = {"x": 1, "name": 'a "b", {c:1}', "deep": {"y": [True, None, "z"]}}
JSON = '<|tool_call>call:add{"x": 1, "a": "b: {c:1}"}<tool_call|>'
FUNCTIONS = [Function("add", {})]


def read(text: str, size: int, prompt: str = PROMPT, stop: tuple[str, ...] = (), functions=FUNCTIONS) -> list:
    """Returns the parts of an answer that comes in pieces of `size` tokens, texts of one kind joined."""
    form = find_format(TOKENIZER)
    assert isinstance(form, Gemma)
    ids = TOKENIZER.encode(text)
    reader = form.reader(TOKENIZER.encode(prompt), functions, stop, has_thoughts=True)
    parts = []
    for first in range(0, max(1, len(ids)), size):
        for part in reader.feed(ids[first : first + size], "", is_last=first + size >= len(ids)):
            if parts and type(parts[-1]) is type(part) and not isinstance(part, FunctionCall):
                part = type(part)(parts.pop().text + part.text)
            parts.append(part)
    return parts


def call(arguments: dict, name: str = "add") -> FunctionCall:
    return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("text, expected", [
    (THOUGHT + "Yes<turn|>", [Thought("Hm, <final>é."), Content("Yes")]),
    ("Yes", [Content("Yes")]), ("", []), ("<|channel>thought", []), ("<|channel>thought\n<channel|>Yes", [Content("Yes")]),
    ("<|channel>thought\nHm", [Thought("Hm")]),
    (THOUGHT + CALL + "<|tool_response>", [Thought("Hm, <final>é."), call(ARGUMENTS)]),
    ("I add." + JSON + CALL, [Content("I add."), call({"x": 1, "a": "b: {c:1}"}), call(ARGUMENTS)]),
    ("<|tool_call>call:add{}<tool_call|>", [call({})]),
    ("<|tool_call>call:my-f.x{a:-1.5e3}<tool_call|>", [call({"a": -1500.0}, "my-f.x")]),
    ("<|tool_call>call:add{x:<tool_call|>", [Content("<|tool_call>call:add{x:<tool_call|>")]),
    ("<|tool_call>call:add{x:1}", [Content("<|tool_call>call:add{x:1}")]),
    ("<|tool_call>add<tool_call|>!", [Content("<|tool_call>add<tool_call|>!")]),
])  # fmt: skip
def test_channels_and_calls_make_parts(text, expected, size):
    assert read(text, size) == expected


@pytest.mark.parametrize("size", [1, 1000])
def test_what_the_prompt_begins_goes_on(size):
    assert read("er.<turn|>", size, CLOSED + "Oth") == [Content("er.")]
    assert read("er.\n<channel|>Yes", size, OPEN + "Oth") == [Thought("er.\n"), Content("Yes")]
    assert read("Yes", size, PROMPT + CALL + "<|tool_response>response:add{}<tool_response|>") == [Content("Yes")]
    assert read("a {b}", size, "A text without turns ") == [Content("a {b}")]
    assert read(CALL[30:], size, PROMPT + CALL[:30]) == [call(ARGUMENTS)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_stop_strings_end_content_and_calls_without_functions_are_text(size):
    assert read("Yes, cats", size, stop=("cat",)) == [Content("Yes, ")]
    assert read(CALL, size, functions=[]) == [Content(CALL)]


def test_turns_and_responses_end_answers():
    assert sorted(find_format(TOKENIZER).stop_ids) == sorted(TOKENIZER.encode("<turn|><|tool_response>"))


SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 23]}}, "required": ["x"], "additionalProperties": False}
STRICT = '<|tool_call>call:add{"x": 23}<tool_call|>'


def accepts(table, ids: list[int]) -> bool:
    state = 0
    for token in ids:
        state = table.next_qc[state, table.class_v[token]]
        if state < 0:
            return False
    return True


@pytest.mark.parametrize("prompt, how, allowed, others", [
    (PROMPT, {}, ["Yes", THOUGHT + "Yes", STRICT, "I add." + STRICT], [STRICT.replace("23", "2")]),
    (CLOSED, {"is_forced": True}, [STRICT, STRICT * 2], ["Yes", THOUGHT + STRICT]),
    (OPEN, {"is_forced": True}, ["Hm<channel|>" + STRICT], [STRICT]),
    (CLOSED, {"is_forced": True, "is_parallel": False}, [STRICT], [STRICT * 2]),
    (CLOSED, {"functions": FUNCTIONS, "is_parallel": False}, [CALL, JSON, "I add." + CALL], [CALL * 2]),
    (CLOSED, {"content": {"type": "const_string", "value": "ok"}}, ["ok", STRICT], ["Yes"]),
])  # fmt: skip
def test_tags_allow_answers_of_their_form_alone(prompt, how, allowed, others):
    functions = how.get("functions", [Function("add", SCHEMA, True)])
    tag = find_format(TOKENIZER).answer_tag(TOKENIZER.encode(prompt), Demands(**how | {"functions": functions}))
    ends = TOKENIZER.encode("<turn|>")
    table = compile_constraint(Constraint("structural_tag", json.dumps(tag)), TOKENIZER, ends, len(TOKENIZER.inner), 8)
    for text in allowed:
        assert accepts(table, TOKENIZER.encode(text + "<turn|>")), text
    for text in others:
        assert not accepts(table, TOKENIZER.encode(text + "<turn|>")), text
