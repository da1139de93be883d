"""Texts of byte automata: which are in one, and random ones."""

import json
import random

from treeflash_jax.constraints.compiler.compile_process import compile_term
from treeflash_jax.constraints.compiler.json_texts import parse
from treeflash_jax.constraints.compiler.terms import Term, contains, is_nothing

FRIENDLY = b'abfox-"\\1205., []{}:'  # bytes that random texts prefer


def schema_term(schema: object, depth: int = 3) -> Term:
    return compile_term({"kind": "schema", "value": json.dumps(schema), "depth": depth})


def is_possible(term: Term, value: object) -> bool:
    """Returns whether a JSON value can be written, with or without spaces."""
    texts = [json.dumps(value, ensure_ascii=False, separators=pair, default=float) for pair in ((", ", ": "), (",", ":"))]
    found = [contains(term, text.encode()) for text in texts]
    assert found[0] == found[1]
    return found[0]


def random_text(term: Term, rng: random.Random, longest: int = 100) -> str | None:
    """Returns a text of a set: some bytes at random, then the shortest end; None for a set without texts."""
    if is_nothing(term):
        return None
    text = b""
    while len(text) < longest and not (term.has_empty and rng.random() < 0.3):
        edges = [(mask, after) for mask, after in term.edges() if not is_nothing(after)]
        if not edges:
            break
        mask, term = rng.choice(edges)
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        preferred = [byte for byte in allowed if byte in FRIENDLY]
        text += bytes([rng.choice(preferred if preferred and rng.random() < 0.7 else allowed)])
    unread = [(text, term)]
    seen = {term}
    for begun, state in unread:
        if state.has_empty:
            return begun.decode()
        for mask, after in state.edges():
            if after not in seen:
                seen.add(after)
                unread.append((begun + bytes([mask.bit_length() - 1]), after))
    raise AssertionError("no end")


def assert_texts_are_valid(term: Term, is_valid, rng: random.Random, draws: int = 10) -> None:
    """Checks random texts with `is_valid`, which gets values with exact numbers."""
    for _ in range(draws):
        text = random_text(term, rng)
        if text is not None:
            assert is_valid(parse(text)), text
