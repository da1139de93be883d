"""train/launch.sh: the commands it gives to gcloud, and what they do on a worker."""

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A worker is the folder $WORKER of this machine. What would signal its processes is only recorded.
GCLOUD = """#!/usr/bin/env bash
echo "$*" >> "$WORKER/../calls"
cd "$WORKER"
case "$4 $*" in
  scp*) cp "$5" . ;;
  *pkill*) ;;
  ssh*) command=${@: -1} && HOME=$WORKER bash -c "${command#--command=}" ;;
esac
"""
CURL = "#!/bin/sh\necho 'mkdir -p ~/.local/bin; printf \"echo \\$@ >> ~/uv\" > ~/.local/bin/uv; chmod +x ~/.local/bin/uv'\n"


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "worker" / "treeflash").mkdir(parents=True)
    for name, text in (("gcloud", GCLOUD), ("curl", CURL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "WORKER": str(tmp_path / "worker")}

    def run(*words: str) -> subprocess.CompletedProcess:
        command = [str(ROOT / "train" / "launch.sh"), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


def test_commands_reach_the_workers_as_they_were_given(launch, tmp_path):
    words = ("sh", "-c", 'echo "$0 $1 $TPU_VISIBLE_CHIPS"', "two  words", "a=[1, 'b']")
    done = launch("pod", "run", *words)
    assert done.stdout == "started\n", done.stderr
    log = tmp_path / "worker" / "treeflash" / "run.log"
    for _ in range(100):
        if log.exists() and "ended" in log.read_text():
            break
        time.sleep(0.1)
    assert log.read_text() == "two  words a=[1, 'b'] \nended, exit status 0\n"
    assert launch("pod", "one", *words).stdout == "two  words a=[1, 'b'] 0\n"
    assert launch("pod", "stop").returncode == 0
    calls = (tmp_path / "calls").read_text()
    workers = [line.split("--worker=")[1].split()[0] for line in calls.splitlines()]
    assert workers == ["all", "0", "all"] and calls.count("compute tpus tpu-vm ssh pod --worker") == 3


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a clone is installed")
def test_a_clone_is_installed_on_the_workers(launch, tmp_path):
    done = launch("pod", "install")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "worker" / "treeflash" / "pyproject.toml").exists(), "the last commit"
    assert (tmp_path / "worker" / "treeflash" / ".git").is_dir(), "runs record it"
    venv, packages = (tmp_path / "worker" / "uv").read_text().splitlines()
    assert venv == "venv --quiet --python 3.12" and packages.endswith("--editable .[tpu,train,gcs,tensorboard]")


def test_mistakes_are_named(launch, tmp_path):
    assert "train/launch.sh NAME install" in launch("pod").stdout
    done = launch("pod", "start")
    assert done.returncode == 2 and done.stderr == "error: got start, expected install, run, log, stop or one\n"
    assert not (tmp_path / "calls").exists()
