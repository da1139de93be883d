"""The sum over the experts of a mixture: a variant that reads every matrix once, and variants that read chosen ones only.

A one-token step reads few of the experts, and a tree reads most of them. `sum_experts` gathers the matrices of each token's
experts if that reads fewer bytes. For n tokens that choose k of x experts each, the first row that applies decides:

| device | when | function | ran there? |
|---|---|---|---|
| CPU | 2 n k <= x or SPARSE k <= x, and no weight has blocks | `gather_in_steps` | yes |
| CPU, GPU | 2 n k <= x | `gather_and_reduce` | on CPUs |
| CPU, GPU | otherwise | `all_experts` | on CPUs |
| TPU | 2 n k <= x | `one_by_one` | no |
| TPU | otherwise | `_two_at_least` | no |

All variants are equal up to rounding. Their arguments are:

- the weights, and the tokens [n, d]
- the weight of every assignment, in float32 at least; 0 for experts that the device does not hold
- the expert of every assignment; the number of the device's experts if the device does not hold it
- the gated activation (`experts.silu_gate`)

They return the sum before it is rounded, without the biases of "expert_down".

Shape suffixes: n tokens of a device, d model, x experts, f ffn of an expert, k experts of a token, a = n k assignments, i
inputs of a step, m either d or f, z = x f.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Params
from treeflash_jax.models.backend import block_scales, expert_products
from treeflash_jax.models.quantized_weight import Quantized

STEP_INPUTS = 8  # inputs of a matrix that a CPU adds up at a time
BLOCK = 256  # tokens computed at a time: with more, time goes into products, not into reading weights
SPARSE = 4  # CPUs always gather if there are this many times more experts than a token chooses

Gate = Callable[[jax.Array, jax.Array], jax.Array]  # gated activation of an expert: function of gate and up map
Variant = Callable[[Params, jax.Array, jax.Array, jax.Array, Gate], jax.Array]
GATE_UP = ("expert_gate", "expert_up")


def sum_experts(weights: Params, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array, gate: Gate) -> jax.Array:
    """Returns the sum, [n, d], computed by the variant that reads fewest bytes."""
    num_experts, (count, per_token) = weights["expert_gate"].shape[0], ids_nk.shape
    reads_few = 2 * count * per_token <= num_experts
    is_sparse = SPARSE * per_token <= num_experts
    has_blocks = any(_has_blocks(weight) for weight in weights.values())
    default = gather_and_reduce if reads_few else all_experts
    variants = {
        "cpu": gather_in_steps if (reads_few or is_sparse) and not has_blocks else default,
        "tpu": partial(_keep_layouts, one_by_one if reads_few else _two_at_least),
        "default": default,
    }
    by_blocks = {platform: partial(_by_blocks, variant, gate) for platform, variant in variants.items()}
    return lax.platform_dependent(weights, x_nd, weight_nk, ids_nk, **by_blocks)


def _keep_layouts(
    variant: Variant, weights: Params, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array, gate: Gate
) -> jax.Array:
    """Runs a variant on weights in their layout.

    Otherwise XLA for TPUs copies weights whose sizes are no multiples of 128 into another layout, for all layers before a
    loop.
    """
    x_nd, weights = lax.optimization_barrier((x_nd, weights))
    return variant(expert_products.keep_layout(weights), x_nd, weight_nk, ids_nk, gate)


def _by_blocks(
    variant: Variant, gate: Gate, weights: Params, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array
) -> jax.Array:
    count = x_nd.shape[0]
    if count <= BLOCK:
        return variant(weights, x_nd, weight_nk, ids_nk, gate)
    blocks = -(-count // BLOCK)
    padding = ((0, blocks * BLOCK - count), (0, 0))
    arrays = [jnp.pad(array, padding).reshape(blocks, BLOCK, -1) for array in (x_nd, weight_nk, ids_nk)]
    y = lax.map(lambda block: variant(weights, *block, gate), arrays)
    return y.reshape(blocks * BLOCK, -1)[:count]


def all_experts(weights: Params, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array, gate: Gate) -> jax.Array:
    """Runs every token through every expert. Tokens are repeated per expert, or else a GPU would copy the weights."""
    num_experts, count = weights["expert_gate"].shape[0], x_nd.shape[0]
    weight_xn = jnp.sum(jnp.where(ids_nk == jnp.arange(num_experts)[:, None, None], weight_nk, 0), axis=-1)
    x_xnd = jnp.broadcast_to(x_nd, (num_experts, *x_nd.shape))
    products = [_product("xnd,xdf->xnf", x_xnd, weights[name]) for name in GATE_UP]
    h_xnf = _gated(products, _biases(weights, lambda bias_xf: bias_xf[:, None]), gate)
    down, wide = weights["expert_down"], weight_xn.dtype
    if isinstance(down, Quantized):  # scales differ by expert, so they are applied before the sum over experts
        return jnp.sum(_product("xnf,xfd->xnd", h_xnf, down, narrow=False) * weight_xn[..., None], axis=0)
    h_xnf = (h_xnf.astype(wide) * weight_xn[..., None]).astype(x_nd.dtype)
    h_nz = jnp.swapaxes(h_xnf, 0, 1).reshape(count, -1)
    return _product("nz,zd->nd", h_nz, down.reshape(h_nz.shape[1], -1), narrow=False)


def gather_in_steps(weights: Params, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array, gate: Gate) -> jax.Array:
    """Adds up a few inputs of all chosen matrices at a time. A CPU compiles each step to a loop that copies nothing."""
    wide = weight_nk.dtype
    ids_a = jnp.minimum(ids_nk, weights["expert_gate"].shape[0] - 1).reshape(-1)

    def multiply_all(names: tuple[str, ...], x_am: jax.Array, narrow: bool = True) -> list[jax.Array]:
        parts = [_parts(weights[name]) for name in names]
        num_experts, inputs, outputs = parts[0][0].shape
        size = math.gcd(inputs, STEP_INPUTS)
        by_step = [values.reshape(num_experts, inputs // size, size, outputs) for values, _ in parts]

        def step(index: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            # Tied to the step: otherwise XLA converts bfloat16 values of all experts to float32 before the loop.
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

    x_ad = jnp.repeat(x_nd, ids_nk.shape[1], axis=0)
    h_af = _gated(multiply_all(GATE_UP, x_ad), _biases(weights, lambda bias_xf: bias_xf[ids_a]), gate)
    (y_ad,) = multiply_all(("expert_down",), h_af, narrow=False)
    return jnp.sum(y_ad.reshape(*ids_nk.shape, -1) * weight_nk[..., None], axis=1)


def gather_and_reduce(weights: Params, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array, gate: Gate) -> jax.Array:
    """Sums over gathered matrices instead of multiplying by them. A GPU compiles each to a kernel that stores no copy."""
    wide = weight_nk.dtype
    experts = {name: weight for name, weight in weights.items() if not name.startswith("router")}
    gathered = jax.tree.map(lambda weight: jnp.take(weight, ids_nk, axis=0, mode="clip"), experts)

    def multiply(name: str, x_nkm: jax.Array, narrow: bool = True) -> jax.Array:
        values, scale = _parts(gathered[name])
        if scale is not None and scale.ndim == values.ndim:
            values, scale = block_scales.widen(gathered[name], wide), None
        y_nkm = jnp.sum(x_nkm.astype(wide)[..., None] * values.astype(wide), axis=2)
        return _scaled(y_nkm, scale, x_nd.dtype if narrow else wide)

    h_nkf = _gated([multiply(name, x_nd[:, None]) for name in GATE_UP], _biases(gathered), gate)
    return jnp.sum(multiply("expert_down", h_nkf, narrow=False) * weight_nk[..., None], axis=1)


def one_by_one(weights: Params, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array, gate: Gate) -> jax.Array:
    """Runs the chosen experts one after the other. A TPU multiplies by a slice of the weights without copying it.

    With `gather_and_reduce`, a TPU would store the gathered matrices in float32.
    """
    experts = {name: weight for name, weight in weights.items() if not name.startswith("router")}

    def run(assignment: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x_1d, weight_11, id_11 = assignment
        expert = jax.tree.map(lambda weight: lax.dynamic_slice_in_dim(weight, id_11[0, 0], 1), experts)
        return _two_at_least(expert, x_1d, weight_11, jnp.zeros_like(id_11), gate)[0]

    x_ad = jnp.repeat(x_nd, ids_nk.shape[1], axis=0)
    y_ad = lax.map(run, (x_ad[:, None], weight_nk.reshape(-1, 1, 1), ids_nk.reshape(-1, 1, 1)))
    return jnp.sum(y_ad.reshape(*ids_nk.shape, -1), axis=1)


def _two_at_least(weights: Params, x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array, gate: Gate) -> jax.Array:
    """Runs `all_experts`. To a single token, which TPUs multiply slowly (`products`), it adds a second token of zeros."""
    count = x_nd.shape[0]
    tokens = (jnp.pad(x, ((0, max(0, 2 - count)), (0, 0))) for x in (x_nd, weight_nk, ids_nk))
    return all_experts(weights, *tokens, gate)[:count]


def _biases(weights: Params, pick: Callable[[jax.Array], jax.Array] = lambda bias: bias) -> list[jax.Array]:
    """Returns the biases of GATE_UP, in the layout of `pick`; [] in models without biases."""
    return [pick(weights[f"{name}_bias"]) for name in GATE_UP if f"{name}_bias" in weights]


def _gated(products: list[jax.Array], biases: list[jax.Array], gate: Gate) -> jax.Array:
    maps = [y + bias.astype(y.dtype) for y, bias in zip(products, biases, strict=True)] if biases else products
    return gate(*maps)


def _product(equation: str, x: jax.Array, weight: jax.Array | Quantized, narrow: bool = True) -> jax.Array:
    """Computes an einsum in float32 at least; `narrow` rounds it to the dtype of x. Scales have the weight's outer axes."""
    if _has_blocks(weight):
        y = expert_products.expert_product(x, weight)
        return y.astype(x.dtype) if narrow else y
    values, scale = _parts(weight)
    wide = at_least_float32(x.dtype)
    y = jnp.einsum(equation, x, values.astype(x.dtype), preferred_element_type=wide)
    if scale is not None and y.ndim == 3:
        scale = scale[:, None]
    return _scaled(y, scale, x.dtype if narrow else y.dtype)


def _has_blocks(weight: jax.Array | Quantized) -> bool:
    return isinstance(weight, Quantized) and weight.block is not None


def _parts(weight: jax.Array | Quantized) -> tuple[jax.Array, jax.Array | None]:
    return (weight.values, weight.scale) if isinstance(weight, Quantized) else (weight, None)


def _scaled(y: jax.Array, scale: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    return (y if scale is None else y * scale.astype(y.dtype)).astype(dtype)
