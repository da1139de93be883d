"""Compiled programs of this process, shared by models of equal shape and calls of equal size.

A program is compiled at its first call and kept until `clear`. Its key is the function, its static arguments, the structure
of its other arguments with the shapes, dtypes and shardings of their arrays, the mesh, and JAX's precision; never values.

With `folder` set, executables are also stored on disk, so that a later process neither traces nor compiles. JAX's own
compilation cache saves only the compiler's time, not the tracing and lowering of every layer.

`compile_ahead` compiles programs in a background thread before they are needed.
"""

import atexit
import hashlib
import logging
import math
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
import numpy as np
from jax.experimental import serialize_executable

from treeflash_jax.core import devices, files, sharding
from treeflash_jax.core.clock import Clock

logger = logging.getLogger("treeflash_jax")
folder: Path | None = None  # of stored executables; None stores none
KEPT_FILES = 128  # number of most recently used executables kept in the folder
NAME = re.compile(r"[0-9a-f]{16}-\d+-\w+-[0-9a-f]{32}")  # of an executable's file
AHEAD = 5  # most executables read ahead: those of one answer
REHEARSED_BYTES = 2**30  # of arguments; larger models compute for longer than a rehearsal saves
THREAD = "treeflash-ahead"  # name of threads that a command does not wait for
LAST_SECONDS = 10.0  # before the most recent use of an executable; earlier uses belong to other answers


@dataclass(frozen=True)
class Program:
    """A jitted function, and an executable compiled from it, which takes those of its arguments that are not static."""

    function: Any
    run: Callable[..., Any]


_programs: dict[Any, Program] = {}
_locks: dict[Any, threading.Lock] = {}
_ahead: dict[Path, Future] = {}
_thread: threading.Thread | None = None


def call(
    function: Any, *args: Any, mesh: Any = None, clock: Clock | None = None, is_kept: bool = True, **static: Any
) -> Any:
    """Runs a jitted function, compiling it ahead of time if these shapes are new.

    Args:
      *args: trees of arrays. With a `jax.ShapeDtypeStruct` among them, the program is compiled but not run, and the shapes
        of its result are returned.
      mesh: ambient mesh of the program; None for one device.
      clock: counts compilation separately from running and announces it if it takes long.
      is_kept: whether `folder` may store the executable; only if its static arguments and the source of this package
        determine it.
      **static: static arguments of `function`, by name.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
    of_products = _precision(leaves, mesh)
    precision = jax.config.jax_enable_x64, of_products
    key = (function, tuple(sorted(static.items())), structure, shapes, mesh, precision)
    with sharding.ambient(mesh), jax.default_matmul_precision(of_products):
        if key not in _programs:
            where = list(leaves[0].sharding.device_set if mesh is None else mesh.devices.flat)
            path = _path(key, where) if is_kept else None
            with clock.paused() if clock else nullcontext():
                executable = _read(path, where)
            if executable is None:
                lock = _locks.setdefault(key, threading.Lock())  # a background thread may be compiling it
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


def _precision(leaves: Sequence[Any], mesh: Any) -> str | None:
    """Returns the precision of matrix products: that of JAX, but the highest for float32 on accelerators.

    Their default rounds float32 to TF32 or bfloat16, by more than the near-ties of float32 allow.
    """
    chosen = jax.config.jax_default_matmul_precision
    is_wide = all(x.dtype.itemsize >= 4 for x in leaves if jax.numpy.issubdtype(x.dtype, np.floating))
    return "highest" if chosen is None and is_wide and not devices.describe_mesh(mesh).is_cpu else chosen


def abstract_shapes(tree: Any) -> Any:
    """Returns the `jax.ShapeDtypeStruct` of every array of a tree; with these, `call` only compiles."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _path(key: Any, where: Sequence[Any]) -> Path | None:
    """Returns the file of a program's executable for these devices, or None.

    None while JAX's own cache is on: executables that XLA:CPU read from it and serialized again do not run. None for
    several CPU devices: once read from a file, executables start their collectives in any order and wait for ever.
    """
    if folder is None or jax.config.jax_compilation_cache_dir is not None or jax.process_count() > 1:
        return None
    if len(where) > 1 and devices.describe(where[0]).is_cpu:
        return None
    function, static, structure, shapes, mesh, precision = key
    mesh_key = None if mesh is None else (mesh, mesh.axis_types, [device.id for device in mesh.devices.flat])
    random = jax.config.jax_default_prng_impl, jax.config.jax_threefry_partitionable
    text = repr((function.__module__, function.__name__, static, str(structure), shapes, mesh_key, precision, random))
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return folder / f"{_environment()}-{len(where)}-{function.__name__}-{digest}"


def read_ahead() -> None:
    """Starts reading the executables for one device that the last answer used, on a thread and in their order.

    Called before weights are read: on two CPU cores, the first text of SmolLM2 then comes after 2.4 seconds instead of 3.6.
    Executables for several devices are left out: XLA would end the process at one that is loaded onto a single device.
    """
    if folder is None or jax.config.jax_compilation_cache_dir is not None:
        return
    used = {path: path.stat().st_mtime for path in folder.glob(f"{_environment()}-1-*")}
    since = max(used.values(), default=0.0) - LAST_SECONDS
    paths = sorted((path for path, time in used.items() if time >= since), key=used.get)[-AHEAD:]
    pool = ThreadPoolExecutor(1)
    _ahead.update({path: pool.submit(_load_and_rehearse, path) for path in paths if path not in _ahead})
    pool.shutdown(wait=False)


@cache
def _environment() -> str:
    """Returns a digest of the inputs of all executables: this source, versions, device and flags."""
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(path.read_bytes())
    versions = [sys.version, *(metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy"))]
    default, runtime = devices.here(), (jax.devices()[0].client.platform_version, jax.device_count())
    device = default.backend, default.kind, sorted(default.features), runtime
    flags = sorted((name, value) for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", "LIBTPU_")))
    return hashlib.sha256(repr((source.hexdigest(), versions, device, flags)).encode()).hexdigest()[:16]


def _read(path: Path | None, where: Sequence[Any]) -> Any:
    """Loads the executable in a file for these devices; None if the file is missing or does not load."""
    if path is None or not path.is_file():
        return None
    with suppress(OSError):  # a read-only folder
        path.touch()
    job = _ahead.pop(path, None) if where == jax.devices()[:1] else None
    return job.result() if job else _load(path, where)


def _load(path: Path, where: Sequence[Any]) -> Any:
    try:
        return serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()), execution_devices=where)
    except Exception as error:  # damaged, or incompatible with this runtime: compiled again
        logger.info("%s does not load (%s)", path, error)
        return None


def _load_and_rehearse(path: Path) -> Any:
    """Loads an executable for one device and, on a CPU, runs it once: XLA:CPU prepares its products at their first use."""
    executable = _load(path, jax.devices()[:1])
    if executable is not None and devices.here().is_cpu:
        try:
            _rehearse(executable)
        except Exception as error:  # out of memory
            logger.info("%s does not run (%s)", path, error)
    return executable


def _rehearse(executable: Any) -> None:
    """Runs an executable of a small model on arguments without content.

    Donated arguments are zeros. The others are zeros, too, or ones if they are integers, so that loops end after one round;
    equal ones are shared.
    """
    infos = executable.args_info[0]
    if sum(info.dtype.itemsize * math.prod(info.shape) for info in jax.tree.leaves(infos)) > REHEARSED_BYTES:
        return
    shared: dict[Any, jax.Array] = {}

    def argument(info: Any) -> jax.Array:
        shape, dtype = info.shape, info.dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
            return jax.random.wrap_key_data(np.zeros(data.shape, data.dtype))
        if info.donated:
            return jax.device_put(np.zeros(shape, dtype))
        if (shape, dtype) not in shared:
            shared[shape, dtype] = jax.device_put(np.full(shape, jax.dtypes.issubdtype(dtype, np.integer), dtype))
        return shared[shape, dtype]

    jax.block_until_ready(executable(*jax.tree.map(argument, infos)))


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
    """Frees all programs; the next calls compile again.

    For processes that load many models of different sizes: on Linux, programs for the CPU use memory maps, which are
    limited to 65,530 per process.
    """
    for function in {program.function for program in _programs.values()}:
        function.clear_cache()  # JAX's own references
    _programs.clear()


def _note() -> str:
    cache_folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir or folder
    kept = f"kept in {cache_folder}" if cache_folder else "kept until this process ends"
    return f"compiling, once for this batch size, length and tree; programs are {kept}"


def compile_ahead(job: Callable[[], Any]) -> None:
    """Runs `job` in the background unless an earlier one still runs; only logs a failure."""
    global _thread
    if _thread is not None and _thread.is_alive():
        return
    has_x64 = jax.config.jax_enable_x64  # may be a setting of the calling thread only

    def run() -> None:
        try:
            with jax.enable_x64(has_x64):
                job()
        except Exception:
            logger.info("compiling ahead failed", exc_info=True)

    _thread = threading.Thread(target=run, daemon=True, name=THREAD)
    _thread.start()


@atexit.register
def wait() -> None:
    """Waits for the job: Python 3.11 aborts if a thread returns from XLA while the interpreter ends."""
    if _thread is not None:
        _thread.join()


def leave(status: int) -> None:
    """Ends the process at once if a thread of the name THREAD still runs."""
    if any(thread.name == THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
