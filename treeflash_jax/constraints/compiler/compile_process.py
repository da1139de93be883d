"""Compiles one constraint; a script that runs in a separate process.

Reads JSON from stdin: {"kind": "schema" | "pattern" | "choices" | "structural_tag", "value": ..., "depth": levels,
"states": largest number of states, "tokens": texts of added tokens in a structural tag}. Writes `ByteAutomaton.to_bytes()`.
Exit status REFUSED: the constraint has no automaton, and stderr says why. TOO_LARGE: memory did not suffice.
"""

import ctypes
import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from treeflash_jax.constraints.compiler.byte_automaton import ByteAutomaton, read_automaton
from treeflash_jax.constraints.compiler.characters import plain
from treeflash_jax.constraints.compiler.json_texts import parse
from treeflash_jax.constraints.compiler.patterns import full_match
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.structural_tags import tag_texts
from treeflash_jax.constraints.compiler.terms import Term, TooLarge, is_nothing, literal, union

REFUSED, TOO_LARGE = 3, 4  # exit statuses
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
DEEPEST = 10_000  # limit on the recursion of calls


def compile_term(request: Mapping[str, Any]) -> Term:
    """Returns the texts of a constraint. Raises Refused, RecursionError, and TooLarge."""
    kind, value = request["kind"], request["value"]
    if kind == "choices":
        return union(*(literal(choice.encode()) for choice in value))
    if kind == "pattern":
        return full_match(value, plain)
    if kind == "structural_tag":
        return tag_texts(parse(value), request["depth"], request["tokens"])
    from treeflash_jax.constraints.compiler.values import schema_texts  # imports a package that patterns do not need

    return schema_texts(parse(value), request["depth"])


def compile_automaton(request: Mapping[str, Any]) -> ByteAutomaton:
    """Returns the automaton of a constraint. Raises Refused if it cannot be followed, or if nothing satisfies it."""
    try:
        term = compile_term(request)
        if is_nothing(term, request["states"]):
            raise Refused("nothing satisfies it")
        return read_automaton(term, request["states"])
    except TooLarge:
        raise Refused(f"it has more than {request['states']:,} states") from None
    except RecursionError:
        raise Refused("it nests too deep") from None
    except UnicodeEncodeError:
        raise Refused("it has half a character, which no answer has") from None


def limit(seconds: int, size: int) -> None:
    """Limits the CPU time and the memory (in bytes) of this process, and ends it with its parent, if the system can."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, size)):
            resource.setrlimit(kind, (most, most))
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)


def main() -> None:
    limit(*map(int, sys.argv[1:]))
    sys.setrecursionlimit(DEEPEST)
    try:
        automaton = compile_automaton(json.load(sys.stdin.buffer))
    except MemoryError:
        sys.exit(TOO_LARGE)
    except Refused as error:
        sys.stderr.buffer.write(str(error).encode("utf-8", "backslashreplace"))
        sys.exit(REFUSED)
    sys.stdout.buffer.write(automaton.to_bytes())
