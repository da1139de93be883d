"""Programs of this process, and of the next: commands keep them unless the user chose otherwise."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from conftest import compilations

from treeflash_jax.core import devices, programs
from treeflash_jax.decoding import loops

SCRIPT = """
import json, jax
jax.jit(lambda x: x + 1)(jax.numpy.ones(3))  # programs are kept after a first compilation, too
from treeflash_jax.core import programs
programs.keep_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x * 3 + 1)(jax.numpy.ones(7)).block_until_ready()
print(json.dumps([jax.config.jax_compilation_cache_dir, str(programs._times)]))
"""
WISHES = """
import json, os, pathlib, jax
from treeflash_jax.core import programs

def keep(folder=None, enabled=True):
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_enable_compilation_cache", enabled)
    programs.keep_programs()
    return jax.config.jax_compilation_cache_dir

def home(cls): raise RuntimeError("no home")

kept = [keep(folder="mine"), keep(enabled=False)]
pathlib.Path(os.environ["XDG_CACHE_HOME"], "treeflash").write_text("")  # fails if a call above has made this folder
kept.append(keep())
os.environ["XDG_CACHE_HOME"], pathlib.Path.home = "", classmethod(home)
print(json.dumps([*kept, keep()]))
"""


def run(home, script: str = SCRIPT, **variables: str) -> Any:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"XDG_CACHE_HOME": str(home)}
    environment |= {"JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_programs_that_were_not_used_for_longest_go(monkeypatch):
    programs.clear()
    multiply = jax.jit(lambda x, n: n * x, static_argnames="n")

    def compiles(n: int) -> bool:
        with compilations() as compiled:
            programs.call(multiply, jnp.ones(3), n=n)
        return len(compiled) > 0

    monkeypatch.setattr(programs, "MOST_PROGRAMS", 2)
    assert [compiles(n) for n in (2, 3, 2, 4, 2, 3)] == [True, True, False, True, False, True]
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 9)
    assert [compiles(n) for n in (5, 6)] == [True, True]
    monkeypatch.setattr(programs, "_count_memory_maps", lambda: 10**6 if len(programs.compiled()) > 3 else 0)
    assert compiles(7) and len(programs.compiled()) == 3


def test_threads_share_programs(monkeypatch):
    """Two calls at the same time compile a new program once."""
    increase, both, compiled = jax.jit(lambda x: x + 1), threading.Barrier(2), []
    digest = programs._digest

    def digest_slowly(*parts) -> str:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for a second thread
        return digest(*parts)

    compile_lowered = programs.compile_lowered
    monkeypatch.setattr(programs, "compile_lowered", lambda *args: compiled.append(1) or compile_lowered(*args))
    monkeypatch.setattr(programs, "_digest", digest_slowly)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda x: int(programs.call(increase, x)), jnp.arange(2)))
    assert results == [1, 2] and len(compiled) == 1


def test_calls_go_on_while_another_thread_traces():
    """Regression: a thread that met a new shape stopped all calls. Another call of the new program shares it."""
    is_tracing, may_go_on, traces = threading.Event(), threading.Event(), []

    def square(x):
        traces.append(x)
        is_tracing.set()
        assert may_go_on.wait(10), "no call went on"
        return x * x

    jitted, increase = jax.jit(square), jax.jit(lambda x: x + 1)
    programs.call(increase, jnp.int32(0))
    with ThreadPoolExecutor(2) as pool:
        squared = pool.submit(programs.call, jitted, jnp.int32(3))
        assert is_tracing.wait(10)
        assert pool.submit(programs.call, increase, jnp.int32(1)).result(5) == 2
        shared = programs.start_compiling(jitted, jnp.int32(4))
        assert not squared.done() and not shared.future.done()
        may_go_on.set()
        assert (squared.result(10), shared.executable(jnp.int32(4)), len(traces)) == (9, 16, 1)


def test_threads_that_wait_for_a_program_get_its_error():
    """The next call traces it again."""
    is_tracing, may_fail, traces = threading.Event(), threading.Event(), []

    def fail(x):
        traces.append(x)
        is_tracing.set()
        may_fail.wait(10)
        raise ValueError("no such shape")

    jitted = jax.jit(fail)
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(programs.call, jitted, jnp.int32(3))
        assert is_tracing.wait(10)
        waiting = programs.start_compiling(jitted, jnp.int32(3))
        may_fail.set()
        for fails in (failing.result, lambda: waiting.future.result(10), lambda: programs.call(jitted, jnp.int32(3))):
            with pytest.raises(ValueError, match="no such shape"):
                fails()
    assert len(traces) == 2 and not programs.compiled(jitted)


@pytest.mark.parametrize("read", [programs.compiled, programs.clear])
def test_threads_may_add_programs_while_another_reads_them(monkeypatch, read):
    """Regression: RuntimeError, dictionary changed size during iteration."""
    increase = jax.jit(lambda x: x + 1)

    class Program:
        @property
        def function(self):
            programs.call(increase, jnp.ones(3))  # as another thread
            return increase

    monkeypatch.setattr(programs, "_programs", {"key": Program()})
    read()


def test_programs_are_kept_and_found_again(tmp_path):
    folder = tmp_path / "treeflash" / "programs"
    kept = []
    for _ in range(2):
        assert run(tmp_path) == [str(folder), str(folder.parent / "compile_times.json")]
        kept.append({path.name: path.stat().st_ino for path in folder.rglob("*-cache")})
    assert kept[0] == kept[1] != {}


def test_other_wishes_are_respected(tmp_path):
    """A folder of the user's, no cache, a folder that cannot be made, and no home."""
    assert run(tmp_path, WISHES) == ["mine", None, None, None]


LIBRARY = """
import json, jax
import treeflash_jax as tf
before = dict(jax.config.values)
tf.load("tiny", mesh={mesh}).generate("3 + 4", max_new_tokens=2, builder="none")
print(json.dumps({{name: str(value) for name, value in jax.config.values.items() if value != before[name]}}))
"""
COMMAND = """
from treeflash_jax.cli.commands import main
raise SystemExit(main("generate --verifier tiny --prompt-ids 3 --max-new-tokens 2 --json --mesh".split() + [{mesh!r}]))
"""


@pytest.mark.slow
def test_loading_changes_no_setting_of_jax(tmp_path):
    assert run(tmp_path, LIBRARY.format(mesh=None)) == {} and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_programs_are_kept_but_not_those_of_several_cpu_devices(tmp_path):
    """By commands, and by the library if JAX has a cache: programs that are read back wait for ever in collectives."""
    two_devices = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    named, usual = tmp_path / "named", tmp_path / "treeflash" / "programs"
    cache = {"JAX_COMPILATION_CACHE_DIR": str(named), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    assert run(tmp_path, LIBRARY.format(mesh="tf.make_mesh(2)"), XLA_FLAGS=two_devices, **cache) == {}
    run(tmp_path, COMMAND.format(mesh="2x1"), XLA_FLAGS=two_devices)
    assert list(named.glob("*-cache"))
    assert not [*named.glob("jit_decode-*"), *usual.glob("jit_decode-*")]
    run(tmp_path, COMMAND.format(mesh="1x1"))
    assert len(list(usual.glob("jit_decode-*-cache"))) == 1


def test_a_program_that_could_not_be_compiled_is_compiled_again(monkeypatch):
    function, x = jax.jit(lambda x: x + 1), jnp.arange(3)
    monkeypatch.setattr(devices.Device, "compiler_options", {"no_such_option": "1"})
    for _ in range(2):
        with pytest.raises(Exception, match="no_such_option"):
            programs.call(function, x)
    monkeypatch.undo()
    assert programs.call(function, x).tolist() == [1, 2, 3]


def test_only_rounds_are_compiled_with_the_options_of_rounds(monkeypatch):
    assert programs.ROUND_FUNCTIONS == {loops.decode}
    rounds = jax.jit(lambda x: x + 1)
    monkeypatch.setattr(programs, "ROUND_FUNCTIONS", {rounds})
    tpu, x = devices.Device("tpu"), jnp.arange(3)
    assert tpu.compiler_options == {} and tpu.decoding_options == {"xla_tpu_offload_gather_to_sparsecore": "false"}
    monkeypatch.setattr(devices.Device, "decoding_options", {"no_such_option": "1"})
    assert programs.call(jax.jit(lambda x: x + 1), x).tolist() == [1, 2, 3]
    with pytest.raises(Exception, match="no_such_option"):
        programs.call(rounds, x)
