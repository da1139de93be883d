"""Texts of single JSON values, and the commas and quotes around them.

After a comma or colon there may be one space, elsewhere none.
"""

import json
import math
from collections.abc import Iterable
from decimal import Context, Decimal
from typing import Any

from treeflash_jax.constraints.compiler.characters import SHORT_ESCAPES, quote
from treeflash_jax.constraints.compiler.numerals import MOST_DIGITS, same_value, write
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import (
    ALL_BYTES,
    ANYTHING,
    EMPTY,
    NOTHING,
    Term,
    concat,
    contains,
    follow,
    literal,
    machine,
    union,
)

SPACE = union(EMPTY, literal(b" "))
COMMA, COLON = concat(literal(b","), SPACE), concat(literal(b":"), SPACE)
QUOTE = literal(b'"')
SPACE_MASK = 1 << ord(" ")
ESCAPED = {char: quote(chr(char)).encode() for char in (*range(32), *SHORT_ESCAPES)}
UNESCAPED = ALL_BYTES & ~sum(1 << char for char in ESCAPED)
EXACT = Context(prec=3 * MOST_DIGITS)
MOST_FINITE, LONGEST_FINITE = 8, 1_000  # limits on a set that is enumerated: number of values, and bytes of each


def key_text(name: Any) -> Term:
    """Returns the text of a key without its quotes; the empty set for a value that is not a string."""
    return literal(quote(name).encode()) if isinstance(name, str) else NOTHING


def type_of(value: Any) -> str:
    """Returns the type of a JSON value. Its integers are int, and its numbers with a fraction are Decimal."""
    kinds = {bool: "boolean", int: "integer", Decimal: "fraction", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def nesting(value: Any) -> int:
    """Returns the levels of arrays and objects in a value."""
    if isinstance(value, dict):
        value = [*value.values()]
    return 1 + max(map(nesting, value), default=0) if isinstance(value, list) else 0


def value_text(value: Any) -> Term:
    """Returns the texts of one value. Numbers have their shortest form."""
    if isinstance(value, dict):
        return _braces(
            [concat(QUOTE, key_text(name), QUOTE, COLON, value_text(item)) for name, item in value.items()], b"{}"
        )
    if isinstance(value, list):
        return _braces(map(value_text, value), b"[]")
    if isinstance(value, str):
        return concat(QUOTE, key_text(value), QUOTE)
    return literal((write(value) if type(value) in (int, Decimal) else json.dumps(value)).encode())


def _braces(parts: Iterable[Term], braces: bytes) -> Term:
    items = [concat(COMMA if i else EMPTY, part) for i, part in enumerate(parts)]
    return concat(literal(braces[:1]), *items, literal(braces[1:]))


def cover(value: Any) -> Term:
    """Returns a superset of a value's texts. For an object, it is the texts of all objects, in any order of keys."""
    if isinstance(value, dict) and value:
        return concat(literal(b"{"), ANYTHING)
    if isinstance(value, list):
        return _braces(map(cover, value), b"[]")
    return same_value(value) if type(value) in (int, Decimal) else value_text(value)


def unquoted(term: Term) -> Term:
    """Returns the strings among the JSON texts of a set, without quotes and escapes."""
    return machine(_unquoted_edges, _is_end_of_string, follow(term, b'"'))


def _unquoted_edges(tail: Term) -> Iterable[tuple[int, Term]]:
    masks = {after: mask & UNESCAPED for mask, after in tail.edges()}
    for char, text in ESCAPED.items():
        after = follow(tail, text)
        masks[after] = masks.get(after, 0) | 1 << char
    return [(mask, after) for after, mask in masks.items() if mask and after is not NOTHING]


def _is_end_of_string(tail: Term) -> bool:
    return contains(tail, b'"')


def finite_values(term: Term) -> dict[str, Term]:
    """Returns the texts of each value in a set, by a text that equal values share. Raises Refused for too many values."""
    texts: dict[str, Term] = {}
    unread = [(b"", term)]
    while unread:
        text, tail = unread.pop()
        if tail.has_empty:
            value = parse(text.decode())
            # A Decimal becomes a list with NaN, which no other value contains.
            key = json.dumps(value, sort_keys=True, default=lambda number: [math.nan, str(number)])
            texts[key] = union(texts.get(key, NOTHING), value_text(value))
        for mask, after in tail.edges():
            is_space = mask == SPACE_MASK and {*after.edges()} <= {*tail.edges()}  # an optional space, as in SPACE
            unread += [(text + bytes([byte]), after) for byte in range(256) if mask >> byte & 1 and not is_space]
        if len(texts) > MOST_FINITE or len(unread) > 256 or len(text) > LONGEST_FINITE:
            raise Refused(f"uniqueItems of more than {MOST_FINITE} possible values cannot be followed")
    return texts


def parse(text: str) -> Any:
    """Returns a JSON value with exact numbers: int, or Decimal for numbers with a fraction."""

    def read(digits: str) -> int | Decimal:
        try:
            value = Decimal(digits)
        except ArithmeticError:
            value = Decimal("inf")
        if not value.is_finite() or abs(value.adjusted()) > MOST_DIGITS or len(digits) > MOST_DIGITS:
            raise Refused(f"number {digits[:40]} has too many digits")
        return int(value) if value == value.to_integral_value() else value.normalize(EXACT)

    def refuse(name: str) -> None:
        raise Refused(f"{name} is no JSON")

    return json.loads(text, parse_float=read, parse_int=read, parse_constant=refuse)
