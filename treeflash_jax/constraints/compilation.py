"""Entry point of constraints: turns `schema`, `pattern`, `choices` or `structural_tag` into an automaton over tokens."""

import hashlib
import json
import subprocess
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from treeflash_jax.constraints.compile_bytes import Run, Unusable, compile_bytes
from treeflash_jax.constraints.tables import AutomatonTable, make_table
from treeflash_jax.core.checks import WrongValue, expect
from treeflash_jax.core.error_text import logger, quoted
from treeflash_jax.core.json_files import parse_json
from treeflash_jax.formats.messages import find_format
from treeflash_jax.formats.messages.message_format import Demands
from treeflash_jax.formats.tokenizer import Tokenizer

CONSTRAINT_NAMES = "schema", "pattern", "choices", "structural_tag"  # settings; a prompt has at most one
SCHEMA_DEPTH = 6  # levels that a schema leaves open: some 2,700 states in an object; each further level doubles them
MOST_STORED_BYTES = 256 * 2**20
_stored: dict[Hashable, AutomatonTable] = {}  # oldest first; later requests often have the same constraint
_num_stored_bytes = 0
_lock = threading.Lock()


class Constraint(NamedTuple):
    """A constraint of an answer.

    Attributes:
      kind: one of CONSTRAINT_NAMES.
      value: JSON text, a regular expression, or the choices.
    """

    kind: str
    value: str | tuple[str, ...]


def as_json(schema: Any) -> Any:
    """Returns JSON text for a dictionary, a pydantic model or JSON text, or a list of them for a list."""
    if isinstance(schema, list | tuple):
        return tuple(as_json(item) for item in schema)
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        return schema
    try:
        return json.dumps(dict(schema))
    except TypeError as error:
        raise ValueError(f"got {quoted(schema)}, expected JSON values: {error}") from None


def find_constraint(settings: Any) -> Constraint | None:
    """Returns the constraint of a prompt's settings; None if there is none. Raises ValueError for several constraints."""
    values = {name: getattr(settings, name) for name in CONSTRAINT_NAMES}
    requested = {name: value for name, value in values.items() if value is not None}
    expect(len(requested) < 2, " and ".join(requested), [*requested.values()], "one of them")
    return Constraint(*requested.popitem()) if requested else None


def as_tag(kind: str, value: str | Sequence[str]) -> dict[str, Any]:
    """Returns a constraint as a structural tag. If a choice spells an added token, the tag requires that token.

    Raises ValueError for wrong JSON.
    """
    if kind == "choices":
        return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in value]}
    if kind == "pattern":
        return {"type": "regex", "pattern": value}
    parsed = _parse(kind, value)
    return {"type": "json_schema", "json_schema": parsed} if kind == "schema" else parsed


def _parse(kind: str, text: str) -> Any:
    """Returns the value of JSON text that was given as this kind of constraint. Raises WrongValue for wrong JSON."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise WrongValue(kind, f"{quoted(text)}, {error}") from None


def answer_constraint(constraint: Constraint, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> Constraint:
    """Returns the constraint of a whole answer, given the constraint of its content: thoughts may come before the content.

    A structural tag already describes the whole answer. Raises ValueError for wrong JSON.
    """
    if tokenizer is None or constraint.kind == "structural_tag":
        return constraint
    content = as_tag(*constraint)
    tag = find_format(tokenizer).answer_tag(prompt_ids, Demands(content=content))
    return constraint if tag is content else Constraint("structural_tag", json.dumps(tag))


def compile_constraint(
    constraint: Constraint,
    tokenizer: Tokenizer | None,
    stop_ids: Sequence[int],
    vocab_size: int,
    depth: int = SCHEMA_DEPTH,
    run: Run = subprocess.run,
) -> AutomatonTable:
    """Returns the automaton of a constraint. Those of the last calls are stored.

    Args:
      stop_ids: ids that end an answer; allowed in states in which the constraint is met.
      depth: largest nesting of arrays and objects in places that a schema leaves open, or where it contains itself.

    Raises ValueError for a constraint that cannot be expressed or met, and for a tokenizer whose tokens have no known
    bytes.
    """
    kind, value = constraint
    if tokenizer is None or not stop_ids:
        missing = "tokenizer.json" if tokenizer is None else "token that ends an answer"
        raise WrongValue(kind, f"{quoted(value)}, but the verifier's folder has no {missing}")
    if kind in ("schema", "structural_tag"):
        _parse(kind, value)
    # The key has a digest, because the text of a constraint may be larger than its table, and keeps no tokenizer alive.
    digest = hashlib.sha256(repr((constraint, depth, tuple(stop_ids), vocab_size)).encode()).digest()
    key = digest, weakref.ref(tokenizer)
    table = _stored.get(key)
    if table is None:
        tokens = _find_tokens(value, tokenizer) if kind == "structural_tag" else []
        try:
            table = make_table(compile_bytes(kind, value, depth, tokens, run), tokenizer, stop_ids, vocab_size, tokens)
        except Unusable as error:
            raise WrongValue(kind, f"{quoted(value)}, {error}") from None
        logger.info("%s %s has %d states and %d kinds of tokens", kind, quoted(value), *table.next_qc.shape)
    return _store(key, table)


def _store(key: Hashable, table: AutomatonTable) -> AutomatonTable:
    """Makes a table the newest; returns the one that another thread has stored meanwhile, if any."""
    global _num_stored_bytes
    with _lock:
        if key not in _stored:
            _num_stored_bytes += table.num_bytes
        _stored[key] = table = _stored.pop(key, table)  # now the newest
        while _num_stored_bytes > MOST_STORED_BYTES:
            _num_stored_bytes -= _stored.pop(next(iter(_stored))).num_bytes
    return table


def _find_tokens(tag: str, tokenizer: Tokenizer) -> list[str]:
    """Returns the texts of the added tokens that JSON text contains."""
    text = json.dumps(parse_json(tag), ensure_ascii=False)
    added = [token.content for token in tokenizer.inner.added_tokens_decoder.values()]
    tokens = [token for token in added if json.dumps(token, ensure_ascii=False)[1:-1] in text]
    # A marker has one byte.
    expect(len(tokens) <= 256, "number of added tokens in structural_tag", len(tokens), "at most 256")
    return tokens
