"""Automata over bytes: compiled in a process with limits, and the smallest of their texts."""

import itertools
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from treeflash_jax.constraints.compile_bytes import Unusable, compile_bytes
from treeflash_jax.constraints.compiler.byte_automaton import ByteAutomaton, minimize
from treeflash_jax.decoding.automaton import NOWHERE


def is_text(automaton: ByteAutomaton, text: bytes) -> bool:
    state = 0
    for byte in text:
        state = automaton.next_qk[state, automaton.class_y[byte]]
        if state == NOWHERE:
            return False
    return bool(automaton.is_final_q[state])


def test_smallest_automaton_of_random_ones():
    """It has the same texts, and no two states have the same texts after them."""
    rng = np.random.default_rng(0)
    class_y = np.zeros(256, np.int64)
    class_y[ord("b")] = 1
    texts = [bytes(text) for size in range(8) for text in itertools.product(b"ab", repeat=size)]
    for _ in range(40):
        states = int(rng.integers(1, 12))
        next_qk = rng.integers(-1, states, (states, 2)).astype(np.int32)
        automaton = ByteAutomaton(next_qk, class_y, rng.random(states) < 0.4)
        if not any(is_text(automaton, text) for text in texts):
            continue
        smallest = minimize(automaton)
        assert [is_text(smallest, text) for text in texts] == [is_text(automaton, text) for text in texts]
        after = [tuple(_texts_from(smallest, state, texts)) for state in range(len(smallest.next_qk))]
        assert len({*after}) == len(after) and all(map(any, after))


def _texts_from(automaton: ByteAutomaton, state: int, texts: list[bytes]) -> list[bool]:
    order = [state, *(other for other in range(len(automaton.next_qk)) if other != state)]
    number = np.append(np.argsort(order), NOWHERE)
    return [
        is_text(ByteAutomaton(number[automaton.next_qk[order]], automaton.class_y, automaton.is_final_q[order]), t)
        for t in texts
    ]


def test_typical_schemas_are_small():
    """Numbers of states, which a server limits."""
    sizes = {
        '{"type": "object"}': 2_751,
        '{"type": "string", "maxLength": 100}': 1_403,
        '{"type": "array", "items": {"type": "integer"}}': 8,
    }
    for schema, states in sizes.items():
        assert len(compile_bytes("schema", schema, 6).next_qk) == states


def test_a_bug_of_the_compiler_is_one_line_and_a_traceback_in_the_log(caplog):
    traceback = "Traceback (most recent call last):\n  File x\nTypeError: a bug\n"
    ended = SimpleNamespace(returncode=1, stderr=traceback.encode())
    with pytest.raises(RuntimeError, match="^the compiler of pattern failed: TypeError: a bug$"):
        compile_bytes("pattern", "a", 6, run=lambda *_, **__: ended)
    assert caplog.messages == [traceback]


@pytest.mark.parametrize("status, error, words", [
    (-signal.SIGKILL, Unusable, "give shorter repetitions"), (-signal.SIGXCPU, Unusable, "give shorter repetitions"),
    (-signal.SIGSEGV, Unusable, "crashed with signal 11$"), (-signal.SIGABRT, Unusable, "crashed with signal 6$"),
    (120, RuntimeError, "^the compiler of pattern ended with status 120$"),
])  # fmt: skip
def test_only_limits_are_reported_as_limits(status, error, words):
    with pytest.raises(error, match=words):
        compile_bytes("pattern", "a", 6, run=lambda *_, **__: SimpleNamespace(returncode=status))


def test_systems_without_these_signals_compile(monkeypatch):
    for name in ("SIGKILL", "SIGXCPU"):
        monkeypatch.delattr(signal, name)
    assert is_text(compile_bytes("pattern", "a", 6), b"a")


def test_what_takes_too_much_is_refused(monkeypatch):
    with pytest.raises(Unusable, match="nothing satisfies it"):
        compile_bytes("schema", "false", 6)
    with pytest.raises(Unusable, match="half a character"):
        compile_bytes("choices", ["\ud800"], 6)
    with pytest.raises(Unusable, match="more than 131,072 states"):
        compile_bytes("pattern", "(a{1,400}b){1,400}", 6)
    with pytest.raises(Unusable, match="nests too deep"):
        compile_bytes("schema", '{"items":' * 5000 + "{}" + "}" * 5000, 6)
    assert is_text(compile_bytes("choices", ["a\x00b", "é"], 6), b"a\x00b")
    monkeypatch.setattr("treeflash_jax.constraints.compile_bytes.MOST_MEMORY", 2**26)
    with pytest.raises(Unusable, match="takes more than 60 s or 0.0625 GiB to compile"):
        compile_bytes("pattern", "(a{1,999}b){1,999}", 6)
