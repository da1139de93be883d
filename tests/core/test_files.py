"""Files: none of others replaced, and none half-written."""

import json
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
from refusals import mistake, refused, snapshot
from safetensors.numpy import save_file

from train import measure, step_memory
from treeflash_jax.bench import bench_records
from treeflash_jax.cli.commands import main as cli
from treeflash_jax.core import files
from treeflash_jax.formats import model_files, storage, tensor_files

PAIR = Path(files.__file__).parents[1] / "assets" / "tiny"


INDICES = {
    "parent": ({"a": "../model.safetensors"}, "the name of a file in this folder"),
    "null": ({"a": None}, "got None for tensor a"),
    "dots": ({"a": ".."}, "got '..' for tensor a"),
    "null byte": ({"a": "x\0"}, "the name of a file in this folder"),
    "long": ({"a" * 5000: "x" * 5000}, "the name of a file in this folder"),
    "no map": (None, "got no weight_map"),
    "list for a map": (["a"], "got no weight_map"),
}


@pytest.mark.parametrize("weight_map, words", INDICES.values(), ids=INDICES)
def test_indices_name_files_of_their_folder(tmp_path, weight_map, words):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    save_file({"a": np.zeros(2, np.float32)}, folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(lambda: tensor_files.open_folder(folder).__enter__(), "model.safetensors.index.json", words)


OUTPUTS = {
    "bench run": lambda out: cli(["bench", "run", "--out", out]),
    "bench latency": lambda out: cli(["bench", "latency", "--out", out]),
    "bench memory": lambda out: cli(["bench", "memory", "--shape", "tiny", "--no-compile", "--out", out]),
    "train.step_memory": lambda out: step_memory.main(["x.toml", "--out", out]),
    "train.measure": lambda out: measure.main(measure.MeasureConfig(verifier="x", drafter="x", respond="x", out=out)),
}


@pytest.mark.parametrize("text", ["a note\n", '{"mine": {}}', "[1]"])
@pytest.mark.parametrize("run", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_never_replace_what_is_not_theirs(tmp_path, capsys, run, text):
    out = tmp_path / "notes.txt"
    out.write_text(text)
    try:
        assert run(str(out)) in (1, 2)
        error = capsys.readouterr().err
    except ValueError as caught:
        error = f"{caught}\n"
    assert error.count("\n") == 1 and "notes.txt" in error
    assert snapshot(tmp_path) == {"notes.txt": text.encode()}


def test_what_lies_at_a_url_is_downloaded_once_until_it_changes(own_cache):
    system = fsspec.filesystem("memory")
    for name in ("config.json", "assistant/model.safetensors", "original/model.safetensors", "video.bin"):
        system.pipe(f"/models/drafter/{name}", name.encode())
    folder = files.fetch("memory://models/drafter")
    assert folder.name == "drafter"
    assert snapshot(folder) == {name: name.encode() for name in ("config.json", "assistant/model.safetensors")}
    (folder / "kept").touch()
    assert files.fetch("memory://models/drafter/") == folder and (folder / "kept").exists()
    assert files.fetch("memory://models/drafter/config.json").read_text() == "config.json"
    for used_since in (True, False):  # another process may still read what was used within a day
        os.utime(folder.parent, (0, 0))
        if used_since:
            files.fetch("memory://models/drafter")
        system.pipe("/models/drafter/config.json", f"new {used_since}".encode())
        new = files.fetch("memory://models/drafter")
        assert (new / "config.json").read_text() == f"new {used_since}" and folder.exists() == used_since
    message = refused(lambda: files.fetch("memory://models/other"))
    assert message == "memory://models/other cannot be read (no such file or folder)"


def test_urls_that_cannot_be_read_get_one_line(own_cache, tmp_path):
    for url in ("data://x", "nothing://x", "http://127.0.0.1:9/x", "zip://x::" + str(tmp_path), "memory://" + "x" * 5000):
        refused(lambda url=url: files.fetch(url), url[:100], "cannot be read")


@pytest.mark.parametrize("url", ["zip://drafter::{}", "zip://::{}"])
def test_names_behind_a_url_stay_inside_the_folder(own_cache, tmp_path, url):
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as bundle:
        bundle.writestr("drafter/config.json", "{}")
        bundle.writestr("drafter/../../../../evil.json", "{}")
    refused(lambda: files.fetch(url.format(tmp_path / "bundle.zip")), "got the name", "expected one inside the folder")
    assert not [*tmp_path.rglob("*.json")]


def test_files_grow_in_utf8_in_every_locale(bucket, tmp_path, monkeypatch):
    """Without an encoding, Python opens text in that of the locale, such as Latin-1."""
    latin = lambda path, mode, encoding="latin-1": open(path, mode, encoding=encoding)  # noqa: E731
    monkeypatch.setattr(files, "open", latin, raising=False)
    for path in (tmp_path / "lines", "gs://bucket/lines"):
        monkeypatch.setattr(type(files.absolute(path)), "read_text", lambda path: path.read_bytes().decode("latin-1"))
        files.write(path, "é")
        files.append(path, "ê")
        assert files.absolute(path).read_bytes().decode() == "éê"


@pytest.mark.parametrize("suite", ["run", "latency"])
def test_refused_benchmarks_leave_no_file(tmp_path, capsys, suite):
    out = ["--out", str(tmp_path / "out.json")]
    mistake(capsys, cli, ["bench", suite, *out, "--temperature", "-1"])
    assert not list(tmp_path.iterdir())


def fill(target, **named):
    with files.filled(target, **named) as folder:
        files.write(folder / "config.json", "new")
        files.write(folder / "README.md", "new")


def make_full(target):
    target.mkdir()
    (target / "README.md").write_text("old")


def make_busy(target):
    make_full(target)
    (target / "config.json").mkdir()
    (target / "config.json" / "x").write_text("old")


REFUSED_FOLDERS = {
    "file": (lambda target: target.write_text("old"), {"overwrite": True}, "exists and is no folder"),
    "folder with files": (make_full, {}, "exists; give a new folder"),
    "link to nowhere": (lambda target: target.symlink_to("nowhere"), {}, "exists and is no folder"),
    "link to a folder": (lambda target: target.symlink_to("."), {"overwrite": True}, "exists and is no folder"),
    "folder in place of a file": (make_busy, {"overwrite": True}, "is a folder, expected a file"),
}


@pytest.mark.parametrize("make, named, words", REFUSED_FOLDERS.values(), ids=REFUSED_FOLDERS)
def test_folders_with_other_files_stay(tmp_path, make, named, words):
    target = tmp_path / "inside" / "out"
    target.parent.mkdir()
    make(target)
    before = snapshot(tmp_path)
    refused(lambda: fill(target, **named), words)
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
    fill(tmp_path / "own", overwrite=True)
    whole = {"config.json": b"new", "README.md": b"new"}
    assert snapshot(tmp_path / "a") == {f"new/{name}": text for name, text in whole.items()}
    assert snapshot(tmp_path / "empty") == whole
    assert snapshot(tmp_path / "own") == whole | {"notes": b"mine"}
    assert elsewhere.read_text() == "theirs", "links are replaced, not followed"
    assert os.stat(tmp_path / "own" / "README.md").st_mode & 0o777 == os.stat(elsewhere).st_mode & 0o777


def test_outputs_in_the_home_folder_are_written_where_they_are_read(tmp_path, monkeypatch):
    """A shell expands ~ in paths, but not in options like --out=~/x or in TOML files."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    files.check_output("~/lines")
    files.write("~/lines", "a")
    files.append("~/lines", "b")
    fill("~/out")
    assert snapshot(tmp_path) == {"home/lines": b"ab", "home/out/README.md": b"new", "home/out/config.json": b"new"}
    refused(lambda: fill("~/out"), "exists; give a new folder")
    refused(lambda: bench_records.read_kept("~/lines", "results"), "holds something else")


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
    [left] = tmp_path.iterdir()
    fill(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {left.name, "out"}, "another process may still write to it"
    os.utime(left, (0, 0))
    files.write(tmp_path / "out" / "x", "")
    fill(tmp_path / "out", overwrite=True)
    fill(tmp_path / "second")
    assert left.exists(), "of another output"
    shutil.rmtree(tmp_path / "out")
    fill(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "second"}


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    def pieces():
        yield b"A"
        files.write(tmp_path / "x", b"BB")
        yield b"A"

    files.write(tmp_path / "x", pieces())
    assert snapshot(tmp_path) == {"x": b"AA"}


def test_devices_are_no_outputs():
    refused(lambda: files.check_output("/dev/null"), "/dev/null", "no regular file")


def test_a_full_disk_leaves_no_weights_and_no_target(tmp_path):
    """No file may grow beyond 3000 bytes."""
    convert = partial(model_files.convert_drafter, PAIR / "drafter", tmp_path / "out", "dflash", drop_head=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        refused(convert, "cannot write", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    convert()
    written, source = (folder / "model.safetensors" for folder in (tmp_path / "out", PAIR / "drafter"))
    assert storage.is_own(written) and not storage.is_own(source)
