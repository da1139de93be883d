"""Attention "xla" against a dense softmax, and the others, which read a part of the cache, against it.

A CPU runs the kernels interpreted.
"""

import re
from dataclasses import replace
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import assert_greedy, make_pair, random_weights
from compiled import ONE_H100, moved_shapes
from conftest import FEW_TOKENS, IS_INTERPRETED, RANDOM_MODEL, needs_8_devices, needs_cpu, needs_mosaic

from treeflash_jax import make_mesh
from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import is_spec
from treeflash_jax.drafters import NgramDrafter
from treeflash_jax.models import attention as attention_module
from treeflash_jax.models import caches, decoder, kernels, quantized
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.backend import products
from treeflash_jax.models.kv_cache import AXES, LayerKV
from treeflash_jax.trees import ancestor_mask

B, T, S, H, K, E = 4, 7, 704, 6, 2, 64
LENGTHS = {"edges": (0, 1, 127, 128), "full": (129, 640, 703, 704), "short": (0, 0, 64, 65), "ragged": (704, 3, 0, 130)}
KERNELS = ["pallas-gpu", "mosaic-gpu"]
NAMES = ["streamed", "blocked", *(["pallas-gpu"] if jax.default_backend() in ("cpu", "gpu") else [])]
WITH_MOSAIC = [*NAMES, pytest.param("mosaic-gpu", marks=needs_mosaic)]
# All lengths in one dtype, and the others for one of them.
CASES = [(name, "float32", lengths) for name in NAMES for lengths in LENGTHS]
CASES += [(name, dtype, "edges") for name in NAMES for dtype in ("float64", "bfloat16")]
MOSAIC_CASES = [("bfloat16", lengths) for lengths in LENGTHS] + [("float16", "edges")]
CASES += [pytest.param("mosaic-gpu", *case, marks=needs_mosaic) for case in MOSAIC_CASES]
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 0.02, "float16": 2e-3}
PARENT = np.int32([[0, 0, 0, 1, 1, 2, 5], [0, 0, 1, 2, 3, 4, 5], [0] * T, [0, 0, 0, 2, 2, 2, 4]])
BLOCK = 96  # divides none of the capacities
attention = jax.jit(tree_attention, static_argnames=("implementation", "window"))
mask_ancestors = jax.jit(ancestor_mask, static_argnums=1)
SINKS = np.float32([0.5, -30.0, 3.0, 1.0, 400.0, 2.0, 0.0, 4.0])  # one that adds nothing, and one that leaves nothing


@pytest.fixture(autouse=True, scope="module")
def short_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "BLOCK", BLOCK)
        yield


def arguments(lengths, dtype="float32", *, queries=T, heads=H, kv_heads=K, slots=S, layers=1, poison=lambda length: length):
    """Queries, keys, values, mask, prefix and lengths; slots from `poison(length)` on are NaN, and garbage before that.

    The prefix is the middle one of `layers` layers, and the others are NaN.
    """
    rng, (batch, parent_bt) = np.random.default_rng(0), (len(lengths), PARENT[: len(lengths)])
    causal_btu = np.broadcast_to(np.tri(queries, dtype=bool), (batch, queries, queries))
    mask_btu = np.asarray(mask_ancestors(parent_bt, T)) if queries == T else causal_btu
    new = [rng.normal(size=(batch, queries, count, E)) for count in (heads, kv_heads, kv_heads)]
    at_bs = np.arange(slots) - np.asarray(lengths)[:, None]
    ends_bs = np.asarray([poison(length) - length for length in lengths])[:, None]
    cached = rng.normal(size=(2, batch, kv_heads, slots, E))
    cached = np.where((at_bs < 0)[:, None, :, None], cached, np.where((at_bs < ends_bs)[:, None, :, None], 1e4, np.nan))
    layer = layers // 2
    stacks = np.full((2, batch, layers, kv_heads, slots, E), np.nan)
    stacks[:, :, layer] = cached
    *new, keys, values = (x.astype(jnp.dtype(dtype)) for x in (*new, *stacks))
    return *new, mask_btu, LayerKV(keys, values, np.int32(layer)), np.int32(lengths)


def short_arguments(**sizes):
    """Sequences with none, some and all of 12 slots filled; unfilled slots hold large garbage."""
    return arguments((0, 5, 12), slots=12, poison=lambda length: 12, **sizes)


def read_past(prefix: LayerKV) -> list[np.ndarray]:
    """Returns a layer's keys and values, [b, s, k, e]."""
    return [np.swapaxes(x[:, prefix.layer], 1, 2) for x in (prefix.keys_bnkse, prefix.values_bnkse)]


def dense(q_bthe, k_bxke, v_bxke, mask_btx, sinks_h=None):
    """Plain softmax attention in float64; every key/value head repeated for its queries. A sink is a key of value 0."""
    k_bxhe, v_bxhe = (np.repeat(np.asarray(x, np.float64), q_bthe.shape[2] // x.shape[2], axis=2) for x in (k_bxke, v_bxke))
    logits_bhtx = np.einsum("bthe,bxhe->bhtx", np.asarray(q_bthe, np.float64), k_bxhe) / E**0.5
    logits_bhtx = np.where(mask_btx[:, None], logits_bhtx, -np.inf)
    if sinks_h is not None:
        sinks_bht1 = np.broadcast_to(np.asarray(sinks_h, np.float64)[:, None, None], (*logits_bhtx.shape[:3], 1))
        logits_bhtx = np.concatenate([logits_bhtx, sinks_bht1], axis=-1)
        v_bxhe = np.pad(v_bxhe, ((0, 0), (0, 1), (0, 0), (0, 0)))
    weights_bhtx = np.exp(logits_bhtx - logits_bhtx.max(-1, keepdims=True))
    return np.einsum("bhtx,bxhe->bthe", weights_bhtx / weights_bhtx.sum(-1, keepdims=True), v_bxhe)


@pytest.mark.parametrize("heads, kv_heads", [(H, K), (4, 4), (4, 1)])
def test_xla_is_the_dense_softmax(heads, kv_heads):
    q_bthe, k_buke, v_buke, mask_btu, prefix, length_b = short_arguments(heads=heads, kv_heads=kv_heads)
    seen_bts = np.broadcast_to((np.arange(12) < length_b[:, None])[:, None], (3, T, 12))
    past = read_past(prefix)
    k_bxke, v_bxke = (np.concatenate(pair, axis=1) for pair in zip(past, (k_buke, v_buke), strict=True))
    expected = dense(q_bthe, k_bxke, v_bxke, np.concatenate([seen_bts, mask_btu], axis=2))
    np.testing.assert_allclose(attention(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b), expected, atol=3e-6)
    expected = dense(q_bthe, k_buke, v_buke, np.asarray(mask_btu))
    np.testing.assert_allclose(attention(q_bthe, k_buke, v_buke, mask_btu), expected, atol=3e-6)


@pytest.mark.parametrize("parts", [3, 6])
def test_parts_of_sequences_and_of_queries_equal_the_whole(parts, on_tpu, monkeypatch):
    arrays = short_arguments()
    first_bt = np.broadcast_to(np.arange(T), (3, T))
    whole = tree_attention(*arrays, first_bt=first_bt)
    monkeypatch.setattr(attention_module, "FEWEST_QUERIES", 1)
    monkeypatch.setattr(products, "ON_CHIP_BYTES", 3 * T * H * 12 * 4 // parts)
    np.testing.assert_allclose(tree_attention(*arrays, first_bt=first_bt), whole, atol=1e-6)
    assert str(jax.make_jaxpr(partial(tree_attention, first_bt=first_bt))(*arrays)).count(" exp ") == 2 * parts


def finite(arrays):
    """The same with zeros for NaN: what "xla" can take."""
    return jax.tree.map(lambda x: np.where(np.isnan(x), x.dtype.type(0), x) if x.dtype.itemsize > 1 else x, arrays)


def needed(name: str, longest: int, slots: int = S):
    """The end of the last block that a sequence needs; "streamed" and "blocked" read as much for all as for the longest."""
    blocks = {"streamed": 4, "blocked": -(-slots // BLOCK)}.get(name, slots // 64)
    size = slots // next(number for number in count(blocks) if slots % number == 0)
    return lambda length: -(-(length if name in KERNELS else longest) // size) * size


def widest(name: str) -> str:
    """Returns the widest dtype that an implementation takes on every device."""
    return "float16" if name == "mosaic-gpu" else "float32"


def same(got, expected, **tolerance):
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(expected, np.float64), rtol=0, **tolerance)


@pytest.mark.parametrize("name, dtype, lengths", CASES)
def test_equals_xla(name, dtype, lengths):
    """Garbage in the last block that is needed is hidden; blocks past it, full of NaN, are not read at all."""
    with jax.enable_x64(dtype == "float64"):
        arrays = arguments(LENGTHS[lengths], dtype, layers=3, poison=needed(name, max(LENGTHS[lengths])))
        got = attention(*arrays, implementation=name)
        assert got.dtype == dtype
        same(got, attention(*finite(arrays)), atol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", WITH_MOSAIC)
@pytest.mark.parametrize("queries, heads, slots", [(1, 2, 2048), (1, 8, 2112), (41, 4, 576), (260, 4, 512)])
def test_any_number_of_queries_and_slots(name, queries, heads, slots):
    """One query, several tiles of queries, and queries that pad the last one."""
    sizes = {"queries": queries, "heads": heads, "slots": slots}
    arrays = arguments((300, 0), widest(name), **sizes, poison=needed(name, 300, slots))
    got = attention(*arrays, implementation=name)
    same(got, attention(*finite(arrays)), atol=TOLERANCES[widest(name)])


@pytest.mark.parametrize("name", WITH_MOSAIC)
def test_large_logits_stay_finite_and_a_prefix_may_be_missing(name):
    """Peaks of a thousand move from block to block, and from the prefix to the new positions: sums never overflow."""
    q_bthe, *others = arguments(LENGTHS["full"], widest(name))
    q_bthe = q_bthe * q_bthe.dtype.type(1e3)
    for arrays in (finite((q_bthe, *others)), (q_bthe, *others[:3])):
        expected = attention(*arrays)
        assert (np.abs(expected) < 10).all()
        same(attention(*arrays, implementation=name), expected, atol=2e-3)


def dense_with_sinks(arrays, first_bt=None):
    """The dense softmax over prefix and new positions, with SINKS; `first_bt` as in `tree_attention`."""
    q_bthe, k_buke, v_buke, mask_btu, prefix, length_b = finite(arrays)
    slots = np.arange(prefix.num_slots)
    first_bt = np.zeros(mask_btu.shape[:2]) if first_bt is None else first_bt
    seen_bts = (slots < length_b[:, None, None]) & (slots >= first_bt[..., None])
    past = read_past(prefix)
    k_bxke, v_bxke = (np.concatenate(pair, axis=1) for pair in zip(past, (k_buke, v_buke), strict=True))
    return dense(q_bthe, k_bxke, v_bxke, np.concatenate([seen_bts, mask_btu], axis=2), SINKS[: q_bthe.shape[2]])


@pytest.mark.parametrize("name", ["xla", *NAMES])
def test_sinks_join_the_sums(name):
    arrays = arguments(LENGTHS["ragged"], layers=3, poison=needed(name, 704))
    got = attention(*(finite(arrays) if name == "xla" else arrays), sinks_h=SINKS[:H], implementation=name)
    same(got, dense_with_sinks(arrays), atol=1e-5)


@pytest.mark.parametrize("name", ["xla", *WITH_MOSAIC])
@pytest.mark.parametrize("window", [20, S])
def test_a_window_reads_its_slots(name, window):
    """Each position of a tree sees slots by its depth. "xla" alone reads slots before the window, and hides them."""
    arrays = *new, mask_btu, prefix, length_b = arguments(LENGTHS["ragged"], layers=3, poison=lambda length: S)
    if name != "xla" and window < S:
        starts_b = np.maximum(length_b - window, 0)[:, None]
        is_read_bs = (np.arange(S) >= starts_b) & (np.arange(S) < starts_b + window)
        nan = np.float32(np.nan)
        stacks = [np.where(is_read_bs[:, None, None, :, None], x, nan) for x in (prefix.keys_bnkse, prefix.values_bnkse)]
        prefix = LayerKV(*stacks, prefix.layer)
    else:
        prefix = finite(prefix)
    first_bt = length_b[:, None] + np.sum(mask_btu, axis=2, dtype=np.int32) - window
    how = {"first_bt": first_bt, "window": window, "sinks_h": SINKS[:H], "implementation": name}
    same(attention(*new, mask_btu, prefix, length_b, **how), dense_with_sinks(arrays, first_bt), atol=1e-5)


def on_mesh(mesh, arrays, implementation, window=None, **how):
    """Attention on a mesh, and its compiled program."""
    q_bthe, k_buke, v_buke, mask_btu, prefix, length_b = arrays
    heads = "kv_heads" if K % mesh.shape["model"] == 0 else None

    def put(x, *axes):
        return jax.device_put(x, sharding.sharding(axes, x.shape, mesh))

    new = [put(x, "batch", None, heads, None) for x in (q_bthe, k_buke, v_buke)]
    stacks = [put(x, *AXES) for x in (prefix.keys_bnkse, prefix.values_bnkse)]
    cached = LayerKV(*stacks, put(prefix.layer)), put(length_b, "batch")
    placed = *new, put(mask_btu, "batch", None, None), *cached
    with sharding.ambient(mesh):
        run = partial(tree_attention, implementation=implementation, window=window)
        compiled = jax.jit(run, out_shardings=new[0].sharding).lower(*placed, **how).compile()
        return compiled(*placed, **how), compiled


@needs_8_devices
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data, model", [(4, 2), (2, 4), (8, 1)])
def test_on_a_mesh_every_device_works_alone(name, data, model):
    """No collective if sequences and heads divide, even for a bound that they share; replicated if they do not."""
    arrays = arguments(LENGTHS["ragged"], heads=8, layers=3, poison=needed(name, 704))
    got, compiled = on_mesh(make_mesh(data, model), arrays, name)
    assert moved_shapes(compiled.as_text()) == []
    np.testing.assert_allclose(got, attention(*finite(arrays)), atol=1e-5)


@needs_8_devices
@pytest.mark.parametrize("name, window", [("blocked", None), ("pallas-gpu", None), ("streamed", 20)])
def test_sinks_and_windows_on_a_mesh(name, window):
    arrays = finite(arguments(LENGTHS["ragged"], heads=8, layers=3))
    first_bt = None if window is None else arrays[-1][:, None] + np.sum(arrays[3], axis=2, dtype=np.int32) - window
    got, compiled = on_mesh(make_mesh(4, 2), arrays, name, window, sinks_h=SINKS, first_bt=first_bt)
    assert moved_shapes(compiled.as_text()) == []
    same(got, dense_with_sinks(arrays, first_bt), atol=1e-5)


@needs_cpu
def test_streamed_copies_no_cache(as_users_compile):
    """The only arrays with all slots and the size of a head are the cache itself."""
    arrays = arguments(LENGTHS["full"])
    text = attention.lower(*arrays, implementation="streamed").compile().as_text()
    made = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", text)
    kinds = {kind for sizes, kind in made if {str(S), str(E)} <= set(sizes.split(","))}
    assert kinds and kinds <= {"parameter", "get-tuple-element", "bitcast"}


@pytest.mark.parametrize("name, word", [("pallas-gpu", "triton"), pytest.param("mosaic-gpu", "mosaic", marks=needs_mosaic)])
@pytest.mark.parametrize("queries, head_dim, slots", [(64, 128, 6144), (1, 64, 2**17)])  # the second array has over 4 GiB
def test_the_kernels_lower_for_a_gpu(name, word, queries, head_dim, slots):
    """As far as a machine without one can tell: Triton and Mosaic take them, at the sizes of Qwen3-4B among others."""
    new = [jax.ShapeDtypeStruct((1, queries, count, head_dim), jnp.bfloat16) for count in (32, 8, 8)]
    stack = jax.ShapeDtypeStruct((1, 36, 8, slots, head_dim), jnp.bfloat16)
    prefix = LayerKV(stack, stack, jax.ShapeDtypeStruct((), jnp.int32))
    mask, length = jax.ShapeDtypeStruct((1, queries, queries), bool), jax.ShapeDtypeStruct((1,), jnp.int32)
    with jax.sharding.use_abstract_mesh(ONE_H100):
        traced = jax.jit(lambda *arrays: tree_attention(*arrays, implementation=name)).trace(*new, mask, prefix, length)
        assert word in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_a_kernel_does_not_take_runs_plainly_and_is_said(caplog):
    """Heads of 256, as Qwen3.5 has them, in one of both kernels; a number of slots in none, or in none of an older JAX."""
    new = [jax.ShapeDtypeStruct((1, 7, count, 256), jnp.bfloat16) for count in (16, 4, 4)]
    stack = jax.ShapeDtypeStruct((1, 8, 4, 704, 256), jnp.bfloat16)
    mask, length = jax.ShapeDtypeStruct((1, 7, 7), bool), jax.ShapeDtypeStruct((1,), jnp.int32)

    def trace(name: str, stack) -> str:
        prefix = LayerKV(stack, stack, jax.ShapeDtypeStruct((), jnp.int32))
        return str(jax.make_jaxpr(partial(tree_attention, implementation=name))(*new, mask, prefix, length))

    plain, pallas, mosaic = (trace(name, stack) for name in ("xla", *KERNELS))
    assert "pallas_call" in pallas and mosaic == plain
    odd = jax.ShapeDtypeStruct((1, 8, 4, 696, 256), jnp.bfloat16)
    assert trace("pallas-gpu", odd) == trace("xla", odd) == trace("mosaic-gpu", odd)
    words = "takes bfloat16 or float16, heads of 64 or 128" if IS_INTERPRETED else "needs jax 0.12; the plain variant runs"
    assert [record.message.split(": kernel ")[0] for record in caplog.records] == ["attention"] * 2, "each line once"
    assert f"'mosaic-gpu' {words}" in caplog.text and "'pallas-gpu' takes heads of a power of two" in caplog.text


@needs_mosaic
@pytest.mark.parametrize("qk_norm, tokens, scheme", [(True, 7, None), (False, 1, None), (True, 7, "fp8")])
def test_the_verifier_adds_norms_and_rotates_in_kernels(qk_norm, tokens, scheme):
    """Merged weights, a prefix of two lengths and a tree: hidden states, keys and values equal "xla"."""
    config = replace(RANDOM_MODEL, hidden_size=512, head_dim=64, qk_norm=qk_norm)
    specs = decoder.specs(config)
    params = random_weights(specs, scale=0.1, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda spec, x: quantized.compress(x, spec, scheme), specs, params, is_leaf=is_spec)
    decoder.merge(params, config)
    forward = jax.jit(decoder.forward, static_argnames=("config", "attention"))
    ids_bt = np.random.default_rng(1).integers(0, config.vocab_size, (2, 70 + tokens))
    at_bs = jnp.broadcast_to(jnp.arange(70), (2, 70))
    prompt = forward(params, config, ids_bt[:, :70], at_bs, decoder.causal_mask(2, 70))
    cache = caches.allocate(config, 2, 192, jnp.bfloat16, stacked=True, can_cut=True)
    cache = caches.commit(cache, prompt.new, jnp.asarray([70, 3]))
    mask_btt = mask_ancestors(PARENT[:2], T)[:, :tokens, :tokens]
    inputs = ids_bt[:, 70:], cache.length_b[:, None] + jnp.arange(tokens), mask_btt, cache
    expected = forward(params, config, *inputs, attention="xla")
    with kernels.use("mosaic-gpu"):
        got = forward(params, config, *inputs, attention="mosaic-gpu")
        traced = str(forward.trace(params, config, *inputs, attention="mosaic-gpu").jaxpr)
    assert "name=tree_attention" in traced and ("name=fp8_product" if scheme else "name=add_and_norm") in traced
    same(got.hidden_btd, expected.hidden_btd, atol=0.05)
    for new, others in zip(jax.tree.leaves(got.new), jax.tree.leaves(expected.new), strict=True):
        same(new, others, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_drafted_ids_are_the_likeliest_ones(name):
    """Prompts of unequal length, one over a block's edge."""
    model = make_pair(replace(FEW_TOKENS, num_layers=1, head_dim=16), NgramDrafter())
    prompts = [np.random.default_rng(0).integers(0, 12, size).tolist() for size in (508, 40)]
    results = model.generate(prompts, builder="best-first", nodes=8, attention=name, max_new_tokens=16)
    assert max(result.tau for result in results) > 1.2
    assert_greedy(model, prompts, results)
