"""int8 verifiers: rounding by hand, products, loading, bytes, meshes, and what `check` compares."""

import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import PROMPTS, SAMPLED, TREE, draw
from conftest import FOLDERS, RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices
from jax.sharding import PartitionSpec
from model_files import assert_same
from refusals import mistake, refused

import treeflash_jax as tf
from treeflash_jax.bench import shapes
from treeflash_jax.bench.memory import compile_programs
from treeflash_jax.bench.verdicts import describe_reference
from treeflash_jax.cli import commands
from treeflash_jax.core import parameters, programs
from treeflash_jax.decoding.state import DecodePlan, SharedPlan
from treeflash_jax.drafters import NgramDrafter
from treeflash_jax.engine import loading
from treeflash_jax.engine.device_memory import footprint
from treeflash_jax.formats import model_files
from treeflash_jax.models import decoder, layers, quantized
from treeflash_jax.models.quantized import quantize_channels
from treeflash_jax.models.quantized_weight import Quantized
from treeflash_jax.models.vocab import embed, unembed

SMALL = replace(RANDOM_MODEL, num_layers=1)
LAYER = layers.layer_specs(RANDOM_MODEL)
PRODUCTS = {"q": ("btd,hed->bthe", (2,)), "down": ("btf,df->btd", (1,)), "o": ("bthe,dhe->btd", (1, 2))}


def widened(weight: Quantized, inputs: tuple[int, ...]) -> np.ndarray:
    return np.asarray(weight.values, np.float32) * np.expand_dims(np.asarray(weight.scale, np.float32), inputs)


@pytest.fixture(scope="module")
def int8() -> tf.TreeFlash:
    return shapes.random_pair(SMALL, NgramDrafter(), jnp.float32, quantize="int8")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["q", "o", "down", "table"])
def test_values_and_scales_by_hand(name, dtype):
    spec = LAYER.get(name) or decoder.specs(RANDOM_MODEL)["embed"]
    weight = draw(*spec.shape, dtype=dtype)
    weight[(0,) * weight.ndim] *= 40  # a channel of its own scale
    weight[(..., 3) if name != "table" else 3] = 0
    got = jax.jit(lambda w: quantize_channels(w, spec.inputs))(weight)
    with jax.debug_nans(True):  # of every step: int8 has no NaN to show for a quotient 0 / 0
        assert_same(quantize_channels(weight, spec.inputs), got)
    scale = (np.abs(weight.astype(np.float32)).max(spec.inputs, keepdims=True) * np.float32(1 / 127)).astype(dtype)
    wide_scale = scale.astype(np.float32)
    steps = np.rint(weight.astype(np.float32) / np.where(wide_scale > 0, wide_scale, 1))
    np.testing.assert_array_equal(got.values, steps.astype(np.int8))
    np.testing.assert_array_equal(np.asarray(got.scale), scale.squeeze(spec.inputs))
    np.testing.assert_array_equal(quantized.expand(spec, got), widened(got, spec.inputs).astype(dtype))
    assert got.values.dtype == jnp.int8 and got.dtype == weight.dtype and got.shape == weight.shape
    error = np.abs(weight.astype(np.float32) - widened(got, spec.inputs))
    assert (error <= wide_scale * (0.5 + 1e-5)).all()
    assert (widened(got, spec.inputs)[weight == 0] == 0).all() and np.abs(got.values).max() == 127


@pytest.mark.parametrize("name", PRODUCTS)
def test_linear_is_the_product_with_the_rounded_weight(name):
    weight, (equation, inputs) = draw(*LAYER[name].shape), PRODUCTS[name]
    x = draw(2, 3, *(weight.shape[axis] for axis in inputs))
    small = jax.jit(quantize_channels, static_argnums=1)(weight, inputs)
    expected = np.einsum(equation, x, widened(small, inputs))
    run = layers.project_output if name == "o" else partial(quantized.product, equation)
    product = jax.jit(run)(*(({"o": small}, x) if name == "o" else (x, small)))
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-4)


def test_sums_of_float16_do_not_overflow():
    run = jax.jit(lambda x, weight: quantized.product("bi,io->bo", x, quantize_channels(weight, (0,))))
    product = run(np.ones((1, 4096), np.float16), np.full((4096, 4), 0.01, np.float16))
    assert product.dtype == jnp.float16 and abs(float(product[0, 0]) - 40.96) < 0.1, "of values up to 127, 520,192"


def test_loops_carry_int8_and_no_wide_copy(as_users_compile):
    """XLA moves what a loop does not change out of it, unless it is tied to what changes."""
    small = quantize_channels(jnp.asarray(draw(32, 32)), (0,))

    @jax.jit
    def repeat(weight, x, times):
        return jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(quantized.product("td,df->tf", x, weight)), x)

    text = repeat.lower(small, jnp.ones((4, 32)), 5).compile().as_text()
    [carried] = re.findall(r"= \((.*)\) while\(", text)
    assert "s8[32,32]" in carried and "f32[32,32]" not in carried


def test_embedding_positions_and_logits():
    table, ids, hidden = draw(64, 32), np.array([[3, 0], [63, 3]]), draw(2, 3, 32)
    small = jax.jit(quantize_channels, static_argnums=1)(table, (1,))
    np.testing.assert_allclose(jax.jit(embed)(small, ids), widened(small, (1,))[ids], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(unembed)(small, hidden), hidden @ widened(small, (1,)).T, rtol=1e-5, atol=1e-4)
    assert jax.eval_shape(embed, small.replace(scale=small.scale.astype(jnp.bfloat16)), ids).dtype == jnp.bfloat16


@pytest.mark.slow
@needs_8_devices
def test_a_mesh_answers_as_one_device_does():
    sharded, single = (tf.load("tiny", quantize="int8", mesh=mesh) for mesh in (tf.make_mesh(4, 2), None))
    assert_same(sharded.weights.verifier, single.weights.verifier)  # o and down: maxima over an axis that is split
    layer = sharded.weights.verifier["groups"][0][0]
    for name, axes in {"q": ["model"], "k": ["model"], "gate": ["model"], "o": [], "down": []}.items():
        assert layer[name].scale.sharding.spec == PartitionSpec(*axes), name
    assert layer["o"].values.sharding.spec == PartitionSpec(None, "model", None)
    assert sharded.weights.verifier["embed"].scale.sharding.spec == PartitionSpec("model")
    tree = sharded.generate(PROMPTS, **TREE, builder="best-first", max_new_tokens=16, **SAMPLED)
    plain = single.generate(PROMPTS, builder="none", max_new_tokens=16, **SAMPLED)
    assert [result.ids for result in tree] == [result.ids for result in plain]


@needs_8_devices
@pytest.mark.parametrize("dtype, sizes", [(jnp.float32, None), (jnp.bfloat16, (4, 2))])
def test_loading_quantises_what_the_files_hold(dtype, sizes):
    mesh, quantise = sizes and tf.make_mesh(*sizes), jax.jit(quantize_channels, static_argnums=1)
    config, wide = model_files.load_verifier(FOLDERS["verifier"], dtype=dtype, mesh=mesh)
    _, small = model_files.load_verifier(FOLDERS["verifier"], dtype=dtype, mesh=mesh, quantize="int8")
    rounded = lambda spec, weight: quantise(weight, spec.inputs) if spec.inputs else weight  # noqa: E731
    assert_same(small, jax.tree.map(rounded, decoder.specs(config), jax.device_get(wide), is_leaf=parameters.is_spec))
    assert small["embed"].dtype == dtype
    assert [quantized.quantization_scheme(weights) for weights in (small, wide)] == ["int8", None]


@pytest.mark.parametrize("scheme, tables", [("int8", 1), ("int4", 0)])
def test_loading_holds_one_wide_matrix_at_a_time(scheme, tables, monkeypatch):
    config = model_files.read_verifier_config(FOLDERS["verifier"])
    matrices = {spec.shape for spec in jax.tree.leaves(decoder.specs(config), is_leaf=parameters.is_spec) if spec.inputs}
    call, held = programs.call, []

    def wide() -> int:
        return sum(x.shape in matrices and x.dtype == jnp.bfloat16 for x in jax.live_arrays())

    monkeypatch.setattr(programs, "call", lambda *args, **named: held.append(wide()) or call(*args, **named))
    before = wide()
    model_files.load_verifier(FOLDERS["verifier"], dtype=jnp.bfloat16, quantize=scheme)
    left_wide = 1 - tables
    assert held == [before + left_wide + 1] * (config.num_layers * 7 + tables) and wide() == before


@needs_8_devices
@pytest.mark.parametrize("sizes", [None, (4, 2)])
def test_footprints_are_the_bytes_of_real_arrays(sizes):
    mesh = sizes and tf.make_mesh(*sizes)
    model = shapes.random_pair(RANDOM_MODEL, RANDOM_DRAFTER, jnp.bfloat16, mesh, "int8")
    request = {"dtype": jnp.bfloat16, "mesh": mesh}
    got = footprint(RANDOM_MODEL, RANDOM_DRAFTER, quantize=model.quantize, **request)
    assert model.quantize == "int8" and quantized.quantization_scheme(model.weights.drafter) is None
    shards = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(model.weights.verifier)]
    assert got.verifier == sum(shards) < 0.6 * footprint(RANDOM_MODEL, RANDOM_DRAFTER, **request).verifier


def test_loading_is_refused_by_the_bytes_of_int8(monkeypatch):
    config = model_files.read_verifier_config(FOLDERS["verifier"])
    drafter = model_files.read_drafter_config(FOLDERS["drafter"])
    limit = footprint(config, drafter, dtype=jnp.float32, quantize="int8").total
    monkeypatch.setattr("treeflash_jax.engine.loading.usable_memory", lambda mesh: limit)
    assert tf.load(**FOLDERS, quantize="int8").quantize == "int8"
    refused(lambda: tf.load(**FOLDERS), "on a device of")


@pytest.mark.parametrize("scheme", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_programs_compile_from_shapes(scheme):
    plan = DecodePlan(shared=SharedPlan(verifier=SMALL, prefill_chunk=32))
    _, decode = compile_programs(plan, tf.make_mesh(1, 1), 1, 256, jnp.float32, scheme)
    needs = footprint(SMALL, dtype=jnp.float32, batch=1, capacity=256, quantize=scheme)
    assert 0 <= decode.memory_analysis().argument_size_in_bytes - needs.total < 4096  # token buffers


def test_unknown_schemes_are_refused_before_anything_is_looked_for(capsys):
    for call in (
        lambda: tf.load(verifier="nobody/nothing", quantize="int2"),
        lambda: model_files.load_verifier("nowhere", quantize="int2"),
        lambda: decoder.specs(RANDOM_MODEL, "int2"),
    ):
        refused(call, "got quantize 'int2', expected ", "'int8'")
    for command in ("generate", "chat", "check", "bench run --out x", "bench latency", "bench memory --shape tiny"):
        mistake(capsys, commands.main, [*command.split(), "--quantize", "int2"], "'int2'", "int8")


@pytest.mark.slow
def test_check_compares_with_the_int8_verifier_and_says_so(capsys, monkeypatch, int8):
    requested = []
    monkeypatch.setattr(loading, "load", lambda **sizes: requested.append(sizes["quantize"]) or int8)
    words = "check --quantize int8 --nodes 16 --max-new-tokens 12".split()
    words += ["--prompt-ids=3 4 5", "--prompt-ids=17 3 2 40"]
    assert commands.main(words) == 0
    verdict, counts, ends, *cases = capsys.readouterr().out.splitlines()
    assert verdict == "lossless: equal" and len(cases) == 2 and all("identical" in case for case in cases)
    assert ends.startswith("tokens that end an answer: ")
    assert "exact with respect to the int8 verifier, whose own answers may differ from those of wider weights" in counts
    assert commands.main([*words, "--json"]) == 0
    for record in map(json.loads, capsys.readouterr().out.splitlines()):
        assert record["quantize"] == "int8" and "int8 verifier" in record["meaning"] and record["identical"]
    assert requested == ["int8", "int8"] and "int8" not in describe_reference(None)


def test_rounded_weights_are_not_saved_as_if_they_were_the_files(int8, tmp_path):
    save = partial(model_files.save_verifier, tmp_path, int8.verifier, int8.weights.verifier)
    refused(save, "got weights in int8, expected those of the files")
    assert not list(tmp_path.iterdir())
