"""MXFP4 as gpt-oss has it: two E2M1 values in a byte of "X_blocks", the exponent of each 32 values in "X_scales".

Source: transformers, integrations/mxfp4; OCP Microscaling Formats (MX) specification v1.0.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from treeflash_jax.formats.grouped_tensors import GroupedTensor, Part
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods.quant_method import nibbles
from treeflash_jax.formats.storage import Tensor


def check(stated: Keys) -> None:
    """Raises ValueError: gpt-oss, the only family with such files, checks its configuration itself."""
    raise ValueError(f"{stated.where}: got weights quantised by 'mxfp4', expected them in files of gpt-oss only")


def join(stated: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins blocks [x, outputs, inputs / 32, 16] with their scales [x, outputs, inputs / 32], by the name of the blocks.

    Raises ValueError for other shapes or types.
    """
    kept = dict(tensors)
    for name in [name for name in tensors if name.endswith("_scales")]:
        scales, blocks = kept.pop(name), name.replace("_scales", "_blocks")
        shape = tuple(scales.get_shape())
        if len(shape) < 2 or blocks not in kept or tuple(kept[blocks].get_shape()) != (*shape, 16):
            raise ValueError(
                f"tensor {name} has shape {list(shape)}, expected that of {blocks} without its last axis of 16"
            )
        for part, tensor in ((name, scales), (blocks, kept[blocks])):
            if tensor.get_dtype() != "U8":
                raise ValueError(f"tensor {part} has type {tensor.get_dtype()}, expected U8: MXFP4 in bytes")
        kept[blocks] = tensor_from(kept[blocks], scales)
    return kept


def tensor_from(blocks: Tensor, scales: Tensor) -> GroupedTensor:
    shape = tuple(scales.get_shape())

    def codes(rows: tuple[Any, ...]) -> np.ndarray:
        numbers = nibbles(blocks[rows])
        return numbers.reshape(*numbers.shape[:-2], -1)

    return GroupedTensor(
        code_book="e2m1",
        group=32,
        codes=Part((*shape[:-1], 32 * shape[-1]), "U8", codes),
        scales=Part(shape, "F8_E8M0", lambda rows: scales[rows].view(ml_dtypes.float8_e8m0fnu)),
    )
