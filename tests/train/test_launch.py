"""train/launch.sh: the commands it gives to gcloud, and what they do on a worker."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A worker is the folder $WORKER of this machine.
GCLOUD = """#!/usr/bin/env bash
echo "$*" >> "$WORKER/../calls"
cd "$WORKER"
case "$4 $*" in
  scp*) cp "$5" . ;;
  ssh*) command=${@: -1} && HOME=$WORKER bash -c "${command#--command=}" ;;
esac
"""
PYTHON = "#!/bin/sh\nmkdir -p ~/.local/bin; printf 'echo $@ >> ~/uv' > ~/.local/bin/uv; chmod +x ~/.local/bin/uv\n"  # pip


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "worker" / "treeflash").mkdir(parents=True)
    for name, text in (("gcloud", GCLOUD), ("python3", PYTHON)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "WORKER": str(tmp_path / "worker")}

    def run(*words: str) -> subprocess.CompletedProcess:
        command = [str(ROOT / "train" / "launch.sh"), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


def wait_for(condition) -> None:
    for _ in range(100):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("waited 10 seconds")


def test_commands_reach_the_workers_as_they_were_given(launch, tmp_path):
    words = ("sh", "-c", 'echo "$0 $1 $TPU_VISIBLE_CHIPS"', "two  words", "a=[1, 'b']")
    done = launch("pod", "run", *words)
    assert done.stdout == "started\n", done.stderr
    log = tmp_path / "worker" / "treeflash" / "run.log"
    wait_for(lambda: log.exists() and "ended" in log.read_text())
    assert log.read_text() == "two  words a=[1, 'b'] \nended, exit status 0\n"
    assert launch("pod", "one", *words).stdout == "two  words a=[1, 'b'] 0,1,2,3\n"
    assert launch("pod", "stop").returncode == 0
    calls = (tmp_path / "calls").read_text()
    workers = [line.split("--worker=")[1].split()[0] for line in calls.splitlines()]
    assert workers == ["all", "all", "0", "all"] and calls.count("compute tpus tpu-vm ssh pod --worker") == 4


def test_status_shows_what_a_worker_does_and_a_second_run_is_refused(launch, tmp_path):
    def status() -> str:
        return launch("pod", "status").stdout.partition(": ")[2]  # after the name of the worker

    folder = tmp_path / "worker" / "treeflash"
    assert status() == "no run yet; last line: \n"
    launch("pod", "run", "sh", "-c", "echo step 1; echo $PPID > wrapper; while [ ! -e end ]; do sleep 0.1; done; exit 3")
    wait_for((folder / "wrapper").exists)
    assert status() == "alive; last line: step 1\n"
    os.kill(int((folder / "wrapper").read_text()), signal.SIGKILL)
    for words in (("run", "true"), ("install",)):
        done = launch("pod", *words)
        assert done.returncode == 2 and "a run is alive\nerror: got a run that is alive" in done.stderr
    assert (folder / "run.log").read_text() == "step 1\n"
    (folder / "end").touch()
    wait_for(lambda: "alive" not in status())
    assert status() == "ended without an exit status (killed, or restarted); last line: step 1\n"
    assert launch("pod", "run", "sh", "-c", "echo step 2; exit 3").returncode == 0
    wait_for(lambda: "alive" not in status())
    assert status() == "ended, exit status 3; last line: step 2\n"


def test_the_processes_of_a_run_are_stopped_and_no_others(launch, tmp_path):
    log = tmp_path / "worker" / "treeflash" / "run.log"
    command = "trap 'echo saved; exit 3' TERM; echo step 1; while true; do sleep 0.1; done", "python -m train"
    other = subprocess.Popen(["sh", "-c", *command])
    try:
        launch("pod", "run", "timeout", "20", "sh", "-c", *command)
        wait_for(lambda: log.exists() and "step 1" in log.read_text())
        assert launch("pod", "stop").returncode == 0
        wait_for(lambda: "saved\nended, exit status" in log.read_text())
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_log_of_a_worker_is_followed(launch, tmp_path):
    (tmp_path / "bin" / "tail").write_text('#!/bin/sh\necho "tail $*"\n')
    (tmp_path / "bin" / "tail").chmod(0o755)
    assert launch("pod", "log", "--worker=3").stdout == launch("pod", "log").stdout == "tail -n +1 -f treeflash/run.log\n"
    assert [line.split()[5] for line in (tmp_path / "calls").read_text().splitlines()] == ["--worker=3", "--worker=0"]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a clone is installed")
def test_a_clone_is_installed_on_the_workers_and_what_runs_left_there_is_kept(launch, tmp_path):
    folder = tmp_path / "worker" / "treeflash"
    for name in ("tracked.py", "runs/head/log.jsonl", "run.log", "measure.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("old")
    for words in (["init", "--quiet"], ["add", "tracked.py"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    done = launch("pod", "install")
    assert done.returncode == 0, done.stderr
    assert (folder / "pyproject.toml").exists(), "the last commit"
    assert (folder / ".git" / "shallow").exists(), "runs record it"
    assert not (folder / "tracked.py").exists(), "of the commit before"
    assert all((folder / name).read_text() == "old" for name in ("runs/head/log.jsonl", "run.log", "measure.json"))
    venv, packages = (tmp_path / "worker" / "uv").read_text().splitlines()
    assert venv == "venv --quiet --clear --python 3.12" and packages.endswith("--editable .[tpu,train,gcs,tensorboard]")


def test_mistakes_are_named(launch, tmp_path):
    assert "train/launch.sh NAME install" in launch("pod").stdout
    done = launch("pod", "start")
    assert done.returncode == 2 and done.stderr == "error: got start, expected install, run, status, log, stop or one\n"
    done = launch("pod", "run")
    assert done.returncode == 2 and done.stderr == "error: got no command, expected one after run\n"
    assert not (tmp_path / "calls").exists()
