"""AWQ files in the layout "gemm": numbers of 4 bits, packed along the outputs in an order of their own.

Source: autoawq, modules/linear/gemm and utils/packing_utils.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from treeflash_jax.formats.grouped_tensors import GroupedTensor
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods.quant_method import (
    WORDS,
    find,
    group_size,
    join_parts,
    nibbles,
    packed_outputs,
    transposed,
)
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
        codes=packed_outputs((8 * words, inputs), _WORDS, lambda at: held["qweight"][:, at[0]]),
        scales=scales,
        zeros=packed_outputs((8 * words, groups), _WORDS, lambda at: zeros[:, at[0]]),
    )


def _unpacked(packed: np.ndarray) -> np.ndarray:
    return nibbles(packed).reshape(*packed.shape, 8)[..., PLACES].reshape(len(packed), -1)


_WORDS = WORDS[4]._replace(unpack=_unpacked)
