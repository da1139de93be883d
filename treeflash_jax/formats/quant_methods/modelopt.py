"""NVFP4 files of NVIDIA's ModelOpt: "X.weight" in bytes, "X.weight_scale" and its factor "X.weight_scale_2".

Source: nvidia-modelopt, quantization "NVFP4".
"""

from collections.abc import Mapping
from typing import Any

from treeflash_jax.formats.grouped_tensors import GroupedTensor
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods import nvfp4
from treeflash_jax.formats.quant_methods.quant_method import join_parts
from treeflash_jax.formats.storage import Tensor


def check(stated: Keys) -> None:
    algorithm = stated.raw.get("quant_algo")
    stated.expect(algorithm == "NVFP4", "quant_algo", algorithm, "'NVFP4': load the model's bfloat16 files")
    stated.check_only({"group_size": (nvfp4.GROUP, None)})


def join(stated: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    def module(name: str, held: dict[str, Tensor]) -> GroupedTensor:
        return nvfp4.tensor(name, held, "weight", "weight_scale_2", is_divisor=False)

    scales = ("weight_scale", "weight_scale_2")
    return join_parts(tensors, "weight", scales, module, marks=scales)
