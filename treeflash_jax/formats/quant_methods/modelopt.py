"""NVFP4 files of NVIDIA's ModelOpt: "X.weight" in bytes, "X.weight_scale", and "X.weight_scale_2", a factor of the scales.

Source: nvidia-modelopt, quantisation "NVFP4".
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods import nvfp4
from treeflash_jax.formats.quant_methods.quant_method import QuantMethod, join_modules
from treeflash_jax.formats.storage import Tensor


class ModelOpt(QuantMethod):
    name = "modelopt"

    def check(self, config: Keys) -> None:
        algorithm = config.raw.get("quant_algo")
        config.expect(algorithm == "NVFP4", "quant_algo", algorithm, "'NVFP4': load the model's bfloat16 files")
        config.check_only({"group_size": (nvfp4.GROUP, None)})

    def join(self, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        scales = ("weight_scale", "weight_scale_2")
        join_module = partial(nvfp4.join_module, packed="weight", outer="weight_scale_2", is_divisor=False)
        return join_modules(tensors, "weight", scales, join_module, marks=scales)
