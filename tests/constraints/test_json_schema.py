"""JSON schemas by examples: values that are possible, values that are not, and what is refused."""

import json
import math

import jsonschema
import pytest
from byte_texts import is_possible, schema_term

from treeflash_jax.constraints.compiler.compile_process import compile_term
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import Term, contains, is_nothing

DEFS = {"a/b": {"type": "null"}, "c~d": {"const": 1}, "p%q": {"const": 2}, "here": {"$anchor": "spot", "enum": [3]}}
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["value"],
}

# Schemas with values that are possible, and values that are not.
FOLLOWED = [
    # any value, and keywords that speak of one type
    ({}, [None, True, 1, -2.5, "é", [], [1, ["a"]], {"a": {"b": [None]}}], []),
    (False, [], [None, {}]),
    ({"properties": {"answer": {}}}, [{"answer": {"city": "Paris"}}, 3], []),
    ({"minLength": 2}, ["ab", 1, [], None], ["a"]),
    ({"type": "integer", "enum": [1, "a"]}, [1], ["a"]),
    ({"enum": [1, "a"], "anyOf": [{"type": "string"}]}, ["a"], [1]),
    ({"type": ["integer", "null"]}, [1, None], [True, 1.5, "1"]),
    ({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1, "y"]}, {}]),
    ({"enum": [10**30, 0.1, True]}, [10**30, 0.1, True], [10**30 + 1, 1, 0]),
    # numbers
    ({"type": "integer", "minimum": -3, "maximum": 12}, [-3, 0, 9, 12], [-4, 13, 100, 3.5]),
    ({"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 101}, [10, 55, 100], [9, 101, 1]),
    ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 10}, [0.5, 1, 9.99], [0.49, 10, 10.0, -1]),
    ({"type": "number", "maximum": -1.25}, [-1.25, -2, -100.5], [-1.2, 0, 3]),
    ({"type": "integer", "multipleOf": 7}, [0, 7, -14, 700], [1, 8, -15]),
    ({"type": "number", "multipleOf": 0.01}, [1, 0.25, -3.1], [0.125, 1.001]),
    ({"type": "number"}, [1, 1.0, 2.50, 1e20, 1.5e-7], []),
    ({"type": "integer"}, [0, -5], [1.5]),
    # texts
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\n", "\U0001f600" * 3, '""'], ["a", "abcd"]),
    ({"type": "string", "pattern": "cat|dog"}, ["cat", "hotdogs"], ["ca"]),
    ({"type": "string", "pattern": "^a|b$"}, ["a", "axx", "xxb"], ["ba"]),
    ({"type": "string", "pattern": r"^\d+$"}, ["123"], ["٣", "a"]),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ["a", "aaa"], ["aaaa", ""]),
    ({"type": "string", "pattern": '^["\\\\\n]+$'}, ['"', "\\\n"], ["n"]),
    (
        {"type": "string", "format": "date"},
        ["2024-02-29", "1999-12-31"],
        ["2023-02-29", "2023-02-30", "1900-02-29", "0000-01-01"],
    ),
    (
        {"type": "string", "format": "date-time"},
        ["2024-02-29T23:59:59Z", "2024-04-30T00:00:00.5+02:00"],
        ["2024-04-31T00:00:00Z", "2024-04-30T00:00:00"],
    ),
    ({"type": "string", "format": "time"}, ["08:30:06Z"], ["24:00:00Z", "08:30:06"]),
    ({"type": "string", "format": "duration"}, ["P4DT12H30M5S", "P2W", "PT36H"], ["P", "P1D2H", "PT"]),
    ({"type": "string", "format": "email"}, ["joe.bloggs@example.com"], ["a@b", ".a@b.c", "a"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "2001:db8::a:1", "1:2:3:4:5:6:7:8"], ["12345::", "1::2::3"]),
    ({"type": "string", "format": "uuid"}, ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
    ({"type": "string", "format": "uri"}, ["http://foo.bar/?baz=qux#quux"], ["//foo.bar", "foo"]),
    ({"type": "string", "format": "hostname"}, ["www.example.com"], ["-a", "a_b"]),
    ({"type": "string", "format": "colour"}, ["anything"], [1]),
    # arrays
    ({"type": "array", "prefixItems": [{}], "items": False}, [[], [1]], [[1, 2]]),
    (
        {"prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2},
        [[1, "a"], [1, "a", None]],
        [[1], ["a", 1]],
    ),
    ({"items": {"type": "boolean"}, "minItems": 1, "maxItems": 2.0}, [[True], [True, False]], [[], [True] * 3, [1]]),
    ({"contains": {"type": "null"}, "items": {"type": ["null", "integer"]}}, [[1, None], [None]], [[], [1], ["a", None]]),
    ({"contains": {"const": 1}, "minContains": 2, "maxContains": 2}, [[1, 1], [1, 2, 1]], [[1], [1, 1, 1]]),
    ({"items": {"enum": [1, 2, 3]}, "uniqueItems": True}, [[], [3, 1, 2]], [[1, 1], [1, 2, 1]]),
    ({"items": {"enum": [1.5, "1.5", ["1.5"]]}, "uniqueItems": True}, [[1.5, "1.5", ["1.5"]]], [[1.5, 1.5]]),
    # objects
    (
        {"properties": {"a": {"type": "null"}}, "required": ["b"]},
        [{"b": 1}, {"a": None, "b": 1}],
        [{"a": None}, {"a": 1, "b": 1}],
    ),
    ({"properties": {'q"\\': {"const": 1}, "é\n": True}}, [{'q"\\': 1, "é\n": 2}, {}], [{'q"\\': 2}]),
    (
        {"properties": {"a": {"const": 1}}, "additionalProperties": {"type": "null"}},
        [{"a": 1, "b": None}],
        [{"b": 1}, {"a": None}],
    ),
    (
        {"type": "object", "patternProperties": {"^x-": {"type": "null"}}, "additionalProperties": False},
        [{"x-a": None}],
        [{"a": None}, {"x-a": 1}],
    ),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    (
        {"type": "object", "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}, {}], [{"a": 1}]),
    ({"dependentSchemas": {"a": {"maxProperties": 1}}}, [{"a": 1}, {"b": 1, "c": 1}], [{"a": 1, "b": 1}]),
    # combinations
    ({"allOf": [{"minimum": 3}, {"maximum": 5}], "type": "integer"}, [3, 5], [2, 6]),
    (
        {"allOf": [{"properties": {"a": {"minimum": 1}}}, {"properties": {"a": {"maximum": 1}}}]},
        [{"a": 1}],
        [{"a": 2}, {"a": 0}],
    ),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "a"], [3, 1.5]),
    ({"not": {"type": ["string", "integer"]}}, [None, 1.5], ["a", 1]),
    ({"not": {"required": ["a"]}}, [{"b": 1}], [{"a": 1}, 3]),
    ({"type": "integer", "not": {"enum": [1, 2]}}, [0, 3], [1, 2]),
    ({"if": {"type": "integer"}, "then": {"minimum": 0}, "else": {"type": "string"}}, [1, "a"], [-1, None]),
    ({"if": {"format": "date"}}, [1, "a"], []),
    (
        {"properties": {"a": True}, "unevaluatedProperties": False, "anyOf": [{"properties": {"b": True}}, True]},
        [{"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    ({"prefixItems": [True], "unevaluatedItems": {"type": "null"}}, [[1, None]], [[1, 1]]),
    # references
    ({"$ref": "#/$defs/a~1b", "$defs": DEFS}, [None], [1]),
    ({"$ref": "#/$defs/c~0d", "$defs": DEFS}, [1], [2]),
    ({"$ref": "#/$defs/p%25q", "$defs": DEFS}, [2], [1]),
    ({"$ref": "#spot", "$defs": DEFS}, [3], [1]),
    ({"$id": "http://x.org/root", "$ref": "other", "$defs": {"o": {"$id": "other", "type": "null"}}}, [None], [1]),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, [{"value": 1, "next": {"value": 2}}], [{"next": {"value": 1}}]),
]

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
ID = {"$id": "http://x.org/a/", "$ref": "b/"}
NESTED = {"o": {"$id": "b/", "properties": {"z": {"$ref": "c"}}}, "l": {"$id": "b/c", "type": "null"}}
NESTED["m"] = {"$id": "b/b/c", "type": "integer"}
FIRST = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
SECOND = FIRST | {"properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False}
EITHER = {"oneOf": [{"properties": {"a": True}}, {"properties": {"b": True}}]}
EACH = [{"if": {"properties": {"k": {"const": x}}, "required": ["k"]}, "then": {"required": [x]}} for x in "abcdefgh"]
KINDS = {"type": "object", "properties": {"k": {"enum": [*"abcdefgh"]}}, "required": ["k"], "allOf": EACH}
TWO_ORDERS = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
LONG = "0.12345678901234567890123456789012345"

# Regressions: texts of these schemas were not valid, or valid ones impossible.
FOLLOWED += [
    ({"oneOf": [FIRST, SECOND]}, [], [{"a": 1}, {"a": 1, "b": 2}]),
    ({"not": {"properties": {"a": True}, "additionalProperties": STRING}}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ({"if": EITHER, "unevaluatedProperties": False}, [], [{"a": 1}]),
    ({"if": {"if": {"prefixItems": [True]}, "then": False}, "unevaluatedItems": False}, [[]], [[1]]),
    (ID | {"$defs": NESTED}, [{"z": None}], [{"z": 1}]),
    ({"items": {"enum": TWO_ORDERS}, "uniqueItems": True}, [[{"b": 2, "a": 1}]], [TWO_ORDERS]),
    (KINDS, [{"k": "b", "b": 1}], [{"k": "b", "a": 1}]),
    ({"enum": [[[[[[1]]]]]], "minItems": 1}, [[[[[[1]]]]]], []),
    ({"dependentRequired": {x: ["z"] for x in "abcdefghi"}}, [{"a": 1, "z": 1}], [{"a": 1}]),
]


@pytest.mark.parametrize("case", FOLLOWED, ids=lambda case: json.dumps(case[0])[:60])
def test_what_a_schema_allows(case):
    schema, possible, impossible = case
    term = schema_term(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    assert all(map(validator.is_valid, possible))
    for value in possible:
        assert is_possible(term, value), value
    for value in impossible:
        assert not is_possible(term, value), value


REFUSED = [
    ({"type": "array", "uniqueItems": True}, ["uniqueItems", "#"]),
    ({"properties": {"a": {"pattern": "(?=x)"}}}, ["look-around", "position 0", "#/properties/a/pattern"]),
    ({"anyOf": [{"colour": 3}]}, ["keyword 'colour'", "#/anyOf/0"]),
    ({"type": "lizard"}, ["lizard", "#/type"]),
    ({"type": "array", "items": [3]}, ["items", "#"]),
    ({"$ref": "#"}, ["contains itself"]),
    ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, ["contains itself"]),
    ({"$ref": "#/$defs/missing"}, ["'#/$defs/missing' names nothing"]),
    ({"$ref": "http://example.com/x"}, ["names nothing"]),
    ({"format": "regex"}, ["format 'regex'", "#/format"]),
    ({"multipleOf": 12345}, ["multipleOf 12345"]),
    ({"type": "object", "minProperties": 3}, ["minProperties 3"]),
    ({"not": {"format": "date"}}, ["format 'date'", "#/not/format"]),
    ({"minimum": "3"}, ["minimum '3'"]),
    ({"const": math.nan}, ["NaN is no JSON"]),
    ({"$id": 3}, ["$id 3 is no text"]),
    ({"properties": {"a/b": {"$id": 3}}}, ["$id 3 is no text", "#/properties/a~1b"]),
    ({"minimum": 10**450}, ["too many digits"]),
    ({"enum": "ab"}, ["enum 'ab'"]),
    ({"format": 3}, ["format 3"]),
    ({"dependentSchemas": {"a": {"foo": 1}}}, ["keyword 'foo'", "#/dependentSchemas/a"]),
    ({"not": {"dependencies": {"a": ["b"]}}}, ["dependencies"]),
    ({"contains": {}, "minContains": 5000}, ["more than 1,000 items"]),
    ([], ["no JSON schema"]),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: json.dumps(case[0])[:60])
def test_what_is_refused_says_what_and_where(case):
    schema, words = case
    with pytest.raises(Refused) as caught:
        schema_term(schema)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [False, {"enum": []}, {"type": "array", "minItems": 2, "maxItems": 1}, {"allOf": [{"const": 1}, {"const": 2}]}],
)
def test_schemas_without_values(schema):
    assert is_nothing(schema_term(schema))


def test_numbers_are_exact():
    def compile(text: str) -> Term:
        return compile_term({"kind": "schema", "value": text, "depth": 1})

    assert not contains(compile(f'{{"type": "number", "not": {{"const": {LONG}}}}}'), LONG.encode())
    term = compile('{"type": "number", "multipleOf": 0.50, "maximum": 1.50}')
    assert contains(term, b"1.5") and contains(term, b"1.500") and contains(term, b"1") and not contains(term, b"2")
    assert contains(compile('{"allOf": [{"const": 1.10}, {"const": 1.1}]}'), b"1.1")


def test_depth_of_values_that_a_schema_does_not_describe():
    for depth in 1, 3:
        for schema in {}, {"type": "array"}:
            term = schema_term(schema, depth)
            nested = [json.loads("[" * levels + "]" * levels) for levels in range(1, 6)]
            assert [is_possible(term, value) for value in nested] == [levels <= depth for levels in range(1, 6)]
    # A schema that describes every level has no depth; one that contains itself has.
    deep = {"type": "integer"}
    value = 1
    for _ in range(5):
        deep, value = {"type": "object", "properties": {"a": deep}, "required": ["a"]}, {"a": value}
    assert is_possible(schema_term(deep, 1), value)
    lists = {"type": "array", "items": {"$ref": "#"}}
    assert is_possible(schema_term(lists, 3), [[[]]]) and not is_possible(schema_term(lists, 3), [[[[[]]]]])
