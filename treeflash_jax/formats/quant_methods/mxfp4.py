"""MXFP4 as in gpt-oss: "X_blocks" has two E2M1 values in a byte, and "X_scales" has an exponent for each 32 values.

Source: transformers, integrations/mxfp4; OCP Microscaling Formats (MX) specification v1.0.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from treeflash_jax.formats.grouped_tensors import ComputedTensor, GroupedTensor
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods.quant_method import QuantMethod, unpack_nibbles
from treeflash_jax.formats.storage import Tensor


class Mxfp4(QuantMethod):
    """Blocks [x, outputs, inputs / 32, 16] and scales [x, outputs, inputs / 32]. The weight has the name of the blocks."""

    name = "mxfp4"

    def check(self, config: Keys) -> None:
        """Raises ValueError, because gpt-oss, the only family with such files, checks its configuration itself."""
        raise ValueError(f"{config.where}: got weights quantised by 'mxfp4', expected them in files of gpt-oss only")

    def join(self, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        joined = dict(tensors)
        for name in [name for name in tensors if name.endswith("_scales")]:
            scales, blocks = joined.pop(name), name.replace("_scales", "_blocks")
            shape = tuple(scales.get_shape())
            if len(shape) < 2 or blocks not in joined or tuple(joined[blocks].get_shape()) != (*shape, 16):
                raise ValueError(
                    f"tensor {name} has shape {list(shape)}, expected that of {blocks} without its last axis of 16"
                )
            for part, tensor in ((name, scales), (blocks, joined[blocks])):
                if tensor.get_dtype() != "U8":
                    raise ValueError(f"tensor {part} has type {tensor.get_dtype()}, expected U8: MXFP4 in bytes")
            joined[blocks] = _join_weight(joined[blocks], scales)
        return joined


def _join_weight(blocks: Tensor, scales: Tensor) -> GroupedTensor:
    shape = tuple(scales.get_shape())

    def read_codes(rows: tuple[Any, ...]) -> np.ndarray:
        codes = unpack_nibbles(blocks[rows])
        return codes.reshape(*codes.shape[:-2], -1)

    return GroupedTensor(
        code_book="e2m1",
        group=32,
        codes=ComputedTensor((*shape[:-1], 32 * shape[-1]), "U8", read_codes),
        scales=ComputedTensor(shape, "F8_E8M0", lambda rows: scales[rows].view(ml_dtypes.float8_e8m0fnu)),
    )
