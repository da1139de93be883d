"""Patterns and schemas as automata over bytes, compiled by the package outlines-core in a process of its own."""

import subprocess
import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib.util import find_spec

import numpy as np

from treeflash_jax.constraints import byte_automaton
from treeflash_jax.core.checks import clipped
from treeflash_jax.decoding.automaton import NOWHERE

RUN: ContextVar[Callable[..., subprocess.CompletedProcess]] = ContextVar("run", default=subprocess.run)  # starts compilers
MOST_STATES = 2**17
MOST_SECONDS, MOST_MEMORY = 60, 2 * 2**30  # that compiling an expression may take


class Unusable(Exception):
    """An expression without a table; the text says why."""


def compile_bytes(kind: str, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the state after each byte, [q, 256], and whether a text may end in a state, [q]; texts begin in state 0.

    Args:
      kind: what `text` is: "pattern" or "schema".
    """
    if find_spec("outlines_core") is None:
        raise ValueError('schema, pattern and choices need outlines-core: pip install "treeflash-jax[schema]"')
    command = [sys.executable, byte_automaton.__file__, kind, str(MOST_SECONDS), str(MOST_MEMORY)]
    run = RUN.get()(command, input=text.encode(), capture_output=True)
    if run.returncode == 1:
        raise Unusable(f"which cannot be followed: {clipped(run.stderr.decode(), 160)}")
    if run.returncode:
        limits = f"{MOST_SECONDS} s or {MOST_MEMORY / 2**30:g} GiB"
        raise Unusable(f"which takes more than {limits} to compile: give shorter repetitions")
    edges_e3 = np.frombuffer(run.stdout, np.int32).reshape(-1, 3)
    states = 1 + edges_e3[:, 2].max()
    if states > MOST_STATES:
        raise Unusable(f"whose {states:,} states exceed {MOST_STATES:,}")
    next_qy = np.full((states, byte_automaton.END_OF_TEXT + 1), NOWHERE, np.int32)
    next_qy[edges_e3[:, 0], edges_e3[:, 1]] = edges_e3[:, 2]
    return next_qy[:, :-1], next_qy[:, -1] != NOWHERE
