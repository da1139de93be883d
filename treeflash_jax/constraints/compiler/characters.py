"""Sets of characters, and their texts: plain UTF-8, or the text inside the quotes of JSON."""

from collections.abc import Callable, Iterable
from functools import cache

from treeflash_jax.constraints.compiler.terms import (
    ALL_BYTES,
    ANYTHING,
    Term,
    byte,
    complement,
    concat,
    intersect,
    literal,
    repeat,
    union,
)

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint ranges of code points, both ends included
LAST_CODE_POINT = 0x10FFFF
HALVES = ((0xD800, 0xDFFF),)  # surrogates: halves of characters in UTF-16, which are not characters
SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
NO_UTF8 = 0xFF  # a byte of no text
UTF8_STEPS = (0x7F, 0x7FF, 0xFFFF, LAST_CODE_POINT)  # last code point of one byte, two, three and four


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the ranges sorted, and without overlaps."""
    merged: list[list[int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return tuple((first, last) for first, last in merged)


def invert(ranges: Ranges) -> Ranges:
    """Returns all other characters."""
    merged = merge((*ranges, *HALVES))
    starts = [0, *(last + 1 for _, last in merged)]
    ends = [*(first - 1 for first, _ in merged), LAST_CODE_POINT]
    return tuple((first, last) for first, last in zip(starts, ends, strict=True) if first <= last)


EVERY = invert(())


@cache
def plain(ranges: Ranges) -> Term:
    """Returns the UTF-8 of one character of a set."""
    return union(*(_utf8(first, last) for first, last in invert(invert(ranges))))


def _utf8(first: int, last: int) -> Term:
    """Returns the UTF-8 of a range, as the union of the largest parts in which each byte varies in a range by itself."""
    for step in UTF8_STEPS:
        if first <= step < last:
            return union(_utf8(first, step), _utf8(step + 1, last))
    for bits in 6, 12, 18:
        low = (1 << bits) - 1
        if first >> bits != last >> bits and last > 0x7F:
            if first & low:
                return union(_utf8(first, first | low), _utf8((first | low) + 1, last))
            if last & low != low:
                return union(_utf8(first, (last & ~low) - 1), _utf8(last & ~low, last))
    pairs = zip(chr(first).encode(), chr(last).encode(), strict=True)
    return concat(*(byte((1 << b + 1) - (1 << a)) for a, b in pairs))


@cache
def quoted(ranges: Ranges) -> Term:
    """Returns one character of a set inside the quotes of JSON. It is escaped only if it must be, in the shortest way."""
    free = [(first, last) for first, last in ranges for first, last in _without_escaped(first, last)]
    escaped = [point for first, last in ranges for point in range(first, min(last, 92) + 1) if _is_escaped(point)]
    return union(plain(merge(free)), *(literal(quote(chr(point)).encode()) for point in escaped))


def _is_escaped(point: int) -> bool:
    return point < 32 or point in SHORT_ESCAPES


def _without_escaped(first: int, last: int) -> list[tuple[int, int]]:
    unescaped = (32, 33), (35, 91), (93, LAST_CODE_POINT)
    return [(max(a, first), min(b, last)) for a, b in unescaped if max(a, first) <= min(b, last)]


def quote(text: str) -> str:
    """Returns a text in the form that it has inside the quotes of JSON."""

    def escape(char: str) -> str:
        if char in map(chr, SHORT_ESCAPES):
            return "\\" + SHORT_ESCAPES[ord(char)]
        return f"\\u{ord(char):04x}" if char < " " else char

    return "".join(map(escape, text))


RangeWriter = Callable[[Ranges], Term]  # `plain` or `quoted`


def texts(writer: RangeWriter, least: int = 0, most: int | None = None) -> Term:
    """Returns all texts of `least` to `most` characters."""
    return repeat(writer(EVERY), least, most)


def free_text(excluded: Iterable[str]) -> Term:
    """Returns all byte strings that contain none of these texts, nor NO_UTF8. Their characters may be incomplete."""
    excluded_text = union(*(literal(text.encode()) for text in excluded))
    return intersect(repeat(byte(ALL_BYTES & ~(1 << NO_UTF8))), complement(concat(ANYTHING, excluded_text, ANYTHING)))
