"""Channels of harmony, read token by token."""

import json

import harmony_tokenizer
import pytest

from treeflash_jax.formats.answer_text import AnswerText
from treeflash_jax.formats.messages import find_format, message_format
from treeflash_jax.formats.messages.harmony import Harmony
from treeflash_jax.formats.messages.message_format import Content, Function, FunctionCall, Thought

TOKENIZER = harmony_tokenizer.make()
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>Hm, <final>é.<|end|>"
FINAL = "<|channel|>final<|message|>Yes"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>'
BEFORE = " to=functions.add<|channel|>commentary json<|message|>{}<|call|>"
PREAMBLE = "<|channel|>commentary<|message|>I add.<|end|>"
NEXT = "<|start|>assistant"
BROWSER = "<|channel|>analysis to=browser.search code<|message|>cats<|end|>"


ADD = Function("add", {})


def read(text: str, size: int, prompt: str = PROMPT, stop: tuple[str, ...] = (), functions=(ADD,)) -> list:
    """Returns the parts of an answer that comes in pieces of `size` tokens, texts of one kind joined."""
    form = find_format(TOKENIZER)
    assert isinstance(form, Harmony)
    prompt_ids = TOKENIZER.encode(prompt)
    answer = AnswerText(TOKENIZER, prompt_ids, stop)
    answer.extend(TOKENIZER.encode(text))
    reader = form.reader(prompt_ids, functions, stop, has_thoughts=True)
    pieces = [answer.ids[i : i + size] for i in range(0, len(answer.ids), size)] or [[]]
    parts = []
    for number, piece in enumerate(pieces):
        for part in reader.feed(piece, "", is_last=number == len(pieces) - 1):
            if parts and type(parts[-1]) is type(part) and not isinstance(part, FunctionCall):
                part = type(part)(parts.pop().text + part.text)
            parts.append(part)
    return parts


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("text, expected", [
    (ANALYSIS + NEXT + FINAL + "<|return|>", [Thought("Hm, <final>é."), Content("Yes")]),
    (FINAL, [Content("Yes")]),
    (ANALYSIS + NEXT + CALL, [Thought("Hm, <final>é."), FunctionCall("add", '{"x": 1}')]),
    (BEFORE, [FunctionCall("add", "{}")]),
    (ANALYSIS + NEXT + PREAMBLE + NEXT + CALL,
     [Thought("Hm, <final>é."), Content("I add."), FunctionCall("add", '{"x": 1}')]),
    (BROWSER + NEXT + FINAL, [Thought("cats"), Content("Yes")]),
    (CALL[:-len('1}<|call|>')], [Content('{"x": ')]),
    (CALL.replace('{"x": 1}', '{"x'), [FunctionCall("add", json.dumps('{"x'))]),
    (CALL.replace('1}', "NaN}"), [FunctionCall("add", json.dumps('{"x": NaN}'))]),
    (CALL.replace('1}', "1e999}"), [FunctionCall("add", json.dumps('{"x": 1e999}'))]),
    (CALL.replace('{"x": 1}', ""), [FunctionCall("add", "{}")]),
    (ANALYSIS + NEXT, [Thought("Hm, <final>é.")]),
    ("<|channel|>analysis<|message|>Hm", [Thought("Hm")]),
    ("<|channel|>final", []), ("", []),
])  # fmt: skip
def test_channels_make_parts(text, expected, size):
    assert read(text, size) == expected


def test_arguments_that_are_nested_too_deeply_stay_text(monkeypatch):
    """Python's versions differ in how deeply their parser and their writer of JSON go."""
    value = {}
    for _ in range(100_000):
        value = {"x": value}
    monkeypatch.setattr(message_format, "parse_json", lambda text: value)
    assert read(CALL, 1000) == [FunctionCall("add", json.dumps('{"x": 1}'))]


@pytest.mark.parametrize("size", [1, 1000])
def test_without_functions_calls_stay_text(size):
    assert read(ANALYSIS + NEXT + CALL, size, functions=()) == [Thought("Hm, <final>é."), Content('{"x": 1}')]


def test_calls_and_returns_end_answers():
    assert sorted(find_format(TOKENIZER).stop_ids) == sorted(TOKENIZER.encode("<|call|><|return|>"))


@pytest.mark.parametrize("size", [1, 1000])
def test_a_message_that_the_prompt_begins_goes_on(size):
    assert read("er.<|end|>", size, PROMPT + FINAL) == [Content("er.")]
    assert read("er.<|end|>", size, PROMPT + "<|channel|>analysis<|message|>Oth") == [Thought("er.")]
    assert read("to=x <final>", size, "A text without messages ") == [Content("to=x <final>")]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_stop_strings_end_content(size):
    assert read("<|channel|>final<|message|>Yes, cats", size, stop=("cat",)) == [Content("Yes, ")]
