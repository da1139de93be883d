"""Attention that reads only the filled part of a cache, against "xla"; kernels run interpreted here."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import TREE, drafted_as_plain, slow_unless
from conftest import needs_8_devices
from jax.sharding import AbstractDevice, AbstractMesh
from refusals import refused

from treeflash_jax import make_mesh
from treeflash_jax.bench.program_text import find_collectives
from treeflash_jax.core import sharding
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.kv_cache import AXES, LayerKV
from treeflash_jax.trees import ancestor_mask

B, T, S, H, K, E = 4, 7, 704, 6, 2, 16
LENGTHS = {"edges": (0, 1, 127, 128), "full": (129, 640, 703, 704), "short": (0, 0, 64, 65), "ragged": (704, 3, 0, 130)}
NAMES = ("streamed", "pallas-gpu", "pallas-tpu")
PARENT = jnp.asarray([[0, 0, 0, 1, 1, 2, 5], [0, 0, 1, 2, 3, 4, 5], [0] * T, [0, 0, 0, 2, 2, 2, 4]], jnp.int32)
attention = jax.jit(tree_attention, static_argnames="implementation")


def arguments(lengths, dtype=np.float32, queries: int = T, heads: int = H, slots: int = S, poison=lambda x: x):
    """Queries, keys, values, mask, prefix and lengths; slots from `poison(length)` on are NaN, and garbage before that."""
    rng, (batch, parent_bt) = np.random.default_rng(0), (len(lengths), PARENT[: len(lengths)])
    causal_btu = jnp.broadcast_to(jnp.tri(queries, dtype=bool), (batch, queries, queries))
    mask_btu = ancestor_mask(parent_bt, T) if queries == T else causal_btu
    new = [rng.normal(size=(batch, queries, count, E)) for count in (heads, K, K)]
    at_bs = np.arange(slots) - np.asarray(lengths)[:, None]
    ends_bs = np.asarray([poison(length) - length for length in lengths])[:, None]
    cached = rng.normal(size=(2, batch, K, slots, E))
    cached = np.where((at_bs < 0)[:, None, :, None], cached, np.where((at_bs < ends_bs)[:, None, :, None], 1e4, np.nan))
    *new, keys, values = (jnp.asarray(x, dtype) for x in (*new, *cached))
    return *new, mask_btu, LayerKV(keys, values), jnp.asarray(lengths, jnp.int32)


def finite(arrays):
    """The same with zeros for NaN: what "xla" can take."""
    return jax.tree.map(lambda x: jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays)


def needed(name: str, longest: int, slots: int = S):
    """The end of the last block that a sequence needs; "streamed" reads as many quarters for all as for the longest."""
    size = {"streamed": slots // 4, "pallas-gpu": 64, "pallas-tpu": math.gcd(slots, 512)}[name]
    return lambda length: -(-(longest if name == "streamed" else length) // size) * size


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype, atol", [("float32", 1e-5), ("float64", 1e-12), ("bfloat16", 0.02)])
def test_equals_xla(name, lengths, dtype, atol):
    """Garbage in the last block that is needed is hidden; blocks past it, full of NaN, are not read at all."""
    with jax.enable_x64(dtype == "float64"):
        arrays = arguments(lengths, jnp.dtype(dtype), poison=needed(name, max(lengths)))
        got = attention(*arrays, implementation=name)
        assert got.dtype == dtype
        expected = attention(*finite(arrays))
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(expected, np.float64), atol=atol, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("queries, heads, slots", [(1, 2, 2048), (1, 8, 2112), (40, 4, 576), (700, 4, 512)])
def test_any_number_of_queries_and_slots(name, queries, heads, slots):
    """One query, several tiles of queries, and queries that pad the last one."""
    arrays = arguments((300, 0), queries=queries, heads=heads, slots=slots, poison=needed(name, 300, slots))
    got = attention(*arrays, implementation=name)
    np.testing.assert_allclose(got, attention(*finite(arrays)), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_large_logits_stay_finite(name):
    """Peaks of a thousand move from block to block: what is kept so far must shrink, never overflow."""
    q_bthe, *others = arguments(LENGTHS["full"])
    arrays = finite((q_bthe * 1e3, *others))
    np.testing.assert_allclose(attention(*arrays, implementation=name), attention(*arrays), atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_prefix(name):
    q_bthe, k_buke, v_buke, mask_btu, *_ = arguments(LENGTHS["full"])
    got = attention(q_bthe, k_buke, v_buke, mask_btu, implementation=name)
    np.testing.assert_array_equal(got, attention(q_bthe, k_buke, v_buke, mask_btu))


@needs_8_devices
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data, model", [(4, 2), (2, 4), (8, 1)])
def test_on_a_mesh_every_device_works_alone(name, data, model):
    """No collective if sequences and heads divide, even for a bound that they share; replicated if they do not."""
    q_bthe, k_buke, v_buke, mask_btu, prefix, length_b = arguments(LENGTHS["ragged"], heads=8, poison=needed(name, 704))
    mesh, heads = make_mesh(data, model), "kv_heads" if K % model == 0 else None

    def put(x, *axes):
        return jax.device_put(x, sharding.sharding(axes, x.shape, mesh))

    new = [put(x, "batch", None, heads, None) for x in (q_bthe, k_buke, v_buke)]
    placed = *new, put(mask_btu, "batch", None, None), jax.tree.map(lambda x: put(x, *AXES), prefix), put(length_b, "batch")
    with sharding.ambient(mesh):
        run = jax.jit(lambda *arrays: tree_attention(*arrays, implementation=name), out_shardings=new[0].sharding)
        compiled = run.lower(*placed).compile()
        got = compiled(*placed)
    assert find_collectives(compiled.as_text()) == []
    expected = attention(*finite((q_bthe, k_buke, v_buke, mask_btu, prefix, length_b)))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_streamed_copies_no_cache():
    """The only arrays with the shape of the cached keys are the cache itself."""
    arrays = arguments(LENGTHS["full"])
    text = attention.lower(*arrays, implementation="streamed").compile().as_text()
    made = re.findall(rf"= \w+\[{B},{K},{S},{E}\]\S* ([\w-]+)\(", text)
    assert made and set(made) <= {"parameter", "get-tuple-element"}


@pytest.mark.parametrize("name, platform, marker", [("gpu", "cuda", "triton"), ("tpu", "tpu", "tpu_custom_call")])
def test_kernels_lower_for_their_device(name, platform, marker, monkeypatch):
    """As far as a machine without the device can tell: Triton and Mosaic take the kernels, at the sizes of Qwen3-4B."""
    new = [jax.ShapeDtypeStruct((1, 64, count, 128), jnp.bfloat16) for count in (32, 8, 8)]
    slots = jax.ShapeDtypeStruct((1, 8, 6144, 128), jnp.bfloat16)
    shapes = *new, jax.ShapeDtypeStruct((1, 64, 64), bool), LayerKV(slots, slots), jax.ShapeDtypeStruct((1,), jnp.int32)
    device = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(lambda *arrays: tree_attention(*arrays, implementation=f"pallas-{name}")).trace(*shapes)
        assert marker in traced.lower(lowering_platforms=(platform,)).as_text()


def test_kernels_refuse_odd_sizes():
    arrays = list(arguments(LENGTHS["full"]))
    arrays[4] = jax.tree.map(lambda x: x[:, :, :696], arrays[4])
    words = "got heads of 16 and a cache of 696 slots, expected a power of two and a"
    refused(lambda: tree_attention(*arrays, implementation="pallas-gpu"), words)


@pytest.mark.parametrize("name", [slow_unless(name == "streamed", name) for name in NAMES])
def test_drafted_ids_are_those_of_one_token_decoding(name, trained):
    """Prompts of unequal length, one over a block's edge."""
    rng, settings = np.random.default_rng(0), {"max_new_tokens": 8, "temperature": [0.0, 0.8]}
    prompts = [rng.integers(4, trained.verifier.vocab_size, size).tolist() for size in (508, 40)]
    plain = trained.generate(prompts, builder="none", attention="xla", **settings)
    draft = TREE | {"builder": "best-first", "attention": name}
    drafted_as_plain(trained, prompts, draft, plain=plain, **settings)
