"""The source itself: layers, cycles, names of files, and how little an import brings in."""

import ast
import json
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import treeflash_jax

PACKAGE = Path(treeflash_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TRAIN_FILES = sorted((PACKAGE.parent / "train").rglob("*.py"))
# A folder imports from itself and from those before it; `__init__` is the package.
LAYERS = "core models trees drafters acceptance decoding formats engine __init__ bench cli __main__".split()
HEAVY = ("torch", "gguf", "grain", "datasets", "transformers", "matplotlib", "orbax", "optax", "flax.nnx", "pydantic")
HEAVY += ("jax.experimental.pallas",)


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


def test_files_have_different_names_and_the_root_of_the_package_is_small():
    counts = Counter(path.name for path in (*FILES, *TRAIN_FILES) if path.name != "__init__.py")
    assert not [name for name, count in counts.items() if count > 1]
    names = {path.name for path in PACKAGE.iterdir()} - {"assets", "py.typed", "README.md", "__pycache__"}
    assert len(names) <= 12, names


def test_only_devices_asks_which_backend_or_chip_runs():
    for path in (*FILES, *TRAIN_FILES):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)]
        assert not {node.attr for node in nodes} & {"default_backend", "device_kind"} or path.name == "devices.py", path


def test_functions_that_are_called_directly_are_compiled_with_the_options_of_the_device():
    """By `programs.jit`; `jax.jit` alone serves what `programs.call`, `bench.phases` or `train.compile` compiles.

    Inside programs, `jax.jit` makes JAX trace repeated pieces once.
    """
    compiled_elsewhere = "programs check loops phases compile draft_vocabulary quantized".split()
    traced_once = "containers backbone ngram levels verifier kv_cache".split()
    for path in (*FILES, *TRAIN_FILES):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)]
        jitted = [node for node in nodes if ast.unparse(node) == "jax.jit"]
        is_known = path.stem in (*compiled_elsewhere, *traced_once)
        assert not jitted or is_known, f"{path}:{jitted[0].lineno} uses jax.jit, not programs.jit"


def test_importing_the_library_is_quick_and_light():
    """CPU seconds of the import alone, best of three fresh interpreters: wall time would measure the machine's load."""
    script = (
        "import json, sys, time; start = time.process_time(); import treeflash_jax; "
        f"print(json.dumps([time.process_time() - start, [m for m in {HEAVY!r} if m in sys.modules]]))"
    )
    seconds = []
    for _ in range(3):
        output = subprocess.check_output([sys.executable, "-c", script], cwd=PACKAGE.parent)
        time, heavy = json.loads(output)
        assert heavy == []
        seconds.append(time)
    assert min(seconds) < 2
