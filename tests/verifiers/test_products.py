"""bfloat16 on a CPU: the same numbers, in the one form that XLA's CPU backend runs at the machine's rate."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeflash_jax import products

SIZES = dict(b=1, q=3, r=5, t=2, d=16, h=4, e=8, k=2, f=24, j=32, v=40, x=2, z=32)
# Every equation that a product of the models has.
EQUATIONS = (
    "btd,dhe->bthe", "btd,dke->btke", "btz,zd->btd", "btd,df->btf", "btf,fd->btd", "btj,jd->btd", "bqd,dxf->bqxf",
    "brf,fd->brd", "brd,de->bre",
)  # fmt: skip


def operands(equation: str, rows: int = 2, dtype=jnp.bfloat16):
    sizes = SIZES | {axis: rows for axis in "tqr"}
    left, right = equation.split("->")[0].split(",")
    shapes = [tuple(sizes[axis] for axis in axes) for axes in (left, right)]
    return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)]


def exact(equation: str, *arrays) -> np.ndarray:
    return np.einsum(equation, *(np.asarray(x, np.float64) for x in arrays))


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_are_rounded_once(equation, rows):
    x, weight = operands(equation, rows)
    found = jax.jit(partial(products.product, equation))(x, weight)
    expected = exact(equation, x, weight)
    assert found.dtype == jnp.bfloat16 and found.shape == expected.shape
    step = 2.0**-8 * np.abs(expected) + 1e-6
    assert np.all(np.abs(np.asarray(found, np.float64) - expected) <= step)


@pytest.mark.parametrize("leading", [(3,), (2, 1)])
def test_a_vocabulary_table_is_summed_over_its_last_axis(leading):
    hidden = jax.random.normal(jax.random.key(0), (*leading, 16)).astype(jnp.bfloat16)
    table = jax.random.normal(jax.random.key(1), (40, 16)).astype(jnp.bfloat16)
    program = jax.jit(partial(products.product, "...d,vd->...v")).lower(hidden, table).compile()
    np.testing.assert_allclose(
        np.asarray(program(hidden, table), np.float64), exact("...d,vd->...v", hidden, table), rtol=2**-8, atol=1e-5
    )
    assert not re.search(r"bf16\[16,40\]", program.as_text()), "the table must not be transposed"


@pytest.mark.parametrize("equation", ["btd,dhe->bthe", "brf,fd->brd"])
@pytest.mark.parametrize("rows", [4, 5])
def test_gradients_are_those_of_the_einsum(equation, rows):
    x, weight = operands(equation, rows)
    out = products.product(equation, x, weight)
    ct = jax.random.normal(jax.random.key(7), out.shape).astype(jnp.bfloat16)
    found = jax.jit(lambda x, w, ct: jax.vjp(partial(products.product, equation), x, w)[1](ct))(x, weight, ct)
    wide = [a.astype(jnp.float32) for a in (x, weight)]
    expected = jax.vjp(partial(jnp.einsum, equation), *wide)[1](ct.astype(jnp.float32))
    for mine, other, like in zip(found, expected, (x, weight), strict=True):
        assert mine.dtype == jnp.bfloat16 and mine.shape == like.shape
        np.testing.assert_allclose(np.asarray(mine, np.float32), other, rtol=2**-7, atol=2**-6)


def dots(text: str) -> list[tuple[str, int]]:
    """Type of the result and its rows, of every product in a compiled program."""
    found = re.findall(r"= (\w+)\[([\d,]+)\]\S* dot\(", text)
    return [(kind, int(shape.split(",")[0])) for kind, shape in found]


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_on_a_cpu_products_accumulate_in_float32_over_four_rows_at_least(rows):
    x, weight = operands("btd,dhe->bthe", rows)

    def loss(x, weight):
        return jnp.sum(products.product("btd,dhe->bthe", x, weight).astype(jnp.float32) ** 2)

    forward = jax.jit(partial(products.product, "btd,dhe->bthe")).lower(x, weight).compile().as_text()
    assert dots(forward) == [("f32", max(rows, products.LEAST_ROWS))]
    backward = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight).compile().as_text()
    assert len(dots(backward)) == 3
    assert all(kind == "f32" and count >= products.LEAST_ROWS for kind, count in dots(backward))
    assert re.findall(r"lhs_contracting_dims={(\d)}", backward) == ["1"] * 3, "slow over the first axis"


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_on_accelerators_nothing_changes(platform):
    """What they are given is the einsum and its gradient, in bfloat16."""
    arrays = operands("btd,dhe->bthe")

    def text(product):
        function = lambda x, w: jax.vjp(product, x, w)[1](product(x, w))  # noqa: E731
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
        return sorted(re.findall(r"stablehlo\.(?:dot_general|convert|pad|transpose).*?: (\(.*)$", lowered, re.M))

    found, expected = (text(partial(f, "btd,dhe->bthe")) for f in (products.product, jnp.einsum))
    assert found == expected and any("bf16" in line for line in found) and not any("f32" in line for line in found)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_other_dtypes_are_plain_einsums(dtype):
    x, weight = operands("btd,df->btf", dtype=dtype)
    np.testing.assert_array_equal(products.product("btd,df->btf", x, weight), jnp.einsum("btd,df->btf", x, weight))


@pytest.mark.parametrize("equation", ["bdt,df->btf", "btd,fdg->btfg", "btd,df->bft", "bt,df->btdf"])
def test_products_of_another_form_are_refused(equation):
    with pytest.raises(ValueError, match="got the product"):
        products.form_of(equation)


def test_a_loop_on_a_cpu_gathers_rows_without_a_wide_copy_of_the_table():
    table, ids = operands("btd,df->btf", rows=4)[1], jnp.asarray([[3, 0], [15, 3]])
    table = jnp.tile(table, (64, 8))

    def looped(table, ids):
        start = jnp.zeros((2, 2, 192), table.dtype)
        return jax.lax.fori_loop(0, 3, lambda i, total: total + products.rows(table, ids + i), start)

    compiled = jax.jit(looped).lower(table, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes
    np.testing.assert_array_equal(compiled(table, ids), table[ids] + table[ids + 1] + table[ids + 2])
    np.testing.assert_array_equal(jax.jit(products.rows)(table, ids), table[ids])
    got = jax.grad(lambda table: jnp.sum(products.rows(table, ids) * 2.0))(table)
    np.testing.assert_array_equal(got, jax.grad(lambda table: jnp.sum(table[ids] * 2.0))(table))
