"""Functions with a variant for some backends: the plain one and the CPU's give the same results, each as it should run."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import draw, slow, slow_unless
from conftest import needs_8_devices, needs_cpu

from treeflash_jax import make_mesh
from treeflash_jax.core import sharding
from treeflash_jax.models.backend import indexing, levels, products, rotation, selection

SIZES = dict(b=1, d=16, h=4, e=8, k=2, g=2, f=24, j=32, v=40, x=2, z=32)
# One equation of each variant that products of the models have.
EQUATIONS = (
    "btd,hed->bthe", "btd,ked->btke", "btz,dz->btd", "btd,fd->btf", "btf,df->btd", "btj,jd->btd", "bqd,dxf->bqxf",
    "bmf,fd->bmd", "bmd,de->bme", "btd,kged->btkge",
)  # fmt: skip


def operands(equation: str, length: int = 2, dtype=jnp.bfloat16):
    sizes = SIZES | {axis: length for axis in "tqm"}
    left, right = equation.split("->")[0].split(",")
    shapes = [tuple(sizes[axis] for axis in axes) for axes in (left, right)]
    return [jax.device_put(draw(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def exact(equation: str, *arrays) -> np.ndarray:
    return np.einsum(equation, *(np.asarray(x, np.float64) for x in arrays))


@pytest.mark.parametrize("dtype, rounding", [(jnp.bfloat16, 2.0**-8), (jnp.float32, 1e-5)])
@pytest.mark.parametrize("length", [1, 5])
def test_products_are_rounded_once(backend_form, length, dtype, rounding):
    pairs = {equation: operands(equation, length, dtype) for equation in EQUATIONS}
    results = jax.jit(
        lambda pairs: {equation: products.dense_product(equation, *pair) for equation, pair in pairs.items()}
    )(pairs)
    for equation, (x, weight) in pairs.items():
        got = results[equation]
        expected = exact(equation, x, weight)
        assert got.dtype == dtype and got.shape == expected.shape
        step = rounding * np.abs(expected) + (1e-6 if dtype == jnp.bfloat16 else 1e-5)
        assert np.all(np.abs(np.asarray(got, np.float64) - expected) <= step), equation


def test_gradients_are_those_of_the_einsum(backend_form):
    for equation, length in (("btd,dhe->bthe", 4), ("bmf,fd->bmd", 5), ("btd,vd->btv", 3)):
        x, weight = operands(equation, length)
        wide = [np.asarray(a, np.float32) for a in (x, weight)]
        grad = draw(*np.einsum(equation, *wide).shape, seed=7, dtype=jnp.bfloat16)
        got = jax.jit(lambda *args, e=equation: jax.vjp(partial(products.dense_product, e), *args[:2])[1](args[2]))(
            x, weight, grad
        )
        left, right, out = re.split(",|->", equation)
        grad = grad.astype(np.float32)
        expected = np.einsum(f"{out},{right}->{left}", grad, wide[1]), np.einsum(f"{out},{left}->{right}", grad, wide[0])
        for ours, theirs, like in zip(got, expected, (x, weight), strict=True):
            assert ours.dtype == jnp.bfloat16 and ours.shape == like.shape
            np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("leading", [(3,), (2, 1)])
def test_a_vocabulary_table_is_summed_over_its_last_axis(leading):
    hidden, table = draw(*leading, 16, dtype=jnp.bfloat16), draw(40, 16, dtype=jnp.bfloat16)
    program = jax.jit(partial(products.dense_product, "...d,vd->...v")).lower(hidden, table).compile()
    expected = exact("...d,vd->...v", hidden, table)
    np.testing.assert_allclose(np.asarray(program(hidden, table), np.float64), expected, rtol=2**-8, atol=1e-5)
    wide = jax.jit(partial(products.dense_product, "...d,vd->...v", dtype=jnp.dtype("float32")))(hidden, table)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, expected, rtol=1e-5, atol=1e-5, err_msg="sums that are not rounded")
    assert not re.search(r"bf16\[16,40\]", program.as_text()), "the table must not be transposed"


def dots(text: str) -> list[tuple[str, int]]:
    """Type and first size of the result of every product in a compiled program."""
    return [(kind, int(shape.split(",")[0])) for kind, shape in re.findall(r"= (\w+)\[([\d,]+)\]\S* dot\(", text)]


@needs_cpu
@pytest.mark.parametrize("length", [1, 16])
def test_on_a_cpu_products_accumulate_in_float32_over_four_vectors_at_least(length):
    x, weight = operands("btd,dhe->bthe", length)

    def loss(x, weight):
        return jnp.sum(products.dense_product("btd,dhe->bthe", x, weight).astype(jnp.float32) ** 2)

    forward = jax.jit(partial(products.dense_product, "btd,dhe->bthe")).lower(x, weight).compile().as_text()
    assert dots(forward) == [("f32", max(length, products.MIN_VECTORS))]
    backward = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight).compile().as_text()
    assert len(dots(backward)) == 3
    assert all(kind == "f32" and count >= products.MIN_VECTORS for kind, count in dots(backward))
    assert re.findall(r"lhs_contracting_dims={(\d)}", backward) == ["1"] * 3, "slow over the first axis"


@needs_cpu
@pytest.mark.parametrize("length", [1, 3])
def test_on_a_cpu_a_float32_weight_is_not_copied(length):
    """The einsum of these equations would transpose it in every pass; on the right of a product, YNNPACK would."""
    for equation in ("btd,hed->bthe", "btd,fd->btf", "btf,df->btd"):
        x, weight = operands(equation, length, jnp.float32)
        inputs, outputs = x.shape[-1], weight.size // x.shape[-1]
        text = jax.jit(partial(products.dense_product, equation)).lower(x, weight).compile().as_text()
        assert not re.search(rf"f32\[{inputs},{outputs}\]", text), f"{equation}: a transposed copy"
        assert length == 1 or dots(text) == [("f32", outputs)], f"{equation}: not on the left"


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_on_accelerators_products_are_einsums(platform):
    """They are given the einsum and its gradient, in bfloat16."""
    arrays = operands("btd,dhe->bthe")

    def text(product):
        function = lambda x, w: jax.vjp(product, x, w)[1](product(x, w))  # noqa: E731
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
        return sorted(re.findall(r"stablehlo\.(?:dot_general|convert|pad|transpose).*?: (\(.*)$", lowered, re.M))

    got, expected = (text(partial(f, "btd,dhe->bthe")) for f in (products.dense_product, jnp.einsum))
    assert got == expected and any("bf16" in line for line in got) and not any("f32" in line for line in got)


WIDTHS = [("bfloat16", None), ("float16", None), ("float32", None), ("bfloat16", "float32")]
VECTORS = [slow_unless(width[0] == "bfloat16", *width, None, 1) for width in WIDTHS]
VECTORS += [slow(*width, None, 2) for width in WIDTHS]
VECTORS += [pytest.param(*WIDTHS[0], (8, 1), 8, marks=needs_8_devices)]
VECTORS += [pytest.param(*width, (8, 1), 8, marks=[needs_8_devices, pytest.mark.slow]) for width in WIDTHS[1:]]


@pytest.mark.parametrize("dtype, wide, sizes, batch", VECTORS)
def test_a_tpu_multiplies_two_vectors_at_least(dtype, wide, sizes, batch, monkeypatch):
    """One vector is multiplied with a vector of zeros beside it; on a mesh, if every device has one."""
    is_single = sizes is not None or batch == 1
    for equation in (*EQUATIONS, "...d,vd->...v"):
        x, weight = operands(equation.replace("...", "b"), 1, jnp.dtype(dtype))
        x = jnp.tile(x, (batch,) + (1,) * (x.ndim - 1))
        product = partial(products.dense_product, equation, dtype=wide and jnp.dtype(wide))
        with sharding.ambient(sizes and make_mesh(*sizes)), monkeypatch.context() as patch:
            traced = jax.jit(product).trace(x, weight)
            lowered = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("tpu", "cuda")}
            variant = lambda *args, tpu=None, default=None, **variants: (tpu or default)(*args)  # noqa: E731
            patch.setattr(jax.lax, "platform_dependent", variant)
            got = product(x, weight)
        counts = {name: count_factors(text) // (x.size // batch) for name, text in lowered.items()}
        assert counts["tpu"] >= 2 * batch if is_single else counts["tpu"] == counts["cuda"], equation
        assert counts["cuda"] == (max(batch, products.MIN_VECTORS) if wide else batch), equation
        np.testing.assert_allclose(np.asarray(got, np.float64), exact(equation, x, weight), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize("dtype, queries", [("bfloat16", 9), ("bfloat16", 8), ("float16", 9), ("float32", 9)])
def test_on_a_tpu_many_weights_of_attention_are_added_by_a_product(dtype, queries, in_one, on_tpu):
    weights = jax.device_put(np.random.default_rng(0).random((2, 3, queries, 40), np.float32))
    values = jax.device_put(draw(2, 3, 40, 8, dtype=jnp.dtype(dtype)))
    sums = partial(products.attention_sums, in_one=in_one)
    mixed, totals = sums(weights, values)
    rounded = np.asarray(weights.astype(values.dtype), np.float64)
    np.testing.assert_allclose(mixed, rounded @ np.asarray(values, np.float64), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(totals, rounded.sum(-1), rtol=1e-5 if queries > 8 else 2**-8)
    text = str(jax.make_jaxpr(sums)(weights, values))
    is_plain = queries == 8 or dtype == "float32"
    assert ("reduce_sum" in text) == is_plain and ("concatenate" in text) == (in_one and not is_plain)


@pytest.mark.parametrize("dtype, length, is_product", [("float16", 3, True), ("bfloat16", 1, False), ("float32", 3, False)])
def test_on_a_tpu_16_bit_heads_of_several_positions_rotate_by_a_product(dtype, length, is_product, on_tpu, monkeypatch):
    x, table = draw(2, length, 4, 16, dtype=jnp.dtype(dtype)), (draw(2, length, 1, 16), draw(2, length, 1, 16, seed=1))
    rotated = rotation.rotate(x, table)
    assert ("dot_general" in str(jax.make_jaxpr(rotation.rotate)(x, table))) == is_product
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **variants: default(*args))
    np.testing.assert_array_equal(np.asarray(rotated, np.float32), np.asarray(rotation.rotate(x, table), np.float32))


@pytest.mark.parametrize("size, shapes", [
    (100, [(2, 7)]), (200, [(1, 7)] * 2), (300, [(1, 3), (1, 4)] * 2), (600, [(1, 2), (1, 2), (1, 3)] * 2),
    (700, [(2, 2), (2, 2), (2, 3)]),
])  # fmt: skip
def test_on_a_tpu_what_is_large_is_computed_in_parts(size, shapes, on_tpu, monkeypatch):
    """Sequences are split before positions, unless there are too many parts; positions into three parts at most."""
    monkeypatch.setattr(products, "ON_CHIP_BYTES", 100)
    found, x = [], jnp.arange(14.0).reshape(2, 7)

    def double(part, sequences, positions):
        found.append(part.shape)
        return part + x[sequences, positions]

    np.testing.assert_array_equal(products.in_parts(double, x, size, most=3), x * 2)
    assert found == shapes


@needs_8_devices
def test_on_a_mesh_no_device_computes_the_parts_of_others(on_tpu, monkeypatch):
    monkeypatch.setattr(products, "ON_CHIP_BYTES", 100)
    with sharding.ambient(make_mesh(2, 1)):
        cuts = []
        products.in_parts(lambda x, *cut: cuts.append(cut) or x, jnp.zeros((2, 7)), 400, most=3)
    assert cuts == [(slice(0, 2), slice(0, 3)), (slice(0, 2), slice(3, 7))]


@pytest.mark.parametrize("sizes", [None, *(pytest.param(sizes, marks=needs_8_devices) for sizes in [(2, 2), (4, 1)])])
def test_on_a_tpu_positions_are_stored_sequence_by_sequence(sizes, on_tpu):
    slots, new = (tuple(draw(4, 2, 2, count, 8, seed=i + count) for i in (0, 1)) for count in (9, 3))
    start, expected = [0, 6, 3, 1], [x.copy() for x in slots]
    for stored, written in zip(expected, new, strict=True):
        for b, at in enumerate(start):
            stored[b, :, :, at : at + 3] = written[b]
    store = lambda *arrays: indexing.store(*arrays)  # noqa: E731 (its own function: what jit traces here is for TPUs)
    with sharding.ambient(sizes and make_mesh(*sizes)):
        program = jax.jit(store).lower(slots, new, jnp.asarray(start)).compile()
    for got, wanted in zip(program(slots, new, jnp.asarray(start)), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert " scatter(" not in program.as_text()


def count_factors(text: str) -> int:
    """Returns the number of numbers on the left of the only product of a lowered program."""
    (shape,) = re.findall(r"stablehlo.dot_general.*: \(tensor<([\dx]+)x\w+>", text)
    return math.prod(map(int, shape.split("x")))


def test_products_of_other_dtypes_are_plain_einsums():
    x, weight = operands("btd,df->btf", dtype=jnp.float16)
    np.testing.assert_array_equal(products.dense_product("btd,df->btf", x, weight), jnp.einsum("btd,df->btf", x, weight))


@pytest.mark.parametrize("queries", [1, products.FEW_QUERIES + 1])
def test_attention_scores(backend_form, queries):
    q, keys = draw(2, 3, queries, 8), draw(2, 3, 20, 8)
    np.testing.assert_allclose(
        jax.jit(products.attention_scores)(q, keys), exact("bkqe,bkxe->bkqx", q, keys), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("size", [5, 96, 102])  # halved never, three times, once
def test_largest(backend_form, size):
    x = draw(3, size)
    x[1] = -np.inf
    np.testing.assert_array_equal(jax.jit(products.largest)(x), np.max(x, axis=-1))


@needs_cpu
def test_lookup_in_a_loop_makes_no_wide_copy_of_the_table(backend_form, as_users_compile):
    table, ids = operands("btd,df->btf", length=4)[1], jnp.asarray([[3, 0], [15, 3]])
    table = jnp.tile(table, (64, 8))

    def looped(table, ids):
        start = jnp.zeros((2, 2, 192), table.dtype)
        return jax.lax.fori_loop(0, 3, lambda i, total: total + indexing.lookup(table, ids + i), start)

    compiled = jax.jit(looped).lower(table, ids).compile()
    makes_copy = backend_form == "plain" and jax.__version_info__ < (0, 12)
    assert (compiled.memory_analysis().temp_size_in_bytes > table.nbytes) == makes_copy
    got = jax.jit(jax.grad(lambda table, ids: jnp.sum(indexing.lookup(table, ids) * 2.0)))(table, ids)
    rows, at, expected = np.asarray(table), np.asarray(ids), np.zeros(table.shape, np.float32)
    np.testing.assert_array_equal(compiled(table, ids), rows[at] + rows[at + 1] + rows[at + 2])
    np.testing.assert_array_equal(jax.jit(indexing.lookup)(table, ids), rows[at])
    np.add.at(expected, at, 2.0)
    np.testing.assert_array_equal(got, expected)


def test_slots_are_repeated_for_their_contexts(backend_form):
    slots = jnp.arange(24.0).reshape(2, 4, 3)
    got = jax.jit(lambda slots: indexing.slot_repeater(4, 3)(slots))(slots)
    np.testing.assert_array_equal(got, slots[:, [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]])


@pytest.mark.parametrize("size, grouped", [(8 * 3 * 128, True), (23 * 128, False), (8 * 3 * 128 + 64, False)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_top_k_searches_long_vectors_by_groups(backend_form, size, grouped, dtype):
    rng, top_k = np.random.default_rng(size), jax.jit(selection.top_k, static_argnums=1)
    for num_values in (2, 40, 10**6):
        scores = rng.integers(0, num_values, (5, size)).astype(np.float32)
        scores[0, :-3], scores[1] = -np.inf, -np.inf
        scores = jnp.asarray(scores, dtype)
        values, ids = top_k(scores, 3)
        np.testing.assert_array_equal(ids, np.argsort(-np.asarray(scores, np.float32), axis=-1, kind="stable")[:, :3])
        np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(scores), np.asarray(ids), -1))
        assert values.dtype == dtype
    assert top_k.lower(scores, 3).as_text().count("chlo.top_k(") == 1 + grouped


@needs_cpu
@pytest.mark.parametrize("size", [8 * 3 * 128, 640])
def test_a_cpu_selects_from_bfloat16_scores_without_sorting_them(size):
    """XLA's CPU backend has a selection for float32 matrices only: it would sort these scores in full."""
    scores = np.random.default_rng(size).integers(0, 200, (5, size)).astype(jnp.bfloat16)
    text = jax.jit(selection.top_k, static_argnums=1).lower(scores, 3).compile().as_text()
    sorted_shapes = re.findall(r"= \(?\w+\[([\d,]+)\].* sort\(", text)
    assert set(sorted_shapes) <= {"5,3"}, "only the chosen groups may be put in order"
    for platform in ("cuda", "tpu"):
        text = jax.jit(selection.top_k, static_argnums=1).trace(scores, 3).lower(lowering_platforms=(platform,)).as_text()
        assert "f32" not in text


@pytest.mark.parametrize("size, grouped", [(8 * 128, True), (7 * 128, False), (8 * 128 + 64, False)])
def test_argmax_searches_groups_on_a_cpu_alone(backend_form, size, grouped):
    rng = np.random.default_rng(size)
    argmax = jax.jit(selection.argmax)
    for num_values in (2, 40, 10**6):
        scores = rng.integers(0, num_values, (2, 5, size)).astype(np.float32)
        scores[0, 0, :-3], scores[1, 0] = -np.inf, np.arange(size) // 130
        np.testing.assert_array_equal(argmax(scores), scores.argmax(-1))
        scores[0, 1], scores[1, 2] = -np.inf, np.nan
        assert np.argwhere(np.asarray(argmax(scores)) >= size).tolist() == [[0, 1], [1, 2]]
    for platform in ("cpu", "cuda", "tpu"):
        lowered = argmax.trace(scores).lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.gather" in lowered) == (grouped and platform == backend_form)


def test_stable_top_k_keeps_ties_in_order(backend_form):
    scores = np.random.default_rng(0).integers(0, 4, (6, 50)).astype(np.float32)
    scores[0] = -np.inf
    values, ids = jax.jit(selection.stable_top_k, static_argnums=1)(scores, 9)
    np.testing.assert_array_equal(ids, np.argsort(-scores, axis=-1, stable=True)[:, :9])
    np.testing.assert_array_equal(values, np.take_along_axis(scores, np.asarray(ids), -1))


def test_levels_are_a_scan_that_may_end_early(backend_form):
    def level(total, depth):
        return total + depth, total * 10

    def run(stop, goes_on=None):
        return jax.jit(lambda start: levels.over_depths(level, start, range(1, stop), goes_on))(jnp.int32(5))

    total, outputs = run(4)
    assert int(total) == 11 and outputs.tolist() == [50, 60, 80]
    assert run(1)[1].shape == (0,)
    total, outputs = run(4, goes_on=lambda total: total < 7)
    assert (int(total), outputs.tolist()) == ((8, [50, 60, 0]) if backend_form == "cpu" else (11, [50, 60, 80]))
