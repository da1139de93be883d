"""Notebooks run top to bottom, and their saved outputs are whole and say nothing about the machine that made them.

`python tests/test_notebooks.py` runs them in place and saves the outputs.
"""

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
from ipykernel.kernelspec import write_kernel_spec
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

import treeflash_jax as tf

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ADDRESS = runpy.run_path(str(ROOT / "notebooks" / "address.py"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|tmp|home|Users)\b")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Runs a notebook in `folder`, on a kernel of this interpreter that imports this clone.

    Raises:
      nbclient.exceptions.CellExecutionError: the first cell that fails.
    """
    write_kernel_spec(folder / "kernels" / "this-interpreter")
    os.environ["JUPYTER_PATH"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm, where ipywidgets is not installed
    notebook = nbformat.read(path, as_version=4)
    place = {"kernel_name": "this-interpreter", "resources": {"metadata": {"path": str(folder)}}}
    return NotebookClient(notebook, timeout=300, record_timing=False, coalesce_streams=True, **place).execute()


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
    text = text.replace("budgets = [2, 4, 8, 16, 32]", "budgets = [2, 8]").replace("default_verifier()", "'tiny'")
    copy.write_text(text, encoding="utf-8")
    assert_no_errors(execute(copy, tmp_path))


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
def test_installs_what_is_missing(present, chips, exists, repository, trains, installed, fetched, monkeypatch):
    """The first code cell of a notebook, with some modules present; None: it says what to do."""
    cell = TransformerManager().transform_cell(ADDRESS["install_cell"](repository, trains))
    commands, lines = [], []

    def install(magic: str, line: str) -> None:
        lines.append(line.format(**namespace))

    namespace = {"get_ipython": lambda: SimpleNamespace(run_line_magic=install, system=commands.append)}
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in present else None)
    monkeypatch.setattr("os.path.exists", lambda place: place in exists)
    monkeypatch.setattr("glob.glob", lambda pattern: [x for x in chips if fnmatch(pattern, x)])
    monkeypatch.setitem(sys.modules, "train", tf)
    with nullcontext() if installed is not None else pytest.raises(ModuleNotFoundError, match="upload"):
        exec(cell, namespace)
    assert lines == ([f'install -q "{installed}"'] if installed else [])
    assert commands == fetched


@each_notebook
def test_the_address_is_that_of_pyproject(path):
    text, render = path.read_text(encoding="utf-8"), ADDRESS["rendered_notebook"]
    assert render(text, ADDRESS["read_address"](), path.name) == text, "run python notebooks/address.py"
    assert "(https://colab.research.google.com/github/" not in render(text, "https://example.org/somewhere", path.name)
    public = render(text, "https://github.com/someone/somewhere", path.name)
    assert f"/github/someone/somewhere/blob/main/notebooks/{path.name})" in public and "upload" not in public


def save(path: Path, folder: Path) -> None:
    """Runs a notebook and saves it with its outputs and nothing that changes between runs of the same code."""
    notebook = execute(path, folder)
    notebook.metadata = METADATA
    for cell in notebook.cells:
        cell.metadata = {}
    for cell in code_cells(notebook):  # notes, such as where programs are kept on this machine
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            output.update({"text": output["text"].replace(f"{folder}/", "")} if "text" in output else {})
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    import tempfile

    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            save(path, Path(folder))
