"""Attention layers with gates, partial rotation, windows and sinks, and norms that store their scale - 1, against NumPy."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import assert_greedy, draw, make_pair, random_weights, with_windows_and_sinks
from conftest import FEW_TOKENS, RANDOM_MODEL

from treeflash_jax.drafters import NgramDrafter
from treeflash_jax.models import layers
from treeflash_jax.models.config import Rope
from treeflash_jax.models.layer_kinds import KINDS
from treeflash_jax.models.layer_protocol import PassInputs

GATED = {"gates_attention": True, "offset_norms": True, "rope": Rope(theta=100.0, fraction=0.5)}
SINKS = {"attention_sinks": True, "qk_norm": False, "qkv_bias": True, "window": 3}
CONFIGS = {
    "gated": ("full_attention", replace(RANDOM_MODEL, **GATED)),
    "sinks": ("full_attention", replace(RANDOM_MODEL, **SINKS)),
    "window": ("sliding_attention", replace(RANDOM_MODEL, **SINKS)),
    "ring": ("sliding_attention", replace(RANDOM_MODEL, **SINKS)),
}
POSITIONS = [4, 5, 5, 6, 7]  # of a tree whose root has two children, the second two descendants
SEES = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1]], bool)


def normed(x, scale, config):
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps)
    return x * (1 + scale if config.offset_norms else scale)


def rotated(x_he, position, config):
    size = int(x_he.shape[-1] * config.rope.fraction)
    angle = position * config.rope.theta ** -(np.arange(0, size, 2) / size)
    first, second, rest = np.split(x_he, [size // 2, size], axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def attended(weights, config, x_td, positions, sees, window):
    """Attention of one sequence, position by position and head by head; row t of `sees` has the positions that t sees."""
    heads = {name: np.einsum("td,hed->the", x_td, weights[name]) + weights.get(f"{name}_bias", 0) for name in "qkv"}
    q_the, k_tke, v_tke = heads.values()
    if config.gates_attention:
        q_the, gate_the = np.split(q_the, 2, axis=-1)
    if config.qk_norm:
        q_the, k_tke = (normed(x, weights[name], config) for x, name in ((q_the, "q_norm"), (k_tke, "k_norm")))
    q_the, k_tke = (
        np.stack([rotated(x, at, config) for x, at in zip(x_t, positions, strict=True)]) for x_t in (q_the, k_tke)
    )
    out_td = []
    for t, at in enumerate(positions):
        mixed_he = []
        for h in range(config.num_heads):
            kv = h // (config.num_heads // config.num_kv_heads)
            seen = [u for u in np.flatnonzero(sees[t]) if not window or positions[u] > at - window]
            weight_u = np.exp(k_tke[seen, kv] @ q_the[t, h] / np.sqrt(config.head_dim))
            total = weight_u.sum() + (np.exp(weights["sinks"][h]) if config.attention_sinks else 0)
            mixed_he.append(weight_u @ v_tke[seen, kv] / total)
            if config.gates_attention:
                mixed_he[-1] = mixed_he[-1] / (1 + np.exp(-gate_the[t, h]))
        out_td.append(np.einsum("he,dhe->d", mixed_he, weights["o"]))
    return np.stack(out_td)


@partial(jax.jit, static_argnames="name")
def run_text_and_tree(weights, x_btd, name):
    """Mixes a text of four positions, commits it, and mixes a tree after it."""
    kind_name, config = CONFIGS[name]
    kind = KINDS[kind_name]
    state, length_b, got = kind.init(config, 1, 16, jnp.float64, can_cut=name != "ring"), jnp.zeros(1, jnp.int32), []
    for part, sees, positions in ((slice(0, 4), np.tri(4), [0, 1, 2, 3]), (slice(4, 9), SEES, POSITIONS)):
        positions_bt, mask_btu = jnp.asarray([positions]), jnp.asarray(sees[None], bool)
        inputs = PassInputs(positions_bt, mask_btu, length_b, kind.precompute(config, positions_bt, mask_btu), "blocked")
        y_btd, new = kind.mix(weights, config, x_btd[:, part], inputs, state.layer(0), None)
        state = state.commit((new,), length_b, jnp.array([4]), None)
        length_b = length_b + 4
        got.append(y_btd[0])
    return jnp.concatenate(got)


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_and_a_tree_after_it(name, is_merged, float64):
    """A text is committed after a pass over it; then a tree of five nodes sees it as far as the window reaches."""
    kind_name, config = CONFIGS[name]
    kind, window = KINDS[kind_name], config.window if kind_name == "sliding_attention" else 0
    weights = random_weights(kind.specs(config), dtype=jnp.float64)
    x_btd, positions = draw(1, 9, config.hidden_size, dtype=np.float64), [0, 1, 2, 3, *POSITIONS]
    sees = np.tri(9, dtype=bool)
    sees[4:, 4:] = SEES
    expected = attended(jax.tree.map(np.asarray, weights), config, x_btd[0], positions, sees, window)
    if is_merged:
        weights = {key: x for key, x in weights.items() if key not in kind.merged} | kind.merge(weights, config)
        shapes = {key: spec.shape for key, spec in kind.specs(config, is_merged=True).items()}
        assert {key: x.shape for key, x in weights.items()} == shapes
    np.testing.assert_allclose(run_text_and_tree(weights, x_btd, name), expected, atol=1e-12)


def test_norms_that_store_their_scale_less_one_are_rounded_once():
    x, stored = (jnp.asarray(draw(3, 8, seed=seed), jnp.bfloat16) for seed in (0, 1))
    config = replace(RANDOM_MODEL, offset_norms=True)
    wide = np.asarray(x, np.float32)
    expected = normed(wide, np.asarray(stored, np.float32), config)
    got = layers.norm(config, x, stored)
    np.testing.assert_array_equal(got, jnp.asarray(expected, jnp.bfloat16))
    assert np.any(got != layers.rms_norm(x, 1 + stored, config.rms_norm_eps))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated", "window"])
def test_drafted_answers_are_the_likeliest_tokens_of_a_pass_over_the_whole_text(name, float64):
    """Prompts of several chunks; with a window that ends inside the tree, layers of two kinds, biases and experts."""
    config = replace(with_windows_and_sinks(FEW_TOKENS), window=3)
    if name == "gated":
        config = replace(FEW_TOKENS, num_layers=1, **GATED)
    model, prompts = make_pair(config, NgramDrafter(), dtype=jnp.float64), [[7, 8, 9] * 50, [3]]
    results = model.generate(prompts, max_new_tokens=24, builder="best-first", nodes=8)
    assert max(result.tau for result in results) > 1.1
    assert [len(result.ids) for result in results] == [24, 24]
    assert_greedy(model, prompts, results)
