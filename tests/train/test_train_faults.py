"""Faults of training: files of others stay, damage is named, one process works on a run, and Ctrl-C saves its step."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import toy_training
from etils import epath
from refusals import refused, snapshot

from train import export, head, respond
from train.data import answers
from train.data.records import Source
from train.runtime import folders, lock, watch
from train.runtime.checkpoint import claim
from treeflash_jax.formats import models

ROOT = Path(__file__).parents[2]


def test_exports_replace_exports_alone(toy, tmp_path, monkeypatch):
    settings = toy_training.settings(toy, f"run={tmp_path}/run")
    claim(epath.Path(settings.run), settings)
    monkeypatch.setattr(export, "read_params", lambda *_: (2, {"head": toy_training.fresh_head()}))

    def exported(out, **named):
        export.main(export.ExportStage(run=settings.run, out=str(out), dtype="float32", **named))

    (tmp_path / "project").mkdir()
    for name in ("README.md", "config.json", "model.safetensors"):
        (tmp_path / "project" / name).write_text("mine")
    before = snapshot(tmp_path / "project")
    refused(lambda: exported(tmp_path / "project"), "exists; give a new folder")
    refused(lambda: exported(tmp_path / "project", overwrite=True), "did not write")
    assert snapshot(tmp_path / "project") == before
    exported(tmp_path / "out")
    written = snapshot(tmp_path / "out")
    (tmp_path / "out" / "notes").write_text("mine")
    exported(tmp_path / "out", overwrite=True, drafter_temperature=0.5)
    assert snapshot(tmp_path / "out").keys() == {*written, "notes"}
    assert models.read_drafter_config(tmp_path / "out").drafter_temperature == 0.5


ASKED = [respond.Prompt("x", ids) for ids in ([1], [2, 3], [4, 5, 6])]


def answer_lines(*indices):
    return "".join(json.dumps({"index": i, "prompt": ASKED[i].ids, "response": [7]}) + "\n" for i in indices)


def test_settings_of_the_user_are_never_written_over(tmp_path):
    theirs, out = tmp_path / "mine.toml", tmp_path / "mine.jsonl"
    theirs.write_text("# my settings\nmax_new_tokens = 8\n")
    settings = respond.RespondConfig(verifier="tiny", sources=(Source(path="x.jsonl"),), out=str(out), max_new_tokens=8)
    answers.check_settings(settings, out, respond.FREE)
    answers.save_settings(settings, out)
    out.write_text(answer_lines(0))
    answers.check_settings(settings, out, respond.FREE)
    assert theirs.read_text() == "# my settings\nmax_new_tokens = 8\n"
    refused(lambda: replace(settings, out=f"{tmp_path}/answers.toml"), "expected the name of a JSONL file")


def test_doubled_answers_are_repaired(tmp_path):
    """In one file, and also in the part of one process."""
    out = tmp_path / "out.jsonl"
    for whole, part in (((0, 1, 2, 0, 1, 2), ()), ((0, 1, 1), (1, 2, 2))):
        out.write_text(answer_lines(*whole))
        (tmp_path / "out.jsonl.part-0").write_text(answer_lines(*part))
        for _ in range(2):
            answers.merge(out, 3)
            assert snapshot(tmp_path) == {"out.jsonl": answer_lines(0, 1, 2).encode()}


HOLDER = (
    "import sys, time; from train.runtime import lock; from etils import epath\n"
    "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
    "with lock.held(epath.Path(sys.argv[1]), 'x'):\n    print('held', flush=True); time.sleep(float(sys.argv[3]))"
)


def holder(path, begins=0.0, seconds=600):
    """Starts a process that holds a lock."""
    command = [sys.executable, "-c", HOLDER, str(path), str(begins), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_lock_ends_with_its_process(tmp_path):
    path = epath.Path(tmp_path) / "x.lock"
    process = holder(path)
    assert process.stdout.readline() == "held\n"
    refused(lambda: lock.held(path, "run=x").__enter__(), "run=x: another process works on it", "x.lock")
    process.kill()
    process.communicate()
    with lock.held(path, "run=x") as check_owner:
        check_owner()
        refused(lambda: lock.held(path, "run=x").__enter__(), "run=x: another process works on it")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_of_many_gets_the_lock(tmp_path):
    """Processes that start together, on the file of a killed one."""
    (tmp_path / "x.lock").write_text("")
    both = [holder(tmp_path / "x.lock", begins=time.time() + 15, seconds=3) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], errors
    assert "works on it" in "".join(errors) and not list(tmp_path.iterdir())


def test_a_bucket_belongs_to_the_newest_process(bucket):
    path = epath.Path("gs://bucket/run/x.lock")
    older = lock.held(path, "run=x")
    check_older = older.__enter__()
    with lock.held(path, "run=x") as check_owner:
        check_owner()
        refused(check_older, "run=x: another process was started on it")
    assert not path.exists()
    with lock.held(path, "run=x") as check_owner:
        older.__exit__(None, None, None)
        check_owner()


def test_damaged_logs_are_named(tmp_path):
    for line in (b"\xff\xfe\n", b'{"step": 2, "lo\n{"step": 3}\n', b"\0" * 20 + b"\n"):
        (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n' + line)
        before = snapshot(tmp_path)
        for read in (watch.read_log, watch.summary, partial(watch.Watch, steps=9, resumed_at=5)):
            refused(lambda read=read: read(epath.Path(tmp_path)), "log.jsonl: ", "move it away to begin a new log")
        assert snapshot(tmp_path) == before
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert watch.read_log(tmp_path) == [{"step": 1}]


def run(script):
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_second_interrupt_ends_at_once():
    script = (
        "import os, signal, time; from train.runtime import loop\n"
        "with loop.Termination() as asked:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5)\n"
        "    assert asked.requested(1) and asked.status == 143\n"
        "with loop.Termination() as asked:\n"
        "    for _ in range(2):\n"
        "        assert not asked.requested(1) or asked.status == 130\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(0.5)\n"
        "    print('went on')"
    )
    ended = run(script)
    assert ended.returncode == 130 and "went on" not in ended.stdout, ended.stderr
    assert "Ctrl-C again ends at once" in ended.stdout and "Traceback" not in ended.stderr


def test_an_evaluation_that_was_cut_short_does_not_abort_the_process():
    """Its thread returns from XLA again and again while the interpreter ends, which aborts Python 3.11 with status 134."""
    script = (
        "import os, signal, sys, threading, jax, jax.numpy as jnp\n"
        "from train import export; from train.runtime import run_config, loop\n"
        "multiply = jax.jit(lambda x: x @ x)\n"
        "def work():\n"
        "    while True: multiply(jnp.ones((64, 64))).block_until_ready()\n"
        "def main(_):\n"
        "    with loop.Termination() as asked:\n"
        "        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "        asked.unless_received(work); sys.exit(asked.status)\n"
        "run_config.run(main, export.ExportStage, None, ['run=a', 'out=b'])"
    )
    ended = run(script)
    assert ended.returncode == 130, ended.stderr


def test_two_runs_of_one_folder_are_refused(toy, tmp_path):
    with lock.held(folders.absolute(tmp_path) / "run.lock", "run"):
        refused(lambda: head.main(toy_training.settings(toy, f"run={tmp_path}")), "works on it")
    assert not list(tmp_path.iterdir())
