"""AWQ files in the layout "gemm": numbers of 4 bits, packed along the outputs in an order of their own.

Source: autoawq, modules/linear/gemm and utils/packing_utils.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from treeflash_jax.formats.grouped_tensors import GroupedTensor, Part
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods.quant_method import find, group_size, join_parts, nibbles, transposed
from treeflash_jax.formats.storage import Tensor

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of each of 8 outputs


def check(stated: Keys) -> None:
    bits = stated.raw.get("bits", stated.raw.get("w_bit", 4))
    stated.expect(bits == 4, "bits", bits, "4: load the model's bfloat16 files")
    version = stated.raw.get("version") or stated.raw.get("checkpoint_format") or stated.raw.get("format") or "gemm"
    stated.expect(str(version).lower() == "gemm", "version", version, "'gemm'")


def join(stated: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return join_parts(tensors, "qweight", ("qzeros", "scales"), _module)


def _module(module: str, held: dict[str, Tensor]) -> GroupedTensor:
    inputs, words = find(module, held, "qweight", ("I32",), (None, None)).get_shape()
    scales = transposed(find(module, held, "scales", ("F16", "BF16", "F32"), (None, 8 * words)))
    groups = scales.get_shape()[-1]
    zeros = find(module, held, "qzeros", ("I32",), (groups, words))
    return GroupedTensor(
        code_book="int4",
        group=group_size(f"{module}.scales", scales, inputs),
        codes=_unpacked(held["qweight"]),
        scales=scales,
        zeros=_unpacked(zeros),
    )


def _unpacked(packed: Tensor) -> Part:
    """Returns the numbers of a tensor [columns, outputs / 8] as [outputs, columns]."""
    columns, words = packed.get_shape()

    def read(rows: tuple[Any, ...]) -> np.ndarray:
        first, last, _ = rows[0].indices(8 * words)
        at = slice(first // 8, -(-last // 8))
        numbers = nibbles(packed[:, at]).reshape(columns, -1, 8)[..., PLACES].reshape(columns, -1)
        return numbers[:, first - 8 * at.start : last - 8 * at.start].T

    return Part((8 * words, columns), "U8", read)
