"""Files and faults: no pipe is waited for, nothing foreign is replaced or left half written, one writer at a time."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import toy_training
from etils import epath
from safetensors.numpy import save_file

from train import answers, compile, config, evaluate, export, folders, head, lock, measure, respond, watch
from train.checkpoint import Checkpoints, claim
from train.records import Source
from treeflash_jax import files
from treeflash_jax.adaptive import calibration
from treeflash_jax.bench import compare, timings
from treeflash_jax.bench import records as kept
from treeflash_jax.checks import read_json
from treeflash_jax.cli import main as cli
from treeflash_jax.formats import conversions, gguf, models, safetensors, storage
from treeflash_jax.formats.tokenizer import Tokenizer

PAIR = Path(files.__file__).parent / "assets" / "tiny"


@pytest.fixture
def no_hang():
    """A case that waits for ever fails instead."""

    def late(*_):
        raise TimeoutError("waited for 30 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(action, *words):
    """Whatever an action is refused with: one line of at most 300 characters that holds the words."""
    with pytest.raises((ValueError, SystemExit)) as caught:
        action()
    line = str(caught.value)
    assert "\n" not in line and len(line) <= 300 and all(word in line for word in words), line


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Named pipes in place of files.


def open_tensors(folder):
    with safetensors.open_folder(folder) as tensors:
        return list(tensors)


PIPES = {
    "config": ("config.json", lambda path: read_json(path)),
    "weights": ("model.safetensors", lambda path: open_tensors(path.parent)),
    "index": ("model.safetensors.index.json", lambda path: open_tensors(path.parent)),
    "gguf": ("model.gguf", lambda path: gguf.read(path)),
    "tokenizer": ("tokenizer.json", lambda path: Tokenizer.load(path.parent)),
    "calibration": ("budget.json", lambda path: calibration.read(path)),
    "settings": ("head.toml", lambda path: config.read(path)),
    "results": ("out.jsonl", lambda path: kept.read_records(path)),
    "timings": ("out.json", lambda path: timings.read_results(path)),
    "log": ("log.jsonl", lambda path: watch.read_log(path.parent)),
    "output": ("out.json", lambda path: files.check_output(path)),
    "answers": ("out.jsonl", lambda path: answers.check_settings(None, path, ())),
}


@pytest.mark.parametrize("name", PIPES)
def test_pipes_are_refused(tmp_path, no_hang, name):
    file, read = PIPES[name]
    os.mkfifo(tmp_path / file)
    refused(lambda: read(tmp_path / file), "is a named pipe", file)


# Shard indices.

INDICES = {
    "parent": ({"weight_map": {"a": "../model.safetensors"}}, "'../model.safetensors'"),
    "absolute": ({"weight_map": {"a": "{folder}/model.safetensors"}}, "the name of a file in this folder"),
    "inner": ({"weight_map": {"a": "sub/model.safetensors"}}, "the name of a file in this folder"),
    "null": ({"weight_map": {"a": None}}, "got None for tensor a"),
    "number": ({"weight_map": {"a": 3}}, "got 3 for tensor a"),
    "list": ({"weight_map": {"a": ["model.safetensors"]}}, "got ['model.safetensors'] for tensor a"),
    "object": ({"weight_map": {"a": {}}}, "got {} for tensor a"),
    "empty name": ({"weight_map": {"a": ""}}, "got '' for tensor a"),
    "dots": ({"weight_map": {"a": ".."}}, "got '..' for tensor a"),
    "null byte": ({"weight_map": {"a": "x\0"}}, "the name of a file in this folder"),
    "long": ({"weight_map": {"a" * 5000: "x/" * 5000}}, "the name of a file in this folder"),
    "no map": ({"metadata": {}}, "got no weight_map"),
    "empty map": ({"weight_map": {}}, "got no weight_map"),
    "list for a map": ({"weight_map": []}, "got no weight_map"),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_name_files_of_their_folder(tmp_path, name):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder, folder / "sub"):
        save_file({"a": np.zeros(2, np.float32)}, place / "model.safetensors")
    raw, words = INDICES[name]
    (folder / "model.safetensors.index.json").write_text(json.dumps(raw).replace("{folder}", str(tmp_path)))
    refused(lambda: open_tensors(folder), "model.safetensors.index.json", words)


# Output files that are somebody else's.

OUTPUTS = {
    "bench run": lambda out: cli(["bench", "run", "--out", out]),
    "bench rules": lambda out: cli(["bench", "rules", "--out", out]),
    "bench latency": lambda out: cli(["bench", "latency", "--out", out]),
    "bench memory": lambda out: cli(["bench", "memory", "--shape", "tiny", "--no-compile", "--out", out]),
    "bench compare": lambda out: compare.main(
        ["--verifier", "x", "--drafter", "x", "--prompt-ids", "1", "--other", "x", "--out", out]
    ),
    "train.compile": lambda out: compile.main(["x.toml", "--shape", "qwen3-4b", "--out", out]),
    "train.measure": lambda out: measure.main(measure.MeasureStage(verifier="x", drafter="x", respond="x", out=out)),
}


@pytest.mark.parametrize("text", ["a note", "a note\n", '{"mine": 1}\n', '{"mine": {}}', "[1]"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_never_replace_what_is_not_theirs(tmp_path, capsys, name, text):
    out = tmp_path / "notes.txt"
    out.write_text(text)
    try:
        assert OUTPUTS[name](str(out)) in (1, 2)
        error = capsys.readouterr().err
    except ValueError as caught:
        error = f"{caught}\n"
    assert error.count("\n") == 1 and "notes.txt" in error
    assert snapshot(tmp_path) == {"notes.txt": text.encode()}


@pytest.mark.parametrize("suite", ["run", "rules", "latency"])
def test_refused_benchmarks_leave_no_file(tmp_path, capsys, suite):
    out = ["--out", str(tmp_path / "out.json"), *(["--plot", str(tmp_path / "a.png")] if suite != "run" else [])]
    assert cli(["bench", suite, *out, "--temperature", "-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_record_that_was_cut_off_is_measured_again(tmp_path):
    out = tmp_path / "out.jsonl"
    for tail in ("", '{"sch', '{"schema": 2, "prompt_id"'):
        out.write_text(tail)
        with pytest.warns(UserWarning, match="cut off") if tail else pytest.MonkeyPatch.context():
            kept.open_results(out).close()
        assert out.read_bytes() == b""


def test_figures_replace_figures_alone(tmp_path):
    from treeflash_jax.bench import plots

    (tmp_path / "a.png").write_bytes(b"\x89PNG of a cat")
    refused(lambda: plots.check(tmp_path / "a.png"), "holds something else")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    for name in ("b.png", "b.svg", "b.pdf"):
        plots.save(pyplot.figure(), tmp_path / name)
        plots.check(tmp_path / name)


# The writer of folders.


def fill(target, **named):
    with files.filled(target, **named) as folder:
        files.write(folder / "config.json", "new")
        files.write(folder / "README.md", "new")


def make_file(target):
    target.write_text("old")


def make_full(target):
    target.mkdir()
    (target / "README.md").write_text("old")


def make_link_to_nowhere(target):
    target.symlink_to(target.parent / "nowhere")


def make_link_to_empty(target):
    (target.parent / "empty").mkdir()
    target.symlink_to(target.parent / "empty")


def make_busy(target):
    make_full(target)
    (target / "config.json").mkdir()
    (target / "config.json" / "x").write_text("old")


REFUSED_FOLDERS = {
    "file": (make_file, {}, "exists and is no folder"),
    "folder with files": (make_full, {}, "exists; give a new folder"),
    "link to nowhere": (make_link_to_nowhere, {}, "exists and is no folder"),
    "link to a folder": (make_link_to_empty, {}, "exists and is no folder"),
    "link to a folder, overwriting": (make_link_to_empty, {"overwrite": True}, "exists and is no folder"),
    "file, overwriting": (make_file, {"overwrite": True}, "exists and is no folder"),
    "foreign, overwriting": (make_full, {"overwrite": True, "own": lambda _: False}, "did not write"),
    "folder in place of a file": (make_busy, {"overwrite": True}, "is a folder, expected a file"),
}


@pytest.mark.parametrize("name", REFUSED_FOLDERS)
def test_folders_that_are_somebody_elses_stay(tmp_path, name):
    make, named, words = REFUSED_FOLDERS[name]
    make(tmp_path / "out")
    before = snapshot(tmp_path)
    refused(lambda: fill(tmp_path / "out", **named), words)
    assert snapshot(tmp_path) == before


def test_new_empty_and_own_folders_are_filled(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("theirs")
    fill(tmp_path / "a" / "new")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    fill(".")
    make_full(tmp_path / "own")
    (tmp_path / "own" / "notes").write_text("mine")
    (tmp_path / "own" / "config.json").symlink_to(elsewhere)
    fill(tmp_path / "own", overwrite=True, own=lambda _: True)
    whole = {"config.json": b"new", "README.md": b"new"}
    assert snapshot(tmp_path / "a") == {f"new/{name}": text for name, text in whole.items()}
    assert snapshot(tmp_path / "empty") == whole
    assert snapshot(tmp_path / "own") == whole | {"notes": b"mine"}
    assert elsewhere.read_text() == "theirs", "links are replaced, not followed"
    assert os.stat(tmp_path / "own" / "README.md").st_mode & 0o777 == os.stat(elsewhere).st_mode & 0o777


def test_what_fails_or_is_killed_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), files.filled(tmp_path / "out") as folder:
        (folder / "half").write_text("1")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    script = (
        "import os, sys; from treeflash_jax import files\n"
        f"with files.filled({str(tmp_path / 'out')!r}) as folder:\n"
        "    (folder / 'half').write_text('1'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], check=False)
    assert len(list(tmp_path.iterdir())) == 1 and not (tmp_path / "out").exists()
    fill(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def small_disk():
    """No file may grow beyond 3000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_no_weights_and_no_target(tmp_path, small_disk):
    source, target = PAIR / "drafter", tmp_path / "out"
    refused(lambda: conversions.convert_drafter(source, target, "dflash", drop_head=True), "cannot write", "File too large")
    assert not list(tmp_path.iterdir())
    small_disk()
    conversions.convert_drafter(source, target, "dflash", drop_head=True)
    assert storage.is_own(target / "model.safetensors") and not storage.is_own(source / "model.safetensors")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return toy_training.write(tmp_path_factory.mktemp("toy"))


def test_exports_replace_exports_alone(toy, tmp_path, monkeypatch):
    settings = toy_training.settings(toy, f"run={tmp_path}/run")
    claim(epath.Path(settings.run), settings)
    fresh = toy_training.fresh_head()
    monkeypatch.setattr(export, "read_params", lambda *_: (2, {"head": fresh}))

    def exported(out, **named):
        export.main(export.ExportStage(run=settings.run, out=str(out), dtype="float32", **named))

    project = tmp_path / "project"
    project.mkdir()
    for name in ("README.md", "config.json", "model.safetensors"):
        (project / name).write_text("mine")
    before = snapshot(project)
    monkeypatch.chdir(project)
    for out in (".", project):
        refused(lambda out=out: exported(out), "exists; give a new folder")
        refused(lambda out=out: exported(out, overwrite=True), "did not write")
    assert snapshot(project) == before
    exported(tmp_path / "out")
    refused(lambda: exported(tmp_path / "out"), "exists; give a new folder")
    written = snapshot(tmp_path / "out")
    (tmp_path / "out" / "notes").write_text("mine")
    exported(tmp_path / "out", overwrite=True, drafter_temperature=0.5)
    assert snapshot(tmp_path / "out").keys() == {*written, "notes"}
    assert models.read_drafter_config(tmp_path / "out").drafter_temperature == 0.5


# The file of answers and its settings.

ASKED = [[1], [2, 3], [4, 5, 6]]


def asking(out, **named):
    named = {"verifier": "tiny", "sources": (Source(path="x.jsonl"),), "out": str(out), "max_new_tokens": 8} | named
    return respond.RespondConfig(**named)


def lines_of(*indices, finished="stop"):
    return "".join(
        json.dumps({"index": i, "prompt": ASKED[i], "response": [7], "finished": finished}) + "\n" for i in indices
    )


def check_answers(settings):
    answers.check_settings(settings, Path(settings.out), respond.FREE)


def test_settings_of_the_user_are_never_written_over(tmp_path):
    theirs = tmp_path / "mine.toml"
    theirs.write_text("# my settings\nmax_new_tokens = 8\n")
    settings = asking(tmp_path / "mine.jsonl")
    check_answers(settings)
    answers.save_settings(settings, Path(settings.out))
    Path(settings.out).write_text(lines_of(0))
    check_answers(settings)
    refused(lambda: check_answers(asking(settings.out, max_new_tokens=12)), "begun with max_new_tokens = 8")
    assert theirs.read_text() == "# my settings\nmax_new_tokens = 8\n"
    refused(lambda: asking(tmp_path / "answers.toml"), "expected the name of a JSONL file")
    other = asking(tmp_path / "other.jsonl")
    (tmp_path / "other.jsonl.settings.toml").write_text("max_new_tokens = 8\n")
    refused(lambda: check_answers(other), "is in the way")


def test_files_of_the_first_edition_go_on(tmp_path):
    settings = asking(tmp_path / "old.jsonl")
    Path(settings.out).write_text(lines_of(0))
    refused(lambda: check_answers(settings), "exists without its settings")
    record = tmp_path / "old.toml"
    config.save(settings, record)
    check_answers(settings)
    refused(lambda: check_answers(asking(settings.out, seed=3)), "begun with seed = 0")
    record.write_text("# mine\n" + record.read_text())
    refused(lambda: check_answers(settings), "exists without its settings")


DOUBLED = {
    "every line": (lines_of(0, 0, 1, 1, 2, 2), {}),
    "two in turns": (lines_of(0, 1, 2, 0, 1, 2), {}),
    "the last": (lines_of(0, 1, 2, 2), {}),
    "in a part too": (lines_of(0, 1, 1), {"out.jsonl.part-0": lines_of(1, 2, 2)}),
}


@pytest.mark.parametrize("name", DOUBLED)
def test_doubled_answers_are_repaired(tmp_path, name):
    text, beside = DOUBLED[name]
    out = tmp_path / "out.jsonl"
    for file, content in {"out.jsonl": text, **beside}.items():
        (tmp_path / file).write_text(content)
    for _ in range(2):
        assert answers.merge(out, ASKED, "keep") == 0
        assert snapshot(tmp_path) == {"out.jsonl": lines_of(0, 1, 2).encode()}


LINES = {
    "text for an index": b'{"index": "0", "prompt": [1], "response": [7]}\n',
    "fraction for an index": b'{"index": 0.5, "prompt": [1], "response": [7]}\n',
    "list": b"[]\n",
    "deep": b"[" * 100_000 + b"\n",
    "bytes": b"\xff\xfe\n",
    "no prompt": b'{"index": 0}\n',
}


@pytest.mark.parametrize("name", LINES)
def test_damaged_answers_are_named(tmp_path, capsys, name):
    out = tmp_path / "out.jsonl"
    out.write_bytes(lines_of(0).encode() + LINES[name])
    refused(lambda: answers.finished(out, ASKED), "out.jsonl, line 2: got no answer")
    words = ["seen", "--responses", str(out), "--results", str(out)]
    refused(lambda: evaluate.main(words), "error: ", "out.jsonl")
    assert snapshot(tmp_path).keys() == {"out.jsonl"}


# The lock.


def written_lock(path, **named):
    mine = {"host": lock.this_host(), "pid": os.getpid(), "token": "theirs", "seen": time.time()}
    path.write_text(json.dumps(mine | named))
    return path


def ended_process():
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


LOCKS = {
    "alive": ({"pid": os.getppid()}, False),
    "this very process": ({"started": files.state_of(os.getpid())[1]}, False),
    "ended": ({"pid": ended_process()}, True),
    "number given again": ({"started": "1"}, True),
    "elsewhere, silent": ({"host": "elsewhere"}, True),
    "elsewhere, long ago": ({"host": "elsewhere", "seen": 0.0}, True),
    "elsewhere, working": ({"host": "elsewhere", "works": True}, False),
    "unreadable": (None, True),
}


@pytest.mark.parametrize("place", ["here", "gs://bucket/run"])
@pytest.mark.parametrize("name", LOCKS)
def test_locks_are_taken_over_from_the_dead_alone(tmp_path, monkeypatch, bucket, name, place):
    monkeypatch.setattr(lock, "STALE", 1.5)
    path = (epath.Path(tmp_path) if place == "here" else epath.Path(place)) / "run.lock"
    says, is_free = LOCKS[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    works = bool(says and says.get("works"))
    path.write_text("{") if says is None else written_lock(path, **says)
    ended = threading.Event()

    def work():
        while not ended.wait(0.2):
            written_lock(path, **says | {"seen": time.time()})

    worker = threading.Thread(target=work)
    if works:
        worker.start()
    try:
        if is_free:
            with lock.held(path, "run=x") as mine:
                mine.check()
                assert json.loads(path.read_text())["pid"] == os.getpid()
            assert not path.exists()
        else:
            refused(lambda: lock.held(path, "run=x").__enter__(), "run=x: process", "works on it")
            assert json.loads(path.read_text())["token"] == "theirs"
    finally:
        ended.set()
        if works:
            worker.join()


@pytest.mark.slow
def test_one_of_many_gets_the_lock(tmp_path):
    """Processes that start together, on a lock that a killed one left."""
    written_lock(tmp_path / "x.lock", pid=ended_process())
    script = (
        "import sys, time; from train import lock; from etils import epath\n"
        f"time.sleep(max(0, {time.time() + 15} - time.time()))\n"
        f"with lock.held(epath.Path({str(tmp_path / 'x.lock')!r}), 'x'):\n    print('mine'); time.sleep(3)"
    )
    start = [sys.executable, "-c", script]
    both = [
        subprocess.Popen(start, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], said
    assert "works on it" in said[0][1] + said[1][1] and not list(tmp_path.iterdir())


def test_a_lock_that_was_lost_ends_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RENEWED", 0.1)
    path = epath.Path(tmp_path) / "x.lock"
    with lock.held(path, "x") as mine:
        seen = json.loads(path.read_text())["seen"]
        time.sleep(0.5)
        assert json.loads(path.read_text())["seen"] > seen
        written_lock(path, host="elsewhere")
        time.sleep(0.5)
        refused(mine.check, "another process took over")
    assert json.loads(path.read_text())["token"] == "theirs"


# Damaged runs.


def checkpoints_is_a_file(run):
    (run / "checkpoints").write_text("x")


def metrics_are_cut(run):
    folder = run / "checkpoints" / "4" / "metrics"
    folder.mkdir(parents=True)
    (folder / "metrics").write_text('{"held_out/lo')


DAMAGES = {
    "a file of checkpoints": (checkpoints_is_a_file, "checkpoints is a file"),
    "metrics": (metrics_are_cut, "checkpoints/4/metrics/metrics is damaged; delete"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_runs_are_named(toy, tmp_path, name):
    damage, words = DAMAGES[name]
    settings = toy_training.settings(toy, f"run={tmp_path}")
    claim(epath.Path(tmp_path), settings)
    damage(tmp_path)
    before = snapshot(tmp_path)
    refused(lambda: Checkpoints(str(tmp_path), settings, {}, keep=1, best="", mode="min"), words)
    assert snapshot(tmp_path) == before


LOGS = {
    "list": b"[]\n",
    "no step": b'{"loss": 1.0}\n',
    "text for a step": b'{"step": "2"}\n',
    "cut in the middle": b'{"step": 2, "lo\n{"step": 3}\n',
    "bytes": b"\xff\xfe\n",
    "nulls": b"\0" * 20 + b"\n",
    "deep": b"[" * 100_000 + b"\n",
    "number": b"7\n",
    "text for a loss": b'{"step": 2, "loss": "x"}\n',
    "object for a loss": b'{"step": 2, "seconds": {}}\n',
}


@pytest.mark.parametrize("name", LOGS)
def test_damaged_logs_are_named(tmp_path, name):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n' + LOGS[name])
    before = snapshot(tmp_path)
    for read in (watch.read_log, watch.summary, lambda run: watch.Log(epath.Path(run), 5)):
        refused(lambda read=read: read(tmp_path), "log.jsonl, line 2: got no line of a log")
    assert snapshot(tmp_path) == before
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert watch.read_log(tmp_path) == [{"step": 1}]


# Ctrl-C while training.


def test_an_interrupted_step_is_saved_in_one_line(toy, tmp_path, monkeypatch, capsys):
    advance = watch.Watch.advance

    def interrupted(self, step):
        advance(self, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    monkeypatch.setattr(watch.Watch, "advance", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        head.main(toy_training.settings(toy, f"run={tmp_path}/run", "loop.batch=4"))
    assert caught.value.code == 130 and signal.getsignal(signal.SIGINT) is before
    assert "interrupted: saved step 2 of 12; the same command goes on from there" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir() and not (tmp_path / "run" / "run.lock").exists()


def test_a_second_interrupt_ends_at_once():
    script = (
        "import os, signal, time; from train import loop\n"
        "with loop.Termination() as asked:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5)\n"
        "    assert asked.requested(1) and asked.status == 143\n"
        "with loop.Termination() as asked:\n"
        "    for _ in range(2):\n"
        "        assert not asked.requested(1) or asked.status == 130\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(0.5)\n"
        "    print('went on')"
    )
    here = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=False)
    assert ended.returncode == 130 and "went on" not in ended.stdout, ended.stderr
    assert "Ctrl-C again ends at once" in ended.stdout and "Traceback" not in ended.stderr


def test_an_evaluation_that_was_cut_short_does_not_abort_the_process():
    """Its thread returns from XLA again and again while the interpreter ends, which aborts Python 3.11 with status 134."""
    script = (
        "import os, signal, sys, threading, jax, jax.numpy as jnp; from train import config, loop, export\n"
        "multiply = jax.jit(lambda x: x @ x)\n"
        "def work():\n"
        "    while True: multiply(jnp.ones((64, 64))).block_until_ready()\n"
        "def main(_):\n"
        "    with loop.Termination() as asked:\n"
        "        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "        asked.unless_received(work); sys.exit(asked.status)\n"
        "config.run(main, export.ExportStage, None, ['run=a', 'out=b'])"
    )
    here = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=False)
    assert ended.returncode == 130, ended.stderr


def test_two_runs_of_one_folder_are_refused(toy, tmp_path):
    with lock.held(folders.absolute(tmp_path) / "run.lock", "run"):
        refused(lambda: head.main(toy_training.settings(toy, f"run={tmp_path}")), "works on it")
    assert not list(tmp_path.iterdir())
