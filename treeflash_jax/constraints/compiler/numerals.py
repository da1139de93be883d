"""Texts of numbers in JSON: ranges, multiples, and all ways to write a value."""

from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

from treeflash_jax.constraints.compiler.characters import plain
from treeflash_jax.constraints.compiler.patterns import full_match
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import (
    EMPTY,
    NOTHING,
    Term,
    byte,
    complement,
    concat,
    intersect,
    literal,
    machine,
    repeat,
    union,
)

Number = int | Decimal
INTEGERS = full_match(r"0|-?[1-9]\d*", plain)
DECIMALS = full_match(r"-?(0|[1-9]\d*)(\.\d+)?", plain)
EXPONENTS = full_match(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d{1,2})?", plain)
FRACTIONS = full_match(r"-?(0|[1-9]\d*)\.\d*[1-9]\d*", plain)  # numbers that are not integers
DIGIT = byte((1 << 58) - (1 << 48))
DIGITS = repeat(DIGIT)
MOST_REMAINDERS = 2_000  # limit on the states of one multipleOf
MOST_DIGITS = 400


class Bounds(NamedTuple):
    """A range of numbers; None: no limit. A strict limit is not part of the range."""

    least: Number | None = None
    is_least_strict: bool = False
    most: Number | None = None
    is_most_strict: bool = False


def write(value: Number) -> str:
    """Returns a number without an exponent."""
    return str(value) if isinstance(value, int) else format(value, "f")


def same_value(value: Number) -> Term:
    """Returns a superset of a value's texts: all of them without an exponent, and all numbers with an exponent."""
    whole, _, fraction = write(abs(value)).partition(".")
    fraction = fraction.rstrip("0")
    zeros = union(EMPTY, concat(literal(b"."), repeat(literal(b"0"), 1)))
    end = concat(literal(b"." + fraction.encode()), repeat(literal(b"0"))) if fraction else zeros
    sign = literal(b"-") if value < 0 else EMPTY
    if value == 0:
        sign = union(EMPTY, literal(b"-"))
    return union(concat(sign, literal(whole.encode()), end), intersect(EXPONENTS, complement(DECIMALS)))


def between(bounds: Bounds) -> Term:
    """Returns the numbers in a range, written without exponents."""
    least, least_strict, most, most_strict = bounds
    positive = _magnitudes(least, least_strict, most, most_strict)
    negative = _magnitudes(_minus(most), most_strict, _minus(least), least_strict)
    return union(positive, concat(literal(b"-"), negative))


def _minus(value: Number | None) -> Number | None:
    return None if value is None else -value


def _magnitudes(least: Number | None, least_strict: bool, most: Number | None, most_strict: bool) -> Term:
    """Returns the numbers of at least 0 that are in a range."""
    terms = [full_match(r"(0|[1-9]\d*)(\.\d+)?", plain)]
    if most is not None:
        if most < 0 or (most == 0 and most_strict):
            return NOTHING
        terms.append(complement(_above(most, not most_strict)))
    if least is not None and (least > 0 or (least == 0 and least_strict)):
        terms.append(_above(least, least_strict))
    return intersect(*terms)


def _above(least: Number, is_strict: bool) -> Term:
    """Returns texts that, among numbers of at least 0, are those above a limit, or also the limit unless `is_strict`."""
    whole, _, fraction = write(least).partition(".")
    end = union(EMPTY, concat(literal(b"."), repeat(DIGIT, 1)))
    above = [concat(byte((1 << 58) - (1 << 49)), repeat(DIGIT, len(whole)), end)]
    for i, digit in enumerate(whole):
        if digit < "9":
            larger = byte((1 << 58) - (1 << ord(digit) + 1))
            above.append(
                concat(literal(whole[:i].encode()), larger, repeat(DIGIT, len(whole) - i - 1, len(whole) - i - 1), end)
            )
    return union(*above, concat(literal(whole.encode()), _fraction_above(fraction.rstrip("0"), is_strict)))


def _fraction_above(fraction: str, is_strict: bool) -> Term:
    """Returns the fractions, with their dot, above another; that one is included unless `is_strict`. "" means zero."""
    above = []
    for i, digit in enumerate(fraction):
        if digit < "9":
            larger = byte((1 << 58) - (1 << ord(digit) + 1))
            above.append(concat(literal(b"." + fraction[:i].encode()), larger, DIGITS))
    more = concat(DIGITS, byte((1 << 58) - (1 << 49)), DIGITS)
    above.append(concat(literal(b"." + fraction.encode()), more if is_strict else DIGITS))
    if fraction or is_strict:
        return union(*above)
    return intersect(union(*above, EMPTY), complement(literal(b".")))


class _Remainder(NamedTuple):
    """A state in the middle of a number.

    Attributes:
      value: remainder of the digits so far.
      digits: number of digits after the dot; None before the dot.
    """

    value: int
    digits: int | None


@cache
def multiples(divisor: Number) -> Term:
    """Returns the multiples of a number, written without exponents. Raises Refused for large divisors."""
    num_decimals = max(0, -Decimal(divisor).normalize().as_tuple().exponent)
    modulus = int(divisor * 10**num_decimals)
    if modulus * (num_decimals + 1) > MOST_REMAINDERS:
        raise Refused(f"multipleOf {divisor} needs more than {MOST_REMAINDERS:,} states")

    def step(state: Any) -> list[tuple[int, Any]]:
        value, digits = state
        edges = [(1 << ord("-"), state)] if digits is None and value == 0 else []
        if digits is None:
            edges.append((1 << ord("."), _Remainder(value, 0)))
        for digit in range(10):
            if digits == num_decimals:  # only zeros may follow
                after = state if digit == 0 else None
            else:
                after = _Remainder((value * 10 + digit) % modulus, None if digits is None else digits + 1)
            if after is not None:
                edges.append((1 << 48 + digit, after))
        return edges

    def is_final(state: Any) -> bool:
        return state.value * 10 ** (num_decimals - (state.digits or 0)) % modulus == 0

    return machine(step, is_final, _Remainder(0, None))
