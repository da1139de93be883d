"""Faults of training: damage is named, one process works on a run, Ctrl-C ends it, and killed stages end as others."""

import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import toy_training
from etils import epath
from refusals import refused, snapshot
from toy_training import ROOT, finish, read_log, start

from train import head
from train.runtime import hosts, watch
from treeflash_jax.core import files
from treeflash_jax.engine.settings.pairs import locate

HOLDER = (
    "import sys, time; from train.runtime import hosts; from etils import epath\n"
    "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
    "with hosts.held(epath.Path(sys.argv[1]), 'x'):\n    print('held', flush=True); time.sleep(float(sys.argv[3]))"
)


def holder(path, begins=0.0, seconds=600):
    """Starts a process that holds a lock."""
    return start([sys.executable, "-c", HOLDER, str(path), str(begins), str(seconds)])


def test_a_lock_ends_with_its_process(tmp_path):
    path = epath.Path(tmp_path) / "x.lock"
    process = holder(path)
    assert process.stdout.readline() == "held\n"
    refused(lambda: hosts.held(path, "run=x").__enter__(), "run=x: another process works on it", "x.lock")
    process.kill()
    process.communicate()
    with hosts.held(path, "run=x"):
        refused(lambda: hosts.held(path, "run=x").__enter__(), "run=x: another process works on it")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_of_many_gets_the_lock(tmp_path):
    """Processes that start together, on the file of a killed one."""
    (tmp_path / "x.lock").write_text("")
    both = [holder(tmp_path / "x.lock", begins=time.time() + 15, seconds=3) for _ in range(2)]
    errors = [process.communicate()[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], errors
    assert "works on it" in "".join(errors) and not list(tmp_path.iterdir())


def test_damaged_logs_are_named(tmp_path):
    for line in (b"\xff\xfe\n", b'{"step": 2, "lo\n{"step": 3}\n', b"\0" * 20 + b"\n"):
        (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n' + line)
        before = snapshot(tmp_path)
        for read in (watch.read_log, watch.summary, partial(watch.Watch, steps=9, resumed_at=5)):
            refused(lambda read=read: read(epath.Path(tmp_path)), "log.jsonl: ", "move it away to begin a new log")
        assert snapshot(tmp_path) == before
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert watch.read_log(tmp_path) == [{"step": 1}]


def test_signals_are_noted_and_a_second_interrupt_ends_at_once():
    script = (
        "import os, signal; from train.runtime import loop; from treeflash_jax import make_mesh\n"
        "with loop.Signals(make_mesh()) as signals:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert signals.requested() and signals.received == signal.SIGTERM\n"
        "with loop.Signals(make_mesh()) as signals:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert signals.requested() and signals.received == signal.SIGINT\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('went on')"
    )
    output = finish(start([sys.executable, "-u", "-c", script]), -signal.SIGINT)
    assert "Ctrl-C again ends at once" in output
    assert "went on" not in output and "Traceback" not in output


def test_two_runs_of_one_folder_are_refused(toy, tmp_path):
    with hosts.held(files.absolute(tmp_path) / "run.lock", "run"):
        refused(lambda: head.main(toy_training.settings(toy, f"run={tmp_path}")), "works on it")
    assert not list(tmp_path.iterdir())


# Every stage may be killed at any moment: run again, the same command ends with the files that it would have written.

RESPOND = "verifier=tiny", "temperatures=[0.0, 0.9]", "max_new_tokens=40", "batch=2"
DRAFTER = (
    "num_layers=1", "block_size=5", "mask_token_id=3", "target_layer_ids=[2]", "objective.loss=cross-entropy",
    "loop.steps=24", "loop.batch=4", "loop.save_every=3", "loop.evaluate_every=12",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(toy):
    """The folder of a toy pair, questions, and a finished run of a head."""
    folder = toy.parent
    toy_training.write_stage(folder, without=("drafter",))
    asked = [{"messages": [{"role": "user", "content": f"What is {i} + {i * i}?"}]} for i in range(12)]
    toy_training.write_lines(folder / "asked.jsonl", asked)
    finish(start([sys.executable, str(ROOT / "tests" / "toy_training.py"), str(folder), "loop.steps=4"]))
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


def written(out: Path) -> dict[str, object]:
    """The files that a stage leaves for the next one, and its log without times."""
    if out.is_file():
        return {"answers": out.read_bytes()}
    model = out / "model" if (out / "model").is_dir() else out
    content = {path.name: path.read_bytes().replace(str(out).encode(), b"OUT") for path in model.iterdir()}
    return content | ({"log": read_log(out)} if (out / "log.jsonl").exists() else {})


def wait_for_lines(process: subprocess.Popen, log: Path) -> None:
    """Waits until a run has logged two more lines: checkpoints are saved between them."""
    lines = len(read_log(log.parent)) if log.exists() else 0
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > lines + 1):
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["respond", "drafter", "export", "convert"])
def test_killed_stages_end_as_others_do(finished, tmp_path, stage):
    """Two kills of a training run fall among its steps, all others anywhere."""
    whole, killed = tmp_path / "whole" / "out", tmp_path / "killed" / "out"
    whole.parent.mkdir()
    began, draw, kills = time.monotonic(), random.Random(stage), 0
    finish(start(commands(stage, finished, whole)))
    took = time.monotonic() - began
    while not kills:  # the first run may have been the slowest by far
        shutil.rmtree(killed.parent, ignore_errors=True)
        killed.parent.mkdir()
        for share in (0.5, 0.75, 0.97):
            process, seconds = start(commands(stage, finished, killed)), took * min(1.0, share + draw.uniform(-0.2, 0.03))
            if stage == "drafter" and share < 0.97:
                wait_for_lines(process, killed / "log.jsonl")
                seconds = draw.uniform(0, 0.1)
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
            process.communicate()
            if process.returncode == 0 or (stage in ("export", "convert") and killed.exists()):  # moved there when whole
                break
        else:
            finish(start(commands(stage, finished, killed)))
        took /= 2
        assert took > 0.1, "nothing was killed"
    assert written(killed) == written(whole)
    left = {path.name for path in killed.parent.iterdir()} - {path.name for path in whole.parent.iterdir()}
    assert not [name for name in left if not name.startswith(".")], left
