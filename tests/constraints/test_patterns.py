"""Patterns of ECMA-262: the texts that they match, by Python's re where both mean the same."""

import json
import random
import re

import hypothesis
import pytest
from byte_texts import random_text
from hypothesis import strategies as st

from treeflash_jax.constraints.compiler.characters import plain, quoted
from treeflash_jax.constraints.compiler.patterns import full_match, search
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import complement, contains, intersect, is_nothing, union

MATCHED = [  # a pattern, texts that it matches as a whole, and others
    (r"\d+(\.\d+)?", ["7", "12.5"], ["٣", "1.", ""]),
    (r"\w\W\s\S", ["a-\ufeffx", "_é\u2028é"], ["éaaa", "a- \t"]),
    (r".", ["a", "\U0001f600", "\x00"], ["\n", "\r", "\u2028", "ab"]),
    (r"[^a-c\d]", ["d", "é", "\n"], ["b", "5"]),
    (r"[^]|[]", ["a", "\n"], [""]),
    (r"[\]\-x^]+", ["]-x^"], ["\\"]),
    (r"a{2}b{1,}c{0,2}", ["aab", "aabbcc"], ["ab", "aabccc"]),
    (r"a{x}\{,2}[{,2}][[:]", ["a{x}{,2},:"], ["aa"]),
    (r"(?:ab|(?<name>c))*?", ["", "abcab"], ["a"]),
    (r"\x41\u0042\u{43}\ud83d\ude00\cJ\0\/\-", ["ABC\U0001f600\n\x00/-"], []),
    (r"^a$|^b", ["a", "b"], ["ab"]),
    (r"(^|x)a", ["a", "xa"], ["ba"]),
    (r"x*^a", ["a"], ["xa"]),
    (r"x^a", [], ["xa", "a"]),
    (r"\p{Lu}\p{Letter}\P{L}", ["Éé1"], ["éé1"]),
]


@pytest.mark.parametrize("case", MATCHED, ids=lambda case: case[0])
def test_texts_that_a_pattern_matches(case):
    pattern, matched, others = case
    term = full_match(pattern, plain)
    assert all(contains(term, text.encode()) for text in matched) and not any(
        contains(term, text.encode()) for text in others
    )


@pytest.mark.parametrize(
    "pattern, what",
    [
        ("(", "unmatched ( at position 0"),
        ("a)", "unmatched ) at position 1"),
        ("[a", "unmatched [ at position 0"),
        ("a(?=b)", "look-around, which cannot be followed, at position 1"),
        ("(?<!b)", "look-around"),
        ("(?i)a", "flags, which cannot be followed, at position 0"),
        (r"a\b", "a word boundary, which cannot be followed, at position 1"),
        (r"(a)\1", "a back reference"),
        (r"\q", r"the unknown escape \q"),
        (r"\x4", "half an escape"),
        (r"\u{110000}", "no character"),
        ("+", "+ without anything before it"),
        ("a**", "a repetition of a repetition at position 2"),
        ("(^a)*", "a repetition of ^ or $"),
        ("a{3,2}", "between 0 and 10,000"),
        ("a{10001}", "between 0 and 10,000"),
        (f"a{{{'9' * 5000}}}", "between 0 and 10,000"),
        ("a{2}{3}", "a repetition of a repetition at position 4"),
        ("[a-z]{,3}", "{,3} (write {0,3}) at position 5"),
        ("a{,}", "{,} (write {0,}) at position 1"),
        ("[^a[:alpha:]]", r"[:alpha:] (write \p{L}, \d, \s or the characters) at position 3"),
        ("{2}a", "{ without anything before it"),
        (r"\pL", "half an escape at position 0"),
        (r"\ud83d\u0041", "half a character"),
        (r"\p{sc=L}", "a property other than a general category"),
        ("[b-a]", "a range without two ends in order"),
        (r"\p{Script=Greek}", "a property other than a general category"),
        ("a\\", "no end at position 2"),
    ],
)
def test_what_is_refused_says_where(pattern, what):
    with pytest.raises(Refused) as caught:
        full_match(pattern, plain)
    assert what in str(caught.value)


def patterns() -> st.SearchStrategy[str]:
    """Patterns that ECMA-262 and Python's re read alike."""
    atoms = st.sampled_from(["a", "b", "é", "[ab]", "[^a]", r"\\", '"', "(?:)"])

    def longer(inner):
        joined = st.lists(inner, min_size=1, max_size=3).map("".join)
        return st.one_of(
            joined,
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        )

    body = st.recursive(atoms, longer, max_leaves=6)
    return st.tuples(st.sampled_from(["", "^"]), body, st.sampled_from(["", r"$"])).map("".join)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(patterns(), st.lists(st.text('ab"\\é\n\x01', max_size=5), min_size=3, max_size=3), st.integers(0, 2**32))
def test_random_patterns(pattern, texts, seed):
    """Inside quotes and without, found anywhere or as a whole."""
    meaning = re.compile(pattern.replace("$", r"\Z"))
    for writer, write in (
        (plain, str),
        (quoted, lambda text: json.dumps(text, ensure_ascii=False)[1:-1]),
    ):
        for term, match in ((full_match(pattern, writer), meaning.fullmatch), (search(pattern, writer), meaning.search)):
            for text in texts:
                assert contains(term, write(text).encode()) == bool(match(text)), text
            if writer is plain:
                text = random_text(term, random.Random(seed), 12)
                assert text is None or match(text), text
            both, either = intersect(term, complement(term)), union(term, complement(term))
            assert is_nothing(both) and is_nothing(complement(either))
