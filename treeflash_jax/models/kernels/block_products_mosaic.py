"""Products of 2 to 128 vectors with FP8 weights that have a scale per block, in a Pallas kernel for Hopper GPUs (Mosaic).

The plain variants are in `block_products`. They write the vectors once per block of outputs, or parts of the weight. The
kernel converts values as it reads them, and scales the sums over each block of inputs, so it writes only sums. It was
compiled for an H200.

There is one program per tile of outputs and share of the input blocks, with as many shares as fill the device. XLA adds up
the shares.

Shape suffixes: n vectors, i inputs, o outputs, b outputs of a block, `...` blocks of outputs, j all of these, k blocks of
inputs, s shares, t outputs of a tile.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from treeflash_jax.models.kernels.attention_mosaic import PROGRAMS, TILE, interpreter, load_wide, multiply_tiles

INPUTS = 128  # inputs of a block
MOST_VECTORS = 128
STAGES = 4  # blocks of values and vectors in shared memory
TAKES = (
    f"2 to {MOST_VECTORS} tokens in bfloat16 or float16, blocks of 64 or more outputs and {INPUTS} inputs, and one device"
)


def supports(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> bool:
    """Returns whether the kernel applies: one device, few vectors in a narrow dtype, blocks as in published FP8 files."""
    num_devices = math.prod(jax.sharding.get_abstract_mesh().shape.values())
    is_few = 1 < x_ni.shape[0] <= MOST_VECTORS and x_ni.dtype in (jnp.float16, jnp.bfloat16)
    is_divided = values.shape[-2] % TILE == 0 and values.shape[-1] == scale.shape[-1] * INPUTS
    return num_devices == 1 and is_few and is_divided


def run(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns vectors times a weight, [..., n, b], in float32.

    Args:
      values: [..., b, i].
      scale: [..., k].
    """
    values_oi, scale_jk = values.reshape(-1, values.shape[-1]), scale.reshape(-1, scale.shape[-1])
    outputs, blocks, count = values_oi.shape[0], scale_jk.shape[1], x_ni.shape[0]
    tiles = outputs // TILE
    divisors = [shares for shares in range(1, blocks + 1) if blocks % shares == 0]
    shares = next((shares for shares in divisors if tiles * shares >= PROGRAMS), blocks)
    x_ni = jnp.pad(x_ni, ((0, -count % 8), (0, 0)))  # the hardware multiplies eight vectors at a time
    kernel = plgpu.kernel(
        _kernel,
        grid=(tiles, shares),
        grid_names=("t", "s"),
        out_type=jax.ShapeDtypeStruct((shares, outputs, x_ni.shape[0]), jnp.float32),
        scratch_types=[plgpu.SMEM((TILE, INPUTS), x_ni.dtype)],
        interpret=interpreter(),
        kernel_name="fp8_product",
    )
    y_on = jnp.sum(kernel(x_ni, values_oi, scale_jk), axis=0)[:, :count]
    return jnp.swapaxes(y_on.reshape(*values.shape[:-1], count), -1, -2)


def _kernel(x_ref, values_ref, scale_ref, y_ref, wide_smem):
    """Multiplies all vectors by a tile of outputs, over a share of the inputs."""
    tile, share = lax.axis_index("t"), lax.axis_index("s")
    size = values_ref.shape[0] // scale_ref.shape[0]
    steps = scale_ref.shape[1] // y_ref.shape[0]

    def step(indices, x_smem, values_smem, sums_tn):
        wide_smem[...] = load_wide(values_smem, plgpu.Layout.WGMMA).astype(wide_smem.dtype)
        plgpu.commit_smem()
        scale = scale_ref[lax.div(tile * TILE, np.int32(size)), share * steps + indices[0]]
        return sums_tn + multiply_tiles(wide_smem, x_smem.transpose((1, 0))) * scale.astype(jnp.float32)

    zeros_tn = plgpu.layout_cast(jnp.zeros((TILE, x_ref.shape[0]), jnp.float32), plgpu.Layout.WGMMA)
    vectors = plgpu.BlockSpec((x_ref.shape[0], INPUTS), lambda index: (0, share * steps + index))
    weights = plgpu.BlockSpec((TILE, INPUTS), lambda index: (tile, share * steps + index))
    run = plgpu.emit_pipeline(
        step, grid=(steps,), in_specs=[vectors, weights], max_concurrent_steps=STAGES, init_carry=zeros_tn
    )
    y_ref[share, pl.ds(tile * TILE, TILE), :] = run(x_ref, values_ref)
