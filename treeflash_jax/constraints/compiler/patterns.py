"""Regular expressions of ECMA-262 (with its flag u, as JSON Schema requires) as terms.

Look-around, back references, word boundaries and flags are refused with their position: they are not regular, or not
supported.
"""

import itertools
import re
import string
import unicodedata
from functools import cache
from typing import NamedTuple, NoReturn

from treeflash_jax.constraints.compiler.characters import LAST_CODE_POINT, Ranges, RangeWriter, invert, merge, texts
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import EMPTY, NOTHING, Term, concat, repeat, union

DIGITS = ((48, 57),)
WORD = merge([*DIGITS, (65, 90), (95, 95), (97, 122)])
SPACES = merge([(0x2000, 0x200A), *((ord(x), ord(x)) for x in "\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff")])
NOT_LINE_ENDS = invert(((10, 10), (13, 13), (0x2028, 0x2029)))
CLASSES = {"d": DIGITS, "D": invert(DIGITS), "w": WORD, "W": invert(WORD), "s": SPACES, "S": invert(SPACES)}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
LONG_CATEGORIES = {
    "Letter": "L", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd",
    "Punctuation": "P", "Symbol": "S", "Separator": "Z", "Mark": "M", "Other": "C",
}  # fmt: skip
COUNT = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
COUNT_WITHOUT_MINIMUM = re.compile(r"\{,([0-9]*)\}")  # of Python and Rust
POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
MOST_REPEATED = 10_000
MOST_SEQUENCES = 1_000


class Anchor(NamedTuple):
    """^ or $."""

    is_start: bool


class Group(NamedTuple):
    """A group of a pattern that contains anchors."""

    alternatives: list[list]


Item = Term | Anchor | Group


@cache
def search(pattern: str, writer: RangeWriter) -> Term:
    """Returns the texts that contain a match of a pattern, as for JSON Schema's `pattern`. Raises as `full_match`."""
    return _read(pattern, writer, texts(writer))


@cache
def full_match(pattern: str, writer: RangeWriter) -> Term:
    """Returns the texts that a pattern matches as a whole.

    Raises Refused for a text that is not a pattern, or a pattern that cannot be followed.
    """
    return _read(pattern, writer, EMPTY)


def _read(pattern: str, writer: RangeWriter, around: Term) -> Term:
    """Returns the texts that match. On sides without an anchor, any of the texts `around` may stand."""
    parser = _Parser(pattern, writer)
    alternatives = parser.read_alternatives()
    if parser.at < len(pattern):
        parser.refuse("an unmatched )")
    return union(*(_match(sequence, around) for sequence in parser.flatten(alternatives)))


def _match(sequence: list[Term | Anchor], around: Term) -> Term:
    starts = [i for i, item in enumerate(sequence) if item == Anchor(True)]
    ends = [i for i, item in enumerate(sequence) if item == Anchor(False)]
    start, end = max(starts, default=-1), min(ends, default=len(sequence))
    outside = [item for i, item in enumerate(sequence) if isinstance(item, Term) and (i < start or i > end)]
    if not all(item.has_empty for item in outside):
        return NOTHING
    body = concat(*sequence[start + 1 : end]) if start < end else EMPTY
    return concat(EMPTY if starts else around, body, EMPTY if ends else around)


class _Parser:
    """Reads one pattern from left to right. `at` is the position of the next character."""

    def __init__(self, pattern: str, writer: RangeWriter):
        self.pattern = pattern
        self.writer = writer
        self.at = 0

    def refuse(self, what: str, at: int | None = None) -> NoReturn:
        raise Refused(f"pattern {self.pattern!r} has {what} at position {self.at if at is None else at}")

    def skip(self, text: str) -> bool:
        """Moves past a text if it comes next, and returns whether it did."""
        if not self.pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def take(self) -> str:
        if self.at == len(self.pattern):
            self.refuse("no end")
        self.at += 1
        return self.pattern[self.at - 1]

    def flatten(self, alternatives: list[list[Item]]) -> list[list[Term | Anchor]]:
        """Returns sequences without groups."""
        flat = []
        for sequence in alternatives:
            choices = [self.flatten(item.alternatives) if isinstance(item, Group) else [[item]] for item in sequence]
            flat += [
                list(itertools.chain(*parts)) for parts in itertools.islice(itertools.product(*choices), MOST_SEQUENCES)
            ]
            if len(flat) >= MOST_SEQUENCES:
                self.refuse("too many groups with ^ or $", 0)
        return flat

    def read_alternatives(self) -> list[list[Item]]:
        alternatives: list[list[Item]] = [[]]
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.skip("|"):
                alternatives.append([])
            else:
                alternatives[-1].append(self._read_item())
        return alternatives

    def _read_item(self) -> Item:
        start = self.at
        char = self.take()
        if char in "^$":
            item = Anchor(char == "^")
        elif char == "(":
            item = self._read_group(start)
        elif char in "*+?" or (char == "{" and self._is_count(start)):
            self.refuse(f"{char} without anything before it", start)
        elif count := COUNT_WITHOUT_MINIMUM.match(self.pattern, start):
            self.refuse(f"{count[0]} (write {{0,{count[1]}}})", start)
        else:
            item = self.writer(self._read_class() if char == "[" else self._read_character(char, start))
        return self._read_count(item)

    def _read_group(self, start: int) -> Item:
        if self.skip("?"):
            if self.skip("=") or self.skip("!") or self.skip("<=") or self.skip("<!"):
                self.refuse("look-around, which cannot be followed,", start)
            if self.skip("<") or self.skip("P<"):
                while self.take() != ">":
                    pass
            elif not self.skip(":"):
                self.refuse("flags, which cannot be followed,", start)
        alternatives = self.read_alternatives()
        if not self.skip(")"):
            self.refuse("an unmatched (", start)
        if any(isinstance(item, Anchor | Group) for sequence in alternatives for item in sequence):
            return Group(alternatives)
        return union(*(concat(*sequence) for sequence in alternatives))

    def _read_count(self, item: Item) -> Item:
        start = self.at
        if self.skip("*"):
            least, most = 0, None
        elif self.skip("+"):
            least, most = 1, None
        elif self.skip("?"):
            least, most = 0, 1
        elif (counts := self._read_braces()) is not None:
            least, most = counts
        else:
            return item
        self.skip("?")  # a lazy quantifier matches the same texts
        if self.pattern[self.at : self.at + 1] in ("*", "+", "?") or self._is_count(self.at):
            self.refuse("a repetition of a repetition")
        if not isinstance(item, Term):
            self.refuse("a repetition of ^ or $, which cannot be followed,", start)
        if max(least, most or 0) > MOST_REPEATED or (most is not None and most < least):
            self.refuse(f"a repetition that is not between 0 and {MOST_REPEATED:,}", start)
        return repeat(item, least, most)

    def _read_braces(self) -> tuple[int, int | None] | None:
        """Returns the numbers of {2}, {2,} or {2,3} if they come next."""
        if not self._is_count(self.at):
            return None
        end = self.pattern.find("}", self.at)
        least, comma, most = self.pattern[self.at + 1 : end].partition(",")
        self.at = end + 1
        if not comma:
            most = least

        def read(digits: str) -> int:
            return int(digits.lstrip("0")[:9] or 0)  # more digits change nothing, and Python reads at most 4,300

        return read(least), read(most) if most else None

    def _is_count(self, at: int) -> bool:
        """Returns whether a quantifier such as {2}, {2,} or {2,3} stands at a position."""
        return COUNT.match(self.pattern, at) is not None

    def _read_character(self, char: str, start: int) -> Ranges:
        """Returns the set of characters that a character means outside of brackets."""
        if char == ".":
            return NOT_LINE_ENDS
        if char != "\\":
            return ((ord(char), ord(char)),)
        if self.pattern[self.at : self.at + 1] in ("b", "B"):
            self.refuse("a word boundary, which cannot be followed,", start)
        return self._read_escape(start)

    def _read_escape(self, start: int) -> Ranges:
        char = self.take()
        if char in CLASSES:
            return CLASSES[char]
        if char in "pP":
            return self._read_property(char == "P", start)
        if char in CONTROLS and not (char == "0" and self.pattern[self.at : self.at + 1].isdigit()):
            point = CONTROLS[char]
        elif char == "x":
            point = self._read_hex(2, start)
        elif char == "u":
            point = self._read_unicode(start)
        elif char == "c":
            letter = self.take()
            if not (letter.isascii() and letter.isalpha()):
                self.refuse("the unknown escape \\c", start)
            point = ord(letter) % 32
        elif char.isdigit() or char == "k":
            self.refuse("a back reference, which cannot be followed,", start)
        elif char.isalpha():
            self.refuse(f"the unknown escape \\{char}", start)
        else:
            point = ord(char)
        return ((point, point),)

    def _read_hex(self, digits: int, start: int) -> int:
        text = self.pattern[self.at : self.at + digits]
        self.at += digits
        if len(text) != digits or not digits or not {*text} <= {*string.hexdigits}:
            self.refuse("half an escape", start)
        return int(text, 16)

    def _read_unicode(self, start: int) -> int:
        if self.skip("{"):
            end = self.pattern.find("}", self.at)
            point = self._read_hex(end - self.at, start)
            self.at = end + 1
            if point > LAST_CODE_POINT:
                self.refuse("no character", start)
            return point
        point = self._read_hex(4, start)
        if 0xD800 <= point < 0xDC00 and self.skip("\\u"):
            second = self._read_hex(4, start)
            if not 0xDC00 <= second < 0xE000:
                self.refuse("half a character", start)
            point = 0x10000 + (point - 0xD800 << 10) + second - 0xDC00
        return point

    def _read_property(self, is_inverted: bool, start: int) -> Ranges:
        end = self.pattern.find("}", self.at)
        if not self.skip("{") or end < 0:
            self.refuse("half an escape", start)
        name = self.pattern[self.at : end].removeprefix("General_Category=").removeprefix("gc=")
        self.at = end + 1
        category = LONG_CATEGORIES.get(name, name)
        ranges = _category(category) if category.isalpha() and len(category) < 3 else ()
        if not ranges:
            self.refuse("a property other than a general category, which cannot be followed,", start)
        return invert(ranges) if is_inverted else ranges

    def _read_class(self) -> Ranges:
        """Returns the set of characters that brackets mean."""
        start = self.at - 1
        is_inverted = self.skip("^")
        ranges: list[tuple[int, int]] = []
        while not self.skip("]"):
            members = self._read_member(start)
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.at += 1
                last = self._read_member(start)
                are_characters = all(len(end) == 1 and end[0][0] == end[0][1] for end in (members, last))
                if not are_characters or members > last:
                    self.refuse("a range without two ends in order", start)
                members = ((members[0][0], last[0][0]),)
            ranges += members
        return invert(merge(ranges)) if is_inverted else merge(ranges)

    def _read_member(self, start: int) -> Ranges:
        at = self.at
        if self.at == len(self.pattern):
            self.refuse("an unmatched [", start)
        if posix_class := POSIX_CLASS.match(self.pattern, at):
            self.refuse(f"{posix_class[0]} (write \\p{{L}}, \\d, \\s or the characters)", at)
        char = self.take()
        if char != "\\":
            return ((ord(char), ord(char)),)
        return ((8, 8),) if self.skip("b") else self._read_escape(at)


@cache
def _category(name: str) -> Ranges:
    """Returns the characters of a general category of Unicode, of one letter or two."""
    points = range(LAST_CODE_POINT + 1)
    return merge((point, point) for point in points if unicodedata.category(chr(point)).startswith(name))
