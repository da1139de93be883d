"""Forms of the sum over the experts of a mixture, equal but for rounding.

The number of tokens, which is static, decides which one is compiled (`choose_form`):

- `gather` reads the matrices of each token's experts, one assignment after the other, without copying any. A GPU reduces
  over gathered matrices in one kernel, TPUs multiply by slices, CPUs add up a few inputs of all chosen matrices at a time.
- `dense` runs all tokens through all experts and adds the results by weight; every matrix is read once. CPUs gather
  instead if a token chooses few of the experts (SPARSE).
- `sort_by_expert` orders the assignments by expert and runs ragged products. Only TPUs have a native one: XLA pads it to E
  times the work on GPUs and CPUs, where `dense` is compiled instead, BLOCK tokens at a time.

Every form takes the weights, the tokens [n, d], the weight of every assignment in float32 at least (0 for experts that the
device does not hold) and its expert (then the number of experts held), and returns the sum before it is rounded.

Shape suffixes: n tokens of a device, d model, x experts, f ffn of an expert, k experts of a token, a = n k assignments, i
inputs of one step, m either of d and f, z = x f.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.models.quantized import Quantized

MANY_TOKENS = 64  # above it most experts serve several tokens, and sorting saves more work than it costs
STEP_INPUTS = 8  # inputs of a matrix that a CPU adds up at a time
BLOCK = 256  # tokens that "dense" runs at a time: beyond it the products, not the weights, take the time
SPARSE = 4  # CPUs gather for any number of tokens if there are this many times the experts of a token

Weights = dict[str, Any]
Form = Callable[[Weights, jax.Array, jax.Array, jax.Array], jax.Array]


def choose_form(num_tokens: int, per_token: int, held: int) -> Form:
    """Returns the form that reads fewest bytes or, for many tokens, does least work."""
    if 2 * num_tokens * per_token <= held:
        return gather
    return dense if num_tokens <= MANY_TOKENS else sort_by_expert


def gather(weights: Weights, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    held = weights["expert_gate"].shape[0]
    arrays = weights, x_nd, weight_nk, jnp.minimum(ids_nk, held - 1)
    return lax.platform_dependent(*arrays, cpu=gather_in_steps, tpu=gather_slices, default=gather_and_reduce)


def gather_slices(weights: Weights, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """Multiplies one assignment at a time by slices of the weights: TPUs read such slices in place."""
    per_token = ids_nk.shape[1]

    def step(a: jax.Array, y_nd: jax.Array) -> jax.Array:
        token = a // per_token
        expert = ids_nk.reshape(-1)[a]
        matrices = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, 0, keepdims=False), _experts(weights))
        x_1d = lax.dynamic_slice_in_dim(x_nd, token, 1)
        h_1f = _gated(*(_product("nd,df->nf", x_1d, matrices[name]) for name in ("expert_gate", "expert_up")))
        more_1d = weight_nk.reshape(-1)[a] * _product("nf,fd->nd", h_1f, matrices["expert_down"], narrow=False)
        return lax.dynamic_update_slice_in_dim(y_nd, lax.dynamic_slice_in_dim(y_nd, token, 1) + more_1d, token, 0)

    start = jnp.zeros(x_nd.shape, weight_nk.dtype)
    return lax.fori_loop(0, ids_nk.size, step, start, unroll=per_token)


def gather_in_steps(weights: Weights, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """Adds up a few inputs of all chosen matrices at a time: a CPU compiles each step to one loop that copies nothing.

    On two cores, one to four tokens take 0.8 to 1.3 times as long as plain products with as many float32 weights;
    multiplying by slices takes 2 to 3.5 times as long.
    """
    wide, ids_a = weight_nk.dtype, ids_nk.reshape(-1)

    def products(names: tuple[str, ...], x_am: jax.Array, narrow: bool = True) -> list[jax.Array]:
        parts = [_parts(weights[name]) for name in names]
        held, inputs, outputs = parts[0][0].shape
        size = math.gcd(inputs, STEP_INPUTS)
        by_step = [values.reshape(held, inputs // size, size, outputs) for values, _ in parts]

        def step(index: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            # Tied to the step: XLA would convert bfloat16 values of all experts to float32 ahead of the loop.
            index, *matrices = lax.optimization_barrier((index, *by_step))
            x_ai = lax.dynamic_slice_in_dim(x_am, index * size, size, axis=1).astype(wide)
            for at, matrix in enumerate(matrices):
                values_aim = matrix.at[ids_a, index].get(mode="promise_in_bounds").astype(wide)
                sums[at] += sum(x_ai[:, i, None] * values_aim[:, i] for i in range(size))
            return sums

        sums = lax.fori_loop(0, inputs // size, step, [jnp.zeros((ids_a.size, outputs), wide) for _ in parts])
        dtype = x_nd.dtype if narrow else wide
        scales = [None if scale is None else scale[ids_a] for _, scale in parts]
        return [_scaled(y_am, scale, dtype) for y_am, scale in zip(sums, scales, strict=True)]

    h_af = _gated(*products(("expert_gate", "expert_up"), jnp.repeat(x_nd, ids_nk.shape[1], axis=0)))
    (y_ad,) = products(("expert_down",), h_af, narrow=False)
    return jnp.sum(y_ad.reshape(*ids_nk.shape, -1) * weight_nk[..., None], axis=1)


def gather_and_reduce(weights: Weights, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """Sums over gathered matrices instead of multiplying by them: a GPU compiles each to one kernel that stores no copy."""
    wide = weight_nk.dtype
    taken = jax.tree.map(lambda weight: jnp.take(weight, ids_nk, axis=0, mode="clip"), _experts(weights))

    def product(name: str, x_nkm: jax.Array, narrow: bool = True) -> jax.Array:
        values, scale = _parts(taken[name])
        y_nkm = jnp.sum(x_nkm.astype(wide)[..., None] * values.astype(wide), axis=2)
        return _scaled(y_nkm, scale, x_nd.dtype if narrow else wide)

    h_nkf = _gated(*(product(name, x_nd[:, None]) for name in ("expert_gate", "expert_up")))
    return jnp.sum(product("expert_down", h_nkf, narrow=False) * weight_nk[..., None], axis=1)


def dense(weights: Weights, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    arrays, plain = (weights, x_nd, weight_nk, ids_nk), partial(_by_blocks, all_experts)
    if SPARSE * ids_nk.shape[1] > weights["expert_gate"].shape[0]:
        return plain(*arrays)
    return lax.platform_dependent(*arrays, cpu=partial(_by_blocks, gather), default=plain)


def _by_blocks(form: Form, weights: Weights, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    count = x_nd.shape[0]
    if count <= BLOCK:
        return form(weights, x_nd, weight_nk, ids_nk)
    blocks = -(-count // BLOCK)
    padding = ((0, blocks * BLOCK - count), (0, 0))
    arrays = [jnp.pad(array, padding).reshape(blocks, BLOCK, -1) for array in (x_nd, weight_nk, ids_nk)]
    y = lax.map(lambda block: form(weights, *block), arrays)
    return y.reshape(blocks * BLOCK, -1)[:count]


def all_experts(weights: Weights, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """Runs every token through every expert. Tokens are repeated per expert, or else a GPU would copy the weights."""
    held, count = weights["expert_gate"].shape[0], x_nd.shape[0]
    weight_xn = jnp.sum(jnp.where(ids_nk == jnp.arange(held)[:, None, None], weight_nk, 0), axis=-1)
    x_xnd = jnp.broadcast_to(x_nd, (held, *x_nd.shape))
    h_xnf = _gated(*(_product("xnd,xdf->xnf", x_xnd, weights[name]) for name in ("expert_gate", "expert_up")))
    down, wide = weights["expert_down"], weight_xn.dtype
    if isinstance(down, Quantized):  # its scales differ by expert, so the sum over the experts comes after them
        return jnp.sum(_product("xnf,xfd->xnd", h_xnf, down, narrow=False) * weight_xn[..., None], axis=0)
    h_xnf = (h_xnf.astype(wide) * weight_xn[..., None]).astype(x_nd.dtype)
    h_nz = jnp.swapaxes(h_xnf, 0, 1).reshape(count, -1)
    return _product("nz,zd->nd", h_nz, down.reshape(h_nz.shape[1], -1), narrow=False)


def sort_by_expert(weights: Weights, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    return lax.platform_dependent(weights, x_nd, weight_nk, ids_nk, tpu=ragged, default=dense)


def ragged(weights: Weights, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """Runs assignments in order of their experts through ragged products. Those of other devices' experts come last."""
    held, (count, per_token) = weights["expert_gate"].shape[0], ids_nk.shape
    ids_a = ids_nk.reshape(-1)
    order_a = jnp.argsort(ids_a)
    sizes_x = jnp.sum(ids_a[:, None] == jnp.arange(held), axis=0, dtype=jnp.int32)
    expert_a = jnp.minimum(ids_a[order_a], held - 1)

    def product(x_am: jax.Array, weight: jax.Array | Quantized, narrow: bool = True) -> jax.Array:
        values, scale = _parts(weight)
        wide = weight_nk.dtype
        y_am = lax.ragged_dot(x_am, values.astype(x_am.dtype), sizes_x, preferred_element_type=wide)
        return _scaled(y_am, None if scale is None else scale[expert_a], x_am.dtype if narrow else wide)

    x_ad = x_nd[order_a // per_token]
    h_af = _gated(*(product(x_ad, weights[name]) for name in ("expert_gate", "expert_up")))
    y_ad = product(h_af, weights["expert_down"], narrow=False)
    weight_a = weight_nk.reshape(-1)[order_a]
    y_ad = jnp.where(weight_a[:, None] > 0, y_ad * weight_a[:, None], 0)  # values outside every group are undefined
    return jnp.sum(y_ad[jnp.argsort(order_a)].reshape(count, per_token, -1), axis=1)


def _experts(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if name != "router"}


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _product(equation: str, x: jax.Array, weight: jax.Array | Quantized, narrow: bool = True) -> jax.Array:
    """An einsum summed in float32 at least; `narrow` rounds it to the dtype of x. A scale has the weight's outer axes."""
    values, scale = _parts(weight)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.einsum(equation, x, values.astype(x.dtype), preferred_element_type=wide)
    if scale is not None and y.ndim == 3:
        scale = scale[:, None]
    return _scaled(y, scale, x.dtype if narrow else y.dtype)


def _parts(weight: jax.Array | Quantized) -> tuple[jax.Array, jax.Array | None]:
    return (weight.values, weight.scale) if isinstance(weight, Quantized) else (weight, None)


def _scaled(y: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    return (y if scale is None else y * scale.astype(y.dtype)).astype(dtype)
