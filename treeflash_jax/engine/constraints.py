"""Constraints of answers: a JSON schema, a pattern or choices, compiled to the automaton over tokens that they mean.

The package outlines-core turns a schema into a regular expression, and that into transitions over bytes.
"""

import functools
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from treeflash_jax.core.checks import clipped, expect, parse_json, quoted
from treeflash_jax.decoding.automaton import NOWHERE, Automaton
from treeflash_jax.engine import byte_automaton
from treeflash_jax.formats.tokenizer import Tokenizer

NAMES = "schema", "pattern", "choices"  # settings, of which a prompt has at most one
MOST_BYTES, MOST_STATES = 64 * 2**20, 2**17  # of one table
MOST_SECONDS, MOST_MEMORY = 60, 2 * 2**30  # that compiling an expression may take
# outlines-core reads a JSON schema by the first of these keywords, or else by its type, and drops silently what does not
# stand beside it here.
BESIDE = {
    "properties": "required additionalProperties", "anyOf": "", "oneOf": "", "prefixItems": "minItems maxItems items",
    "enum": "", "const": "", "$ref": "",
}  # fmt: skip
BESIDE_TYPE = {
    "string": "minLength maxLength pattern format", "array": "items minItems maxItems", "object": "additionalProperties",
    "number": "", "integer": "", "boolean": "", "null": "",
}  # fmt: skip
ANNOTATIONS = """type title description default examples deprecated readOnly writeOnly discriminator $schema $id $comment
    $defs definitions""".split()
FORMATS = "date", "date-time", "uuid"  # others of outlines-core match texts that are no JSON


class AutomatonTable(NamedTuple):
    """The automaton of a sequence; see `decoding.automaton.Automaton`.

    Attributes:
      next_qc: state after a token of each class.
      class_v: class of each token.
    """

    next_qc: np.ndarray
    class_v: np.ndarray

    def follow(self, ids: Sequence[int]) -> int:
        """Returns the state after allowed tokens."""
        return functools.reduce(lambda state, token: int(self.next_qc[state, self.class_v[token]]), ids, 0)


@functools.lru_cache(maxsize=4)
def allow_all(vocab_size: int) -> AutomatonTable:
    """Returns the automaton that allows every token; kept, since requests without a constraint share it."""
    return AutomatonTable(np.zeros((1, 1), np.int32), np.zeros(vocab_size, np.int32))


def stack(tables: Sequence[AutomatonTable | None], states: int, classes: int, vocab_size: int) -> Automaton:
    """Returns the automata of a batch, padded to these sizes with states and classes that nothing leads to.

    None in place of a table allows everything.
    """
    tables = [table or allow_all(vocab_size) for table in tables]
    next_bqc = np.full((len(tables), states, classes), NOWHERE, np.int32)
    for next_qc, table in zip(next_bqc, tables, strict=True):
        used_states, used_classes = table.next_qc.shape
        next_qc[:used_states, :used_classes] = table.next_qc
    return Automaton(next_bqc, np.stack([table.class_v for table in tables]))


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
) -> AutomatonTable | None:
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
    text = _any_of(value) if name == "choices" else value
    try:
        return _compile("schema" if name == "schema" else "pattern", text, tokenizer, tuple(stop_ids), vocab_size)
    except _Unusable as error:
        raise ValueError(f"got {name} {quoted(value)}, {error}") from None


class _Unusable(Exception):
    """An expression without a table; the text says why."""


def _check_schema(schema: Any, root: Any, is_open: dict[str, bool]) -> None:
    """Raises ValueError for what would not be followed in a schema and in those inside it.

    Args:
      root: the schema that references are paths in.
      is_open: the references met so far; True while the schema that they name is being checked.
    """
    if isinstance(schema, bool) or schema is None:
        return
    first = next((name for name in BESIDE if name in schema), "type")
    kinds = schema.get("type")
    kinds = [kind for kind in BESIDE_TYPE if kind in (kinds if isinstance(kinds, list) else [kinds])]
    beside = [BESIDE[first]] if first in BESIDE else [BESIDE_TYPE[kind] for kind in kinds]
    known = {*ANNOTATIONS, first, *" ".join(beside).split()}
    for name in schema:
        expect(name in known, "keyword of a schema", name, f"one that outlines-core follows beside {first!r}")
    if first == "properties":
        for name in schema[first]:
            expect(json.dumps(name, ensure_ascii=False) == f'"{name}"', "property", name, "no quotes or backslashes")
        missing = {*schema.get("required", [])} - {*schema[first]}
        expect(not missing, "required", sorted(missing), "names of properties")
    elif first == "prefixItems":
        count, least, most = len(schema[first]), schema.get("minItems", 0), schema.get("maxItems", math.inf)
        expect(least <= count <= most, "minItems and maxItems", [least, most], f"those of {count} prefixItems")
    elif first == "type" and "string" in kinds:
        _check_text(schema)
    elif first == "$ref":
        place = schema[first]
        if is_open.get(place):
            raise ValueError(f"got a schema that contains itself ({quoted(place)}), which cannot be followed")
        if place not in is_open:
            is_open[place] = True
            named = functools.reduce(lambda part, key: part[key], filter(None, place.split("#")[-1].split("/")), root)
            _check_schema(named, root, is_open)
            is_open[place] = False
    for part in _parts_of(schema):
        _check_schema(part, root, is_open)


def _parts_of(schema: dict[str, Any]) -> list[Any]:
    """Returns the schemas inside a schema."""
    lists = [schema.get("properties", {}).values(), *(schema.get(name, []) for name in ("anyOf", "oneOf", "prefixItems"))]
    return [schema.get("items"), schema.get("additionalProperties"), *itertools.chain(*lists)]


def _check_text(schema: dict[str, Any]) -> None:
    """Raises ValueError for a text of which a limit would not be followed, or whose pattern matches what ends a text."""
    given = [name for name in ("minLength", "maxLength", "pattern", "format") if name in schema]
    expect(given in (["minLength", "maxLength"], given[:1]), "keywords of a text", given, "its lengths, pattern or format")
    if "format" in schema:
        expect(schema["format"] in FORMATS, "format of a text", schema["format"], f"one of {', '.join(FORMATS)}")
    if "pattern" in schema:
        pattern = schema["pattern"]
        body = pattern[1:-1] if pattern.startswith("^") and pattern.endswith("$") else pattern
        try:
            next_qy, _ = _byte_automaton("pattern", body)
        except _Unusable as error:
            raise ValueError(f"got pattern {quoted(pattern)} in a schema, {error}") from None
        is_safe = (next_qy[:, [*range(32), *b'"\\']] == NOWHERE).all()
        expect(is_safe, "pattern in a schema", pattern, "one that matches no quotes, backslashes or control characters")


def _any_of(choices: Sequence[str]) -> str:
    return "|".join(f"({re.escape(choice)})" for choice in choices)


@functools.lru_cache(maxsize=16)
def _compile(kind: str, text: str, tokenizer: Tokenizer, stop_ids: tuple[int, ...], vocab_size: int) -> AutomatonTable:
    """Returns the automaton of a pattern or a schema, of whole answers; kept, since they come back."""
    if kind == "schema":
        root = parse_json(text)
        try:
            _check_schema(root, root, {})
        except (TypeError, LookupError, AttributeError, RecursionError):
            raise _Unusable("which cannot be followed: it is no JSON schema") from None
    next_qy, is_final_q = _byte_automaton(kind, text)
    columns, class_v = _token_classes(next_qy, _token_bytes(tokenizer), vocab_size)
    class_v[[*stop_ids]] = len(columns)
    columns.append(np.where(is_final_q, np.arange(is_final_q.size), NOWHERE))  # the end of an answer
    classes, class_v = np.unique(class_v, return_inverse=True)
    next_qc = np.stack([columns[number] for number in classes], axis=1)
    is_useful_q = _is_useful(next_qc, is_final_q)
    if not is_useful_q[0]:
        raise _Unusable("which no answer in this model's tokens matches")
    number_q = np.where(is_useful_q, np.cumsum(is_useful_q) - 1, NOWHERE)
    next_qc = np.append(number_q, NOWHERE)[next_qc[is_useful_q]]
    return AutomatonTable(next_qc.astype(np.int32), class_v.astype(np.int32))


def _byte_automaton(kind: str, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the state after each byte, [q, 256], and whether a text may end in a state, [q]; texts begin in state 0.

    Args:
      kind: what `text` is: "pattern" or "schema".
    """
    if find_spec("outlines_core") is None:
        raise ValueError('schema, pattern and choices need outlines-core: pip install "treeflash-jax[schema]"')
    command = [sys.executable, byte_automaton.__file__, kind, str(MOST_SECONDS), str(MOST_MEMORY)]
    run = subprocess.run(command, input=text.encode(), capture_output=True)
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


def _is_useful(next_qc: np.ndarray, is_final_q: np.ndarray) -> np.ndarray:
    """Returns whether a state can be reached from the first one, and a final state from it, [q]."""
    from scipy import sparse  # takes long to import
    from scipy.sparse import csgraph

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
