"""Monitoring of a run: a bar and lines in a terminal, plain lines elsewhere, a closing line."""

import io
import logging
import sys

import numpy as np
import pytest
from matplotlib.image import imread
from toy_training import write_lines

from train.runtime import picture, run_config, watch
from treeflash_jax.core import files, programs

LOG = [
    {"step": 20, "loss": 3.25, "top1": [0.5, 0.25], "tokens_per_second": 900.0, "mfu": 0.25, "seconds": 61.0},
    {"step": 40, "loss": 2.5, "tokens_per_second": 1100.0, "tau_estimate": 1.75, "seconds": 118.0},
    {"step": 40, "held_out/loss": 2.75, "held_out/tau_16": 2.5, "held_out/tau_64": 3.0, "held_out/tau_marginal_64": 2.25,
     "held_out/top1": [0.5, 0.25], "seconds": 125.0},
]  # fmt: skip


def test_a_picture_shows_loss_and_tau_if_it_was_measured():
    """Two panels, or one; each line in a colour of its own."""
    images = [imread(io.BytesIO(picture.draw(lines)), format="png") for lines in (LOG, LOG[:2], [])]
    with_tau, loss, nothing = (image.shape[1] for image in images)
    assert with_tau == 2 * loss == 2 * nothing

    def colours(image):
        """Returns the number of saturated colours that cover more than a few pixels."""
        pixels = (255 * image[..., :3]).astype(int).reshape(-1, 3)
        vivid, counts = np.unique(pixels[np.ptp(pixels, axis=1) > 100], axis=0, return_counts=True)
        return len({tuple(colour // 64) for colour in vivid[counts > 50]})

    assert colours(images[0]) > colours(images[1]) > colours(images[2]) == 0
    assert picture.draw(LOG) == picture.draw(LOG), "a run that was killed leaves the same files"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    terminal = Terminal()
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    return terminal


@pytest.fixture
def run(tmp_path):
    write_lines(tmp_path / "log.jsonl", LOG)
    return tmp_path


TAUS = "held-out loss 2.750, tau 2.50 at 16 nodes, tau 3.00 at 64 nodes (marginal 2.25)"


def test_lines_are_short_and_say_what_matters():
    assert watch.describe(LOG[0]) == "loss 3.250, 900 tokens/s, MFU 25%"
    assert watch.describe(LOG[2]) == TAUS and watch.describe(LOG[0] | {"mfu": None}) == "loss 3.250, 900 tokens/s"


def test_a_run_ends_with_a_summary(run, tmp_path):
    assert watch.summary(run) == "40 steps in 2 min 5 s" and watch.summary(tmp_path / "none") == ""
    assert [watch.duration(seconds) for seconds in (41.4, 60, 12004)] == ["41 s", "1 min 0 s", "3 h 20 min"]


def test_lines_stay_above_the_bar_of_a_terminal(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with watch.Bar("answers", 8, 2) as bar:
        bar.show(3, "evaluating 3 of 16 [prompts]")
        print("step 20 of 40")
    shown = terminal.getvalue()
    assert "3/8" in shown and "evaluating 3 of 16 [prompts]" in shown and "step 20 of 40\n" in shown


def test_commands_keep_programs_and_their_warnings_do_not_tear_bars(monkeypatch):
    """Also where another package has called `logging.basicConfig` by then: its handler would write into the bar."""
    terminal, kept = open_terminal(monkeypatch), []
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(programs, "keep_programs", lambda: kept.append(True))

    def main(settings):
        logging.basicConfig(stream=sys.stderr)
        with watch.Bar("answers", 8):
            logging.getLogger("treeflash_jax").warning("compiling a program")

    run_config.run_command(main, run_config.MeshConfig, "doc", [])
    assert kept and "\x1b[2Kcompiling a program\n" in terminal.getvalue(), terminal.getvalue()


def test_without_a_terminal_there_are_plain_lines_only(capsys):
    with watch.Bar("answers", 8) as bar:
        bar.show(3, "evaluating 3 of 16")
        print("step 20 of 40")
    assert capsys.readouterr().out == "step 20 of 40\n"


def test_a_run_logs_the_seconds_of_all_its_parts(run, monkeypatch, capsys):
    """Also of steps 41 to 50 of an earlier start, which are lost."""
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 50, "seconds": 140.0}\n')
    monkeypatch.setattr(watch.time, "perf_counter", iter([100.0, 107.5]).__next__)
    with watch.Watch(files.absolute(run), steps=60, resumed_at=40) as log:
        log.write(60, {"loss": 2.0})
    assert watch.read_log(run) == [*LOG, {"step": 60, "loss": 2.0, "seconds": 147.5}]
    assert capsys.readouterr().out == "continuing at step 40 of 60\nstep 60 of 60: loss 2.000\n"
