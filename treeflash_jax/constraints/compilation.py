"""Constraints of answers, compiled to the automaton over tokens that they mean."""

import functools
import re
from collections.abc import Sequence

from treeflash_jax.constraints import expressions
from treeflash_jax.constraints.expressions import Unusable
from treeflash_jax.constraints.json_schema import check_schema
from treeflash_jax.constraints.tables import AutomatonTable, make_table
from treeflash_jax.core.checks import expect, parse_json, quoted
from treeflash_jax.formats.tokenizer import Tokenizer

NAMES = "schema", "pattern", "choices"  # settings, of which a prompt has at most one


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
    except Unusable as error:
        raise ValueError(f"got {name} {quoted(value)}, {error}") from None


def _any_of(choices: Sequence[str]) -> str:
    return "|".join(f"({re.escape(choice)})" for choice in choices)


@functools.lru_cache(maxsize=16)
def _compile(kind: str, text: str, tokenizer: Tokenizer, stop_ids: tuple[int, ...], vocab_size: int) -> AutomatonTable:
    """Returns the automaton of a pattern or a schema, of whole answers; kept, since they come back."""
    if kind == "schema":
        root = parse_json(text)
        try:
            check_schema(root, root, {})
        except (TypeError, LookupError, AttributeError, RecursionError):
            raise Unusable("which cannot be followed: it is no JSON schema") from None
    return make_table(*expressions.compile_bytes(kind, text), tokenizer, stop_ids, vocab_size)
