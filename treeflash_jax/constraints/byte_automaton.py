"""Compiles a pattern or a JSON schema to an automaton over bytes, in a process of its own: a huge one cannot end others.

    python byte_automaton.py pattern|schema SECONDS BYTES < text > edges

SECONDS of CPU time and BYTES of memory are the most that it takes. An edge is three int32: a state, a byte and the state
after it; END_OF_TEXT in place of the byte says that a text may end in the state. Texts begin in state 0. If it ends with
status 1, stderr says why the text cannot be followed; any other status but 0 means that it took too much.
"""

import ctypes
import signal
import sys
from array import array
from contextlib import suppress

END_OF_TEXT = 256
START, END = "\x01\x01", "\x00"  # around a text
START_TOKEN, EOS_TOKEN = 256, 257  # ids; those of bytes are their values
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
DEEPEST = 1000  # references to definitions inside each other; beyond that, outlines-core leaves them out
ANCHORS = "leave out ^ and $, a pattern matches the whole text"


def read_edges(expression: str) -> array:
    """Returns the edges of the automaton, without those that nothing leads to.

    They are read from the automaton of START, the expression and END, or nothing. outlines-core's automata look for matches
    that begin at any byte, so those of a text of up to n characters in quotes, which may have quotes in it, have some 2^n
    states; the empty match ends that search. Up to 0.2.14 they also lack ways on from a match to a longer one. Here nothing
    but the empty text and what ends with END matches, and START, one token of two bytes, passes what follows the former.
    """
    from outlines_core import Index, Vocabulary

    tokens = {bytes([byte]): [byte] for byte in range(256)} | {START.encode(): [START_TOKEN]}
    Index(f"{expression}|", Vocabulary(EOS_TOKEN, {}))  # refuses what parentheses around it would make an expression
    index = Index(f"(?:{START}(?:{expression}){END})|", Vocabulary(EOS_TOKEN, tokens))
    rows, ends = index.get_transitions(), index.get_final_states()
    if START_TOKEN not in rows[index.get_initial_state()]:
        raise ValueError("nothing matches it")
    numbers, edges = {rows[index.get_initial_state()][START_TOKEN]: 0}, array("i")
    unread = [*numbers]
    while unread:
        state = unread.pop()
        for token, target in rows[state].items():
            if token == ord(END) and target in ends:
                edges.extend((numbers[state], END_OF_TEXT, numbers[state]))
            elif token in range(256) and token != ord(END):
                if target not in numbers:
                    numbers[target] = len(numbers)
                    unread.append(target)
                edges.extend((numbers[state], token, numbers[target]))
    return edges


def main() -> None:
    kind, *limits = sys.argv[1:]
    with suppress(ImportError, ValueError, OSError):  # not every system has such limits
        import resource

        for limit, most in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), map(int, limits), strict=True):
            resource.setrlimit(limit, (most, most))
    with suppress(AttributeError, OSError, TypeError):  # not every system has prctl
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    text = sys.stdin.buffer.read().decode()
    try:
        if kind == "schema":
            from outlines_core.json_schema import build_regex_from_schema

            text = build_regex_from_schema(text, max_recursion_depth=DEEPEST)
        edges = read_edges(text)
    except MemoryError:
        sys.exit(2)
    except Exception as error:  # of Rust code: no common class
        sys.exit(ANCHORS if "start state" in str(error) else str(error))
    edges.tofile(sys.stdout.buffer)


if __name__ == "__main__":
    main()
