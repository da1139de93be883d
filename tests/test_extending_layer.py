"""Extending the library by a kind of layer with a recurrent state, without an edit to it."""

from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import TREE, drafted_as_plain, make_pair, read_texts
from conftest import FEW_TOKENS, RANDOM_DRAFTER, needs_8_devices
from flax import struct

import treeflash_jax as tf
from treeflash_jax.core.parameters import Spec
from treeflash_jax.engine.device_memory import footprint
from treeflash_jax.models.layer_kinds import KINDS
from treeflash_jax.models.layer_protocol import LayerKind, LayerState

# A kind of layer: a sum over earlier positions that fades by half with each, h_t = h_{t-1} / 2 + into x_t.


@struct.dataclass
class Sum(LayerState):
    sum_bd: jax.Array

    def commit(self, new, length_b, count_b, path_bp) -> Self:
        [into_btd] = new
        into_bpd = into_btd if path_bp is None else jnp.take_along_axis(into_btd, path_bp[..., None], axis=1)
        behind_bp = count_b[:, None] - 1 - jnp.arange(into_bpd.shape[1])
        fading_bp = jnp.where(behind_bp >= 0, 0.5 ** jnp.maximum(behind_bp, 0), 0)
        return Sum(self.sum_bd * 0.5 ** count_b[:, None] + jnp.einsum("bp,bpd->bd", fading_bp, into_bpd))

    def axes(self) -> Self:
        return Sum(("batch", None))

    def grow(self, capacity) -> Self:
        return self

    def longest_cut(self, length_b, kept_b):
        return jnp.where(kept_b == length_b, kept_b, 0)

    def cut(self, kept_b) -> Self:
        return Sum(jnp.where(kept_b[:, None] > 0, self.sum_bd, 0))


class FadingSum(LayerKind):
    def specs(self, config, is_merged=False):
        square = Spec((config.hidden_size,) * 2, ("embed", None), inputs=(0,), outputs=(1,))
        return {"into": square, "out": square}

    def init(self, config, batch, capacity, dtype, num_layers=1, *, can_cut):
        return Sum(jnp.zeros((batch, config.hidden_size), jnp.promote_types(dtype, jnp.float32)))

    def precompute(self, config, positions_bt, mask_btu):
        behind_btu = positions_bt[:, :, None] - positions_bt[:, None]
        return jnp.where(mask_btu, 0.5 ** jnp.maximum(behind_btu, 0), 0)

    def mix(self, params, config, x_btd, inputs, state, earlier):
        into_btd = x_btd @ params["into"]
        sum_btd = jnp.einsum("btu,bud->btd", inputs.precomputed, into_btd)
        if state is not None:
            behind_bt = inputs.positions_bt - inputs.length_b[:, None] + 1
            sum_btd += 0.5 ** behind_bt[..., None] * state.sum_bd[:, None]
        return (sum_btd @ params["out"]).astype(x_btd.dtype), into_btd


CONFIG = replace(FEW_TOKENS, num_layers=3, layer_types=("fading_sum", "full_attention", "fading_sum"))
DRAFTER = replace(RANDOM_DRAFTER, layers=replace(FEW_TOKENS, num_layers=1), mask_token_id=11, taps=(0, 2))
TEXTS = [[7, 8, 9, 10, 11] * 6 + [7, 8], [3], [1, 2, 3, 4] * 40]  # the last is longer than a chunk of the prefill


@pytest.fixture(autouse=True)
def fading_sum(monkeypatch):
    monkeypatch.setitem(KINDS, "fading_sum", FadingSum())


def assert_likeliest(model: tf.TreeFlash, text: list[int], ids: list[int]) -> None:
    """The ids are the likeliest after each part of the text, read in one pass without caches."""
    _, logits_1tv = read_texts(model.weights.verifier, model.verifier, jnp.asarray([text + ids]))
    np.testing.assert_array_equal(jnp.argmax(logits_1tv[0, len(text) - 1 : -1], axis=-1), ids)


def test_a_kind_of_layer(float64):
    """Trees, prompts in chunks, caches that grow, and sequences that are admitted into others' places."""
    model = make_pair(CONFIG, DRAFTER, dtype=jnp.float64)
    settings = {"max_new_tokens": 40, "batch_size": 2, "temperature": [0.0, 0.8, 0.8]}
    results = drafted_as_plain(model, TEXTS, TREE, **settings)
    assert results[0].tau > 1.1
    assert_likeliest(model, TEXTS[0], results[0].ids)


@pytest.mark.slow
def test_chains_and_ngrams_over_it(float64):
    model, settings = make_pair(CONFIG, DRAFTER, dtype=jnp.float64), {"max_new_tokens": 40, "batch_size": 2}
    drafted_as_plain(model, TEXTS, TREE | {"builder": "walk", "ngrams": 2}, **settings)


@pytest.mark.slow
def test_a_session_reads_anew_what_a_state_cannot_be_cut_to(float64):
    model, session, prompt = make_pair(CONFIG, DRAFTER, dtype=jnp.float64), tf.Session(), TEXTS[0]
    for _ in range(2):
        settings = TREE | {"max_new_tokens": 12, "log_probs": True}
        alone, kept = ([*model.stream(prompt, session=here, **settings)][-1] for here in (None, session))
        assert kept.ids == alone.ids
        np.testing.assert_allclose(kept.log_probs, alone.log_probs, atol=1e-5)
        prompt = prompt + alone.ids + [3, 4]


@pytest.mark.slow
@needs_8_devices
def test_its_state_is_sharded_and_counted():
    mesh = tf.make_mesh(4, 2)
    expected = make_pair(CONFIG, None).generate(TEXTS, max_new_tokens=12)
    drafted_as_plain(make_pair(CONFIG, DRAFTER, mesh=mesh), TEXTS, TREE, plain=expected, max_new_tokens=12)
    sizes = {"dtype": jnp.float32, "batch": 8, "capacity": 256}
    caches = [footprint(config, mesh=mesh, **sizes).verifier_cache for config in (CONFIG, replace(CONFIG, layer_types=()))]
    keys_and_values = 2 * 2 * 256 * CONFIG.num_kv_heads // 2 * CONFIG.head_dim * 4
    assert caches == [keys_and_values + 2 * 2 * CONFIG.hidden_size * 4, 3 * keys_and_values]
