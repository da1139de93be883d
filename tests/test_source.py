"""The source itself: layers, cycles, and how little an import brings in."""

import ast
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import treeflash_jax

PACKAGE = Path(treeflash_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TRAIN_FILES = sorted((PACKAGE.parent / "train").rglob("*.py"))
TEST_FILES = sorted(Path(__file__).parent.rglob("*.py"))
# A folder imports from itself and from those before it; `__init__` is the package.
LAYERS = (
    "core models trees drafters acceptance decoding formats constraints engine __init__ bench serve cli __main__".split()
)
ROOMS = "settings call schedule answers".split()  # of the engine, in which the same holds
HEAVY = ("torch", "grain", "datasets", "transformers", "matplotlib", "orbax", "optax", "flax.nnx")
HEAVY += ("jax.experimental.pallas", "fastapi", "uvicorn", "prometheus_client")


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


def layer(name: str) -> int:
    """Returns the layer of a top-level module; a name that is none is one that the package re-exports."""
    is_module = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
    return LAYERS.index(name if is_module else "__init__")


def test_no_module_imports_a_higher_layer():
    for path in FILES:
        importer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for name in imports(path):
            root, module, *_ = [*name.split("."), "__init__"]
            assert root != "train", f"{path} imports {name}: the library never imports the training code"
            assert root != "treeflash_jax" or layer(module) <= layer(importer), f"{path} imports {name} of a higher layer"


def test_no_room_of_the_engine_imports_a_later_one():
    for path in (path for path in FILES if path.parts[-3:-1] in {("engine", room) for room in ROOMS}):
        rooms = {(*name.split("."), "", "")[2] for name in imports(path) if name.startswith("treeflash_jax.engine.")}
        assert rooms <= {*ROOMS[: ROOMS.index(path.parts[-2]) + 1]}, path


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


def test_no_module_imports_a_module_of_tests():
    """What several of them share is in a plain module."""
    tests = {path.stem for path in TEST_FILES if path.stem.startswith("test_")}
    for path in TEST_FILES:
        assert tests.isdisjoint(name.partition(".")[0] for name in imports(path)), path


def test_only_openings_of_docstrings_are_followed_by_deeper_lines():
    """A colon, a bracket, a backslash, a list item and an entry of Args open something; the lines of a paragraph do not."""
    for path in (*FILES, *TRAIN_FILES):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for line, following in pairwise((ast.get_docstring(node) or "").splitlines()):
                    is_deeper = re.match(" *", following).end() > re.match(" *", line).end()
                    opens = not line or line.endswith((":", "(", "\\")) or re.match(r" *- | +[\w*, ]+: ", line)
                    assert opens or not is_deeper, f"{path}: {line}"


def test_modules_with_shape_suffixes_list_them():
    """Finds suffixes of b, the batch, and one to three consonants: no English word has this form."""
    for path in (*FILES, *TRAIN_FILES):
        text = path.read_text(encoding="utf-8")
        names = set(re.findall(r"\w+_b[b-df-hj-np-tv-xz]{1,3}\b", text))
        assert len(names) < 3 or "\nShape suffixes: " in text, path


def test_no_form_is_for_a_release_of_jax_that_is_no_longer_supported():
    """Comments name the release for whose compiler a form was chosen: when the minimum rises, it is to be tried again."""
    minimum = tuple(map(int, re.search(r'"jax>=(\d+)\.(\d+)', (PACKAGE.parent / "pyproject.toml").read_text()).groups()))
    named = {path: re.findall(r"\bjax(?:lib)? (\d+)\.(\d+)", path.read_text(), re.I) for path in (*FILES, *TRAIN_FILES)}
    assert sum(map(len, named.values())) > 5
    old = [path for path, releases in named.items() if any(tuple(map(int, release)) < minimum for release in releases)]
    assert old == [], "try these forms against plain ones (CONTRIBUTING, A new release of JAX)"


def test_importing_the_library_is_quick_and_light():
    """It takes less CPU time than the import of JAX before it, in one of three fresh interpreters."""
    script = (
        "import json, sys, time; start = time.process_time(); import jax; middle = time.process_time(); "
        "import treeflash_jax; "
        "seconds = middle - start, time.process_time() - middle; "
        f"print(json.dumps([*seconds, [m for m in {HEAVY!r} if m in sys.modules]]))"
    )

    def is_quick() -> bool:
        output = subprocess.check_output([sys.executable, "-c", script], cwd=PACKAGE.parent)
        jax_seconds, our_seconds, heavy = json.loads(output)
        assert heavy == []
        return our_seconds < jax_seconds

    assert any(is_quick() for _ in range(3))
