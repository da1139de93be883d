"""Products of activations with weights, and rows of tables, in the form that the backend runs fastest.

On accelerators an einsum in the model's dtype is that form. XLA's CPU backend runs a bfloat16 product at the machine's
rate only as a plain matrix product that accumulates in float32 and rounds afterwards, summed over the last axis of its
left matrix; as a product from bfloat16 to bfloat16, of a single row, or summed over the first axis (the gradient of a
weight), it takes two to five times as long. The result is mathematically the same: accelerators accumulate in float32 as
well.

Shape suffixes: r rows (all leading axes of the activations), i input axes flattened, o output axes flattened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import lax

LEAST_ROWS = 4  # XLA's CPU backend multiplies fewer bfloat16 rows at the speed of scalar code


def product(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """An einsum of activations with a weight, in their common dtype.

    Args:
      equation: such as "btd,dhe->bthe" or "...d,vd->...v". The activations' summed axes come last; the weight's come first
        or last; the result has the activations' other axes, then the weight's.
      x: activations.
      weight: of any float dtype.
    """
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return jnp.einsum(equation, x, weight)
    return _narrow(equation, x, weight)


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table, [..., d]."""

    def tied(table: jax.Array, ids: jax.Array) -> jax.Array:
        table, ids = lax.optimization_barrier((table, ids))
        return table[ids]

    if table.dtype != jnp.bfloat16:
        return table[ids]
    # XLA's CPU backend gathers float32. Not tied to the ids, it would convert the whole table ahead of a decoding loop.
    return lax.platform_dependent(table, ids, cpu=tied, default=lambda table, ids: table[ids])


@dataclass(frozen=True)
class Form:
    """How an einsum reads as a product of two matrices.

    Attributes:
      summed: how many axes are summed over.
      inputs_first: whether these are the weight's first axes, or its last.
    """

    summed: int
    inputs_first: bool

    def matrices(self, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The activations as [r, i], the weight as [i, o] or [o, i]."""
        size = math.prod(x.shape[x.ndim - self.summed :])
        return x.reshape(-1, size), weight.reshape(size, -1) if self.inputs_first else weight.reshape(-1, size)


@cache
def form_of(equation: str) -> Form:
    """Reads an equation of `product`.

    Raises:
      ValueError: axes in another order than `product` expects.
    """
    operands, result = equation.replace("...", "").split("->")
    x, weight = operands.split(",")
    summed = "".join(axis for axis in x if axis in weight)
    kept = weight.replace(summed, "")
    if not summed or not x.endswith(summed) or summed not in (weight[: len(summed)], weight[-len(summed) :]):
        raise ValueError(f"got the product {equation!r}, expected summed axes last in x, first or last in the weight")
    if result != x.removesuffix(summed) + kept:
        raise ValueError(f"got the product {equation!r}, expected the axes of x, then those of the weight, in the result")
    return Form(len(summed), weight.startswith(summed))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, weight, cpu=partial(_on_cpu, equation), default=partial(jnp.einsum, equation))


def _forward(equation: str, x: jax.Array, weight: jax.Array):
    return _narrow(equation, x, weight), (x, weight)


def _backward(equation: str, operands: tuple[jax.Array, jax.Array], grad: jax.Array):
    def by_einsum(x: jax.Array, weight: jax.Array, grad: jax.Array):
        return jax.vjp(partial(jnp.einsum, equation), x, weight)[1](grad)

    return lax.platform_dependent(*operands, grad, cpu=partial(_backward_on_cpu, equation), default=by_einsum)


_narrow.defvjp(_forward, _backward)


def _on_cpu(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    form = form_of(equation)
    x_ri, matrix = form.matrices(x, weight)
    y_ro = _by_rows("ri,io->ro" if form.inputs_first else "ri,oi->ro", x_ri, matrix)
    outputs = weight.shape[form.summed :] if form.inputs_first else weight.shape[: weight.ndim - form.summed]
    return y_ro.reshape(*x.shape[: x.ndim - form.summed], *outputs)


def _backward_on_cpu(equation: str, x: jax.Array, weight: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    form = form_of(equation)
    x_ri, matrix = form.matrices(x, weight)
    grad_ro = grad.reshape(x_ri.shape[0], -1)
    grad_x = _by_rows("ro,io->ri" if form.inputs_first else "ro,oi->ri", grad_ro, matrix)
    pair = (x_ri, grad_ro) if form.inputs_first else (grad_ro, x_ri)
    grad_weight = _summed_over_rows(*pair)
    return grad_x.reshape(x.shape), grad_weight.reshape(weight.shape)


def _by_rows(equation: str, rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """Rows times a matrix, LEAST_ROWS of them at least."""
    count = rows.shape[0]
    padded = jnp.pad(rows, ((0, max(0, LEAST_ROWS - count)), (0, 0)))
    return _accumulated(equation, padded, matrix)[:count]


def _summed_over_rows(left_ri: jax.Array, right_ro: jax.Array) -> jax.Array:
    """[i, o]. XLA would fold a plain transpose into the product, which then runs at the rate of float32."""
    even = ((0, left_ri.shape[0] % 2), (0, 0))
    left_ri, right_ro = jnp.pad(left_ri, even), jnp.pad(right_ro, even)
    inputs = left_ri.shape[1]
    left_ir = jnp.moveaxis(left_ri.reshape(-1, 2, inputs), -1, 0).reshape(inputs, -1)
    return _accumulated("ir,ro->io", left_ir, right_ro)


def _accumulated(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Summed in float32, rounded once."""
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32).astype(left.dtype)
