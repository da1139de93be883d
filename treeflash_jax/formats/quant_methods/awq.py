"""AWQ files in the layout "gemm": numbers of 4 bits, packed along the outputs in an order that is AWQ's alone.

Source: autoawq, modules/linear/gemm and utils/packing_utils.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from treeflash_jax.formats.grouped_tensors import GroupedTensor
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods import quant_method
from treeflash_jax.formats.quant_methods.quant_method import Module, QuantMethod
from treeflash_jax.formats.storage import Tensor

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of 8 outputs


class Awq(QuantMethod):
    name = "awq"

    def check(self, config: Keys) -> None:
        bits = config.raw.get("bits", config.raw.get("w_bit", 4))
        config.expect(bits == 4, "bits", bits, "4: load the model's bfloat16 files")
        version = config.raw.get("version") or config.raw.get("checkpoint_format") or config.raw.get("format") or "gemm"
        config.expect(str(version).lower() == "gemm", "version", version, "'gemm'")

    def join(self, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return quant_method.join_modules(tensors, "qweight", ("qzeros", "scales"), _join_module)


def _join_module(module: Module) -> GroupedTensor:
    packed = module.checked_tensor("qweight", ("I32",), (None, None))
    inputs, words = packed.get_shape()
    outputs = 8 * words
    scales = quant_method.transpose(module.checked_tensor("scales", quant_method.SCALE_DTYPES, (None, outputs)))
    groups = scales.get_shape()[-1]
    packed_zeros = module.checked_tensor("qzeros", ("I32",), (groups, words))
    return GroupedTensor(
        code_book="int4",
        group=quant_method.find_group_size(f"{module.prefix}.scales", scales, inputs),
        codes=quant_method.unpack_outputs((outputs, inputs), _PACKING, lambda at: packed[:, at[0]]),
        scales=scales,
        zeros=quant_method.unpack_outputs((outputs, groups), _PACKING, lambda at: packed_zeros[:, at[0]]),
    )


def _unpack(packed: np.ndarray) -> np.ndarray:
    return quant_method.unpack_nibbles(packed).reshape(*packed.shape, 8)[..., PLACES].reshape(len(packed), -1)


_PACKING = quant_method.PACKINGS[4]._replace(unpack=_unpack)
