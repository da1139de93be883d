"""Log lines about anything that takes over a second."""

import logging
import time

from treeflash_jax.core import clock


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
