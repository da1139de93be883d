"""Caches of keys and values against lists: whole ones, and rings of layers with a window."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import draw
from conftest import RANDOM_MODEL

from treeflash_jax.models import caches

K = RANDOM_MODEL.num_kv_heads


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("batch, dtype", [(1, jnp.float32), (3, jnp.float32), (3, jnp.bfloat16)])  # three ways to store
def test_append_commits_paths_in_order(backend_form, batch, dtype, stacked):
    """Random commits, some of nothing, against lists; garbage of one commit is gone or hidden after the next."""
    rng, width, append = np.random.default_rng(batch), 5, jax.jit(caches.commit)
    cache = caches.allocate(replace(RANDOM_MODEL, num_layers=2), batch, 40, dtype, stacked=stacked, can_cut=True)
    assert len(cache.states) == (1 if stacked else 2)
    expected = [[] for _ in range(batch)]  # of every sequence, the keys and values of both layers, position by position
    for step in range(6):
        new_btlxke = draw(batch, 9, 2, 2, K, 8, seed=step, dtype=dtype)  # l layers, x keys and values
        count_b = rng.integers(0, width + 1, batch) if step else np.zeros(batch, int)
        path_bp = np.stack([rng.permutation(9)[:width] for _ in range(batch)])
        new = tuple(tuple(new_btlxke[:, :, layer, kind] for kind in (0, 1)) for layer in (0, 1))
        cache = append(cache, new, jnp.asarray(count_b), jnp.asarray(path_bp))
        slots_lxbkse = np.stack([kv.read() for kv in cache.layers])
        assert slots_lxbkse.shape[4] == 40
        for b, text in enumerate(expected):
            text += list(new_btlxke[b, path_bp[b, : count_b[b]]])
            assert cache.length_b[b] == len(text)
            for got_lxke, expected_lxke in zip(np.moveaxis(slots_lxbkse[:, :, b], 3, 0), text, strict=False):
                np.testing.assert_array_equal(got_lxke, expected_lxke)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_ring_holds_the_last_positions_of_its_window(dtype):
    """Chunks longer than the ring, paths of a tree and nothing, in turns; the first ring is shorter than the window."""
    rng, window, config = np.random.default_rng(0), 6, replace(RANDOM_MODEL, num_layers=2)
    config = replace(config, layer_types=("sliding_attention",) * 2, window=window)
    cache = caches.allocate(config, 2, 5, dtype, can_cut=False)
    assert cache.states[0].keys_bnkse.shape == (2, 1, K, 5, 8)
    append, texts = jax.jit(caches.commit), [[], []]
    for step, counts in enumerate([(3, 5), (0, 4), (2, 1), (9, 7), (0, 2), (4, 0)]):
        if step == 1:
            cache = cache.grow(40)
            assert cache.states[0].keys_bnkse.shape == (2, 1, K, window, 8)
        new_btlxke = draw(2, 9, 2, 2, K, 8, seed=step, dtype=dtype)  # l layers, x keys and values
        path_bp = np.stack([rng.permutation(9) for _ in range(2)]) if step % 2 else None
        new = tuple(tuple(new_btlxke[:, :, layer, kind] for kind in (0, 1)) for layer in (0, 1))
        cache = append(cache, new, jnp.asarray(counts), path_bp)
        for b, text in enumerate(texts):
            order = np.arange(9) if path_bp is None else path_bp[b]
            text += list(new_btlxke[b, order[: counts[b]]])
            at_s = np.asarray(cache.layers[0].positions(cache.length_b))[b]
            assert sorted(at_s[at_s >= 0]) == [*range(len(text))][-window:]
            slots_lxbkse = np.stack([kv.read() for kv in cache.layers])
            for slot in np.flatnonzero(at_s >= 0):
                np.testing.assert_array_equal(slots_lxbkse[:, :, b, :, slot], text[at_s[slot]])
