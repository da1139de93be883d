"""Constraints of answers: a JSON schema, a pattern or choices, compiled to the automaton over tokens that they mean.

The package outlines-core turns a schema into a regular expression, and that into transitions over bytes.
"""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from treeflash_jax.core.checks import clipped, expect, parse_json, quoted
from treeflash_jax.decoding.automaton import NOWHERE
from treeflash_jax.engine import byte_automaton
from treeflash_jax.formats.tokenizer import Tokenizer

NAMES = "schema", "pattern", "choices"  # settings, of which a prompt has at most one
MOST_BYTES, MOST_STATES = 64 * 2**20, 2**17  # of one table
MOST_SECONDS, MOST_MEMORY = 60, 2 * 2**30  # that compiling an expression may take
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
    next_qy, is_final_q = _byte_automaton(expression)
    columns, class_v = _token_classes(next_qy, _token_bytes(tokenizer), vocab_size)
    class_v[[*stop_ids]] = len(columns)
    columns.append(np.where(is_final_q, np.arange(is_final_q.size), NOWHERE))  # the end of an answer
    classes, class_v = np.unique(class_v, return_inverse=True)
    next_qc = np.stack([columns[number] for number in classes], axis=1)
    is_useful_q = _on_a_way(next_qc, is_final_q)
    if not is_useful_q[0]:
        raise _Unusable("which no answer in this model's tokens matches")
    number_q = np.where(is_useful_q, np.cumsum(is_useful_q) - 1, NOWHERE)
    next_qc = np.append(number_q, NOWHERE)[next_qc[is_useful_q]]
    return Table(next_qc.astype(np.int32), class_v.astype(np.int32))


def _byte_automaton(expression: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the state after each byte, [q, 256], and whether a text may end in a state, [q]; texts begin in state 0."""
    if find_spec("outlines_core") is None:
        raise _needs_package()
    command = [sys.executable, byte_automaton.__file__, str(MOST_SECONDS), str(MOST_MEMORY)]
    run = subprocess.run(command, input=expression.encode(), capture_output=True)
    if run.returncode == 1:
        raise _Unusable(f"which cannot be followed: {clipped(run.stderr.decode(), 160)}")
    if run.returncode:
        limits = f"{MOST_SECONDS} s or {MOST_MEMORY / 2**30:g} GiB"
        raise _Unusable(f"which takes more than {limits} to compile: give shorter repetitions")
    edges_e3 = np.frombuffer(run.stdout, np.int32).reshape(-1, 3)
    states = 1 + edges_e3[:, 2].max()
    if states > MOST_STATES:
        raise _Unusable(f"whose {states:,} states exceed {MOST_STATES:,}")
    next_qy = np.full((states, byte_automaton.END_OF_TEXT + 1), NOWHERE, np.int32)
    next_qy[edges_e3[:, 0], edges_e3[:, 1]] = edges_e3[:, 2]
    return next_qy[:, :-1], next_qy[:, -1] != NOWHERE


def _token_classes(next_qy: np.ndarray, texts: Mapping[int, bytes], vocab_size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the next states of each class of tokens, and the class of each token.

    A class is what a text does to every state. That of a token follows from the class of its bytes but the last, and that
    of the last byte.
    """
    columns, numbers, followed = [], {}, {}

    def number(column_q: np.ndarray) -> int:
        known = numbers.setdefault(column_q.tobytes(), len(columns))
        if known == len(columns):
            if column_q.nbytes * known > MOST_BYTES:
                raise _Unusable(f"whose {column_q.size:,} states x {known:,} kinds of tokens exceed {MOST_BYTES >> 20} MiB")
            columns.append(column_q)
        return known

    nowhere = number(np.full(len(next_qy), NOWHERE, np.int32))
    empty = number(np.arange(len(next_qy), dtype=np.int32))
    byte_class = [number(next_qy[:, byte]) for byte in range(256)]
    class_v = np.full(vocab_size, nowhere)
    for token, text in texts.items():
        at = empty
        for byte in text:
            step = at, byte_class[byte]
            if step not in followed:
                followed[step] = number(np.append(columns[step[1]], np.int32(NOWHERE))[columns[at]])
            at = followed[step]
        class_v[token] = at
    return columns, class_v


def _on_a_way(next_qc: np.ndarray, is_final_q: np.ndarray) -> np.ndarray:
    """Returns whether a state can be reached from the first one, and a final state from it, [q]."""
    source_e, class_e = np.nonzero(next_qc != NOWHERE)
    end, final = len(next_qc), np.flatnonzero(is_final_q)  # one more state, behind the final ones
    edges = np.append(source_e, final), np.append(next_qc[source_e, class_e], np.full(final.size, end))
    graph = sparse.csr_array((np.ones(edges[0].size, bool), edges), shape=(end + 1, end + 1))
    after = csgraph.breadth_first_order(graph, 0, return_predecessors=False)
    before = csgraph.breadth_first_order(graph.T.tocsr(), end, return_predecessors=False)
    return np.isin(np.arange(end), np.intersect1d(after, before))


@functools.lru_cache(maxsize=4)
def _token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    return tokenizer.token_bytes()
