"""Vocabulary reductions: sharded equals unsharded, thresholds equal a sort, noise depends on its key alone."""

import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import draw
from conftest import needs_8_devices
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from scipy.special import log_softmax

import treeflash_jax as tf
from treeflash_jax.models import vocab

V = 64
REDUCTIONS = {
    "top_k": lambda table, scores, ids: vocab.top_k(scores, 5),
    "top_k, more than a shard holds": lambda table, scores, ids: vocab.top_k(scores, 40),
    "argmax": lambda table, scores, ids: vocab.argmax(scores),
    "take": lambda table, scores, ids: vocab.take(scores, ids.at[0, 2].set(np.iinfo(np.int32).max)),
    "put": lambda table, scores, ids: vocab.put(scores, ids.at[0, 2].set(np.iinfo(np.int32).max), 1.0 * ids),
    "embed": lambda table, scores, ids: vocab.embed(table, ids),
    "log_sum_exp": lambda table, scores, ids: vocab.log_sum_exp(scores),
    "unembed": lambda table, scores, ids: vocab.unembed(table, table[ids[..., 0]]),
}
SUMS = ("log_sum_exp", "unembed")  # the only ones that add across shards
filter_threshold = jax.jit(vocab.filter_threshold)
top_log_probs = jax.jit(vocab.top_log_probs, static_argnums=1)


@pytest.fixture(scope="module")
def mesh():
    return tf.make_mesh(2, 4)


def inputs(size: int, batch: int = 4) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A table, scores full of ties and ids at both ends of every shard."""
    rng = np.random.default_rng(size)
    table_vd = rng.normal(size=(size, 8)).astype(np.float32)
    scores_btv = rng.integers(0, 6, (batch, 3, size)).astype(np.float32)
    ids_btc = rng.integers(0, size, (batch, 3, 4))
    ids_btc[0, 0], ids_btc[0, 1] = [0, size // 4 - 1, size // 4, size - 1], size // 2
    return jax.device_put((table_vd, scores_btv, ids_btc.astype(np.int32)))


@needs_8_devices
@pytest.mark.parametrize("batch, size", [(4, V), (3, V), (4, V + 2)])  # neither axis; batch; vocabulary not divisible
def test_sharded_equals_unsharded(mesh, batch, size):
    def reduce(*arrays):
        return {name: reduction(*arrays) for name, reduction in REDUCTIONS.items()}

    arrays = inputs(size, batch)
    expected = jax.jit(reduce)(*arrays)
    with jax.set_mesh(mesh):
        results = jax.jit(lambda *xs: reduce(*xs))(*arrays)
    for name, got in results.items():
        for got_x, expected_x in zip(jax.tree.leaves(got), jax.tree.leaves(expected[name]), strict=True):
            assert got_x.dtype == expected_x.dtype
            tolerance = {"atol": 1e-5} if name in SUMS else {"rtol": 0}
            np.testing.assert_allclose(got_x, expected_x, **tolerance, err_msg=name)


def gathers_with_full_vectors(function, scores: jax.Array) -> list[str]:
    text = jax.jit(function).lower(scores).compile().as_text()
    gathers = [line for line in text.splitlines() if re.search(r"\ball-gather(-start)?\(", line)]
    return [line for line in gathers if re.search(rf"[\[,]{V}[,\]]", line.split("all-gather")[1] + line.split("=")[1])]


@needs_8_devices
def test_no_shard_sees_a_full_vector(mesh):
    with jax.set_mesh(mesh):
        sharded = jax.device_put(inputs(V)[1], NamedSharding(mesh, PartitionSpec("data", None, "model")))
        assert gathers_with_full_vectors(lambda x: lax.top_k(x, 3), sharded), "the control must gather"
        for reduction in (
            lambda x: vocab.top_k(x, 3), vocab.argmax, lambda x: vocab.take(x, jnp.zeros((4, 3, 2), jnp.int32)),
            vocab.log_sum_exp, lambda x: vocab.filter_threshold(x, 0.7, jnp.int32(5), jnp.float32(0.9), 0.1),
        ):  # fmt: skip
            assert not gathers_with_full_vectors(reduction, sharded)


def kept_by_sorting(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float):
    """Returns the tokens that top-k, then top-p, then min-p keep, and whether rounding could change the result."""
    kept = logits >= (np.sort(logits)[-top_k] if 0 < top_k <= logits.size else -np.inf)
    if min_p:
        kept_before, unclear = kept_by_sorting(logits, temperature, top_k, top_p, 0.0)
        ratio = np.exp((logits - logits.max()) / temperature) / min_p
        return kept_before & (ratio >= 1), unclear or bool(np.abs(ratio - 1).min() < 1e-5 / temperature)
    if top_p >= 1:
        return kept, False
    mass = np.where(kept, np.exp((logits - logits.max()) / temperature), 0)
    values = np.unique(logits[kept])[::-1]
    reached = np.array([mass[logits >= value].sum() for value in values]) / mass.sum()
    crossing = np.argmax(reached >= top_p) if (reached >= top_p).any() else values.size - 1
    return logits >= values[crossing], bool(np.abs(reached - top_p).min() < 1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("ties", [False, True])
def test_filter_threshold_equals_sorting(ties, dtype):
    rng = np.random.default_rng(int(ties))
    count, size = 2000, 48
    logits = (rng.normal(size=(count, size)) * rng.choice([0.1, 1, 4, 30], (count, 1))).astype(np.float32)
    logits = np.round(logits) if ties else logits
    logits[rng.random((count, size)) < 0.02] = -np.inf
    logits = np.asarray(jnp.asarray(logits, dtype))
    temperature = rng.choice([0.2, 0.7, 1, 3], count).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 7, 47, 48, 60], count).astype(np.int32)
    top_p = rng.choice([1.0, 0.999, 0.95, 0.9, 0.5, 0.1, 1e-4], count).astype(np.float32)
    min_p = rng.choice([0.0, 0.02, 0.5], count).astype(np.float32)
    threshold = np.asarray(filter_threshold(*map(jnp.asarray, (logits, temperature, top_k, top_p, min_p))))
    assert threshold.dtype == dtype
    unclear = 0
    for scores_v, t, k, *ps, cut in zip(
        logits.astype(np.float64), temperature, top_k, top_p, min_p, threshold, strict=True
    ):
        expected, rounding = kept_by_sorting(scores_v, float(t), int(k), *map(float, ps))
        unclear += rounding
        if not rounding:
            np.testing.assert_array_equal(scores_v >= cut, expected)
            assert ps[1] or cut in scores_v or (np.isneginf(cut) and expected.all())
    assert unclear < 0.05 * count


def test_top_p_counts_all_tokens_as_in_transformers_and_min_p_comes_after_it():
    """vLLM applies min-p first: of the two tokens that it keeps here, the likeliest alone has over 0.6 of the mass."""
    logits, top_k = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), jnp.int32(0)
    assert int((logits >= filter_threshold(logits, 1.0, top_k, jnp.float32(0.6), 0.4)).sum()) == 2


def test_peaked_vectors_keep_their_peak():
    others = np.log(1e-7 / (V - 1)).astype(np.float32)
    logits = np.where(np.arange(V) == 17, np.float32(np.log1p(-1e-7)), others).astype(np.float32)
    for top_p in (1e-6, 0.5, 0.99, 1 - 1e-6):
        cut = filter_threshold(jnp.asarray(logits), 1.0, jnp.int32(0), jnp.float32(top_p))
        np.testing.assert_array_equal(logits >= cut, np.arange(V) == 17)
    kept = filter_threshold(jnp.asarray(logits), 1.0, jnp.int32(2), jnp.float32(1.0))
    assert (logits >= kept).all(), "ties of the second largest are kept"
    assert filter_threshold(jnp.asarray([[0.0, 3.0, 1.0]]), 1.0, jnp.int32([0]), jnp.float32([1e-39])).tolist() == [3.0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_top_log_probs_are_those_of_log_softmax(dtype):
    logits = draw(5, 3, V, dtype=dtype) * dtype(4)
    for temperature in (1.0, 0.3):
        ids, log_probs = top_log_probs(logits, 6, temperature)
        expected = log_softmax(logits.astype(np.float32) / temperature, axis=-1)
        np.testing.assert_allclose(log_probs, np.take_along_axis(expected, np.asarray(ids), -1), atol=1e-5)
        np.testing.assert_allclose(log_probs, -np.sort(-expected)[..., :6], atol=1e-5)
        assert log_probs.dtype == jnp.float32


@needs_8_devices
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_the_likeliest_tokens_do_not_depend_on_chunks(mesh, monkeypatch, sharded, chunks):
    table_vd, hidden_btd = draw(V, 8), draw(4, 7, 8)
    temperature_b = np.float32([1.0, 0.7, 2.0, 1.0])
    logits_btv = hidden_btd @ table_vd.T
    expected = top_log_probs(logits_btv, 5, temperature_b[:, None, None])
    monkeypatch.setattr(vocab, "CHUNK_BYTES", logits_btv.nbytes // (mesh.size if sharded else 1) // chunks + 3)
    likeliest = jax.jit(lambda *args: vocab.likeliest(args[0], args[1], 5, args[2]))
    with jax.set_mesh(mesh) if sharded else nullcontext():
        program = likeliest.lower(table_vd, hidden_btd, temperature_b)
        actual = program.compile()(table_vd, hidden_btd, temperature_b)
    assert ("stablehlo.while" in program.as_text()) == (chunks > 1)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-5)


def test_no_log_probability_is_above_zero():
    logits = draw(500, V) * np.logspace(-1, 3, 500, dtype=np.float32)[:, None]
    for temperature in (1.0, 0.7, 0.03):
        _, log_probs = top_log_probs(logits, 2, np.float32(temperature))
        assert log_probs.max() == 0, "peaked vectors occur, and a child never outscores its parent"


@needs_8_devices
def test_noise_depends_on_its_key_alone(mesh):
    keys = jax.random.split(jax.random.key(3), (4, 2))
    draw_noise = jax.jit(lambda keys: vocab.gumbel(keys, V, jnp.float32))
    noise = np.asarray(draw_noise(keys))
    assert noise.shape == (4, 2, V)
    np.testing.assert_array_equal(draw_noise(keys[2, 1]), noise[2, 1])
    np.testing.assert_array_equal(draw_noise(keys[1:3].reshape(-1)), noise[1:3].reshape(-1, V))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(lambda k: vocab.gumbel(k, V, jnp.float32))(keys), noise)
    count = np.asarray(noise).reshape(-1, V)
    assert len(np.unique(count.round(5), axis=0)) == len(count) and np.unique(count).size > 0.99 * count.size
