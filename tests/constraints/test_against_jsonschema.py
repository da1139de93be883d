"""Random schemas, the public test suite and pydantic's: jsonschema and pydantic accept every text of the automaton."""

import datetime
import decimal
import enum
import ipaddress
import itertools
import json
import os
import random
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import hypothesis
import jsonschema
import pydantic
import pytest
from byte_texts import assert_texts_are_valid, is_possible, random_text, schema_term
from hypothesis import strategies as st
from typing_extensions import TypedDict

from treeflash_jax.constraints.compiler.json_texts import parse
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import is_nothing

# A clone of https://github.com/json-schema-org/JSON-Schema-Test-Suite, under the name that jsonschema's own tests read. The
# numbers below are those of its commit 44401e0c.
SUITE = Path(os.environ.get("JSON_SCHEMA_TEST_SUITE", "JSON-Schema-Test-Suite")) / "tests/draft2020-12"


def permutations(value):
    """Yields values whose keys stand in any order, up to a number of them."""
    if isinstance(value, dict):
        for items in itertools.islice(itertools.permutations(value.items()), 24):
            for values in itertools.islice(itertools.product(*(permutations(inner) for _, inner in items)), 12):
                yield dict(zip([key for key, _ in items], values, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.islice(itertools.product(*map(permutations, value)), 24))
    else:
        yield value


@pytest.mark.skipif(not SUITE.exists(), reason="JSON_SCHEMA_TEST_SUITE names no clone of the public JSON Schema test suite")
def test_public_suite():
    """No schema allows an invalid value. Of 461, 43 are refused, and 9 allow none of their valid values."""
    groups = [group for path in sorted(SUITE.rglob("*.json")) for group in json.loads(path.read_text())]
    refused, without = [], []
    for group in groups:
        try:
            term = schema_term(group["schema"], 6)
        except Refused:
            refused.append(group["description"])
            continue
        found = set()
        for case in group["tests"]:
            if any(is_possible(term, value) for value in permutations(case["data"])):
                found.add(case["valid"])
        assert False not in found, group
        if True not in found and any(case["valid"] for case in group["tests"]):
            without.append(group["description"])
    assert len(groups) >= 461 and len(refused) <= 43 and len(without) <= 9


SCALARS = None, True, 0, 3, -1, 7, 2.5, "", "a", "ab", 'é"', "\x00"
INNER = 1, "a", None, [], {"a": 1}
SMALL_VALUES = [
    *SCALARS,
    *(list(items) for size in range(3) for items in itertools.product(INNER, repeat=size)),
    *({"a": a, "b": b} for a in INNER for b in INNER),
    *({key: value} for key in ("a", "b", "c") for value in INNER),
    {},
]
SIZES, NAMES = st.integers(0, 3), st.sampled_from(["a", "b"])
LEAVES = {
    "type": st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"]),
    "enum": st.lists(st.sampled_from([None, True, 0, 1, 2.5, "a", 'é"', [1], {"a": 1}]), min_size=1, max_size=3),
    "const": st.sampled_from([False, 7, -1.25, "ab", ["a"], {}]),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "maxProperties"), SIZES),
    **dict.fromkeys(("minimum", "exclusiveMaximum"), st.sampled_from([-12, 0, 0.5, 3, 99.75])),
    "multipleOf": st.sampled_from([1, 3, 10]),
    # These mean the same in ECMA-262 and Python, but for the ends of lines.
    "pattern": st.sampled_from(["a", "^a", "b$", "^[a-c]+$", "a|b$"]),
    "required": st.lists(NAMES, max_size=2, unique=True),
}


def schemas(levels: int) -> st.SearchStrategy[dict]:
    """Returns a strategy of schemas of up to three keywords."""
    keywords = dict(LEAVES)
    if levels:
        inner = st.booleans() | schemas(levels - 1)
        several, named = st.lists(inner, min_size=1, max_size=2), st.dictionaries(NAMES, inner, min_size=1, max_size=2)
        keywords |= dict.fromkeys(("items", "contains", "propertyNames", "not", "if", "then", "else"), inner)
        keywords |= dict.fromkeys(("additionalProperties", "unevaluatedProperties"), inner)
        keywords |= dict.fromkeys(("prefixItems", "anyOf", "allOf", "oneOf"), several)
        keywords |= dict.fromkeys(("properties", "patternProperties"), named)
    some = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=3, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(schema=schemas(2), seed=st.integers(0, 2**32))
def test_random_schemas(schema, seed):
    """Texts are values that jsonschema accepts, and values without items and keys that it accepts are texts."""
    try:
        term = schema_term(schema, 2)
    except Refused:
        return
    is_valid = jsonschema.Draft202012Validator(parse(json.dumps(schema))).is_valid
    with decimal.localcontext(decimal.Context(prec=400)):  # jsonschema divides
        assert_texts_are_valid(term, is_valid, random.Random(seed))
        for value in SMALL_VALUES:
            value = parse(json.dumps(value))
            if is_possible(term, value):
                assert is_valid(value), value
            elif not isinstance(value, list | dict) and "\n" not in str(value):
                assert not is_valid(value), value


class Colour(enum.Enum):
    RED, GREEN = "red", 'gr"een'


class Leaf(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(min_length=1, max_length=4, pattern="^[a-z]+$")]
    next: Optional["Leaf"] = None


@dataclass
class Point:
    x: float
    y: float = 0.0


FIELDS = [
    bool, int, float, str, None, bytes, datetime.date, datetime.datetime, datetime.time,
    datetime.timedelta, uuid.UUID, Path, Colour, Literal["a", 1, None], int | str, int | None, list[int], list[list[str]],
    tuple[int, str], tuple[int, ...], dict[str, int], dict[str, Any], list[Any], Any, dict, list, Point, Leaf, list[Leaf],
    set[Colour], frozenset[bool], Annotated[int, pydantic.Field(ge=0, le=120)],
    Annotated[int, pydantic.Field(gt=3, multiple_of=5)],
   
    Annotated[float, pydantic.Field(gt=0, lt=1)], Annotated[str, pydantic.Field(max_length=5)],
    Annotated[str, pydantic.Field(pattern="cat|dog")], Annotated[list[int], pydantic.Field(min_length=1, max_length=2)],
    pydantic.PositiveInt, pydantic.NonNegativeFloat, pydantic.AnyUrl, ipaddress.IPv4Address, ipaddress.IPv6Address,
    Annotated[Leaf | Point, pydantic.Field(title="either")], TypedDict("Movie", {"title": str, "year": int}),
    dict[Literal["a", "b"], int], dict[Annotated[str, pydantic.Field(pattern="^x")], bool],
]  # fmt: skip


@pytest.mark.parametrize("kind", FIELDS, ids=str)
def test_fields_of_pydantic_models(kind):
    """Models with a field of each kind read every text."""
    model = pydantic.create_model("Model", field=(kind, ...), other=(kind, None))
    term, rng = schema_term(model.model_json_schema(), 3), random.Random(0)
    texts = [random_text(term, rng) for _ in range(20)]
    assert len({*texts}) > 1
    for text in texts:
        model.model_validate_json(text)


@pytest.mark.slow
def test_sampled_answers_are_valid(tiny):
    """Of random schemas, at a high temperature, with trees and without."""
    drawn = []

    @hypothesis.settings(max_examples=80, database=None, derandomize=True, deadline=None)
    @hypothesis.given(schemas(2))
    def draw(schema):
        drawn.append({"type": ["array", "object", "string", "number"], **schema})

    draw()
    followed = []
    for schema in drawn:
        try:
            if not is_nothing(schema_term(schema, 2)):
                followed.append(schema)
        except Refused:
            pass
    assert len(followed) > 40
    how = {"schema": followed, "schema_depth": 2, "temperature": 2.0, "max_new_tokens": 120, "batch_size": 8}
    for draft in {"builder": "none"}, {"nodes": 8}:
        results = tiny.generate(["Write JSON."] * len(followed), seed=1, **how, **draft)
        ended = [(result, schema) for result, schema in zip(results, followed, strict=True) if result.finished == "stop"]
        assert len(ended) > 20
        with decimal.localcontext(decimal.Context(prec=400)):
            for result, schema in ended:
                jsonschema.Draft202012Validator(parse(json.dumps(schema))).validate(parse(result.text))
