"""Norms and rotations against restatements in plain NumPy. Whole layers: test_against_transformers.py."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import draw
from compiled import ONE_H100
from conftest import DATA, RANDOM_MODEL, needs_mosaic
from jax.sharding import AbstractMesh
from published_configs import QWEN3_4B, parse, without

from treeflash_jax.models import kernels, layers
from treeflash_jax.models.config import ModelConfig, Rope
from treeflash_jax.models.kernels import layers_mosaic
from treeflash_jax.models.kv_cache import LayerKV
from treeflash_jax.models.layer_protocol import PassInputs
from treeflash_jax.models.quantized import product, quantize_channels

LLAMA3 = Rope(
    theta=500_000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)  # fmt: skip
YARN = Rope(theta=10_000.0, kind="yarn", factor=8.0, original_max_positions=2048, attention_factor=1.25)


def test_rms_norm_sums_bfloat16_in_float32():
    x = jnp.asarray(draw(1, 4096), jnp.bfloat16)
    out = layers.rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-6)
    assert out.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(np.asarray(out, np.float64), wide / np.sqrt((wide**2).mean() + 1e-6), rtol=2**-8)


def operands(batch: int, positions: int, width: int, inner: int, dtype) -> list:
    """Residual, activations, weight, and scale of a norm."""
    shapes = (batch, positions, width), (batch, positions, inner), (width, inner), (width,)
    return [jax.device_put(draw(*shape, seed=seed, dtype=jnp.dtype(dtype))) for seed, shape in enumerate(shapes)]


def fused(*arrays):
    with kernels.use("mosaic-gpu"):
        return layers_mosaic.add_product(*arrays, 1e-6)


@jax.jit
def plain(residual_btd, x_btz, weight_dz, scale_d):
    sum_btd = residual_btd + product("btz,dz->btd", x_btz, weight_dz)
    return sum_btd, layers.rms_norm(sum_btd, scale_d, 1e-6)


@needs_mosaic
@pytest.mark.parametrize("dtype, rounding", [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
@pytest.mark.parametrize("sizes", [(1, 1, 1024, 64), (2, 7, 2560, 128), (1, 3, 8192, 64)])
def test_one_kernel_adds_a_product_and_norms(sizes, dtype, rounding):
    arrays = operands(*sizes, dtype)
    for got, expected in zip(jax.jit(fused)(*arrays), plain(*arrays), strict=True):
        assert got.dtype == dtype
        got, expected = (np.asarray(x, np.float64) for x in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=2 * rounding, atol=16 * rounding)
    with jax.sharding.use_abstract_mesh(ONE_H100):
        assert "mosaic" in jax.jit(fused).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_kernels_of_layers_refuse_models_with_other_parts():
    heads = jnp.zeros((1, 3, 2, 8, 64), jnp.bfloat16)
    inputs = {"full_attention": PassInputs(None, None, None, None, "mosaic-gpu")}

    def supports(**fields) -> bool:
        config, prefixes = replace(RANDOM_MODEL, **fields), (LayerKV(heads, heads, 0),)
        return layers_mosaic.supports([{"qkv": None}], config, None, None, inputs, prefixes, None, None)

    assert supports() and supports(qk_norm=False, qkv_bias=True, num_experts=8, expert_biases=True, logit_cap=30.0)
    parts = [name for name in ModelConfig.__annotations__ if name not in layers_mosaic.SUPPORTED]
    assert {"o_bias", "wide_norms", "layer_input_size", "dense_beside_experts", "shared_expert_size", "sizes"} <= {*parts}
    assert not any(supports(**{name: "another"}) for name in parts)
    assert not supports(rope=Rope(fraction=0.5)) and not supports(layer_types=("sliding_attention",) * 3)


@needs_mosaic
def test_the_kernel_leaves_other_products_to_xla():
    """Many rows, odd widths, float32, int8 weights, and more than one device."""

    def has_kernel(arrays) -> bool:
        return "name=add_and_norm" in str(jax.make_jaxpr(fused)(*arrays))

    usual = operands(1, 2, 1024, 64, "bfloat16")
    assert has_kernel(usual)
    for sizes in ((1, 257, 1024, 64, "bfloat16"), (1, 2, 1000, 64, "bfloat16"), (1, 2, 1024, 60, "bfloat16")):
        assert not has_kernel(operands(*sizes))
    assert not has_kernel(operands(1, 2, 1024, 64, "float32"))
    residual_btd, x_btz, weight_dz, scale_d = usual
    assert not has_kernel([residual_btd, x_btz, quantize_channels(weight_dz, (1,)), scale_d])
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 2), ("data", "model"))):
        assert not has_kernel(usual)


@pytest.mark.parametrize(
    "rope", [Rope(theta=10_000.0), Rope(theta=1_000_000.0), LLAMA3, YARN], ids=["small", "large", "llama3", "yarn"]
)
def test_rotation_is_multiplication_by_a_complex_number(rope, backend_form):
    positions_bt, x_bthe = np.array([[0, 1, 17], [5, 100, 3000]]), draw(2, 3, 4, 16)
    got = layers.rotate(jnp.asarray(x_bthe), layers.rotary_table(rope, 16, jnp.asarray(positions_bt)))
    plane = x_bthe[..., :8].astype(complex) + 1j * x_bthe[..., 8:]
    frequencies = layers.rope_frequencies(rope, 16)
    if rope.kind != "yarn":
        np.testing.assert_allclose(frequencies, published_frequencies(rope, 16), rtol=1e-12)
    turned = plane * rope.attention_factor * np.exp(1j * positions_bt[:, :, None, None] * frequencies)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(got, expected, atol=2e-3)
    np.testing.assert_allclose(np.asarray(got)[:, :2], expected[:, :2], atol=6e-5)
    lengths = rope.attention_factor * np.linalg.norm(x_bthe, axis=-1)
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), lengths, rtol=1e-5)


def published_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """The rule of the Llama 3.1 release, one pair at a time: keep, slow down, or blend."""
    actual = []
    for pair in range(head_dim // 2):
        frequency = rope.theta ** (-2 * pair / head_dim)
        turns = rope.original_max_positions * frequency / (2 * np.pi)  # full turns within the original context
        if rope.kind == "default" or turns > rope.high_freq_factor:
            actual.append(frequency)
        elif turns < rope.low_freq_factor:
            actual.append(frequency / rope.factor)
        else:
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            actual.append((1 - smooth) * frequency / rope.factor + smooth * frequency)
    return np.array(actual)


@pytest.mark.parametrize("case", json.loads((DATA / "yarn.json").read_text()), ids=lambda case: str(case["rope"]["factor"]))
def test_yarn_is_that_of_transformers(case):
    """Frequencies and attention factors that transformers 5.23 computed in float32."""
    raw = QWEN3_4B | {"head_dim": case["head_dim"], "max_position_embeddings": case["max_positions"]}
    for spelling in ("rope_scaling", "rope_parameters"):
        rope = parse("verifier", without(raw, "rope_theta", "rope_scaling") | {spelling: case["rope"]}).rope
        np.testing.assert_allclose(layers.rope_frequencies(rope, case["head_dim"]), case["frequencies"], rtol=2e-6)
        np.testing.assert_allclose(rope.attention_factor, case["attention_factor"], rtol=1e-12)
