"""Runs the compiler of constraints to automata over bytes, in a separate process."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from treeflash_jax.constraints.compiler import compile_process
from treeflash_jax.constraints.compiler.byte_automaton import ByteAutomaton
from treeflash_jax.core.error_text import clipped, logger

Run = Callable[..., subprocess.CompletedProcess]  # runs the compiler's process, as `subprocess.run` does
MOST_STATES = 2**17
MOST_SECONDS, MOST_MEMORY = 60, 2 * 2**30  # limits on the compilation of one constraint
# Imports neither the package nor JAX. OpenBLAS would reserve memory for every core.
START = """import os, sys, types
os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.modules["treeflash_jax"] = package = types.ModuleType("treeflash_jax")
package.__path__ = [sys.argv.pop(1)]
from treeflash_jax.constraints.compiler.compile_process import main
main()"""


class Unusable(Exception):
    """Raised for a constraint that cannot be compiled. The text says why."""


def compile_bytes(
    kind: str, value: str | Sequence[str], depth: int, tokens: Sequence[str] = (), run: Run = subprocess.run
) -> ByteAutomaton:
    """Returns the automaton of a constraint.

    Args:
      kind: "schema" or "structural_tag" (JSON text), "pattern" or "choices".
      depth: largest nesting of values in places that a schema leaves open, or where it contains itself.
      tokens: texts of the added tokens in a structural tag; see `compiler.structural_tags`.

    Raises Unusable for a constraint that cannot be followed, that nothing satisfies, or that exceeds the limits.
    """
    request = {"kind": kind, "value": value, "depth": depth, "states": MOST_STATES, "tokens": tokens}
    command = [sys.executable, "-P", "-c", START, str(Path(__file__).parents[1]), str(MOST_SECONDS), str(MOST_MEMORY)]
    process = run(command, input=json.dumps(request).encode(), capture_output=True)
    if process.returncode == compile_process.REFUSED:
        raise Unusable(f"which cannot be followed: {clipped(process.stderr.decode(), 200)}")
    if process.returncode == 1:  # a bug of the compiler
        traceback = process.stderr.decode()
        logger.error(traceback)
        reason = traceback.strip().rpartition("\n")[2]
        raise RuntimeError(f"the compiler of {kind} failed: {clipped(reason)}")
    is_killed = process.returncode < 0 and process.returncode in (-signal.SIGKILL, -signal.SIGXCPU)  # Windows has neither
    if is_killed or process.returncode == compile_process.TOO_LARGE:
        limits = f"{MOST_SECONDS} s or {MOST_MEMORY / 2**30:g} GiB"
        raise Unusable(f"which takes more than {limits} to compile: give shorter repetitions")
    if process.returncode < 0:  # such as by an overflow of the stack
        raise Unusable(f"which cannot be followed: its compilation crashed with signal {-process.returncode}")
    if process.returncode:
        raise RuntimeError(f"the compiler of {kind} ended with status {process.returncode}")
    return ByteAutomaton.from_bytes(process.stdout)
