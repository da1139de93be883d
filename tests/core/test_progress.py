"""Log lines about anything that takes over a second."""

import logging
import time

from treeflash_jax.core import clock


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
