"""Runs the notebooks in place and saves their outputs, without what changes between runs of the same code.

python notebooks/run.py [NOTEBOOK ...]
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Runs a notebook in `folder`, on a kernel of this interpreter that imports this clone.

    Raises:
      nbclient.exceptions.CellExecutionError: the first cell that fails.
    """
    write_kernel_spec(folder / "kernels" / "this-interpreter")
    os.environ["JUPYTER_PATH"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm, where ipywidgets is not installed
    notebook = nbformat.read(path, as_version=4)
    place = {"kernel_name": "this-interpreter", "resources": {"metadata": {"path": str(folder)}}}
    return NotebookClient(notebook, timeout=900, record_timing=False, coalesce_streams=True, **place).execute()


def save(path: Path, folder: Path) -> None:
    """Runs a notebook in `folder` and saves it where it is."""
    notebook = execute(path, folder)
    notebook.metadata = METADATA
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":  # stderr has notes, such as where programs are kept on this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.update({"text": output["text"].replace(f"{folder}/", "")} if "text" in output else {})
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            save(path, Path(folder))
