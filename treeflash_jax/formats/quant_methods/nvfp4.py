"""NVFP4: E2M1 values, an E4M3 scale for each 16 of them, and one float32 factor or divisor of these scales."""

from collections.abc import Mapping

import numpy as np

from treeflash_jax.formats.grouped_tensors import GroupedTensor, Part
from treeflash_jax.formats.quant_methods.quant_method import find, nibbles
from treeflash_jax.formats.storage import FLOAT8, Tensor

GROUP = 16


def tensor(module: str, held: Mapping[str, Tensor], packed: str, outer: str, is_divisor: bool) -> GroupedTensor:
    """Returns the weight of a module.

    Args:
      held: its tensors, by the last words of their names.
      packed: name of that with two values in a byte, low half first, [..., outputs, inputs / 2].
      outer: name of that of the second-level scale.
    """
    stored = tuple(find(module, held, packed, ("U8",)).get_shape())
    if len(stored) < 2 or stored[-1] % (GROUP // 2):
        raise ValueError(
            f"tensor {module}.{packed} has shape {list(stored)}, expected rows of whole groups, of {GROUP // 2}"
        )
    *experts, outputs, width = stored
    codes, inputs = held[packed], 2 * width
    scales = find(module, held, "weight_scale", (FLOAT8,), (*experts, outputs, inputs // GROUP))
    factor = find(module, held, outer, ("F32",))
    if np.prod(factor.get_shape()) != 1:
        raise ValueError(f"tensor {module}.{outer} has shape {list(factor.get_shape())}, expected one number")
    number = np.asarray(factor[...]).reshape(())
    shape = (*experts, outputs, 1)
    return GroupedTensor(
        code_book="e2m1",
        group=GROUP,
        codes=Part((*experts, outputs, inputs), "U8", lambda rows: nibbles(codes[rows])),
        scales=scales,
        outer=Part(shape, "F32", lambda rows: np.broadcast_to(number, shape)[rows]),
        is_divisor=is_divisor,
    )
