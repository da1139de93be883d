"""Attention within packed sequences against "chunked": splash attention interpreted, and XLA in place of cuDNN."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import draw
from conftest import needs_8_devices

from train.stages import blocks
from treeflash_jax import make_mesh
from treeflash_jax.core import sharding
from treeflash_jax.models import packed_attention as module
from treeflash_jax.models.packed_attention import PackedMask, packed_attention

T, H, K, E = 256, 4, 2, 8
CASES = [("splash", "float32", 1e-5), ("cudnn", "float16", 5e-3)]
ANCHORS = np.array([[0, 5, 17, 127, 3, 99, 64, 70], [1, 126, 125, 2, 55, 0, 9, 33]])
plain = jax.nn.dot_product_attention


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """XLA for cuDNN, and several small blocks; a causal mask hides some of them."""

    def attend(*arrays, implementation, **options):
        assert implementation == "cudnn"
        return plain(*(x.astype(jnp.float32) for x in arrays), **options).astype(arrays[0].dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(module, "BLOCK", 128)


def segments(batch: int, length: int) -> jax.Array:
    """Documents of random lengths, the last of them padding."""
    ends_bn = np.sort(np.random.default_rng(7).integers(1, length, (batch, 4)))
    return jnp.asarray(4 - (np.arange(length) < ends_bn[..., None]).sum(1), jnp.int32) % 4


def compare(function, arrays, kind, atol):
    """Compares results, and gradients of a weighted sum of them, with the plain variant's in float32."""

    def summed(arrays, kind):
        out = function(*arrays, kind)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(weights * out.astype(jnp.float32)), out

    got, expected = (
        jax.jit(partial(jax.grad(summed, has_aux=True), kind=name))(given)
        for name, given in ((kind, arrays), ("chunked", [x.astype(jnp.float32) for x in arrays]))
    )
    assert got[1].dtype == arrays[0].dtype
    for x, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), wanted, atol=atol * max(1, float(jnp.abs(wanted).max())))


def documents(segments_bt):
    mask = PackedMask(segments_bt, segments_bt)
    return lambda q, k, v, kind: packed_attention(q, k, v, mask, implementation=kind)


@pytest.mark.parametrize("kind, dtype, atol", CASES)
def test_documents(kind, dtype, atol):
    arrays = [draw(2, T, heads, E, seed=i, dtype=dtype) for i, heads in enumerate((H, K, K))]
    compare(documents(segments(2, T)), arrays, kind, atol)


@pytest.mark.parametrize("kind, dtype, atol", CASES)
@pytest.mark.parametrize("queries, keys", [(32, 16), (16, 32)])
def test_blocks(kind, dtype, atol, queries, keys):
    """Blocks may have more keys than queries: a rollout keeps the keys of its earlier steps."""
    count = len(ANCHORS[0])
    sizes = (count * queries, H), *2 * [(count * keys, K)], *2 * [(128, K)]
    arrays = [draw(2, *size, E, seed=i, dtype=dtype) for i, size in enumerate(sizes)]
    where = jnp.asarray(ANCHORS), segments(2, 128)
    compare(lambda *arrays: blocks.block_attention(*arrays[:5], *where, arrays[5]), arrays, kind, atol)


@needs_8_devices
def test_on_a_mesh():
    arrays = [draw(4, 128, heads, E, seed=i) for i, heads in enumerate((H, K, K))]
    with sharding.ambient(make_mesh(data=2, fsdp=2, model=2)):
        compare(documents(segments(4, 128)), arrays, "splash", 1e-5)


def test_lowered_for_a_tpu():
    """No array of logits or mask is in the program."""
    arrays = [jax.ShapeDtypeStruct((2, T, heads, 64), jnp.bfloat16) for heads in (H, K, K)]
    program = jax.jit(partial(documents(segments(2, T)), kind="splash")).trace(*arrays)
    text = program.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text and f"{T}x{T}x" not in text


def test_other_sizes_and_dtypes_run_in_the_plain_form(caplog):
    def supports(kind, queries, keys, head_dim=128, dtype="bfloat16"):
        q, k = (jax.ShapeDtypeStruct((1, count, 2, head_dim), dtype) for count in (queries, keys))
        return module.supports(kind, q, k)

    assert supports("splash", 128, 3328, 64, "float32")
    assert not supports("splash", 128, 3264) and not supports("splash", 64, 128)
    assert supports("cudnn", 256, 3328) and not supports("cudnn", 256, 3328, dtype="float32")
    assert not supports("cudnn", 256, 3328, 256) and not supports("cudnn", 255, 3328) and not supports("chunked", 256, 256)
    lines = [record.message.split(" takes ")[0] for record in caplog.records]
    assert lines == ["attention 'splash'", "attention 'cudnn'"], "each once"
    arrays = [draw(2, 60, heads, E, seed=i) for i, heads in enumerate((H, K, K))]
    compare(documents(segments(2, 60)), arrays, "splash", 0)
