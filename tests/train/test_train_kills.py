"""Every stage may be killed at any moment: run again, the same command ends with the files that it would have written.

Kills of a head's training are in test_train_resume.py.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy_training
from toy_training import ROOT, finish, read_log, start

from treeflash_jax.engine.pairs import locate

RESPOND = "verifier=tiny", "temperatures=[0.0, 0.9]", "max_new_tokens=40", "batch=2"
DRAFTER = (
    "num_layers=1", "block_size=5", "mask_token_id=3", "target_layer_ids=[2]", "objective.loss=cross-entropy",
    "loop.steps=24", "loop.batch=4", "loop.save_every=3", "loop.evaluate_every=12",
)  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A toy pair, questions, and a finished run of a head."""
    folder = tmp_path_factory.mktemp("toy")
    toml = toy_training.write(folder)
    toy_training.write_stage(folder, without=("drafter",))
    asked = [{"messages": [{"role": "user", "content": f"What is {i} + {i * i}?"}]} for i in range(12)]
    toy_training.write_lines(folder / "asked.jsonl", asked)
    finish(start([sys.executable, str(ROOT / "tests" / "toy_training.py"), str(folder), "loop.steps=4"]))
    assert toml.exists() and (folder / "run" / "checkpoints").is_dir()
    return folder


def commands(stage: str, toy: Path, out: Path) -> list[str]:
    """The command of a stage that writes its results to `out`."""
    python = [sys.executable, "-m"]
    if stage == "export":
        return [*python, "train.export", f"run={toy / 'run'}", f"out={out}"]
    if stage == "convert":
        drafter = locate("tiny", "drafter")
        return [*python, "treeflash_jax", "convert", str(drafter), str(out), "--to", "dflash", "--drop-head"]
    if stage == "respond":
        asked = f"sources=[{{path = '{toy / 'asked.jsonl'}', hold_out = 0}}]"
        return [*python, "train.respond", f"out={out}", asked, *RESPOND]
    return [*python, "train.drafter", str(toy / "stage.toml"), f"run={out}", *DRAFTER]


def timed(command: list[str]) -> float:
    """Seconds that a command takes."""
    since = time.monotonic()
    finish(start(command))
    return time.monotonic() - since


def written(out: Path) -> dict[str, object]:
    """The files that a stage leaves for the next one, and its log without times."""
    if out.is_file():
        return {"answers": out.read_bytes()}
    model = out / "model" if (out / "model").is_dir() else out
    content = {path.name: path.read_bytes().replace(str(out).encode(), b"OUT") for path in model.iterdir()}
    return content | ({"log": read_log(out)} if (out / "log.jsonl").exists() else {})


@pytest.mark.parametrize("stage", ["respond", "drafter", "export", "convert"])
def test_killed_stages_end_as_others_do(toy, tmp_path, stage):
    whole, killed = tmp_path / "whole" / "out", tmp_path / "killed" / "out"
    whole.parent.mkdir()
    took, draw, kills = timed(commands(stage, toy, whole)), random.Random(stage), 0
    while not kills:  # the first run may have been the slowest by far
        shutil.rmtree(killed.parent, ignore_errors=True)
        killed.parent.mkdir()
        for share in (0.5, 0.75, 0.97):
            process = start(commands(stage, toy, killed))
            try:
                process.wait(timeout=took * min(1.0, share + draw.uniform(-0.2, 0.03)))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
            process.communicate()
            if process.returncode == 0 or (stage in ("export", "convert") and killed.exists()):  # moved there when whole
                break
        else:
            finish(start(commands(stage, toy, killed)))
        took /= 2
        assert took > 0.1, "nothing was killed"
    assert written(killed) == written(whole)
    left = {path.name for path in killed.parent.iterdir()} - {path.name for path in whole.parent.iterdir()}
    assert not [name for name in left if not name.startswith(".")], left
