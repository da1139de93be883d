"""Import layers, and how little `import treeflash_jax` brings in."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import treeflash_jax

PACKAGE = Path(treeflash_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# A module imports its own layer and those before it. A directory stands for all its files; `__init__` is the package.
LAYERS = (
    {"files"},
    {"checks", "ahead", "clock", "suggest", "chats"},
    {"devices", "products"},
    {"mesh", "params", "programs", "quantized"},
    {"vocab", "kernels"},
    {"verifiers", "trees"},
    {"costs"},
    {"drafters", "acceptance"},
    {"decoding"},
    {"adaptive"},
    {"memory", "formats", "prompts"},
    {"settings", "draw", "inputs", "planning"},
    {"batching"},
    {"session"},
    {"results"},
    {"serving", "model"},
    {"pairs"},
    {"loading", "arguments"},
    {"bench", "check", "chat", "cli", "demo", "__init__", "__main__"},
)
HEAVY = ("torch", "gguf", "grain", "datasets", "transformers", "matplotlib", "orbax", "optax", "flax.nnx")
HEAVY += ("jax.experimental.pallas",)


def layer_of(module: str) -> int:
    places = [place for place, modules in enumerate(LAYERS) if module in modules]
    assert places, f"treeflash_jax.{module} has no place in LAYERS"
    return places[0]


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, inside functions too; `from a import b` is a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(name: str) -> str:
    """The top-level module that `treeflash_jax.<...>` names; the package itself for what it only re-exports."""
    _, _, inside = name.partition(".")
    top = inside.split(".")[0]
    return top if top and ((PACKAGE / top).is_dir() or (PACKAGE / f"{top}.py").exists()) else "__init__"


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_no_module_imports_a_higher_layer(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for name in imports(path):
        root = name.split(".")[0]
        assert root != "train", f"{own} imports {name}: the library never imports the training code"
        if root == "treeflash_jax":
            assert layer_of(module_of(name)) <= layer_of(own), f"{own} imports {name}, which lies in a higher layer"


def test_kernels_are_imported_by_attention_alone_and_inside_a_function():
    for path in FILES:
        names = {name for name in imports(path) if name.startswith("treeflash_jax.kernels")}
        assert not names or path.name == "attention.py", f"{path} imports {names}"
    top = ast.parse((PACKAGE / "verifiers" / "attention.py").read_text(encoding="utf-8")).body
    assert not [node for node in top if isinstance(node, ast.ImportFrom) and "kernels" in node.module]


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
