"""Log lines about anything that takes over a second."""

import logging
import time

import jax
import jax.numpy as jnp

from treeflash_jax.core import clock, compile_times, programs
from treeflash_jax.core.json_files import read_json


def test_compilation_that_takes_long_is_announced_once_a_process(monkeypatch, caplog):
    monkeypatch.setattr(clock, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(clock.Clock, "has_announced", False)
    with caplog.at_level(logging.INFO, logger="treeflash_jax"):
        for _ in range(2):
            timer = clock.Clock()
            with timer.compiling("decode", "compiling, once"):
                time.sleep(0.2)
            assert timer.compile_seconds >= 0.2 > timer.seconds
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", "compiling, once")]


def test_only_what_takes_long_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(clock, "SILENT_SECONDS", 0.02)
    with caplog.at_level(logging.INFO, logger="treeflash_jax"):
        with clock.slow("loading a feather"):
            pass
        time.sleep(0.05)
        assert not caplog.records
        with clock.slow("loading a mountain"):
            time.sleep(0.3)
    assert [record.message for record in caplog.records] == ["loading a mountain"]


def square(x, times=2):
    return x**times


def add(x):
    return x + 1


def test_programs_are_counted_with_the_seconds_that_they_took_in_an_earlier_process(monkeypatch, caplog, tmp_path):
    """A known program is expected to take as long as it took to read, a new one as long as the last new one of its kind."""
    path, compile_lowered, x = tmp_path / "times.json", programs.compile_lowered, jnp.arange(3)
    functions = [jax.jit(square, static_argnames="times"), jax.jit(add)]

    def compile_after_the_line(lowered, mesh, function):
        until = time.monotonic() + 60
        while not any(function.__name__ in record.message for record in caplog.records) and time.monotonic() < until:
            time.sleep(0.01)
        return compile_lowered(lowered, mesh, function)

    monkeypatch.setattr(programs, "compile_lowered", compile_after_the_line)
    monkeypatch.setattr(programs, "_times", path)
    monkeypatch.setattr(programs, "_programs", {})
    monkeypatch.setattr(clock, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(clock.Clock, "has_announced", True)
    caplog.set_level(logging.INFO, logger="treeflash_jax")

    def announced(*functions, **static) -> list[str]:
        """Returns the lines of a process that compiles these functions; `static` are arguments of all."""
        programs._programs.clear()
        caplog.clear()
        timer = clock.Clock()
        started = [programs.start_compiling(function, x, clock=timer, **static) for function in functions]
        programs.wait(*started, clock=timer)
        programs.wait(*started, clock=timer)
        return [record.message for record in caplog.records]

    assert announced(*functions) == ["compiling square, 1 of 2", "compiling add, 2 of 2"]
    program, model = programs.compiled(functions[0])[0].labels
    compile_times.record(path, program, model, 7.6)
    compile_times.record(path, "another program", model, 41.7)
    assert announced(*functions)[0] == "compiling square, 1 of 2: about 8 s, as last time"
    assert announced(functions[0], times=3) == ["compiling square: about 42 s, as last time"], "a new program, alone"
    monkeypatch.setattr(programs, "_times", None)
    assert announced(functions[0]) == ["compiling square"], "without kept programs"


def test_estimates_are_few_and_may_be_lost(tmp_path, monkeypatch):
    path = tmp_path / "times.json"
    for content in ("[", "3", "\x00"):
        path.write_text(content)
        assert compile_times.estimate(path, "p", "model") is None
    for number in range(20):
        compile_times.record(path, f"p{number}", "model", 30.0 + number)
    assert compile_times.estimate(path, "new", "model") == 49.0 and compile_times.estimate(path, "p3", "model") is None
    compile_times.record(path, "p3", "model", 2.0)
    assert compile_times.estimate(path, "p3", "model") == 2.0 and compile_times.estimate(path, "new", "model") == 49.0
    compile_times.record(tmp_path / "nowhere" / "times.json", "p", "model", 1.0)
    monkeypatch.setattr(compile_times, "MOST_ENTRIES", 4)
    compile_times.record(path, "p3", "model", 3.0)
    assert len(read_json(path)) == 4 and compile_times.estimate(path, "p3", "model") == 3.0
