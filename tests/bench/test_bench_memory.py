"""`treeflash bench memory`: its words and results, no gather of logits or caches, and few launches."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from answers import make_assistant, with_shared_layers
from compiled import moved_shapes, written_weights
from conftest import PAIR, RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices
from jax.experimental import topologies as jax_topologies
from refusals import mistake, refused

import treeflash_jax as tf
from treeflash_jax.bench import memory
from treeflash_jax.cli.commands import main
from treeflash_jax.core import sharding
from treeflash_jax.decoding.state import DecodePlan, SharedPlan
from treeflash_jax.engine.device_memory import Footprint
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.plan import resolve
from treeflash_jax.models import vocab

SHAPES = ["--shape", str(PAIR / "verifier"), "--drafter-shape", str(PAIR / "drafter" / "config.json")]
COMPILERS = {"h200": "jax_plugins.xla_cuda12", "v5e:2x2": "libtpu", "v6e:2x2": "libtpu"}
# At most, by nodes. A GPU would launch an operation for every copy of a weight in 8 bits.
IS_NEW = jax.__version_info__ >= (0, 12)
LAUNCHES = {
    ("h200", ""): {1: 640, 64: 1040 if IS_NEW else 960},
    ("h200", "--quantize int8"): {1: 640, 64: 1040 if IS_NEW else 960},
    ("h200", "--quantize int4"): {1: 745},
    ("h200", "--quantize fp8"): {1: 640} if IS_NEW else {1: 640, 16: 1070, 64: 1110},
    ("v5e:2x2", ""): {1: 1060, 64: 1750},
    ("v5e:2x2", "--quantize int8"): {1: 1180, 64: 2010},
    ("v5e:2x2", "--quantize int4"): {1: 1330, 64: 2260},
    ("v5e:2x2", "--quantize fp8"): {1: 1260, 16: 2310, 64: 2320},
    ("v6e:2x2", "--quantize fp8"): {1: 1180, 16: 2270, 64: 2280},
}
if IS_NEW:
    LAUNCHES["h200", "--attention mosaic-gpu --kernels mosaic-gpu"] = {1: 355, 64: 590}
    LAUNCHES["h200", "--attention mosaic-gpu --kernels mosaic-gpu --quantize fp8"] = {1: 430, 16: 700, 64: 700}
# Bytes written beside the caches, at most, by nodes. In a round, TPUs lay out gate and up of the drafter anew: 199 MB.
TEMPORARIES = {
    ("h200", "--quantize fp8"): {1: 2.6e6, 16: 125e6, 64: 320e6},
    ("h200", "--attention mosaic-gpu --kernels mosaic-gpu --quantize fp8"): {1: 2.6e6, 16: 75e6, 64: 85e6},
    ("v5e:2x2", "--quantize fp8"): {1: 34e6, 16: 315e6, 64: 315e6},
    ("v5e:2x2", "--quantize int4"): {1: 70e6},
    ("v6e:2x2", "--quantize fp8"): {1: 39e6, 16: 330e6, 64: 330e6},
}
QWEN3_4B = {(2, 9728, 2560), (2560, 9728), (8, 6, 128, 2560), (2560, 32, 128)}  # shapes of a layer's weights
# 509 divides no other size of the pair, so only arrays with a whole vocabulary hold a multiple of 1018 numbers.
MODEL = replace(RANDOM_MODEL, vocab_size=1018)
DRAFTER = replace(RANDOM_DRAFTER, layers=replace(RANDOM_DRAFTER.layers, vocab_size=1018))


@pytest.mark.slow
@needs_8_devices
def test_a_round_on_a_mesh_gathers_neither_logits_nor_caches(monkeypatch):
    def moved(nodes: int) -> list[tuple[int, ...]]:
        draft = replace(DRAFTER, candidates=4, children=4)
        shared = SharedPlan(prefill_chunk=32, verifier=MODEL, loaded_drafter=DRAFTER)
        plan = DecodePlan(shared=shared, configured_drafter=draft, builder="best-first", num_nodes=nodes)
        return moved_shapes(memory.compile_programs(plan, tf.make_mesh(4, 2), 4, 256, jnp.float32)[1].as_text())

    def are_moved(shapes, size: int) -> bool:
        return any(math.prod(shape) >= size and math.prod(shape) % size == 0 for shape in shapes)

    shipped = moved(nodes=8)
    assert shipped and not are_moved(shipped, MODEL.vocab_size)
    assert not are_moved(shipped, MODEL.num_kv_heads * 256 * MODEL.head_dim)
    monkeypatch.setattr(vocab, "top_k", jax.lax.top_k)
    assert are_moved(moved(nodes=7), MODEL.vocab_size), "automatic partitioning gathers logits"


def test_launches_are_the_operations_in_the_body_of_the_largest_loop():
    def launches(sorts: int) -> int:
        def body(x):
            for _ in range(sorts):
                x = jnp.sort(x + 1)
            return x

        def program(x):
            x = jax.lax.while_loop(lambda x: x[0] < 5, lambda x: x + 1, jnp.sort(x))
            return jax.lax.while_loop(lambda x: x[0] < 9, body, x)

        return memory.count_launches(jax.jit(program).lower(jnp.zeros(8)).compile().as_text())

    assert launches(4) == 4 * launches(1) > 0


KEEP_TEXT = """
import sys
from treeflash_jax.bench import memory
from treeflash_jax.cli.commands import main
count = memory.count_launches
memory.count_launches = lambda text: open(sys.argv[1], "w").write(text) and count(text)
sys.exit(main(sys.argv[2:]))
"""


def compiled_ahead(tmp_path, topology: str, nodes: int, *words: str, shape: str = "qwen3-4b") -> tuple[dict, str]:
    """Returns the result of `bench memory` for one device that is not here, and the text of its program of rounds."""
    pytest.importorskip(COMPILERS[topology], reason='needs pip install "jax[cuda12]" or "jax[tpu]"')
    out, text = tmp_path / f"{nodes}.json", tmp_path / f"{nodes}.txt"
    words = ["bench", "memory", "--shape", shape, "--topology", topology, "--mesh", "1x1", "--out", str(out), *words]
    words += ["--nodes", str(nodes)] if nodes > 1 else ["--builder", "none"]
    run = subprocess.run([sys.executable, "-c", KEEP_TEXT, str(text), *words], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    [result] = json.loads(out.read_text()).values()
    assert result["topology"] == topology and result["fits"]
    assert "temporary in a round" in run.stdout and f"{result['launches']:,} operations launched" in run.stdout
    return result, text.read_text()


def test_a_written_weight_is_seen():
    body = "%body (p: s32[]) -> s32[] {\n  %x = OUT fusion(%p)\n}\n"
    body += "ENTRY %main (p: s32[]) -> s32[] {\n  %y = s32[] while(%p), body=%body\n}\n"
    seen = {"bf16[76,64,2560]{2,1,0}": 0, "bf16[2,9728,2560]{2,1,0}": 1, "(f32[8], bf16[2560,9728]{0,1:T(8,128)})": 1}
    seen |= {"bf16[2560,9728]{1,0:T(8,128)(4,1)S(1)}": 0, "bf16[16,1556480]{1,0}": 0}
    texts = {out: body.replace("OUT", out) for out in seen}
    assert {out: len(written_weights(text, QWEN3_4B, 16)) for out, text in texts.items()} == seen
    seen["bf16[2560,9728]{1,0:T(8,128)(4,1)S(1)}"] = 1
    assert {out: len(written_weights(text, QWEN3_4B, 16, on_chip=True)) for out, text in texts.items()} == seen


@pytest.mark.slow
@pytest.mark.parametrize("topology, options", LAUNCHES)
def test_a_device_that_is_not_here_compiles_step_and_round_in_few_launches(topology, options, tmp_path):
    for nodes, most in LAUNCHES[topology, options].items():
        result, text = compiled_ahead(tmp_path, topology, nodes, "--context", "1280", *options.split())
        assert 0.8 * most < result["launches"] <= most
        # By default less than gate and up of a layer, or the vocabulary, in bfloat16.
        largest = TEMPORARIES.get((topology, options), {}).get(nodes, 2**26 if nodes == 1 else 2**29)
        assert 0 < result["bytes_per_device"]["round"] < largest, "copies a weight"
        assert "fp8" not in options and "int4" not in options or written_weights(text, QWEN3_4B, nodes) == []


@pytest.mark.slow
def test_gpt_oss_120b_and_a_round_of_it_fit_one_gpu(tmp_path):
    """Its largest temporaries are parts of the experts in bfloat16."""
    result, _ = compiled_ahead(tmp_path, "h200", 64, "--context", "1280", "--quantize", "mxfp4", shape="gpt-oss-120b")
    assert 60 * 2**30 < result["bytes_per_device"]["total"] < 75 * 2**30


@pytest.mark.slow
def test_a_round_over_recurrent_layers_keeps_no_state_per_node(tmp_path):
    """In Qwen3.6-27B, 64 states would take 9 GiB."""
    result, _ = compiled_ahead(tmp_path, "h200", 64, shape="qwen3.6-27b")
    assert 0 < result["bytes_per_device"]["round"] < 2**29 and 2000 < result["launches"] <= 2400


@pytest.mark.slow
def test_prefill_of_a_long_prompt_holds_neither_all_its_scores_nor_a_copy_of_a_cache(tmp_path):
    result, _ = compiled_ahead(tmp_path, "h200", 1, "--context", "131072")
    assert result["bytes_per_device"]["prefill"] < 0.75 * 2**30 < result["bytes_per_device"]["verifier_cache"]


@needs_8_devices
@pytest.mark.slow
def test_the_command_writes_what_it_prints_and_keeps_what_was_there(tmp_path, capsys):
    out = tmp_path / "rounds.json"
    out.write_text('{"earlier": {"bytes_per_device": {}}}')
    words = ["bench", "memory", *SHAPES, "--mesh", "4x2", "--batch", "8", "--context", "300", "--out", str(out)]
    words += ["--nodes", "8", "--candidates", "4", "--children", "4"]
    assert main(words) == 0
    printed, steps = capsys.readouterr()
    assert steps == "compiling the prefill\ncompiling the rounds\n"
    results = json.loads(out.read_text())
    assert results.pop("earlier") == {"bytes_per_device": {}}
    [(key, result)] = results.items()
    name = "verifier cpu 4x2 batch 8 drafted by drafter: caches of 384 positions, 8 nodes, bfloat16"
    assert key == name and key in printed
    assert (result["context"], result["nodes"], result["mesh"]) == (384, 8, {"data": 4, "model": 2})
    assert result["dtype"] == "bfloat16" and result["fits"] and result["bytes_limit"] > 2**30, "the host's memory"
    sizes = result["bytes_per_device"]
    parts = [sizes[part] for part in (*asdict(Footprint(verifier=0)), "rest", "programs")]
    assert min(parts[:5]) > 0 and sizes["resident"] == sum(parts)
    assert sizes["total"] == sizes["resident"] + max(sizes["round"], sizes["prefill"]) and sizes["round"] > 0
    assert str(tmp_path) not in out.read_text() and str(PAIR) not in out.read_text()

    assert main([*words[:-6], "--no-compile", "--batch", "16", "--builder", "none"]) == 0
    results = json.loads(out.read_text())
    plain = "verifier cpu 4x2 batch 16 none: caches of 384 positions, 1 nodes, bfloat16"
    assert set(results) == {"earlier", key, plain} and results[key] == result and results[plain]["nodes"] == 1
    arithmetic = results[plain]["bytes_per_device"]
    assert arithmetic["verifier_cache"] == 2 * sizes["verifier_cache"] and "round" not in arithmetic
    assert arithmetic["drafter"] == arithmetic["drafter_cache"] == 0


def test_a_shape_on_a_mesh_that_is_not_here_is_arithmetic(capsys):
    words = ["bench", "memory", "--shape", "qwen3-8b", "--no-compile", "--topology", "v5e:4x4", "--batch", "16"]
    assert main([*words, "--mesh", "4x4"]) == 0
    assert "of 16.00 GiB: fits" in capsys.readouterr().out
    assert main([*words, "--mesh", "16x1"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_a_small_shape_needs_no_drafter(tmp_path, num_layers, capsys):
    """The default drafter reads five layers of a verifier, of a small one as many as it has."""
    config = json.loads((PAIR / "verifier" / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--shape", str(tmp_path), "--builder", "best-first", "--mesh", "1x1", "--no-compile"]
    assert main(["bench", "memory", *words]) == 0
    assert "drafter's cache" in capsys.readouterr().out


@pytest.mark.parametrize("words, message", [
    (["--topology", "v5e4x4", "--no-compile"], "got topology 'v5e4x4', expected one like"),
    (["--topology", "h200:2x2"], "got topology 'h200:2x2', expected one like"),
    (["--mesh", "64x64"], "got a mesh of 64 x 64"),
    (["--mesh", "2x2", "--no-compile", "--batch", "3"], "expected a multiple"),
    (["--drafter-shape", str(PAIR / "drafter")], "drafter does not fit"),
])  # fmt: skip
def test_mistakes_are_one_line_before_anything_compiles(words, message, capsys, monkeypatch):
    monkeypatch.setattr(memory, "compile_programs", lambda *_: pytest.fail("compiled"))
    mistake(capsys, main, ["bench", "memory", "--shape", "qwen3-4b", *words], message)


def test_a_topology_without_its_compiler_says_what_to_install(monkeypatch):
    def without(**_):
        raise RuntimeError("no cuda here\nat all")

    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setattr(jax_topologies, "get_topology_desc", without)
    for topology, words in (("v5e:2x2", 'pip install "jax[tpu]"'), ("h200", 'pip install "jax[cuda12]" (no cuda here)')):
        refused(partial(memory.find_devices, topology), words)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [1, pytest.param(2, marks=needs_8_devices)])
def test_the_table_of_each_layers_inputs_is_never_copied(ways):
    """In bfloat16, of which XLA for CPUs converts what it multiplies or moves; a mesh splits its rows."""
    model = with_shared_layers(RANDOM_MODEL)
    model = replace(model, vocab_size=2**14, layer_input_size=64, num_experts=0, dense_beside_experts=False)
    plan = resolve(GenerateConfig(nodes=4), model, make_assistant(model), dtype=jnp.bfloat16, device=sharding.device())
    mesh = sharding.make_mesh(1, ways, devices=jax.devices()[:ways])
    table = 2 * model.vocab_size * model.num_layers * model.layer_input_size // ways
    for program in memory.compile_programs(plan, mesh, 1, 256, jnp.bfloat16):
        assert program.memory_analysis().temp_size_in_bytes < table / 2
