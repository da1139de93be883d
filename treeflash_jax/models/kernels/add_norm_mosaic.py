"""A product, the addition of a residual and the RMS norm of the sum, with a Pallas kernel for Hopper GPUs (Mosaic).

The plain variant is a product, a sum and `layers.rms_norm`. To fill a GPU, XLA splits a product of few rows along its inner
axis. It then adds up the shares together with the residual, and norms in one or two more operations. Here, the product
returns its shares, and one program per row adds and norms.

Shape suffixes: b batch, t positions, r rows (a sequence and a position each), z inner axis, s shares of it, d model.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from treeflash_jax.models.kernels.attention_mosaic import interpreter

SHARES = 8  # number of shares into which XLA also splits a product's inner axis
MOST_ROWS = 256  # with more rows, products fill the device without shares
VECTOR = 4  # numbers that a thread loads at once
TAKES = f"up to {MOST_ROWS} positions in all, arrays of one dtype, bfloat16 or float16, and one device"


def supports(residual_btd: jax.Array, x_btz: jax.Array, weight_dz: Any, scale_d: jax.Array, eps: float) -> bool:
    """Returns whether the kernel applies: one device, one narrow dtype, few rows, widths that threads and shares divide."""
    batch, positions, width = residual_btd.shape
    num_devices = math.prod(jax.sharding.get_abstract_mesh().shape.values())
    if num_devices > 1 or not isinstance(weight_dz, jax.Array):  # other weights are quantised
        return False
    dtype = residual_btd.dtype
    if dtype not in (jnp.float16, jnp.bfloat16) or not dtype == weight_dz.dtype == scale_d.dtype:
        return False
    is_divided = width % (128 * VECTOR) == 0 and weight_dz.shape[1] % (8 * SHARES) == 0
    return is_divided and batch * positions <= MOST_ROWS


def run(
    residual_btd: jax.Array, x_btz: jax.Array, weight_dz: jax.Array, scale_d: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Returns residual + weight x, and its RMS norm, [b, t, d] each."""
    batch, positions, width = residual_btd.shape
    rows = batch * positions
    x_rsz, weight_dsz = x_btz.reshape(rows, SHARES, -1), weight_dz.reshape(width, SHARES, -1)
    shares_srd = jnp.einsum("rsz,dsz->srd", x_rsz, weight_dsz, preferred_element_type=jnp.float32)
    out = jax.ShapeDtypeStruct((rows, width), residual_btd.dtype)
    kernel = plgpu.kernel(
        partial(_kernel, eps=eps),
        grid=(rows,),
        grid_names=("r",),
        out_type=[out, out],
        interpret=interpreter(),
        kernel_name="add_and_norm",
    )
    sum_rd, normed_rd = kernel(shares_srd, residual_btd.reshape(rows, width), scale_d)
    return sum_rd.reshape(residual_btd.shape), normed_rd.reshape(residual_btd.shape)


def _kernel(shares_ref, residual_ref, scale_ref, sum_ref, normed_ref, *, eps):
    """Rounds at the same places as the product, the addition and `layers.rms_norm`."""
    row, width, dtype = lax.axis_index("r"), scale_ref.shape[0], sum_ref.dtype

    def load(ref) -> jax.Array:
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=VECTOR)
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def rounded(x_d: jax.Array) -> jax.Array:
        return x_d.astype(dtype).astype(jnp.float32)

    product_d = rounded(sum(load(shares_ref.at[share, row]) for share in range(shares_ref.shape[0])))
    sum_d = rounded(load(residual_ref.at[row]) + product_d)
    sum_ref[row] = sum_d.astype(dtype)
    inverse = lax.rsqrt(jnp.sum(sum_d * sum_d) / width + eps)
    normed_ref[row] = (rounded(sum_d * inverse) * load(scale_ref)).astype(dtype)
