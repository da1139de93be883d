"""Structural tags: the texts of every format, tokens of their own, and calls that are read back."""

import copy
import json
import random

import jsonschema
import numpy as np
import pytest
from byte_texts import random_text, schema_term
from refusals import refused
from toy_tokenizers import byte_fallback, byte_level

from treeflash_jax.constraints.compilation import Constraint, compile_constraint
from treeflash_jax.constraints.compile_bytes import compile_bytes
from treeflash_jax.constraints.compiler.compile_process import compile_term
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import Term, contains
from treeflash_jax.constraints.tables import AutomatonTable
from treeflash_jax.decoding.automaton import NOWHERE
from treeflash_jax.formats.messages.message_format import Function
from treeflash_jax.formats.messages.tag_reader import TagReader
from treeflash_jax.formats.tokenizer import Tokenizer

ANY, INTEGER = {"type": "any_text"}, {"type": "json_schema", "json_schema": {"type": "integer"}}
LETTER = {"type": "regex", "pattern": "[ab]"}


def tag_term(tag: dict, tokens: tuple[str, ...] = ()) -> Term:
    return compile_term({"kind": "structural_tag", "value": json.dumps(tag), "depth": 3, "tokens": tokens})


def const(value: str) -> dict:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict, end: str) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def several(kind: str, **more) -> dict:
    return {"type": kind, "tags": [tag("<n>", INTEGER, ";"), {"begin": "<t>", "content": ANY, "end": ";"}], **more}


def triggered(**more) -> dict:
    return several("triggered_tags", triggers=["<n", "<t>"], **more)


def separated(**more) -> dict:
    return several("tags_with_separator", separator=", ", **more)


TEXTS = [  # a format, its texts, and others
    (const("yé"), ["yé"], ["", "y", "yéé"]),
    ({"type": "structural_tag", "format": const("y")}, ["y"], [""]),
    (INTEGER, ["7", "-12"], ["1.5", "x"]),
    (LETTER, ["a"], ["c", "ab"]),
    (ANY, ["", "a\n<é"], []),
    ({"type": "any_text", "excludes": ["</a>", "aab"]}, ["", "aaa</a", "<</a<"], ["</a>", "x aaaab"]),
    ({"type": "sequence", "elements": [LETTER, INTEGER]}, ["a5"], ["a", "5", "a5a"]),
    ({"type": "sequence", "elements": []}, [""], ["a"]),
    ({"type": "or", "elements": [LETTER, INTEGER]}, ["a", "5"], ["", "a5"]),
    ({"type": "optional", "content": LETTER}, ["", "a"], ["ab"]),
    (tag("<a>", INTEGER, "</a>"), ["<a>5</a>"], ["<a></a>", "5"]),
    (tag("<a>", ANY, "</a>"), ["<a>x</</a>", "<a></a>"], ["<a>x</a>y</a>", "<a>"]),
    (tag("(", {"type": "sequence", "elements": [tag("[", ANY, "]"), ANY]}, ")"), ["([x]y)"], ["([)])", "([x])y)"]),
    (tag("<a>", ANY, ""), ["<a>x"], ["x"]),
    (triggered(), ["", "a", "<n>5;", "a<n>5;b<t>c;<n>6;d", "5;"], ["<n", "a<n>x;", "<n>5", "a<t>"]),
    (triggered(at_least_one=True), ["<n>5;", "<n>5;b<t>c;d"], ["", "a", "a<n>5;"]),
    (triggered(stop_after_first=True), ["", "a", "a<n>5;"], ["<n>5;b", "a<n>5;<n>6;"]),
    (triggered(at_least_one=True, stop_after_first=True), ["<n>5;"], ["", "a<n>5;", "<n>5;b"]),
    (separated(), ["", "<n>5;", "<n>5;, <t>x;, <n>6;"], ["a", "<n>5;<n>6;", "<n>5;, "]),
    (separated(at_least_one=True), ["<n>5;", "<n>5;, <n>6;"], [""]),
    (separated(stop_after_first=True), ["", "<n>5;"], ["<n>5;, <n>6;"]),
    (separated(at_least_one=True, stop_after_first=True), ["<t>;"], ["", "<n>5;, <n>6;"]),
]


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: f"{case[0]['type']}")
def test_texts_of_a_format(case):
    structure, texts, others = case
    term = tag_term(structure)
    assert [text for text in texts if not contains(term, text.encode())] == []
    assert [text for text in others if contains(term, text.encode())] == []


def parameters(**properties: dict) -> Term:
    """The elements of these parameters, of which all but x are required."""
    required = [name for name in properties if name != "x"]
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "$defs": {"Side": {"enum": ["left", "right"]}},
    }
    return tag_term({"type": "qwen_xml_parameter", "json_schema": schema})


TEXT = {"type": "string"}
VALUES = [  # schema of a parameter, values as they are written, and others
    (
        TEXT,
        ["", 'a "b"\\n\n\té\x01', "\nx\n", "</param></p> < <p"],
        ["</parameter", "a</parameter>", "<parameter=y>", "x</tool_call>"],
    ),
    ({}, ["5", "null"], ["<parameter"]),
    ({"type": ["string", "null"]}, ["null", "x"], []),
    ({"anyOf": [TEXT | {"maxLength": 2}, {"type": "null"}]}, ["a\n"], ["abc"]),
    ({"enum": ["a\nb", '"', None, "</parameter>"]}, ["a\nb", '"'], ['"a\\nb"', "null", "</parameter>"]),
    ({"$ref": "#/$defs/Side"}, ["left"], ['"left"', "up"]),
    (TEXT | {"pattern": "^a+$", "minLength": 2}, ["aa"], ["a", "b"]),
    (TEXT | {"format": "date"}, ["2026-11-29"], ["today"]),
    ({"type": "integer"}, ["5"], ['"5"', "five"]),
    ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, ["true", "null"], ["True", ""]),
    ({"type": "array", "items": TEXT}, ['["a\\n", "b"]', "[]"], ["a", '["<parameter"]', '["</parameter>"]']),
]


@pytest.mark.parametrize("case", VALUES, ids=lambda case: json.dumps(case[0]))
def test_values_of_parameters(case):
    schema, values, others = case
    term = parameters(n=schema)
    texts = {value: f"<parameter=n>\n{value}\n</parameter>\n".encode() for value in (*values, *others)}
    assert [value for value, text in texts.items() if contains(term, text) != (value in values)] == []


def test_parameters_stand_in_order():
    term = parameters(a=INTEGER["json_schema"], x=TEXT, b={"type": "null"})
    first, optional, last = (
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in zip("axb", ["5", "y", "null"], strict=True)
    )
    assert contains(term, (first + optional + last).encode()) and contains(term, (first + last).encode())
    for text in first + optional, optional + last, first + last + optional, first + first + last, "":
        assert not contains(term, text.encode())
    assert contains(parameters(), b"")


ARGUMENTS = {
    "type": "object",
    "properties": {
        "path": TEXT, "mode": {"enum": ["read", "write"]}, "count": {"type": "integer"}, "share": {"type": "number"},
        "tags": {"type": "array", "items": TEXT}, "more": {"type": "object"}, "note": TEXT,
        "deep": {"anyOf": [{"type": "array", "items": {"type": "object", "properties": {"s": TEXT}}}, {"type": "null"}]},
    },
    "required": ["path", "count", "more"],
    "additionalProperties": False,
}  # fmt: skip
FORMS = {
    "json": tag(
        '<tool_call>\n{"name": "edit", "arguments": ', {"type": "json_schema", "json_schema": ARGUMENTS}, "}\n</tool_call>"
    ),
    "elements": tag(
        "<tool_call>\n<function=edit>\n",
        {"type": "json_schema", "style": "qwen_xml", "json_schema": ARGUMENTS},
        "</function>\n</tool_call>",
    ),
}


def write_call(form: str, values: dict[str, str]) -> str:
    """Returns a call, as templates write it, with these JSON texts as arguments."""
    if form == "json":
        arguments = ", ".join(f'"{name}": {value}' for name, value in values.items())
    else:
        values = {name: json.loads(value) if value[0] == '"' else value for name, value in values.items()}
        arguments = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    begin, end = FORMS[form]["begin"], FORMS[form]["end"]
    return f"{begin}{{{arguments}}}{end}" if form == "json" else begin + arguments + end


def read_call(text: str, schema: dict = ARGUMENTS) -> dict:
    reader = TagReader(reads_thoughts=True, functions=[Function("edit", schema)])
    [call] = reader.feed([], text, is_last=True)
    assert call.name == "edit"
    arguments = json.loads(call.arguments)
    jsonschema.validate(arguments, schema)
    return arguments


NUMBERED = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
DEFS = {"Box": {"type": "object", **NUMBERED}, "Level": {"enum": [1, 2]}, "Name": TEXT, "a/b c": {"$ref": "#/$defs/Level"}}


@pytest.mark.parametrize("value", [
    {"$ref": "#/$defs/Box"}, {"$ref": "#/$defs/Level"}, {"$ref": "#/$defs/a~1b%20c"}, {"$ref": "#/$defs/Name"},
    {"$ref": "#/$defs/Name", "enum": ["5", 5]}, {"const": 5}, {"const": "5"}, {"const": None}, {"enum": [1, 2.5, None]},
    {"enum": [1, "1"]}, {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 2}]}, {"type": ["integer", "boolean"]},
    {"type": ["string", "null"], "anyOf": [{"maxLength": 3}, {"type": "null"}]},
    {"oneOf": [{"type": "integer"}, {"type": "null"}]}, {"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/Name"}]},
    {"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, {"allOf": [{}, {"$ref": "#/$defs/Level"}]},
    {"anyOf": [False, {"type": "array", "items": TEXT}]},
], ids=json.dumps)  # fmt: skip
def test_values_are_read_as_the_constraint_writes_them(value):
    schema = {"type": "object", "properties": {"v": value}, "required": ["v"], "$defs": DEFS}
    rng = random.Random(0)
    term = tag_term(FORMS["elements"] | {"content": {"type": "qwen_xml_parameter", "json_schema": schema}})
    for _ in range(10):
        read_call(random_text(term, rng, rng.choice([60, 90])), schema)


@pytest.mark.parametrize("form", FORMS)
def test_forced_calls_are_read_back(form):
    term, rng = tag_term(FORMS[form]), random.Random(0)
    terms = {name: schema_term(schema, 2) for name, schema in ARGUMENTS["properties"].items()}
    for _ in range(40):
        read_call(random_text(term, rng, rng.choice([60, 400])))
        chosen = [name for name in terms if name in ARGUMENTS["required"] or rng.random() < 0.6]
        values = {name: random_text(terms[name], rng, 30) for name in chosen}
        text = write_call(form, values)
        assert contains(term, text.encode()), text
        assert read_call(text) == {name: json.loads(value) for name, value in values.items()}


def test_no_schema_and_no_pattern_has_the_byte_of_markers():
    closed = {"not": {"enum": [{"a": 1}, "\u00ff"]}, "patternProperties": {"^[^a]$": True}, "additionalProperties": TEXT}
    cases = (
        ("schema", "{}"),
        ("schema", json.dumps(closed)),
        ("pattern", r"[^a]*\xff\P{L}"),
        ("choices", ["\u00ff\U0010ffff"]),
    )
    for kind, value in cases:
        automaton = compile_bytes(kind, value, 2)
        assert (automaton.next_qk[:, automaton.class_y[0xFF]] == NOWHERE).all()


HALF, CALL, END, STOP = "<tool", "<tool_call>", "</tool_call>", "<stop>"


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request) -> Tokenizer:
    """A tokenizer with tokens of its own, two of which begin alike."""
    tokenizer = Tokenizer(copy.deepcopy(request.param().inner))
    tokenizer.inner.add_tokens([HALF, CALL, END, STOP])
    return tokenizer


def compiled(tokenizer: Tokenizer, structure: dict, *stops: str) -> AutomatonTable:
    constraint = Constraint("structural_tag", json.dumps(structure))
    return compile_constraint(constraint, tokenizer, ids_of(tokenizer, *stops), len(tokenizer.inner))


def can_answer(table: AutomatonTable, ids: list[int]) -> bool:
    state = 0
    for token in ids:
        state = table.next_qc[state, table.class_v[token]]
        if state < 0:
            return False
    return True


def ids_of(tokenizer: Tokenizer, *pieces: str | bytes) -> list[int]:
    """Returns added tokens for texts that are one, otherwise and for bytes a token for each byte."""
    by_byte = {text: id for id, text in tokenizer.token_bytes.items() if len(text) == 1}
    added = {token.content: id for id, token in tokenizer.inner.added_tokens_decoder.items()}
    ids = []
    for piece in pieces:
        spelled = piece.encode() if isinstance(piece, str) else piece
        ids += [added[piece]] if piece in added else [by_byte[bytes([byte])] for byte in spelled]
    return ids


def test_added_tokens_are_tokens_where_a_constraint_names_them(tokenizer):
    free = {"type": "any_text", "excludes": [CALL]}
    table = compiled(tokenizer, {"type": "sequence", "elements": [free, tag(CALL + "\n", INTEGER, "\n" + END)]}, STOP)

    def can(*pieces: str | bytes) -> bool:
        return can_answer(table, ids_of(tokenizer, *pieces, STOP))

    assert can("Hm. ", CALL, "\n5\n", END) and can(b"<tool", "_cal", CALL, "\n5\n", END)
    spelled = [part.encode() for part in (CALL, END)]
    assert not can(spelled[0], "\n5\n", END) and not can(CALL, "\n5\n", spelled[1])
    assert not can(spelled[0], CALL, "\n5\n", END), "free text spells what it excludes"
    assert not can(HALF, CALL, "\n5\n", END) and not can(END, CALL, "\n5\n", END), "free text has added tokens"
    # A byte of no text, behind which the first marker's number would follow, is not the beginning of a marker.
    assert not can(b"\xff\x00\n5\n", END) and not can(b"\xff\x01\n5\n", END) and not can(b"\xff", CALL, "\n5\n", END)
    allowed = np.flatnonzero(table.next_qc[:, table.class_v].max(axis=0) >= 0)
    texts = tokenizer.token_bytes
    assert not any(b"\xff" in texts.get(token, b"") for token in allowed)


def test_tokens_that_the_model_cannot_embed_are_never_allowed(tokenizer):
    """A tokenizer may have more tokens than the model: here, those that were added."""
    size, stops = len(tokenizer.inner) - 4, ids_of(tokenizer, "z")
    table = compile_constraint(Constraint("pattern", "<tool[0-9]"), tokenizer, stops, size)
    assert table.class_v.size == size and can_answer(table, ids_of(tokenizer, b"<tool5"))
    constraint = Constraint("structural_tag", json.dumps(tag(CALL, INTEGER, END)))
    refused(lambda: compile_constraint(constraint, tokenizer, stops, size), "has the token '<tool", "no embedding")


def test_a_token_that_ends_answers_may_end_a_constraint(tokenizer):
    table = compiled(tokenizer, {"type": "or", "elements": [tag(CALL, INTEGER, END), LETTER]}, END, STOP)

    def can(*pieces: str) -> bool:
        return can_answer(table, ids_of(tokenizer, *pieces))

    assert can(CALL, "5", END) and not can(CALL, "5", STOP) and not can(CALL, END)
    for stop in END, STOP:
        assert can("a", stop) and not can(stop)
    longer = {"type": "sequence", "elements": [tag(CALL, INTEGER, END), LETTER]}
    refused(lambda: compiled(tokenizer, longer, END, STOP), "goes on behind '</tool_call>', a token that ends an answer")


@pytest.mark.parametrize(
    "structure, what",
    [
        ([], "type None is unknown, expected one of const_string"),
        ({"type": "structural_tag"}, "format.type None is unknown"),
        ({"type": "sequence", "elements": [ANY, {"type": "grammar"}]}, "elements.1.type 'grammar' is unknown"),
        ({"type": "or", "elements": [tag("", const("a") | {"more": 1}, "")]}, "elements.0.content.more cannot be followed"),
        ({"type": "tag", "begin": "a", "content": ANY}, "end is missing in 'tag'"),
        (const(5), "value 5 is of another type than 'const_string' has"),
        ({"type": "any_text", "excludes": ["a", 5]}, "excludes ['a', 5] is of another type"),
        ({"type": "optional", "content": {"type": "regex", "pattern": "("}}, "content.pattern: pattern '('"),
        ({"type": "json_schema", "json_schema": {"type": "lizard"}}, "json_schema: type 'lizard' is unknown, at #/type"),
        (several("triggered_tags", triggers=["<n"]), "tags.1.begin '<t>' begins with none of the triggers"),
        ({"type": "json_schema", "json_schema": True, "style": "yaml"}, "style 'yaml' is unknown"),
        ({"type": "qwen_xml_parameter", "json_schema": {"anyOf": []}}, "json_schema: keyword 'anyOf' cannot be followed"),
        ({"type": "qwen_xml_parameter", "json_schema": {"required": ["a"]}}, "'a' is none of the properties"),
        ({"type": "qwen_xml_parameter", "json_schema": {"required": [{}]}}, "required {} is none of the properties"),
        ({"type": "qwen_xml_parameter", "json_schema": {"properties": {"a>": {}}}}, "no element has the name 'a>'"),
        ({"type": "qwen_xml_parameter", "json_schema": {"properties": {"<a": {}}}}, "no element has the name '<a'"),
        ({"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": {"type": "lizard"}}}}, "#/properties/a/type"),
        ({"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": {"not": TEXT}}}}, "string', at #/properties/a"),
        ({"type": "tags_with_separator", "tags": [LETTER], "separator": ""}, "tags.0.type 'regex' is not 'tag'"),
    ],
)
def test_what_is_refused_says_where(structure, what):
    with pytest.raises(Refused) as caught:
        tag_term(structure)
    assert what in str(caught.value)
