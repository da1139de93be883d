"""The pieces of a decoder layer against restatements in plain NumPy."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA
from published_configs import QWEN3_4B, without

from treeflash_jax.core.parameters import initialize
from treeflash_jax.formats.dialects import parse
from treeflash_jax.models import layers
from treeflash_jax.models.config import ModelConfig, Rope

LLAMA3 = Rope(
    theta=500_000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)  # fmt: skip
YARN = Rope(theta=10_000.0, kind="yarn", factor=8.0, original_max_positions=2048, attention_factor=1.25)
CONFIG = ModelConfig(
    vocab_size=8, hidden_size=12, intermediate_size=20, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=6
)  # fmt: skip


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def weights(config: ModelConfig = CONFIG) -> dict[str, jax.Array]:
    """Fresh weights of one layer with norms that are not all ones."""
    params = initialize(layers.layer_specs(config), jax.random.key(1), scale=0.3)
    return {name: x * normal(*x.shape, seed=7) if name.endswith("norm") else x for name, x in params.items()}


def normed(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(scale, np.float64)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps):
    x, scale = normal(3, 5, 12) * 3, normal(12, seed=1)
    np.testing.assert_allclose(layers.rms_norm(jnp.asarray(x), jnp.asarray(scale), eps), normed(x, scale, eps), atol=2e-6)


def test_rms_norm_sums_bfloat16_in_float32():
    x = jnp.asarray(normal(1, 4096), jnp.bfloat16)
    out = layers.rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-6)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(out, np.float32), normed(np.asarray(x, np.float32), np.ones(4096), 1e-6), rtol=2**-8
    )


@pytest.mark.parametrize(
    "rope", [Rope(theta=10_000.0), Rope(theta=1_000_000.0), LLAMA3, YARN], ids=["small", "large", "llama3", "yarn"]
)
def test_rotation_is_multiplication_by_a_complex_number(rope):
    positions_bt, x_bthe = np.array([[0, 1, 17], [5, 100, 3000]]), normal(2, 3, 4, 16)
    got = layers.rotate(jnp.asarray(x_bthe), layers.rotary_table(rope, 16, jnp.asarray(positions_bt)))
    plane = x_bthe[..., :8].astype(complex) + 1j * x_bthe[..., 8:]
    frequencies = published_frequencies(rope, 16) if rope.kind != "yarn" else layers.rope_frequencies(rope, 16)
    turned = plane * rope.attention_factor * np.exp(1j * positions_bt[:, :, None, None] * frequencies)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], axis=-1), atol=2e-3)
    np.testing.assert_allclose(
        np.asarray(got)[:, :2], np.concatenate([turned.real, turned.imag], axis=-1)[:, :2], atol=6e-5
    )
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


def test_llama3_frequencies_have_three_bands():
    got, plain = layers.rope_frequencies(LLAMA3, 128), layers.rope_frequencies(Rope(theta=500_000.0), 128)
    np.testing.assert_allclose(got, published_frequencies(LLAMA3, 128), rtol=1e-12)
    kept, slowed = np.isclose(got, plain, rtol=1e-12), np.isclose(got, plain / 8, rtol=1e-12)
    assert kept.sum() == 29 and slowed.sum() == 29 and (~kept & ~slowed).sum() == 6
    assert kept[:29].all() and slowed[-29:].all()


@pytest.mark.parametrize("case", json.loads((DATA / "yarn.json").read_text()), ids=lambda case: str(case["rope"]["factor"]))
def test_yarn_is_that_of_transformers(case):
    """Frequencies and attention factors that transformers 5.23 computed in float32."""
    raw = QWEN3_4B | {"head_dim": case["head_dim"], "max_position_embeddings": case["max_positions"]}
    for spelling in ("rope_scaling", "rope_parameters"):
        rope = parse("verifier", without(raw, "rope_theta", "rope_scaling") | {spelling: case["rope"]}).rope
        np.testing.assert_allclose(layers.rope_frequencies(rope, case["head_dim"]), case["frequencies"], rtol=2e-6)
        np.testing.assert_allclose(rope.attention_factor, case["attention_factor"], rtol=1e-12)


def test_yarn_slows_the_pairs_of_the_specification():
    rope = Rope(theta=1e6, kind="yarn", factor=4.0, original_max_positions=32768)
    slowed = layers.rope_frequencies(Rope(theta=1e6), 128) / layers.rope_frequencies(rope, 128)
    np.testing.assert_allclose(slowed[:24], 1)
    np.testing.assert_allclose(slowed[40:], 4)
    assert (np.diff(slowed[23:41]) > 0).all()
    np.testing.assert_allclose(
        layers.rope_frequencies(replace(rope, factor=1.0), 128), layers.rope_frequencies(Rope(theta=1e6), 128)
    )


def test_attention_logits_depend_on_distance_alone():
    q_bthe, k_bthe = normal(1, 1, 2, 16), normal(1, 1, 2, 16, seed=1)

    def logit(q_position: int, k_position: int) -> np.ndarray:
        q, k = (
            layers.rotate(jnp.asarray(x), layers.rotary_table(LLAMA3, 16, jnp.asarray([[at]])))
            for x, at in ((q_bthe, q_position), (k_bthe, k_position))
        )
        return np.sum(np.asarray(q) * np.asarray(k), axis=-1)

    np.testing.assert_allclose(logit(40, 33), logit(7, 0), atol=1e-5)
    np.testing.assert_allclose(logit(933, 940), logit(0, 7), atol=3e-4)
    assert np.abs(logit(40, 33) - logit(40, 30)).max() > 1e-2


def test_queries_and_keys_are_normed_before_they_are_rotated():
    """A scale that differs between the halves of a head does not commute with the rotation."""
    params, x_btd = weights(), normal(2, 3, 12)
    table = layers.rotary_table(CONFIG.rope, 6, jnp.asarray([[0, 1, 2], [9, 10, 11]]))
    k_btke, v_btke = layers.keys_values(params, CONFIG, jnp.asarray(x_btd), table)
    q_bthe = layers.queries(params, CONFIG, jnp.asarray(x_btd), table)
    for got, name in ((q_bthe, "q"), (k_btke, "k")):
        projected = np.einsum("btd,hed->bthe", x_btd, params[name])
        expected = layers.rotate(jnp.asarray(normed(projected, params[f"{name}_norm"], 1e-6), jnp.float32), table)
        np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(v_btke, np.einsum("btd,ked->btke", x_btd, params["v"]), atol=1e-5)


def test_llama_layers_have_no_norm_on_queries_and_keys():
    llama = ModelConfig(**{**CONFIG.__dict__, "qk_norm": False})
    params, x_btd = weights(llama), jnp.asarray(normal(1, 1, 12))
    assert "q_norm" not in params and "k_norm" not in params
    at_0 = layers.rotary_table(llama.rope, 6, jnp.zeros((1, 1), jnp.int32))
    expected = np.einsum("btd,hed->bthe", x_btd, params["q"])
    np.testing.assert_allclose(layers.queries(params, llama, x_btd, at_0), expected, atol=1e-5)


def test_swiglu():
    params, x_btd = weights(), normal(2, 3, 12)
    gate, up, down = (np.asarray(params[name], np.float64).T for name in ("gate", "up", "down"))
    np.testing.assert_allclose(
        layers.swiglu(params, jnp.asarray(x_btd)), (silu(x_btd @ gate) * (x_btd @ up)) @ down, atol=1e-5
    )


def test_decoder_layer_is_pre_norm_with_two_residuals():
    params, x_btd, mixed_bthe, eps = weights(), normal(2, 3, 12), normal(2, 3, 4, 6), 1e-3

    def attend(given, normed_btd):
        assert given is params
        np.testing.assert_allclose(normed_btd, normed(x_btd, params["attention_norm"], eps), atol=1e-5)
        return jnp.asarray(mixed_bthe), "handed back"

    got, extra = layers.decoder_layer(params, jnp.asarray(x_btd), attend, eps)
    middle = x_btd + np.einsum("bthe,dhe->btd", mixed_bthe, params["o"])
    inner = jnp.asarray(normed(middle, params["mlp_norm"], eps), jnp.float32)
    np.testing.assert_allclose(got, middle + layers.swiglu(params, inner), atol=1e-5)
    assert extra == "handed back"
