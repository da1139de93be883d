"""Compiled programs of this process. Models of equal shapes share them, and so do calls of equal size.

A program is compiled at its first call. It is kept until `clear`, or until there are too many: then the least recently used
programs are freed. The key of a program is its function, its static arguments, the structure of its other arguments with
the shapes, dtypes and shardings of their arrays, the mesh, and JAX's precision. Values are never part of the key.
"""

import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered, Wrapped

from treeflash_jax.core import compile_times, files, sharding
from treeflash_jax.core.clock import Clock
from treeflash_jax.core.dtypes import bits

MOST_PROGRAMS = 256
# Linux gives a process 65,530 memory maps, and a program for the CPU uses some 850. XLA crashes if none is left.
MOST_MAPS = 40_000
KEPT_SECONDS = 0.1  # commands store a program on disk if compiling it takes at least this long
ROUND_FUNCTIONS: set[Wrapped] = set()  # jitted functions that run rounds


@dataclass(eq=False)
class Program:
    """A jitted function and an executable compiled from it. The executable takes the arguments that are not static.

    Attributes:
      labels: digest of the program, then the name of its function with a digest of its model; equal in all processes.
      last_use: number that grows with every call.
    """

    function: Wrapped
    future: futures.Future
    labels: tuple[str, str] = ("", "")
    has_run: bool = False
    last_use: int = 0

    @property
    def executable(self) -> Any:
        """The executable. Waits until it is compiled."""
        return self.future.result()


_programs: dict[Any, Program] = {}
_uses = itertools.count()
_times: Path | None = None  # file of `compile_times`, beside programs that are kept on disk
_changing = RLock()  # held while the table is read or changed, but not while a program is traced or compiled
_unstored = Lock()  # held while compiling a program that must not be stored on disk


def call(function: Wrapped, *args: Any, mesh: Mesh | None = None, clock: Clock | None = None, **static: Any) -> Any:
    """Runs a jitted function, and compiles it ahead of time if these shapes are new.

    Args:
      *args: trees of arrays.
      mesh: ambient mesh of the program; None for one device.
      clock: clock that counts compilation apart from running, and announces compilation if it takes long.
      **static: static arguments of `function`, by name.
    """
    clock = clock or Clock()
    program = start_compiling(function, *args, mesh=mesh, clock=clock, **static)
    wait(program, clock=clock)
    outputs = program.executable(*args)
    program.has_run = True
    return outputs


def wait(*programs: Program, clock: Clock) -> None:
    """Waits until programs are compiled; see `as_compiled`."""
    for _ in as_compiled(*programs, clock=clock):
        pass


def as_compiled(*programs: Program, clock: Clock) -> Iterator[Program]:
    """Yields programs in the given order, each as soon as it is compiled. The clock counts the waiting as compilation.

    A program that takes over a second is announced. The announcement has its number among the programs that are not yet
    compiled, and the time that it took in an earlier process if that is known.
    """
    unfinished = [program for program in programs if not program.future.done()]
    for program in programs:
        if not program.future.done():
            _wait_for(program, unfinished, clock)
        yield program


def _wait_for(program: Program, unfinished: Sequence[Program], clock: Clock) -> None:
    name = program.function.__name__
    since = time.perf_counter()
    text = f"compiling {name.replace('_', ' ')}"
    if len(unfinished) > 1:
        text += f", {unfinished.index(program) + 1} of {len(unfinished)}"
    seconds = _times and compile_times.estimate(_times, *program.labels)
    if seconds:
        text += f": about {max(1, round(seconds))} s, as last time"
    with clock.compiling(name, text if Clock.has_announced else f"{text}; {_note()}", always=True):
        futures.wait([program.future])
    if _times and not program.future.exception():
        compile_times.record(_times, *program.labels, time.perf_counter() - since)


def start_compiling(
    function: Wrapped, *args: Any, mesh: Mesh | None = None, clock: Clock | None = None, **static: Any
) -> Program:
    """Returns the program of a call with these arguments, but does not wait until it is compiled.

    A new program is traced and lowered here. Another thread then compiles it with XLA, or reads it from JAX's cache.
    Threads that call the same program meanwhile wait for it; calls of other programs go on.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
    precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    key = (function, tuple(sorted(static.items())), structure, shapes, mesh, precision)
    with _changing:
        program = _programs.get(key)
        if program is not None and not (program.future.done() and program.future.exception()):  # repeats a failed one
            program.last_use = next(_uses)
            return program
        model = _digest(jax.tree.map(lambda x: (x.shape, x.dtype), args[:1]))  # the first argument is a model's weights
        labels = _digest(function.__name__, jax.__version__, *key[1:]), f"{function.__name__} {model}"
        _programs[key] = program = Program(function, futures.Future(), labels, last_use=next(_uses))
    with (clock or Clock()).compiling(function.__name__, f"compiling, {_note()}"):
        _make_room()
        try:
            product_precision = _precision(leaves, mesh)
            with sharding.ambient(mesh), jax.default_matmul_precision(product_precision):
                lowered = function.lower(*args, **static)
        except BaseException as error:
            with _changing:
                _programs.pop(key, None)  # the error refers to the arguments
            program.future.set_exception(error)
            raise
        if _takes_no_four_bits(mesh, leaves):
            program.future.set_result(functools.partial(_call_jitted, function, mesh, product_precision, static))
        else:
            thread = futures.ThreadPoolExecutor(1)
            thread.submit(_compile_into, program.future, lowered, mesh, function)
            thread.shutdown(wait=False)
    return program


def _compile_into(future: futures.Future, *arguments: Any) -> None:
    try:
        future.set_result(compile_lowered(*arguments))
    except BaseException as error:
        future.set_exception(error)


def _takes_no_four_bits(mesh: Mesh | None, leaves: Sequence[Any]) -> bool:
    """Returns whether a program compiled ahead of time would refuse its four-bit arguments.

    JAX 0.10 misstates their layout on meshes.
    """
    return mesh is not None and jax.__version_info__ < (0, 11) and any(bits(x.dtype) < 8 for x in leaves)


def _call_jitted(function: Wrapped, mesh: Mesh | None, precision: str | None, static: dict[str, Any], *args: Any) -> Any:
    """Calls a jitted function, which JAX compiles at the first call."""
    with sharding.ambient(mesh), jax.default_matmul_precision(precision):
        return function(*args, **static)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _make_room() -> None:
    """Frees the least recently used programs if there are too many, but not the newest."""
    with _changing:
        while len(_programs) > 1 and (len(_programs) > MOST_PROGRAMS or _count_memory_maps() > MOST_MAPS):
            oldest = min(_programs, key=lambda key: _programs[key].last_use)
            del _programs[oldest]
            oldest[0].clear_cache()  # JAX's own references


def _count_memory_maps() -> int:
    maps = Path("/proc/self/maps")  # exists on Linux only
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@functools.cache
def _first_process() -> int:
    return os.getpid()


def check_process() -> None:
    """Raises RuntimeError in a process that was forked after the first call.

    Such a process lacks JAX's threads, so it would wait for ever.
    """
    if os.getpid() != _first_process():
        raise RuntimeError(
            "got a process that was forked from one with a model, expected a new one: JAX does not survive a fork; use "
            "multiprocessing.get_context('spawn') and load the model in each process"
        )


def compile_lowered(lowered: Lowered, mesh: Mesh | None, function: Wrapped | None = None) -> Compiled:
    """Compiles a program, or reads it from JAX's cache. Programs of several CPU devices are never stored there.

    The device's options for rounds apply to a function in ROUND_FUNCTIONS.

    XLA:CPU may start the collectives of a cached program in a different order on each device; the devices then wait for
    each other for ever. The JAX setting that prevents storing is restored afterwards.
    """
    device = sharding.device(mesh)
    options = device.decoding_options if function in ROUND_FUNCTIONS else device.compiler_options
    if mesh is None or mesh.size == 1 or not device.is_cpu:
        return lowered.compile(options)
    with _unstored:
        seconds = jax.config.jax_persistent_cache_min_compile_time_secs
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
        try:
            return lowered.compile(options)
        finally:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns `jax.jit(function, **options)` with the compiler options of the default device, built at the first call.

    It is meant for functions that are called directly; `call` compiles the others. The result cannot be called inside
    another jitted function, because JAX accepts compiler options only for the outermost one.
    """
    jitted = functools.cache(lambda: jax.jit(function, compiler_options=sharding.device().compiler_options, **options))
    return functools.wraps(function)(lambda *args, **kwargs: jitted()(*args, **kwargs))


def _precision(leaves: Sequence[Any], mesh: Mesh | None) -> str | None:
    """Returns the precision of matrix products: JAX's default, except for float32 on accelerators, which gets the highest.

    By default, accelerators round float32 to TF32 or bfloat16. The error exceeds what the near-ties of float32 allow.
    """
    chosen = jax.config.jax_default_matmul_precision
    is_wide = all(x.dtype.itemsize >= 4 for x in leaves if jax.numpy.issubdtype(x.dtype, np.floating))
    return "highest" if chosen is None and is_wide and not sharding.device(mesh).is_cpu else chosen


def compiled(function: Wrapped | None = None) -> list[Program]:
    """Returns the programs of this process, oldest first. With `function`, only those compiled from it."""
    kept = list(_programs.values())  # a copy, because other threads add programs meanwhile
    return [program for program in kept if function in (None, program.function)]


def clear() -> None:
    """Frees all programs; the next calls compile again."""
    with _changing:
        for function in {program.function for program in compiled()}:
            function.clear_cache()  # JAX's own references
        _programs.clear()


def keep_programs() -> None:
    """Keeps compiled programs on disk for later processes, in ~/.cache/treeflash/programs. Call it before loading a model.

    Turns on JAX's persistent compilation cache for this process, as the commands do. Changes nothing if JAX already has a
    cache (JAX_COMPILATION_CACHE_DIR), or if JAX_ENABLE_COMPILATION_CACHE=false. The folder may be deleted at any time;
    JAX_COMPILATION_CACHE_MAX_SIZE limits its bytes.

    Example:
      >>> tf.keep_programs()
      >>> model = tf.load("smollm2")
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    try:
        folder = files.user_cache() / "programs"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home folder, or a read-only one
        return
    if os.access(folder, os.W_OK):
        global _times
        _times = folder.parent / "compile_times.json"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_SECONDS)
        compilation_cache.reset_cache()  # otherwise JAX keeps the folder that it read at its first compilation


def _note() -> str:
    folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    kept = f"kept in {folder}" if folder else "kept until this process ends"
    return f"once for this batch size, length and tree; programs are {kept}"
