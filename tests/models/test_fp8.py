"""Weights with a scale per block or group: rounding by hand, products of few and many vectors, experts, meshes."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import PROMPTS, assert_greedy, draw, make_pair, random_weights, slow, with_recurrent_layers
from compiled import ONE_H100, moved_shapes
from conftest import FEW_TOKENS, RANDOM_MODEL, needs_8_devices, needs_mosaic
from fp8_files import widened
from jax import lax
from jax.sharding import AbstractMesh
from model_files import assert_same

from treeflash_jax import make_mesh
from treeflash_jax.bench.memory import compile_programs
from treeflash_jax.core import parameters, sharding
from treeflash_jax.core.devices import Device
from treeflash_jax.decoding.state import DecodePlan, SharedPlan
from treeflash_jax.drafters import NgramDrafter
from treeflash_jax.engine.device_memory import footprint
from treeflash_jax.engine.settings import defaults
from treeflash_jax.models import decoder, experts, kernels, layers, quantized
from treeflash_jax.models.backend import block_products, block_scales, expert_products, expert_sums
from treeflash_jax.models.quantized_weight import Quantized, is_quantized

WIDE = replace(RANDOM_MODEL, hidden_size=320, intermediate_size=1024, num_layers=1, head_dim=96)
EXPERTS = replace(
    RANDOM_MODEL, model_type="qwen3_moe", hidden_size=256, num_experts=4, experts_per_token=2, expert_size=384
)  # fmt: skip
SMALL = replace(RANDOM_MODEL, num_layers=1)
LAYER = layers.layer_specs(WIDE)
EQUATIONS = {"q": "btd,hed->bthe", "down": "btf,df->btd", "up": "btd,fd->btf"}


def compress_all(specs, weights, scheme="fp8"):
    return jax.tree.map(lambda spec, x: quantized.compress(x, spec, scheme), specs, weights, is_leaf=parameters.is_spec)


def widen_all(specs, weights):
    return jax.tree.map(lambda spec, x: jax.device_put(widened(x, spec)), specs, weights, is_leaf=parameters.is_spec)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_scales_by_hand(dtype):
    spec, weight = LAYER["q"], draw(*LAYER["q"].shape, dtype=dtype)
    weight[0, :32, :64] = 0
    weight[1, 32:64, 64:128] *= 1000  # a block of its own scale
    counts = quantized.count_blocks(spec)
    assert counts == (4, 3, 5), "of blocks of 32 elements of a head and 64 inputs"
    got = jax.jit(lambda w: quantized.quantize_blocks(w, counts, "fp8"))(weight)
    with jax.debug_nans(True):
        assert_same(quantized.quantize_blocks(weight, counts, "fp8"), got)
    blocks = weight.astype(np.float32).reshape(4, 3, 32, 5, 64)
    scale = (np.abs(blocks).max((2, 4)) * np.float32(1 / 448)).astype(dtype)
    np.testing.assert_array_equal(np.asarray(got.scale), scale)
    assert scale[1, 1, 1] > 100 * scale[1, 1, 0] and scale[0, 0, 0] == 0 and got.block == (1, 32, 64)
    exact = np.clip(blocks / np.where(scale > 0, scale, 1).astype(np.float32)[:, :, None, :, None], -448, 448)
    error = np.abs(exact - np.asarray(got.values, np.float32).reshape(blocks.shape))
    assert (error <= np.maximum(np.abs(exact) * 2.0**-4, 2.0**-10) * 1.01).all(), "half of the last of three bits"
    assert np.abs(got.values.astype(np.float32)).max() == 448


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
def test_float16_keeps_small_weights(scheme):
    """Scales would be subnormal, which XLA rounds to 0."""
    weight = (draw(128, 128) * 1e-4).clip(-4e-4, 4e-4).astype(np.float16)
    got = quantized.quantize_blocks(weight, (1, 1), scheme)
    error = np.abs(weight.astype(np.float32) - np.float32(got.values) * np.float32(got.scale))
    assert got.scale.dtype == jnp.float16 and error.max() <= 2.0**-15, "half a step of the smallest normal scale"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("vectors", [1, 7, 200])
@pytest.mark.parametrize("name, scheme", [*((name, "fp8") for name in EQUATIONS), ("q", "int4"), ("down", "int4")])
def test_products_are_those_with_the_dense_weight(name, scheme, vectors):
    spec = LAYER[name]
    small = quantized.compress(jax.device_put(draw(*spec.shape, dtype=np.float64)), spec, scheme)
    x = draw(1, vectors, spec.shape[-1], dtype=np.float64)
    got = jax.jit(partial(quantized.product, EQUATIONS[name]))(x, small)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, np.einsum(EQUATIONS[name], x, widened(small, spec)), atol=1e-11)


def in_kernel(x, values, scale):
    with kernels.use("mosaic-gpu"):
        return block_products.block_product(x, Quantized(values, scale), jnp.float32)


@needs_mosaic
@pytest.mark.parametrize(
    "vectors, dtype, blocks", [(2, "float16", (2, 2)), (70, "bfloat16", (2, 2)), (128, "bfloat16", (2, 4))]
)
def test_one_kernel_multiplies_blocks(vectors, dtype, blocks):
    """Blocks of 64 and 128 outputs, and vectors that are no multiple of eight."""
    x, scale = jnp.asarray(draw(1, vectors, 384), dtype), jnp.asarray(np.abs(draw(*blocks, 3)), jnp.bfloat16)
    small = Quantized(jnp.asarray(draw(2, 256, 384), jnp.float8_e4m3fn), scale)
    got = jax.jit(in_kernel)(x, small.values, scale)
    np.testing.assert_allclose(got, np.einsum("bni,joi->bnjo", x.astype(jnp.float32), widened(small, None)), atol=1e-3)
    with jax.sharding.use_abstract_mesh(ONE_H100):
        traced = jax.jit(in_kernel).trace(x, small.values, scale)
        assert "mosaic" in traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic
def test_the_kernel_leaves_other_products_to_xla():
    """One vector, many, float32, other blocks, and more than one device."""

    def has_kernel(vectors=16, dtype=jnp.bfloat16, blocks=(2, 2)) -> bool:
        shapes = ((vectors, 256), dtype), ((256, 256), jnp.float8_e4m3fn), (blocks, jnp.bfloat16)
        return "name=fp8_product" in str(jax.make_jaxpr(in_kernel)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)))

    assert has_kernel() and not has_kernel(vectors=1) and not has_kernel(vectors=129)
    assert not has_kernel(dtype=jnp.float32) and not has_kernel(blocks=(8, 2)) and not has_kernel(blocks=(2, 4))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 2), ("data", "model"))):
        assert not has_kernel()


@pytest.mark.parametrize("scheme, block", [("fp8", (64, 1, 32)), ("int4", (1, 1, 32))])
def test_the_output_of_attention_folds_heads_of_blocks(scheme, block):
    spec = LAYER["o"]
    small = quantized.compress(jax.device_put(draw(*spec.shape)), spec, scheme)
    mixed = draw(1, 3, *spec.shape[1:])
    assert small.block == block
    expected = np.einsum("bthe,dhe->btd", mixed, widened(small, spec))
    np.testing.assert_allclose(jax.jit(layers.project_output)({"o": small}, mixed), expected, rtol=1e-4, atol=1e-3)


def make_zeros(shape, blocks, dtype=jnp.float8_e4m3fn):
    return Quantized(jnp.zeros(shape, dtype), jnp.ones(blocks, jnp.bfloat16))


def on_platform(monkeypatch, platform):
    """Runs variants for another backend on the CPU."""
    monkeypatch.setattr(
        lax, "platform_dependent", lambda *operands, default, **variants: variants.get(platform, default)(*operands)
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("vectors", [1, 4, 60])
def test_every_form_multiplies_all_parts_of_a_group(platform, vectors, monkeypatch):
    """Eight groups of 32 inputs, two factors of four scales each, zero points and minimums."""
    on_platform(monkeypatch, platform)
    rng = np.random.default_rng(0)
    small = Quantized(
        jnp.asarray(rng.integers(-8, 8, (2, 12, 256)), jnp.int4), jnp.asarray(rng.integers(1, 64, (2, 12, 8)), jnp.uint8),
        jnp.asarray(rng.uniform(0.5, 1, (2, 12, 2)), jnp.float16), jnp.asarray(rng.integers(-3, 3, (2, 12, 8)), jnp.int8),
        jnp.asarray(rng.integers(0, 64, (2, 12, 8)), jnp.uint8), jnp.asarray(rng.uniform(0, 0.1, (2, 12, 2)), jnp.float16),
        compute_dtype=jnp.dtype(jnp.float64),
    )  # fmt: skip
    scale, outer, zero, minimum, outer_minimum = (
        np.asarray(part).astype(float).repeat(256 // part.shape[-1], -1) for part in jax.tree.leaves(small)[1:]
    )
    dense = (np.asarray(small.values).astype(float) - zero) * scale * outer - minimum * outer_minimum
    x = draw(1, vectors, 256, dtype=np.float64)
    got = jax.jit(lambda x, small: quantized.product("bti,xoi->btxo", x, small))(x, small)
    np.testing.assert_allclose(got, np.einsum("bti,xoi->btxo", x, dense), atol=1e-10)
    by_expert = jax.tree.map(lambda part: jnp.swapaxes(part, 1, 2), small)
    x_xni = np.repeat(x, 2, 0)
    got = jax.jit(lambda x, small: expert_products.expert_product(x, small))(x_xni, by_expert)
    np.testing.assert_allclose(got, np.einsum("xni,xoi->xno", x_xni, dense), atol=1e-10)


@pytest.mark.parametrize("name, dtype, vectors, converts", [
    *((name, "float8_e4m3fn", vectors, vectors < 128) for name in ("dense", "experts") for vectors in (1, 63, 129, 300)),
    ("dense", "int4", 1, False), ("dense", "int4", 300, False), ("experts", "int4", 63, True),
    ("experts", "int4", 64, False),
])  # fmt: skip
def test_no_program_scales_a_whole_weight(name, dtype, vectors, converts):
    """Nothing in bfloat16 or float32 has a weight's size but the values that few vectors are multiplied with."""
    outputs = dtype == "int4"  # with scales of their own
    if name == "dense":
        small = make_zeros((1280, 512), (1280 if outputs else 10, 4), dtype)
        x = jnp.ones((1, vectors, 512), jnp.bfloat16)
        run = partial(quantized.product, "btd,fd->btf")
    else:
        small = make_zeros((8, 640, 128), (8, 5, 128 if outputs else 1), dtype)
        x = jnp.ones((8, vectors, 640), jnp.bfloat16)
        run = expert_products.expert_product
    text = jax.jit(run).lower(x, small).as_text()
    made = re.findall(r"stablehlo\.(\w+) .*-> tensor<([\dx]+)x(?:bf16|f32)>", text)
    made += re.findall(r"stablehlo\.(\w+) .* : tensor<([\dx]+)x(?:bf16|f32)>$", text, re.MULTILINE)
    whole = {op for op, shape in made if math.prod(map(int, shape.split("x"))) == 1280 * 512}
    assert made and whole == ({"convert"} if converts else set())


def test_tpus_multiply_experts_in_one_piece():
    """Compiled for a TPU v5e, parts of 128 experts of 768 x 2,048 write a copy of all of them, 403 MB."""
    x = jax.ShapeDtypeStruct((8, 300, 640), jnp.bfloat16)
    traced = jax.jit(expert_products.expert_product).trace(x, make_zeros((8, 640, 128), (8, 5, 1)))
    texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")}
    assert [name for name, text in texts.items() if "stablehlo.while" in text] == ["cpu", "cuda"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scheme, block", [("fp8", (1, 128, 128)), ("int4", (1, 128, 1)), ("mxfp4", (1, 32, 1))])
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_experts_are_those_of_the_dense_weights(tokens, scheme, block):
    specs = experts.specs(EXPERTS)
    small = compress_all(specs, random_weights(specs, dtype=jnp.float64), scheme)
    dense = widen_all(specs, small)
    assert small["expert_up"].block == block
    x_nd = draw(tokens, 256, dtype=np.float64)
    weight_nk, ids_nk = jax.jit(experts.route, static_argnums=1)(dense, EXPERTS, x_nd)
    variants = [expert_sums.all_experts] + [expert_sums.gather_and_reduce, expert_sums.sum_experts] * (tokens < 10)
    for variant in variants:
        run = jax.jit(partial(variant, gate=experts.silu_gate))
        got, expected = (run(weights, x_nd, weight_nk, ids_nk) for weights in (small, dense))
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12, err_msg=variant.__name__)


@needs_8_devices
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("sizes, scheme", [
    ({"data": 1, "model": 4, "experts": 2}, "fp8"), ({"data": 2, "model": 4}, "fp8"),
    ({"data": 1, "model": 4, "experts": 2}, "int4"),
])  # fmt: skip
def test_experts_on_a_mesh_have_whole_blocks(sizes, scheme):
    """384 outputs of an expert are three blocks, which four devices do not divide: each has blocks of 32."""
    mesh, specs = make_mesh(**sizes), experts.specs(EXPERTS)
    dense = random_weights(specs, dtype=jnp.float64)
    placed = jax.device_put(dense, jax.tree.map(lambda x: x.sharding, parameters.abstract(specs, float, mesh)))
    small = {name: quantized.compress(x, specs[name], scheme, mesh) for name, x in placed.items()}
    if "experts" in sizes:
        outputs = (32, 128) if scheme == "fp8" else (1, 1)
        assert small["expert_up"].block == (1, 128, outputs[0]) and small["expert_down"].block == (1, 32, outputs[1])
    x_btd = jax.device_put(draw(2, 5, 256, dtype=np.float64))
    run = jax.jit(lambda weights, x: experts.mixture(weights, EXPERTS, x))
    expected = run(widen_all(specs, jax.device_get(small)), x_btd)
    with sharding.ambient(mesh):
        np.testing.assert_allclose(run(small, x_btd), expected, atol=1e-9)


@needs_8_devices
@pytest.mark.parametrize("scheme, block", [("fp8", (128, 64)), ("int4", (1, 64))])
@pytest.mark.parametrize("vectors", [3, 200])
def test_a_mesh_multiplies_its_shards(vectors, scheme, block):
    """No values travel, for few vectors and for many."""
    mesh, spec = make_mesh(2, 4), LAYER["up"]
    weight = jax.device_put(draw(*spec.shape), sharding.sharding(spec.axes, spec.shape, mesh))
    small = quantized.compress(weight, spec, scheme, mesh)
    assert small.scale.sharding.spec[0] == small.values.sharding.spec[0] == "model" and small.block == block
    x = draw(2, vectors, spec.shape[1])
    with sharding.ambient(mesh):
        run = jax.jit(partial(quantized.product, "btd,fd->btf"))
        compiled = run.lower(x, small).compile()
        np.testing.assert_allclose(run(x, small), np.einsum("btd,fd->btf", x, widened(small, spec)), rtol=1e-3, atol=1e-2)
    moved = re.findall(r"= (\w+)\[([\d,]+)\][^=]* (?:all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    assert all(math.prod(map(int, shape.split(","))) < math.prod(spec.shape) / 8 for _, shape in moved)


@needs_8_devices
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "sizes, is_merged, length",
    [((4, 2), True, 1), slow((2, 4), False, 3), slow((4, 2), True, 3), slow((2, 4), False, 1)],
)
def test_tpus_of_a_mesh_multiply_by_their_parts_of_groups(sizes, is_merged, length, monkeypatch):
    """Of a layer, merged, and with fewer key/value heads than devices; `down` has offsets. No values travel."""
    on_platform(monkeypatch, "tpu")
    mesh, specs, params = make_mesh(*sizes), decoder.specs(SMALL), random_weights(decoder.specs(SMALL))
    places = jax.tree.map(lambda spec: sharding.sharding(spec.axes, spec.shape, mesh), specs, is_leaf=parameters.is_spec)
    params = jax.tree.map(lambda x, place: jax.device_put(x.astype(jnp.float64), place), params, places)
    with sharding.ambient(mesh):
        compress = partial(quantized.compress, scheme="int4", mesh=mesh)
        small = jax.tree.map(lambda spec, x: compress(x, spec), specs, params, is_leaf=parameters.is_spec)
        layer = small["groups"][0][0]
        layer["down"] = layer["down"].replace(
            zero=jnp.asarray(draw(layer["down"].shape[0], 1)), minimum=layer["down"].scale
        )
        widen = lambda x: block_scales.widen(x, jnp.float64) if isinstance(x, Quantized) else x  # noqa: E731
        dense = jax.tree.map(widen, jax.device_get(small), is_leaf=is_quantized)
        if is_merged:
            decoder.merge(small, SMALL)
    tokens = jnp.arange(sizes[0] * length).reshape(sizes[0], length)
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = decoder.causal_mask(*tokens.shape)
    run = jax.jit(lambda weights: decoder.forward(weights, SMALL, tokens, positions, mask).hidden_btd)
    expected = run(dense)
    with sharding.ambient(mesh):
        np.testing.assert_allclose(run(small), expected, atol=1e-10)
        text = run.lower(small).compile().as_text()
    least = min(math.prod(spec.shape) for spec in specs["groups"][0][0].values() if spec.inputs) // sizes[1]
    assert all(math.prod(shape) < least for shape in moved_shapes(text))


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_drafted_answers_are_the_likeliest_tokens_of_the_dense_weights(scheme):
    config = replace(FEW_TOKENS, num_layers=1)
    pair, specs = make_pair(config, NgramDrafter(), NgramDrafter().specs(), dtype=jnp.float64), decoder.specs(config)
    pair.weights = pair.weights.replace(verifier=compress_all(specs, pair.weights.verifier, scheme))
    assert pair.quantize == scheme and pair.dtype == jnp.float64
    results = pair.generate(PROMPTS, nodes=8, builder="best-first", max_new_tokens=20)
    assert any(max(result.accept_lengths) > 1 for result in results)
    got = assert_greedy(pair, PROMPTS, results)
    pair.weights = pair.weights.replace(verifier=widen_all(specs, pair.weights.verifier))
    np.testing.assert_allclose(got, assert_greedy(pair, PROMPTS, results), atol=1e-12)


def test_maps_of_different_blocks_are_not_joined():
    """Blocks of 8 outputs and of 4; a head's queries and gates in one block, its keys in a smaller one."""
    config = with_recurrent_layers(replace(RANDOM_MODEL, num_layers=2))
    specs = decoder.specs(config)
    weights = compress_all(specs, random_weights(specs))
    decoder.merge(weights, config)
    delta, attention = weights["groups"][0][0], weights["groups"][1][0]
    assert {"delta_qkv", "delta_b", "gate_up"} <= delta.keys() and {"q", "k", "v", "gate_up"} <= attention.keys()


def test_tables_routers_and_norms_stay_as_they_are():
    specs = decoder.specs(EXPERTS, "fp8")
    layer = specs["groups"][0][0]
    assert not isinstance(specs["embed"], Quantized) and not isinstance(layer["router"], Quantized)
    assert {name for name, x in layer.items() if isinstance(x, Quantized)} == {
        "q", "k", "v", "o", "expert_gate", "expert_up", "expert_down",
    }  # fmt: skip


def test_programs_compile_from_shapes():
    plan = DecodePlan(shared=SharedPlan(verifier=SMALL, prefill_chunk=32))
    _, decode = compile_programs(plan, make_mesh(1, 1), 1, 256, jnp.float32, "fp8")
    needs = footprint(SMALL, dtype=jnp.float32, batch=1, capacity=256, quantize="fp8")
    assert 0 <= decode.memory_analysis().argument_size_in_bytes - needs.total < 4096  # token buffers


def test_parts_divide_an_axis_and_what_a_shard_has_of_it():
    sizes = [(76, 1), (76, 4), (19, 1), (8, 4), (3, 1), (1, 8), (32, 8)]
    assert [block_scales.count_parts(size, ways) for size, ways in sizes] == [4, 19, 19, 2, 3, 1, 4]


def test_groups_are_kept_where_that_moves_fewer_bytes_or_nothing_else_fits():
    keeps, gpu = partial(defaults.keeps_groups, fits=True), Device("gpu", "NVIDIA H200")
    assert [keeps(gpu, jnp.bfloat16, tokens) for tokens in (1, 16, 23, 24, 64)] == [True, True, True, False, False]
    assert keeps(Device("tpu"), jnp.bfloat16, 64) and not keeps(Device("cpu"), jnp.bfloat16, 1)
    assert defaults.keeps_groups(gpu, jnp.bfloat16, 64, False) and defaults.keeps_groups(Device("cpu"), float, 1, False)


def test_fp8_files_are_kept_where_that_moves_fewer_bytes():
    keeps, gpu = defaults.keeps_fp8, Device("gpu", "NVIDIA H200")
    assert [keeps(gpu, jnp.bfloat16, tokens) for tokens in (1, 16, 31, 32, 64)] == [True, True, True, False, False]
    assert keeps(gpu, jnp.float32, 40) and not keeps(Device("cpu"), jnp.bfloat16, 1)
