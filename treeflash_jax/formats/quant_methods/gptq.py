"""GPTQ files of 4 or 8 bits. Weights are packed along the inputs, zero points along the outputs, first number lowest.

In the first version of the format ("gptq"), every stored zero point is one too small. With `desc_act`, "X.g_idx" has the
group of each input.

Source: gptqmodel, nn_modules/qlinear and utils/model (convert_gptq_v1_to_v2_format_module).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from treeflash_jax.formats.grouped_tensors import GroupedTensor
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods import quant_method
from treeflash_jax.formats.quant_methods.quant_method import Module, QuantMethod
from treeflash_jax.formats.storage import Tensor

FORMATS = ("gptq", "gptq_v2")
ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}  # a word in which every number is one, by bits


class Gptq(QuantMethod):
    name = "gptq"

    def check(self, config: Keys) -> None:
        config.check_only({"pack_dtype": ("int32", None)})
        bits, version = config.raw.get("bits"), _format(config.raw)
        config.expect(type(bits) is int and bits in ONES, "bits", bits, "4 or 8: load the model's bfloat16 files")
        config.expect(version in FORMATS, "checkpoint_format", version, " or ".join(map(repr, FORMATS)))

    def join(self, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        join_module = partial(_join_module, bits=config["bits"], zeros_less_one=_format(config) == "gptq")
        return quant_method.join_modules(tensors, "qweight", ("qzeros", "scales", "g_idx"), join_module)


def _format(config: Mapping[str, Any]) -> Any:
    return config.get("checkpoint_format") or config.get("format") or FORMATS[0]


def _join_module(module: Module, bits: int, zeros_less_one: bool) -> GroupedTensor:
    packing = quant_method.PACKINGS[bits]
    packed = module.checked_tensor("qweight", ("I32",), (None, None))
    height, outputs = packed.get_shape()
    inputs = height * packing.factor
    scales = quant_method.transpose(module.checked_tensor("scales", quant_method.SCALE_DTYPES, (None, outputs)))
    group = quant_method.find_group_size(f"{module.prefix}.scales", scales, inputs)
    groups = scales.get_shape()[-1]
    packed_zeros = module.checked_tensor("qzeros", ("I32",), (groups, -(-outputs // packing.factor)))
    order = None
    if "g_idx" in module:
        group_ids = module.checked_tensor("g_idx", ("I32",), (inputs,))[...]
        order = quant_method.find_input_order(f"{module.prefix}.g_idx", group_ids, group)

    def read_zeros(rows: tuple[slice, ...]) -> np.ndarray:
        words = packed_zeros[:, rows[0]].view(np.uint32)
        return words + ONES[bits] if zeros_less_one else words  # this addition carries if the subtraction borrowed

    return GroupedTensor(
        code_book=packing.code_book,
        group=group,
        codes=quant_method.unpack_inputs((outputs, inputs), packing, order, lambda rows: packed[:, rows[0]].T),
        scales=scales,
        zeros=quant_method.unpack_outputs((outputs, groups), packing, read_zeros),
        order=order,
    )
