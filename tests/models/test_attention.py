"""Attention over prefix and new positions against a dense float64 softmax; caches after commits of any length."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import draw
from conftest import RANDOM_MODEL

from treeflash_jax.models import kv_cache
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.kv_cache import LayerKV
from treeflash_jax.trees import ancestor_mask

B, T, S, H, K, E = 3, 7, 12, 6, 2, 8
LENGTHS = np.array([0, 5, 12])
PARENT = jnp.asarray([[0, 0, 0, 1, 1, 2, 5], [0, 0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0, 0]], jnp.int32)
CAUSAL = jnp.broadcast_to(jnp.tri(T, dtype=bool), (B, T, T))
attention = jax.jit(tree_attention, static_argnames="implementation")


def dense(q_bthe, k_bxke, v_bxke, mask_btx):
    """Plain softmax attention in float64; every key/value head repeated for its queries."""
    k_bxhe, v_bxhe = (np.repeat(np.asarray(x, np.float64), q_bthe.shape[2] // x.shape[2], axis=2) for x in (k_bxke, v_bxke))
    logits_bhtx = np.einsum("bthe,bxhe->bhtx", np.asarray(q_bthe, np.float64), k_bxhe) / E**0.5
    weights_bhtx = np.where(mask_btx[:, None], np.exp(logits_bhtx - logits_bhtx.max(-1, keepdims=True)), 0)
    return np.einsum("bhtx,bxhe->bthe", weights_bhtx / weights_bhtx.sum(-1, keepdims=True), v_bxhe)


def node_prefix(keys_bske, values_bske) -> LayerKV:
    """A layer's cache; slots beyond a sequence's length hold large garbage."""
    keep_bs11 = (np.arange(S) < LENGTHS[:, None])[:, :, None, None]
    return LayerKV(*(jnp.asarray(np.where(keep_bs11, x, 1e4).swapaxes(1, 2)) for x in (keys_bske, values_bske)))


@pytest.mark.parametrize("heads, kv_heads", [(H, K), (4, 4), (4, 1)])
def test_dense_softmax(heads, kv_heads):
    q_bthe, k_buke, v_buke = draw(B, T, heads, E), draw(B, T, kv_heads, E, seed=1), draw(B, T, kv_heads, E, seed=2)
    keys_bske, values_bske = draw(B, S, kv_heads, E, seed=3), draw(B, S, kv_heads, E, seed=4)
    above_btu = np.asarray(ancestor_mask(PARENT, T))
    prefix = node_prefix(keys_bske, values_bske)
    got = attention(q_bthe, k_buke, v_buke, jnp.asarray(above_btu), prefix, jnp.asarray(LENGTHS))

    past_bts = np.broadcast_to((np.arange(S) < LENGTHS[:, None])[:, None], (B, T, S))
    mask_btx = np.concatenate([past_bts, above_btu], axis=2)
    k_bxke, v_bxke = np.concatenate([keys_bske, k_buke], axis=1), np.concatenate([values_bske, v_buke], axis=1)
    expected = dense(q_bthe, k_bxke, v_bxke, mask_btx)
    np.testing.assert_allclose(got, expected, atol=3e-6)


def test_no_prefix_is_an_empty_prefix():
    q_bthe, k_buke, v_buke = draw(B, T, H, E), draw(B, T, K, E, seed=1), draw(B, T, K, E, seed=2)
    got = attention(q_bthe, k_buke, v_buke, CAUSAL)
    np.testing.assert_allclose(got, dense(q_bthe, k_buke, v_buke, CAUSAL), atol=3e-6)
    empty = node_prefix(draw(B, S, K, E), draw(B, S, K, E))
    again = attention(q_bthe, k_buke, v_buke, CAUSAL, empty, jnp.zeros(B, jnp.int32))
    np.testing.assert_allclose(again, got, atol=1e-6)


def test_large_logits_and_bfloat16_stay_finite():
    """The prefix holds the peak of some positions, the new positions that of others: both must enter the maximum."""
    q_bthe, k_buke, v_buke = (jnp.asarray(draw(B, T, *x), jnp.bfloat16) for x in ((H, E), (K, E), (K, E)))
    prefix = jax.tree.map(lambda x: x.astype(jnp.bfloat16), node_prefix(draw(B, S, K, E, seed=3), draw(B, S, K, E, seed=4)))
    out = attention(q_bthe * 1e4, k_buke, v_buke, CAUSAL, prefix, jnp.asarray(LENGTHS))
    assert out.dtype == jnp.bfloat16 and bool(jnp.isfinite(out).all()) and bool((jnp.abs(out) < 10).all())


@pytest.mark.parametrize("batch, dtype", [(1, jnp.float32), (3, jnp.float32), (3, jnp.bfloat16)])  # three ways to store
def test_append_commits_paths_in_order(backend_form, batch, dtype):
    """Random commits, some of nothing, against lists; garbage of one commit is gone or hidden after the next."""
    rng, width, append = np.random.default_rng(batch), 5, jax.jit(kv_cache.append)
    cache = kv_cache.allocate(replace(RANDOM_MODEL, num_layers=2), batch, 40, dtype)
    expected = [[] for _ in range(batch)]  # of every sequence, the keys and values of both layers, position by position
    for step in range(6):
        new_btlxke = draw(batch, 9, 2, 2, K, E, seed=step, dtype=dtype)  # l layers, x keys and values
        count_b = rng.integers(0, width + 1, batch) if step else np.zeros(batch, int)
        path_bp = np.stack([rng.permutation(9)[:width] for _ in range(batch)])
        new = tuple(tuple(new_btlxke[:, :, layer, kind] for kind in (0, 1)) for layer in (0, 1))
        cache = append(cache, new, jnp.asarray(count_b), jnp.asarray(path_bp))
        slots_lxbkse = np.stack([[kv.keys_bkse, kv.values_bkse] for kv in cache.layers])
        assert slots_lxbkse.shape[4] == 40
        for b, text in enumerate(expected):
            text += list(new_btlxke[b, path_bp[b, : count_b[b]]])
            assert cache.length_b[b] == len(text)
            for got_lxke, expected_lxke in zip(np.moveaxis(slots_lxbkse[:, :, b], 3, 0), text, strict=False):
                np.testing.assert_array_equal(got_lxke, expected_lxke)
