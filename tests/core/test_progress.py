"""Progress of measurements, and log lines about anything that takes over a second."""

import io
import logging
import time

import pytest
from rich.console import Console

from treeflash_jax.bench.timed import Progress
from treeflash_jax.core import clock


@pytest.mark.parametrize("terminal", [False, True])
def test_elsewhere_and_in_dumb_terminals_every_step_is_a_line(monkeypatch, terminal):
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    with Progress(2, Console(file=file, width=20, force_terminal=terminal)) as progress:
        progress.step("compiling [a] long line of words")
        progress.detail("3 of 9")
        progress.step("timing")
    assert file.getvalue().splitlines() == ["[1/2] compiling [a] long line of words", "[2/2] timing"]


def test_a_terminal_has_one_live_line_that_goes_away():
    file = io.StringIO()
    with Progress(2, Console(file=file, width=60, force_terminal=True, legacy_windows=False)) as progress:
        progress.step("compiling")
        progress.detail("3 of 9")
        progress.refresh()
        shown = file.getvalue()
    assert "[1/2] compiling: 3 of 9" in shown
    assert file.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_results_go_to_stdout_below_a_live_line_on_stderr(capsys):
    file = io.StringIO()
    with Progress(1, Console(file=file, force_terminal=True, legacy_windows=False)) as progress:
        progress.step("timing")
        print("3.2 ms")
    assert capsys.readouterr().out == "3.2 ms\n" and "3.2 ms" not in file.getvalue()


def test_compilation_that_takes_long_is_announced_once_a_call(monkeypatch, caplog):
    monkeypatch.setattr(clock, "SILENT_SECONDS", 0.0)
    timer = clock.Clock()
    with caplog.at_level(logging.INFO, logger="treeflash_jax"):
        for program in ("prefill", "decode"):
            with timer.compiling(program, "compiling, once"):
                time.sleep(0.2)
    levels = {(record.levelname, record.message.partition(" in ")[0]) for record in caplog.records}
    assert levels == {("WARNING", "compiling, once"), ("INFO", "compiled prefill"), ("INFO", "compiled decode")}
    assert len(caplog.records) == 3 and timer.compile_seconds >= 0.4


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
