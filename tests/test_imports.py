"""Structure of the package: layers, cycles, names of files, and how little `import treeflash_jax` brings in."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import treeflash_jax

PACKAGE = Path(treeflash_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TRAIN_FILES = sorted((PACKAGE.parent / "train").rglob("*.py"))
# A folder imports from itself and from those before it. "commands" are bench, cli and __main__; `__init__` is the package.
LAYERS = ("core", "models", "trees", "drafters", "acceptance", "decoding", "formats", "engine", "__init__", "commands")
HEAVY = ("torch", "gguf", "grain", "datasets", "transformers", "matplotlib", "orbax", "optax", "flax.nnx", "pydantic")
HEAVY += ("jax.experimental.pallas",)


def layer(name: str) -> int:
    return LAYERS.index("commands" if name in ("bench", "cli", "__main__") else name)


def imports(path: Path) -> set[str]:
    """Returns the dotted names that a file imports, inside functions too; `from a import b` is a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top_module(name: str) -> str:
    """Returns the top-level module of `treeflash_jax.<...>`; `__init__` for a name that the package only re-exports."""
    _, _, inside = name.partition(".")
    top = inside.split(".")[0]
    return top if top and ((PACKAGE / top).is_dir() or (PACKAGE / f"{top}.py").exists()) else "__init__"


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_no_module_imports_a_higher_layer(path):
    importer = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for name in imports(path):
        root = name.split(".")[0]
        assert root != "train", f"{importer} imports {name}: the library never imports the training code"
        if root == "treeflash_jax":
            assert layer(top_module(name)) <= layer(importer), f"{importer} imports {name}, which lies in a higher layer"


def test_no_modules_import_each_other():
    modules = {}
    for path in (*FILES, *TRAIN_FILES):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path

    def module(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = {name: {module(other) for other in imports(path)} - {name, ""} for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_no_two_modules_share_a_file_name():
    counts = Counter(path.name for path in (*FILES, *TRAIN_FILES) if path.name != "__init__.py")
    assert not [name for name, count in counts.items() if count > 1]


def test_the_root_of_the_package_stays_small():
    names = {path.name for path in PACKAGE.iterdir()} - {"assets", "py.typed", "README.md", "__pycache__"}
    assert len(names) <= 12, names


def test_kernels_are_imported_by_attention_alone_and_inside_a_function():
    for path in FILES:
        names = {
            name
            for name in imports(path)
            if name.startswith(("treeflash_jax.models.backend.attention_gpu", "treeflash_jax.models.backend.attention_tpu"))
        }
        assert not names or path.name == "attention_kernels.py", f"{path} imports {names}"
    top = ast.parse((PACKAGE / "models" / "backend" / "attention_kernels.py").read_text(encoding="utf-8")).body
    assert not [node for node in top if isinstance(node, ast.ImportFrom) and "backend" in node.module]


def test_importing_the_library_is_quick_and_light():
    """CPU seconds of the import alone, best of three fresh interpreters: wall time would measure the machine's load."""
    script = (
        "import json, sys, time; start = time.process_time(); import treeflash_jax; "
        f"print(json.dumps([time.process_time() - start, [m for m in {HEAVY!r} if m in sys.modules]]))"
    )
    runs = [
        json.loads(
            subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, check=True).stdout
        )
        for _ in range(3)
    ]
    assert runs[0][1] == []
    assert min(seconds for seconds, _ in runs) < 2
