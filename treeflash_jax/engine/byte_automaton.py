"""Compiles a regular expression to an automaton over bytes, in a process of its own: a huge one ends that process only.

    python byte_automaton.py SECONDS BYTES < expression > edges

SECONDS of a processor and BYTES of memory are what it may take. An edge is three int32: a state, a byte and the state after
it; END_OF_TEXT in place of the byte says that a text may end in the state. Texts begin in state 0. Exit status 1: stderr
says why the expression cannot be followed; above: it took too much.
"""

import resource
import sys
from array import array

END_OF_TEXT = 256
START, END = "\x01\x01", "\x00"  # around a text
START_TOKEN, NO_TOKEN = 256, 257  # ids; those of bytes are their values


def read_edges(expression: str) -> array:
    """Returns the edges of the automaton, without those that nothing leads to.

    What is compiled is START, the expression and END, or nothing. Automata of outlines-core look for matches that begin at
    any byte: without the empty match, which ends that search, a text of up to n characters in quotes, and with quotes in
    it, has some 2^n states. And up to 0.2.14 they lack the ways on from a match to a longer one: here none ends before END
    but the empty one, which START, as a token of two bytes, jumps over.
    """
    from outlines_core import Index, Vocabulary

    tokens = {bytes([byte]): [byte] for byte in range(256)} | {START.encode(): [START_TOKEN]}
    Index(f"{expression}|", Vocabulary(NO_TOKEN, {}))  # refuses what parentheses around it would make an expression
    index = Index(f"(?:{START}(?:{expression}){END})|", Vocabulary(NO_TOKEN, tokens))
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
    for kind, most in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), map(int, sys.argv[1:]), strict=True):
        resource.setrlimit(kind, (most, most))
    try:
        edges = read_edges(sys.stdin.buffer.read().decode())
    except MemoryError:
        sys.exit(2)
    except Exception as error:  # of Rust code: no common class
        sys.exit(str(error))
    edges.tofile(sys.stdout.buffer)


if __name__ == "__main__":
    main()
