"""Constraints of answers, compiled to the automaton over tokens that they mean."""

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from treeflash_jax.constraints.compile_bytes import Unusable, compile_bytes
from treeflash_jax.constraints.tables import AutomatonTable, make_table
from treeflash_jax.core.checks import expect, parse_json, quoted
from treeflash_jax.formats.tokenizer import Tokenizer

logger = logging.getLogger("treeflash_jax")

NAMES = "schema", "pattern", "choices"  # settings, of which a prompt has at most one
DEPTH = 6  # levels of values that a schema does not describe: some 2,700 states in an object, twice as many for each more


def as_json(schema: Any) -> Any:
    """Returns a schema, or each of a list of them, as JSON text: of a dictionary, a pydantic model, or JSON text."""
    if isinstance(schema, list | tuple):
        return tuple(as_json(item) for item in schema)
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        return schema
    try:
        return json.dumps(dict(schema))
    except TypeError as error:
        raise ValueError(f"got schema {quoted(schema)}, expected JSON values: {error}") from None


def compile_constraint(
    schema: str | None,
    pattern: str | None,
    choices: Sequence[str] | None,
    tokenizer: Tokenizer | None,
    stop_ids: Sequence[int],
    vocab_size: int,
    depth: int = DEPTH,
    thoughts_end: str | None = None,
) -> AutomatonTable | None:
    """Returns the automaton of a prompt's constraint; None if it has none.

    Args:
      stop_ids: ids that end an answer, in states where the constraint is met.
      depth: levels of arrays and objects up to which an answer nests where its schema says nothing, or contains itself.
      thoughts_end: what ends the free text with which an answer begins, before it follows the constraint; None if it begins
        with none.

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
    if name == "schema":
        parse_json(value)
    try:
        value = tuple(value) if name == "choices" else value
        return _compile(name, value, depth, thoughts_end, tokenizer, tuple(stop_ids), vocab_size)
    except Unusable as error:
        raise ValueError(f"got {name} {quoted(value)}, {error}") from None


@functools.lru_cache(maxsize=16)
def _compile(
    name: str,
    value: str | tuple[str, ...],
    depth: int,
    thoughts_end: str | None,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    vocab_size: int,
) -> AutomatonTable:
    """Returns the automaton of one constraint; kept, since they come back."""
    automaton = compile_bytes(name, value, depth, thoughts_end)
    table = make_table(automaton, tokenizer, stop_ids, vocab_size, thoughts_end)
    logger.info("%s %s has %d states and %d kinds of tokens", name, quoted(value), *table.next_qc.shape)
    return table
