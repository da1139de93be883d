"""GPTQ files of 4 or 8 bits: weights packed along the inputs, zero points along the outputs, first number lowest.

In the first version of the format ("gptq"), words of zero points are stored less one in each number. With `desc_act`,
"X.g_idx" has the group of each input.

Source: gptqmodel, nn_modules/qlinear and utils/model (convert_gptq_v1_to_v2_format_module).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from treeflash_jax.formats.grouped_tensors import GroupedTensor, Part
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods.quant_method import (
    WORDS,
    find,
    group_size,
    input_order,
    join_parts,
    packed_outputs,
    transposed,
)
from treeflash_jax.formats.storage import Tensor

FORMATS = ("gptq", "gptq_v2")
ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


def check(stated: Keys) -> None:
    stated.check_only({"pack_dtype": ("int32", None)})
    bits, form = stated.raw.get("bits"), _format(stated.raw)
    stated.expect(type(bits) is int and bits in ONES, "bits", bits, "4 or 8: load the model's bfloat16 files")
    stated.expect(form in FORMATS, "checkpoint_format", form, " or ".join(map(repr, FORMATS)))


def _format(stated: Mapping[str, Any]) -> Any:
    return stated.get("checkpoint_format") or stated.get("format") or FORMATS[0]


def join(stated: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    joined = partial(_module, stated["bits"], _format(stated) == FORMATS[0])
    return join_parts(tensors, "qweight", ("qzeros", "scales", "g_idx"), joined)


def _module(bits: int, is_first: bool, module: str, held: dict[str, Tensor]) -> GroupedTensor:
    words = WORDS[bits]
    height, outputs = find(module, held, "qweight", ("I32",), (None, None)).get_shape()
    packed, inputs = held["qweight"], height * words.each
    scales = transposed(find(module, held, "scales", ("F16", "BF16", "F32"), (None, outputs)))
    group, groups = group_size(f"{module}.scales", scales, inputs), scales.get_shape()[-1]
    stored = find(module, held, "qzeros", ("I32",), (groups, -(-outputs // words.each)))
    order = None
    if "g_idx" in held:
        order = input_order(f"{module}.g_idx", find(module, held, "g_idx", ("I32",), (inputs,))[...], group)

    def codes(rows: tuple[slice, ...]) -> np.ndarray:
        numbers = words.unpack(packed[:, rows[0]].T)
        return numbers if order is None else numbers.take(order, axis=-1)

    def zeros(rows: tuple[slice, ...]) -> np.ndarray:
        numbers = stored[:, rows[0]].view(np.uint32)
        return numbers + ONES[bits] if is_first else numbers  # carries as it borrowed

    return GroupedTensor(
        code_book=words.code_book,
        group=group,
        codes=Part((outputs, inputs), words.dtype, codes),
        scales=scales,
        zeros=packed_outputs((outputs, groups), words, zeros),
        order=order,
    )
