"""Matrix products in the variant that the backend runs fastest.

The plain variant is an einsum in the operands' dtype. The other variants avoid slow paths of backends (jax 0.10):

- XLA's CPU backend runs a bfloat16 product at the machine's rate only as a matrix product that sums over the last axis of
  its left matrix, accumulates in float32 and is rounded afterwards. It is slow from bfloat16 to bfloat16, with a single
  vector, and if it sums over the first axis (the gradient of a weight).
- In float32, XLA's CPU backend reads the left matrix in place and copies the right matrix into another layout. A few
  vectors are therefore best multiplied with the weight on the left.
- XLA for TPUs multiplies one vector on the vector unit, but two on the matrix unit.

All variants accumulate in float32, as accelerators do. Their results differ only in the order of sums.

Shape suffixes: n activation vectors (all leading axes flattened), i input axes flattened, o output axes flattened. For
attention: b batch, k key/value heads, q queries of one key/value head, x keys, e head dim.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32

MIN_VECTORS = 4  # XLA's CPU backend multiplies fewer bfloat16 vectors at the speed of scalar code
MOST_VECTORS_RIGHT = 48  # with more float32 vectors, transposing the result takes longer than copying the weight
SHORTEST_HALVED = 16  # axes up to this length are not halved for their maximum
ON_CHIP_BYTES = 2**26  # most bytes of attention logits that a TPU with 128 MiB on chip computes at a time
MOST_PARTS = 6  # most parts into which sequences are split: trees within a v6e's ridge need 5 at 4,096 positions
FEW_QUERIES = 8  # per key/value head: for up to these, a CPU multiplies with keys on the left, and a TPU adds their weights


def dense_product(equation: str, x: jax.Array, weight: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns an einsum of activations with a weight.

    Args:
      equation: for example "btd,dhe->bthe" or "...d,vd->...v". The activations' summed axes come last; the weight's come
        first or last. The result has the activations' other axes, then the weight's.
      weight: array of any float dtype.
      dtype: dtype of the result; None: the operands' common dtype. If it is wider than the dtype of `x`, sums are not
        rounded, and all backends use the variant for CPUs.
    """
    if dtype not in (None, x.dtype):
        return _by_platform(equation, x, weight, default=partial(_on_cpu, dtype=dtype))
    if x.dtype == weight.dtype == jnp.bfloat16:
        return _narrow(equation, x, weight)
    if x.dtype == weight.dtype == jnp.float32 and sharding.current() is None:  # on a mesh, flattening gathers axes
        return _by_platform(equation, x, weight, cpu=_wide_on_cpu, default=jnp.einsum)
    return _by_platform(equation, x, weight, default=jnp.einsum)


def is_one_vector(x: jax.Array, num_axes: int) -> bool:
    """Returns whether each device has a single vector; the first `num_axes` axes of `x` are the axes of vectors."""
    batch, *lengths = x.shape[:num_axes] or (1,)
    return sharding.per_shard(batch, sharding.current()) * math.prod(lengths) == 1


def attention_scores(q_bkqe: jax.Array, keys_bkxe: jax.Array) -> jax.Array:
    """Returns products of queries with keys, [b, k, q, x], in float32 at least."""
    wide = at_least_float32(q_bkqe.dtype)

    def keys_first(q_bkqe: jax.Array, keys_bkxe: jax.Array) -> jax.Array:
        """Puts keys on the left: on the right, a CPU would copy all keys. The barrier keeps XLA from swapping the sides."""
        scores_bkxq = jnp.einsum("bkxe,bkqe->bkxq", keys_bkxe, q_bkqe, preferred_element_type=wide)
        return jnp.swapaxes(lax.optimization_barrier(scores_bkxq), 2, 3)

    plain = partial(jnp.einsum, "bkqe,bkxe->bkqx", preferred_element_type=wide)
    if q_bkqe.shape[2] > FEW_QUERIES or q_bkqe.dtype == jnp.bfloat16:
        return plain(q_bkqe, keys_bkxe)
    return lax.platform_dependent(q_bkqe, keys_bkxe, cpu=keys_first, default=plain)


def attention_sums(weights_bkqx: jax.Array, values_bkxe: jax.Array, *, in_one: bool = True) -> tuple[jax.Array, jax.Array]:
    """Returns sums of weighted values [b, k, q, e], and of weights [b, k, q], in the dtype of the weights.

    A TPU's vector unit takes longer to add weights along an axis than its matrix unit to multiply them with the values. On
    TPUs, weights are therefore multiplied with ones, which gives the sums of the rounded weights.

    Args:
      in_one: whether a TPU appends the ones to the values. If these are a slice, XLA would copy it to append anything.
    """
    wide = weights_bkqx.dtype

    def mix(weights_bkqx: jax.Array, values_bkxe: jax.Array) -> jax.Array:
        rounded_bkqx = weights_bkqx.astype(values_bkxe.dtype)
        return jnp.einsum("bkqx,bkxe->bkqe", rounded_bkqx, values_bkxe, preferred_element_type=wide)

    def plain(weights_bkqx: jax.Array, values_bkxe: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mix(weights_bkqx, values_bkxe), jnp.sum(weights_bkqx, axis=-1)

    def by_products(weights_bkqx: jax.Array, values_bkxe: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not in_one:
            return mix(weights_bkqx, values_bkxe), mix(weights_bkqx, jnp.ones_like(values_bkxe))[..., -1]
        mixed_bkqe = mix(weights_bkqx, jnp.concatenate([values_bkxe, jnp.ones_like(values_bkxe)], axis=-1))
        return mixed_bkqe[..., : values_bkxe.shape[-1]], mixed_bkqe[..., -1]

    if weights_bkqx.shape[2] <= FEW_QUERIES or values_bkxe.dtype.itemsize > 2:
        return plain(weights_bkqx, values_bkxe)
    return lax.platform_dependent(weights_bkqx, values_bkxe, tpu=by_products, default=plain)


def in_parts(run: Callable[..., jax.Array], x_bt: jax.Array, size: int, most: int) -> jax.Array:
    """Returns `run(x_bt, all, all)`. If its arrays do not fit on a TPU's chip, it runs on one part at a time.

    Up to MOST_PARTS, sequences are split first, and positions only if the arrays of one sequence do not fit.

    Args:
      run: function of a part and its slices of sequences and positions, each of which it treats separately.
      size: bytes of its intermediate arrays, on all devices.
      most: largest number of parts of the positions.
    """
    mesh, (batch, length) = sharding.current(), x_bt.shape[:2]
    parts = max(1, -(-size // (ON_CHIP_BYTES * (1 if mesh is None else mesh.size))))
    is_sharded = sharding.per_shard(batch, mesh) < batch  # a slice of the batch would lie on some of the devices
    batch_parts = 1 if is_sharded or parts > MOST_PARTS else min(batch, parts)
    length_parts = max(1, min(most, length, -(-parts // batch_parts)))
    cuts = [(b, t) for b in _slices(batch, batch_parts) for t in _slices(length, length_parts)]

    def by_parts(x_bt: jax.Array) -> jax.Array:
        results: list[jax.Array] = []
        for cut in cuts:
            part_bt = x_bt[cut]
            if results:  # otherwise XLA would compute all parts at the same time
                part_bt, results[-1] = lax.optimization_barrier((part_bt, results[-1]))
            results.append(run(part_bt, *cut))
        rows = [results[i : i + length_parts] for i in range(0, len(cuts), length_parts)]
        return jnp.concatenate([jnp.concatenate(row, axis=1) for row in rows], axis=0)

    whole = partial(run, sequences=slice(None), positions=slice(None))
    return whole(x_bt) if len(cuts) == 1 else lax.platform_dependent(x_bt, tpu=by_parts, default=whole)


def _slices(length: int, parts: int) -> list[slice]:
    return [slice(length * i // parts, length * (i + 1) // parts) for i in range(parts)]


def largest(x: jax.Array) -> jax.Array:
    """Returns the maximum over the last axis.

    XLA's CPU backend (jax 0.10) compares one number at a time in a maximum over the last axis. In the maximum of two
    arrays, such as the two halves, it compares many numbers at a time.
    """

    def by_halves(x: jax.Array) -> jax.Array:
        while x.shape[-1] > SHORTEST_HALVED and x.shape[-1] % 2 == 0:
            x = jnp.maximum(*jnp.split(x, 2, axis=-1))
        return jnp.max(x, axis=-1)

    return lax.platform_dependent(x, cpu=by_halves, default=partial(jnp.max, axis=-1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _by_platform(equation, x, weight, cpu=_on_cpu, default=jnp.einsum)


def _forward(equation: str, x: jax.Array, weight: jax.Array):
    return _narrow(equation, x, weight), (x, weight)


def _backward(equation: str, operands: tuple[jax.Array, jax.Array], grad: jax.Array):
    def plain(x: jax.Array, weight: jax.Array, grad: jax.Array):
        return jax.vjp(partial(jnp.einsum, equation), x, weight)[1](grad)

    return lax.platform_dependent(*operands, grad, cpu=partial(_backward_on_cpu, equation), default=plain)


_narrow.defvjp(_forward, _backward)


def _by_platform(equation: str, x: jax.Array, weight: jax.Array, **variants: Callable[..., jax.Array]) -> jax.Array:
    """Runs the variant for the platform. If each device of TPUs has one vector, runs the default with a second vector."""
    if is_one_vector(x, x.ndim - len(_summed_axes(equation))):
        variants["tpu"] = partial(_with_second_vector, variants["default"])
    if len(variants) == 1:
        return variants["default"](equation, x, weight)
    return lax.platform_dependent(x, weight, **{name: partial(variant, equation) for name, variant in variants.items()})


def _with_second_vector(variant: Callable[..., jax.Array], equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Appends a vector of zeros along a new axis, and drops its result. A mesh may have sharded all other axes."""
    inputs, weights, outputs = equation.replace("->", ",").split(",")
    summed = _summed_axes(equation)
    kept, axis = inputs.removesuffix(summed), x.ndim - len(summed)
    padding = [(0, int(i == axis)) for i in range(x.ndim + 1)]
    both = jnp.pad(jnp.expand_dims(x, axis), padding)
    y = variant(f"{kept}Z{summed},{weights}->{kept}Z{outputs.removeprefix(kept)}", both, weight)
    return lax.index_in_dim(y, 0, axis, keepdims=False)


def _on_cpu(equation: str, x: jax.Array, weight: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    x_ni, matrix, inputs_first, shape = _as_matrices(equation, x, weight)
    return _padded_product("ni,io->no" if inputs_first else "ni,oi->no", x_ni, matrix, dtype).reshape(shape)


def _wide_on_cpu(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies float32 matrices. A weight summed over its last axis is put on the left: on the right, it is copied."""
    x_ni, matrix, inputs_first, shape = _as_matrices(equation, x, weight)
    if inputs_first or not 1 < x_ni.shape[0] <= MOST_VECTORS_RIGHT:
        return jnp.einsum("ni,io->no" if inputs_first else "ni,oi->no", x_ni, matrix).reshape(shape)
    y_on = lax.optimization_barrier(jnp.einsum("oi,in->on", matrix, x_ni.T))  # keeps XLA from swapping the sides
    return y_on.T.reshape(shape)


def _backward_on_cpu(equation: str, x: jax.Array, weight: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ni, matrix, inputs_first, _ = _as_matrices(equation, x, weight)
    grad_no = grad.reshape(x_ni.shape[0], -1)
    grad_x = _padded_product("no,io->ni" if inputs_first else "no,oi->ni", grad_no, matrix)
    left, right = (x_ni, grad_no) if inputs_first else (grad_no, x_ni)
    grad_weight = _sum_over_vectors(left, right)
    return grad_x.reshape(x.shape), grad_weight.reshape(weight.shape)


def _as_matrices(equation: str, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array, bool, tuple[int, ...]]:
    """Returns [n, i], [i, o] or [o, i], whether the weight's first axes are summed over, and the shape of the product."""
    summed = _summed_axes(equation)
    weight_axes = equation.split("->")[0].split(",")[1]
    kept = x.ndim - len(summed)
    size = math.prod(x.shape[kept:])
    inputs_first = weight_axes.startswith(summed)
    outputs = weight.shape[len(summed) :] if inputs_first else weight.shape[: weight.ndim - len(summed)]
    matrix = weight.reshape((size, -1) if inputs_first else (-1, size))
    return x.reshape(-1, size), matrix, inputs_first, (*x.shape[:kept], *outputs)


def _summed_axes(equation: str) -> str:
    x_axes, weight_axes = equation.replace("...", "").split("->")[0].split(",")
    return "".join(axis for axis in x_axes if axis in weight_axes)


def _padded_product(equation: str, x_ni: jax.Array, matrix: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    count = x_ni.shape[0]
    padded = jnp.pad(x_ni, ((0, max(0, MIN_VECTORS - count)), (0, 0)))
    return _accumulated(equation, padded, matrix, dtype)[:count]


def _sum_over_vectors(left_ni: jax.Array, right_no: jax.Array) -> jax.Array:
    """Returns left^T right, [i, o]. XLA would fold a plain transpose into the product, and run it at float32's rate."""
    even = ((0, left_ni.shape[0] % 2), (0, 0))
    left_ni, right_no = jnp.pad(left_ni, even), jnp.pad(right_no, even)
    inputs = left_ni.shape[1]
    left_in = jnp.moveaxis(left_ni.reshape(-1, 2, inputs), -1, 0).reshape(inputs, -1)
    return _accumulated("in,no->io", left_in, right_no)


def _accumulated(equation: str, left: jax.Array, right: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Sums in float32, and rounds once, to the dtype of the operands or to `dtype`."""
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32).astype(dtype or left.dtype)
