"""Constraints of answers: a JSON schema, a pattern or choices, compiled to the automaton over tokens that they mean.

The package outlines-core turns a schema into a regular expression, and that into transitions over tokens.
"""

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from treeflash_jax.core.checks import clipped, expect, parse_json, quoted
from treeflash_jax.decoding.automaton import NOWHERE
from treeflash_jax.formats.tokenizer import Tokenizer

NAMES = "schema", "pattern", "choices"  # settings, of which a prompt has at most one
MOST_BYTES = 64 * 2**20  # of one table
# Keywords of JSON schemas that outlines-core follows, by what is in them; it drops others silently.
NAMED_SCHEMAS = "properties", "$defs", "definitions"
LISTED_SCHEMAS = "anyOf", "oneOf", "prefixItems"
SINGLE_SCHEMAS = "items", "additionalProperties"
PLAIN = """type required minItems maxItems minLength maxLength pattern format enum const $ref minProperties maxProperties
    title description default examples deprecated $schema $id $comment""".split()


class Table(NamedTuple):
    """The automaton of a sequence; see `decoding.automaton.Automaton`.

    Attributes:
      next_qc: state after a token of each class.
      class_v: class of each token.
    """

    next_qc: np.ndarray
    class_v: np.ndarray

    def padded(self, states: int, classes: int) -> "Table":
        """Returns the automaton with states and classes that nothing leads to. Raises ValueError if it is larger."""
        has_states, has_classes = self.next_qc.shape
        expect(has_states <= states, "states of a constraint", has_states, f"at most {states}")
        expect(has_classes <= classes, "kinds of tokens of a constraint", has_classes, f"at most {classes}")
        more = states - has_states, classes - has_classes
        next_qc = np.pad(self.next_qc, ((0, more[0]), (0, more[1])), constant_values=NOWHERE)
        return Table(next_qc, self.class_v)


def allow_all(vocab_size: int) -> Table:
    """Returns the automaton that allows every token."""
    return Table(np.zeros((1, 1), np.int32), np.zeros(vocab_size, np.int32))


def as_json(schema: Any) -> Any:
    """Returns a schema, or each of a list of them, as JSON text: of a dictionary, a pydantic model, or JSON text."""
    if isinstance(schema, list | tuple):
        return tuple(as_json(item) for item in schema)
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return json.dumps(schema) if isinstance(schema, Mapping) else schema


def compile_constraint(
    schema: str | None,
    pattern: str | None,
    choices: Sequence[str] | None,
    tokenizer: Tokenizer | None,
    stop_ids: Sequence[int],
    vocab_size: int,
) -> Table | None:
    """Returns the automaton of a prompt's constraint; None if it has none.

    Args:
      stop_ids: ids that end an answer, in states where the constraint is met.

    Raises ValueError for several constraints, one that cannot be expressed or met, and a tokenizer that does not say which
    bytes its tokens stand for.
    """
    given = {name: value for name, value in zip(NAMES, (schema, pattern, choices), strict=True) if value is not None}
    if not given:
        return None
    (name, value), *others = given.items()
    expect(not others, " and ".join(given), [*given.values()], "one of them")
    if tokenizer is None or not stop_ids:
        missing = "tokenizer.json" if tokenizer is None else "token that ends an answer"
        raise ValueError(f"got {name} {quoted(value)}, but the verifier's folder has no {missing}")
    expression = {"schema": _schema_pattern, "pattern": str, "choices": _any_of}[name](value)
    try:
        return _compile(expression, tokenizer, tuple(stop_ids), vocab_size)
    except _Unusable as error:
        raise ValueError(f"got {name} {quoted(value)}, {error}") from None


class _Unusable(Exception):
    """An expression without a table; the text says why."""


def _schema_pattern(schema: str) -> str:
    _check_keywords(parse_json(schema))
    try:
        from outlines_core.json_schema import build_regex_from_schema

        return build_regex_from_schema(schema)
    except ImportError:
        raise _needs_package() from None
    except Exception as error:  # of Rust code: no common class
        raise ValueError(f"got schema {quoted(schema)}, which cannot be followed: {clipped(error, 160)}") from None


def _check_keywords(schema: Any) -> None:
    """Raises ValueError for a keyword of a schema, or of those in it, that would not be followed."""
    known = {*PLAIN, *NAMED_SCHEMAS, *LISTED_SCHEMAS, *SINGLE_SCHEMAS}
    for name, value in schema.items() if isinstance(schema, dict) else ():
        expect(name in known, "keyword of a schema", name, "one that outlines-core follows")
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            inside = [*value.values()]
        elif name in LISTED_SCHEMAS and isinstance(value, list):
            inside = value
        else:
            inside = [value] if name in SINGLE_SCHEMAS else []
        for part in inside:
            _check_keywords(part)


def _any_of(choices: Sequence[str]) -> str:
    return "|".join(f"({re.escape(choice)})" for choice in choices)


def _needs_package() -> ValueError:
    return ValueError('schema, pattern and choices need outlines-core: pip install "treeflash-jax[schema]"')


@functools.lru_cache(maxsize=64)
def _compile(expression: str, tokenizer: Tokenizer, stop_ids: tuple[int, ...], vocab_size: int) -> Table:
    """Returns the automaton of a regular expression that matches whole answers; kept, since schemas come back."""
    try:
        from outlines_core import Index
    except ImportError:
        raise _needs_package() from None
    try:
        index = Index(expression, _vocabulary(tokenizer, vocab_size))
    except Exception as error:
        raise _Unusable(f"which cannot be followed: {clipped(error, 160)}") from None
    first, final = index.get_initial_state(), index.get_final_states()
    edges = index.get_transitions()
    states = _useful_states(edges, final)
    if first not in states:
        raise _Unusable("which no answer in this model's tokens matches")
    number = {state: i for i, state in enumerate([first, *states - {first}])}
    transitions = {}  # tokens and next states, by state
    ends = {vocab_size, *stop_ids}
    for state in states & edges.keys():
        row = {token: number[to] for token, to in edges[state].items() if to in number and token not in ends}
        transitions[number[state]] = np.fromiter(row, np.int64, len(row)), np.fromiter(row.values(), np.int64, len(row))
    class_v, num_classes = _token_classes([*transitions.values()], len(number), stop_ids, vocab_size)
    if 4 * len(number) * num_classes > MOST_BYTES:
        raise _Unusable(f"whose {len(number):,} states x {num_classes:,} kinds of tokens exceed {MOST_BYTES >> 20} MiB")
    next_qc = np.full((len(number), num_classes), NOWHERE, np.int32)
    for state, (tokens, targets) in transitions.items():
        next_qc[state, class_v[tokens]] = targets
    numbers = [number[state] for state in final]
    next_qc[numbers, class_v[stop_ids[0]]] = numbers
    return Table(next_qc, class_v)


def _token_classes(
    transitions: Sequence[tuple[np.ndarray, np.ndarray]], num_states: int, stop_ids: Sequence[int], vocab_size: int
) -> tuple[np.ndarray, int]:
    """Returns the class of each token, and the number of classes: tokens of a class lead to one state from every state.

    All tokens begin in one class; every state splits the classes of its tokens by the states that follow.
    """
    class_v, used = np.zeros(vocab_size, np.int64), 1
    for tokens, targets in transitions:
        _, part = np.unique(class_v[tokens] * num_states + targets, return_inverse=True)
        class_v[tokens] = used + part
        used += tokens.size
    class_v[[*stop_ids]] = used  # a class of their own
    classes, class_v = np.unique(class_v, return_inverse=True)
    return class_v.astype(np.int32), classes.size


def _useful_states(edges: Mapping[int, Mapping[int, int]], final: Collection[int]) -> set[int]:
    """Returns the states from which a final one can be reached."""
    before: dict[int, set[int]] = {}
    for state, row in edges.items():
        for target in set(row.values()):
            before.setdefault(target, set()).add(state)
    useful, unread = set(final), [*final]
    while unread:
        new = before.get(unread.pop(), set()) - useful
        useful |= new
        unread += new
    return useful


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, end: int) -> Any:
    """Returns the tokens with their bytes; `end` is an id of no token, after which outlines-core ends a text."""
    from outlines_core import Vocabulary

    tokens: dict[bytes, list[int]] = {}
    for token, text in tokenizer.token_bytes().items():
        tokens.setdefault(text, []).append(token)
    return Vocabulary(end, tokens)
