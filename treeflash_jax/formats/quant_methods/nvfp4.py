"""NVFP4: E2M1 values, an E4M3 scale for each 16 values, and a float32 factor or divisor of all these scales."""

import numpy as np

from treeflash_jax.formats.grouped_tensors import ComputedTensor, GroupedTensor
from treeflash_jax.formats.quant_methods.quant_method import Module, unpack_nibbles
from treeflash_jax.formats.storage import FLOAT8

GROUP = 16


def join_module(module: Module, packed: str, outer: str, is_divisor: bool) -> GroupedTensor:
    """Returns the weight of a module.

    Args:
      packed: last word of the name of the packed tensor [..., outputs, inputs / 2]: two values in a byte, low half first.
      outer: last word of the name of the tensor with the second-level scale.
      is_divisor: whether scales are divided by the second-level scale.
    """
    codes = module.checked_tensor(packed, ("U8",))
    shape = tuple(codes.get_shape())
    if len(shape) < 2 or shape[-1] % (GROUP // 2):
        raise ValueError(
            f"tensor {module.prefix}.{packed} has shape {list(shape)}, expected rows of whole groups, of {GROUP // 2}"
        )
    *outputs, width = shape
    inputs = 2 * width
    scales = module.checked_tensor("weight_scale", (FLOAT8,), (*outputs, inputs // GROUP))
    factor = module.checked_tensor(outer, ("F32",))
    if np.prod(factor.get_shape()) != 1:
        raise ValueError(f"tensor {module.prefix}.{outer} has shape {list(factor.get_shape())}, expected one number")
    factors = np.broadcast_to(np.asarray(factor[...]).reshape(()), (*outputs, 1))
    return GroupedTensor(
        code_book="e2m1",
        group=GROUP,
        codes=ComputedTensor((*outputs, inputs), "U8", lambda rows: unpack_nibbles(codes[rows])),
        scales=scales,
        outer=ComputedTensor(factors.shape, "F32", lambda rows: factors[rows]),
        is_divisor=is_divisor,
    )
