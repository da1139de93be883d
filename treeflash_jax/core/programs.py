"""Compiled programs of this process: models of equal shape, and calls of equal size, share them.

A program is compiled when it is first called with these shapes and kept until `clear`. It is determined by the function,
its static arguments, the structure of its other arguments with the shapes, dtypes and shardings of their arrays, the mesh,
and JAX's precision; never by values, nor by the model that calls.

With `folder` set, executables are also kept on disk, so that a later process neither traces nor compiles. JAX's own
compilation cache saves only the compiler's time, not the tracing and lowering of every layer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from treeflash_jax.core import devices, files, sharding
from treeflash_jax.core.clock import Clock

logger = logging.getLogger("treeflash_jax")
folder: Path | None = None  # of kept executables; None keeps none
KEPT_FILES = 128  # most recently used executables kept in the folder
NAME = re.compile(r"[0-9a-f]{16}-\w+-[0-9a-f]{32}")  # of an executable's file
AHEAD = 4  # executables read ahead: those of one answer


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
_ahead: dict[Path, Future] = {}


def call(
    function: Any, *args: Any, mesh: Any = None, clock: Clock | None = None, is_kept: bool = True, **static: Any
) -> Any:
    """Runs a jitted function, compiling it ahead of time if these shapes are new.

    Args:
      function: a `jax.jit` function.
      *args: its arguments, trees of arrays. With a `jax.ShapeDtypeStruct` among them, the program is compiled only, and the
        shapes of its result are returned.
      mesh: the ambient mesh of the program; None for one device.
      clock: counts compilation apart from running and announces it if it takes long.
      is_kept: whether the executable may be read from and written to `folder`, since its static arguments and the source of
        this package determine it.
      **static: static arguments of `function`, by name.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
    precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    key = (function, tuple(sorted(static.items())), structure, shapes, mesh, precision)
    with sharding.ambient(mesh):
        if key not in _programs:
            path = _path(key) if is_kept else None
            with clock.paused() if clock else nullcontext():
                executable = _read(path, list(leaves[0].sharding.device_set if mesh is None else mesh.devices.flat))
            if executable is None:
                lock = _locks.setdefault(key, threading.Lock())  # the background may be compiling it
                with (clock or Clock()).compiling(function.__name__, _note()), lock:
                    if key in _programs:
                        executable = _programs[key].run
                    else:
                        lowered = function.lower(*args, **static)
                        executable = lowered.compile(devices.describe_mesh(mesh).compiler_options)
                        _programs[key] = Program(function, executable)
                        _write(path, executable)
            _programs.setdefault(key, Program(function, executable))
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return abstract_shapes(_programs[key].run.out_info)
        return _programs[key].run(*args)


def abstract_shapes(tree: Any) -> Any:
    """Returns the arrays of a tree as shapes, with which `call` compiles and does not run."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _path(key: Any) -> Path | None:
    """Returns the file of a program's executable, or None.

    If JAX keeps programs itself, there is none: what XLA:CPU has read from JAX's cache and serializes again does not run.
    """
    if folder is None or jax.config.jax_compilation_cache_dir is not None or jax.process_count() > 1:
        return None
    function, static, structure, shapes, mesh, precision = key
    place = None if mesh is None else (mesh, mesh.axis_types, [device.id for device in mesh.devices.flat])
    random = jax.config.jax_default_prng_impl, jax.config.jax_threefry_partitionable
    text = repr((function.__module__, function.__name__, static, str(structure), shapes, place, precision, random))
    return folder / f"{_environment()}-{function.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def read_ahead() -> None:
    """Starts reading the executables that were used last, on a thread.

    Called before weights are read: on two CPU cores, 32 tokens of SmolLM2 from a warm cache then end a second earlier.
    """
    if folder is None or jax.config.jax_compilation_cache_dir is not None:
        return
    paths = sorted(folder.glob(f"{_environment()}-*"), key=lambda path: path.stat().st_mtime)[-AHEAD:]
    pool = ThreadPoolExecutor(1)
    _ahead.update({path: pool.submit(_load, path, jax.devices()[:1]) for path in paths if path not in _ahead})
    pool.shutdown(wait=False)


@cache
def _environment() -> str:
    """Returns a digest of what determines executables besides a call: this source, versions, device and flags."""
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(path.read_bytes())
    versions = [sys.version, *(metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy"))]
    here = devices.here()
    device = [here.backend, here.kind, sorted(here.features), jax.devices()[0].client.platform_version, jax.device_count()]
    flags = sorted((name, value) for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", "LIBTPU_")))
    return hashlib.sha256(repr((source.hexdigest(), versions, device, flags)).encode()).hexdigest()[:16]


def _read(path: Path | None, where: Sequence[Any]) -> Any:
    """Returns the executable in a file, loaded for these devices; None if the file is missing or does not load."""
    if path is None or not path.is_file():
        return None
    with suppress(OSError):  # a folder that may only be read
        path.touch()
    job = _ahead.pop(path, None) if where == jax.devices()[:1] else None
    return job.result() if job else _load(path, where)


def _load(path: Path, where: Sequence[Any]) -> Any:
    try:
        return serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()), execution_devices=where)
    except Exception as error:  # damaged, or refused by a runtime that differs in unlisted ways: compiled again
        logger.info("%s does not load (%s)", path, error)
        return None


def _write(path: Path | None, executable: Any) -> None:
    if path is None:
        return
    try:
        files.write(path, pickle.dumps(serialize_executable.serialize(executable)))
        kept = [file for file in path.parent.iterdir() if NAME.fullmatch(file.name)]
        for file in sorted(kept, key=lambda file: file.stat().st_mtime)[:-KEPT_FILES]:
            file.unlink(missing_ok=True)
    except Exception as error:  # a full disk, or a program that cannot be serialized: the next process compiles again
        logger.info("%s is not kept (%s)", path, error)


def compiled(function: Any = None) -> list[Program]:
    """Returns the programs of this process, oldest first; with `function`, those compiled from it."""
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
    place = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir or folder
    kept = f"kept in {place}" if place else "kept until this process ends"
    return f"compiling, once for this batch size, length and tree; programs are {kept}"
