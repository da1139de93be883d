"""Files and faults: no blocking on pipes, no files of others replaced, no half-written files, one writer at a time."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
import toy_training
from etils import epath
from safetensors.numpy import save_file

from train import compile, export, head, measure, respond
from train.data import answers
from train.data.records import Source
from train.runtime import folders, lock, run_config, watch
from train.runtime.checkpoint import Checkpoints, claim
from treeflash_jax.bench import bench_records, latency
from treeflash_jax.cli.commands import main as cli
from treeflash_jax.core import files
from treeflash_jax.core.checks import read_json
from treeflash_jax.decoding import calibration
from treeflash_jax.formats import conversions, gguf_reader, models, safetensors, storage
from treeflash_jax.formats.tokenizer import Tokenizer

PAIR = Path(files.__file__).parents[1] / "assets" / "tiny"


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
    """Asserts that an action is refused with one line of at most 300 characters that holds the words."""
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
    "gguf": ("model.gguf", lambda path: gguf_reader.read(path)),
    "tokenizer": ("tokenizer.json", lambda path: Tokenizer.load(path.parent)),
    "calibration": ("budget.json", lambda path: calibration.read(path)),
    "settings": ("head.toml", lambda path: run_config.read(path)),
    "results": ("out.jsonl", lambda path: bench_records.read_records(path)),
    "timings": ("out.json", lambda path: latency.read_results(path)),
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
    "object": ({"weight_map": {"a": {}}}, "got {} for tensor a"),
    "dots": ({"weight_map": {"a": ".."}}, "got '..' for tensor a"),
    "null byte": ({"weight_map": {"a": "x\0"}}, "the name of a file in this folder"),
    "long": ({"weight_map": {"a" * 5000: "x/" * 5000}}, "the name of a file in this folder"),
    "no map": ({"metadata": {}}, "got no weight_map"),
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


# Output files with other content.

OUTPUTS = {
    "bench run": lambda out: cli(["bench", "run", "--out", out]),
    "bench drafters": lambda out: cli(["bench", "drafters", "--out", out]),
    "bench latency": lambda out: cli(["bench", "latency", "--out", out]),
    "bench memory": lambda out: cli(["bench", "memory", "--shape", "tiny", "--no-compile", "--out", out]),
    "train.compile": lambda out: compile.main(["x.toml", "--shape", "qwen3-4b", "--out", out]),
    "train.measure": lambda out: measure.main(measure.MeasureStage(verifier="x", drafter="x", respond="x", out=out)),
}


@pytest.mark.parametrize("text", ["a note\n", '{"mine": {}}', "[1]"])
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


def test_what_lies_at_a_url_is_downloaded_once_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    system = fsspec.filesystem("memory")
    for name in ("config.json", "inside/weights"):
        system.pipe(f"/models/drafter/{name}", name.encode())
    folder = files.fetch("memory://models/drafter")
    assert folder.name == "drafter" and (folder / "inside" / "weights").read_bytes() == b"inside/weights"
    (folder / "kept").touch()
    assert files.fetch("memory://models/drafter/") == folder and (folder / "kept").exists()
    assert files.fetch("memory://models/drafter/config.json").read_text() == "config.json"
    system.pipe("/models/drafter/config.json", b"new")
    assert (files.fetch("memory://models/drafter") / "config.json").read_text() == "new" and not folder.exists()
    with pytest.raises(ValueError, match="memory://models/other cannot be read .no such file or folder.; gs:// needs"):
        files.fetch("memory://models/other")


@pytest.mark.parametrize("suite", ["run", "latency"])
def test_refused_benchmarks_leave_no_file(tmp_path, capsys, suite):
    out = ["--out", str(tmp_path / "out.json"), *(["--plot", str(tmp_path / "a.png")] if suite != "run" else [])]
    with pytest.raises(SystemExit, match="2"):
        cli(["bench", suite, *out, "--temperature", "-1"])
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_record_that_was_cut_off_is_measured_again(tmp_path):
    out = tmp_path / "out.jsonl"
    for tail in ("", '{"sch', '{"schema": 2, "prompt_id"'):
        out.write_text(tail)
        with pytest.warns(UserWarning, match="cut off") if tail else pytest.MonkeyPatch.context():
            bench_records.open_results(out).close()
        assert out.read_bytes() == b""


def test_figures_replace_figures_alone(tmp_path):
    from treeflash_jax.bench import plots

    (tmp_path / "a.png").write_bytes(b"\x89PNG of a cat")
    refused(lambda: plots.check(tmp_path / "a.png"), "holds something else")
    pytest.importorskip("matplotlib")
    for name in ("b.png", "b.svg", "b.pdf"):
        plots.draw({}, tmp_path / name)
        plots.check(tmp_path / name)


# The writer of folders.


def fill(target, **named):
    with files.filled(target, **named) as folder:
        files.write(folder / "config.json", "new")
        files.write(folder / "README.md", "new")


def make_full(target):
    target.mkdir()
    (target / "README.md").write_text("old")


def make_link(target, to):
    (target.parent / "empty").mkdir()
    target.symlink_to(target.parent / to)


def make_busy(target):
    make_full(target)
    (target / "config.json").mkdir()
    (target / "config.json" / "x").write_text("old")


REFUSED_FOLDERS = {
    "file": (lambda target: target.write_text("old"), {"overwrite": True}, "exists and is no folder"),
    "folder with files": (make_full, {}, "exists; give a new folder"),
    "link to nowhere": (lambda target: make_link(target, "nowhere"), {}, "exists and is no folder"),
    "link to a folder": (lambda target: make_link(target, "empty"), {"overwrite": True}, "exists and is no folder"),
    "foreign": (make_full, {"overwrite": True, "may_replace": lambda _: False}, "did not write"),
    "folder in place of a file": (make_busy, {"overwrite": True}, "is a folder, expected a file"),
}


@pytest.mark.parametrize("name", REFUSED_FOLDERS)
def test_folders_with_other_files_stay(tmp_path, name):
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
    fill(tmp_path / "own", overwrite=True, may_replace=lambda _: True)
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
        "import os, sys; from treeflash_jax.core import files\n"
        f"with files.filled({str(tmp_path / 'out')!r}) as folder:\n"
        "    (folder / 'half').write_text('1'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False)
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

ASKED = [respond.Prompt("x", ids) for ids in ([1], [2, 3], [4, 5, 6])]


def asking(out, **named):
    named = {"verifier": "tiny", "sources": (Source(path="x.jsonl"),), "out": str(out), "max_new_tokens": 8} | named
    return respond.RespondConfig(**named)


def answer_lines(*indices, finished="stop"):
    return "".join(
        json.dumps({"index": i, "prompt": ASKED[i].ids, "response": [7], "finished": finished}) + "\n" for i in indices
    )


def check_answers(settings):
    answers.check_settings(settings, Path(settings.out), respond.FREE)


def test_settings_of_the_user_are_never_written_over(tmp_path):
    theirs = tmp_path / "mine.toml"
    theirs.write_text("# my settings\nmax_new_tokens = 8\n")
    settings = asking(tmp_path / "mine.jsonl")
    check_answers(settings)
    answers.save_settings(settings, Path(settings.out))
    Path(settings.out).write_text(answer_lines(0))
    check_answers(settings)
    refused(lambda: check_answers(asking(settings.out, max_new_tokens=12)), "begun with max_new_tokens = 8")
    (tmp_path / "other.jsonl").write_text(answer_lines(0))
    refused(lambda: check_answers(asking(tmp_path / "other.jsonl")), "exists without its settings")
    assert theirs.read_text() == "# my settings\nmax_new_tokens = 8\n"
    refused(lambda: asking(tmp_path / "answers.toml"), "expected the name of a JSONL file")


@pytest.mark.parametrize("repeated", [(0, 1, 2, 0, 1, 2), (0, 1, 1)])
def test_doubled_answers_are_repaired(tmp_path, repeated):
    """In one file, and also in the part of one process."""
    out = tmp_path / "out.jsonl"
    out.write_text(answer_lines(*repeated))
    if 2 not in repeated:
        (tmp_path / "out.jsonl.part-0").write_text(answer_lines(1, 2, 2))
    for _ in range(2):
        assert answers.merge(out, 3, "keep") == 0
        assert snapshot(tmp_path) == {"out.jsonl": answer_lines(0, 1, 2).encode()}


LINES = {
    "text for an index": b'{"index": "0", "prompt": [1], "response": [7]}\n',
    "list": b"[]\n",
    "deep": b"[" * 100_000 + b"\n",
    "bytes": b"\xff\xfe\n",
    "no prompt": b'{"index": 0}\n',
}


@pytest.mark.parametrize("name", LINES)
def test_damaged_answers_are_named(tmp_path, name):
    out = tmp_path / "out.jsonl"
    out.write_bytes(answer_lines(0).encode() + LINES[name])
    refused(lambda: answers.match(out, ASKED), "out.jsonl, line 2: got no answer")
    assert snapshot(tmp_path).keys() == {"out.jsonl"}


# The lock.

HOLDER = (
    "import sys, time; from train.runtime import lock; from etils import epath\n"
    "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
    "with lock.held(epath.Path(sys.argv[1]), 'x'):\n    print('held', flush=True); time.sleep(float(sys.argv[3]))"
)


def holder(path, begins=0.0, seconds=600):
    """A process that holds a lock."""
    command = [sys.executable, "-c", HOLDER, str(path), str(begins), str(seconds)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes)


def test_a_lock_ends_with_its_process(tmp_path):
    path = epath.Path(tmp_path) / "x.lock"
    process = holder(path)
    assert process.stdout.readline() == "held\n"
    refused(lambda: lock.held(path, "run=x").__enter__(), "run=x: another process works on it", "x.lock")
    process.kill()
    process.communicate()
    with lock.held(path, "run=x") as mine:
        mine.check()
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
    with lock.held(path, "run=x") as killed:
        with lock.held(path, "run=x") as newer:
            newer.check()
            refused(killed.check, "run=x: another process was started on it")
        assert not path.exists()
        with lock.held(path, "run=x") as newer:
            killed.release()
            newer.check()


# Damaged runs.


def test_damaged_metrics_of_checkpoints_are_refused(toy, tmp_path):
    folder = tmp_path / "checkpoints" / "4" / "metrics"
    folder.mkdir(parents=True)
    (folder / "metrics").write_text('{"held_out/lo')
    before, loop = snapshot(tmp_path), toy_training.settings(toy).loop
    refused(lambda: Checkpoints(str(tmp_path), loop, {}), "checkpoints cannot be read (", "delete its damaged step")
    assert snapshot(tmp_path) == before


LOGS = {
    "list": b"[]\n",
    "text for a step": b'{"step": "2"}\n',
    "cut in the middle": b'{"step": 2, "lo\n{"step": 3}\n',
    "bytes": b"\xff\xfe\n",
    "nulls": b"\0" * 20 + b"\n",
    "deep": b"[" * 100_000 + b"\n",
    "object for a loss": b'{"step": 2, "seconds": {}}\n',
}


def new_watch(run):
    return watch.Watch(epath.Path(run), steps=9, resumed_at=5)


@pytest.mark.parametrize("name", LOGS)
def test_damaged_logs_are_named(tmp_path, name):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n' + LOGS[name])
    before = snapshot(tmp_path)
    for read in (watch.read_log, watch.summary, new_watch):
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
    here = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=False)
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
    here = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=False)
    assert ended.returncode == 130, ended.stderr


def test_two_runs_of_one_folder_are_refused(toy, tmp_path):
    with lock.held(folders.absolute(tmp_path) / "run.lock", "run"):
        refused(lambda: head.main(toy_training.settings(toy, f"run={tmp_path}")), "works on it")
    assert not list(tmp_path.iterdir())
