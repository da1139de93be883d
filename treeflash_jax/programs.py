"""Compiled programs of this process: models of equal shape, and calls of equal size, share them.

A program is compiled when it is first called with these shapes and kept until `clear`. What shapes it is the function, its
static arguments, the structure of its other arguments with the shapes, dtypes and shardings of their arrays, the mesh, and
JAX's precision. Values never matter, and neither does which model calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from treeflash_jax import devices
from treeflash_jax import mesh as meshes
from treeflash_jax.clock import Clock


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      function: the jitted function it was compiled from.
      run: the executable, which takes the arguments that are not static.
    """

    function: Any
    run: Callable[..., Any]


_programs: dict[Any, Program] = {}
_locks: dict[Any, threading.Lock] = {}


def call(function: Any, *args: Any, mesh: Any = None, clock: Clock | None = None, **static: Any) -> Any:
    """Runs a jitted function, compiling it ahead of time where these shapes are new.

    Args:
      function: a `jax.jit` function.
      *args: its arguments, trees of arrays. With a `jax.ShapeDtypeStruct` among them, the program is compiled only, and the
        shapes of its result are returned.
      mesh: the ambient mesh of the program; None for one device.
      clock: counts compilation apart from running and announces it when it takes long.
      **static: static arguments of `function`, by name.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
    precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    key = (function, tuple(sorted(static.items())), structure, shapes, mesh, precision)
    with meshes.ambient(mesh):
        if key not in _programs:
            lock = _locks.setdefault(key, threading.Lock())  # the background may be compiling it
            with (clock or Clock()).compiling(function.__name__, _note()), lock:
                if key not in _programs:
                    lowered = function.lower(*args, **static)
                    _programs[key] = Program(function, lowered.compile(devices.of_mesh(mesh).compiler_options))
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return shapes_of(_programs[key].run.out_info)
        return _programs[key].run(*args)


def shapes_of(tree: Any) -> Any:
    """The arrays of a tree as shapes, with which `call` compiles and does not run."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def compiled(function: Any = None) -> list[Program]:
    """The programs there are, oldest first; with `function`, those compiled from it."""
    return [program for program in _programs.values() if function in (None, program.function)]


def clear() -> None:
    """Drops all programs, so that their memory is freed. The next calls compile again.

    A process that loads many models of different sizes may need this: on Linux, programs for the CPU take memory maps, of
    which a process may have 65,530.
    """
    for function in {program.function for program in _programs.values()}:
        function.clear_cache()  # JAX keeps what it lowered and compiled, too
    _programs.clear()


def _note() -> str:
    folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    kept = f"kept in {folder}" if folder else "kept until this process ends"
    return f"compiling, once for this batch size, length and tree; programs are {kept}"
