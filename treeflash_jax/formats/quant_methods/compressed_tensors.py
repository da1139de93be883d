"""compressed-tensors: FP8 values ("float-quantized"), whole numbers ("pack-quantized") and NVFP4 ("nvfp4-pack-quantized").

Packed numbers of 4 or 8 bits fill words of 32 bits, the first number lowest. They are stored plus 8 or 128. Zero points are
packed along the outputs. The second-level scale of NVFP4 is a divisor. A module's format is known from its tensors, so
"mixed-precision" files are read, too.

Source: compressed-tensors, compressors/pack_quantized and compressors/nvfp4.
"""

from collections.abc import Mapping
from typing import Any

from treeflash_jax.formats.grouped_tensors import GroupedTensor
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods import fp8, nvfp4, quant_method
from treeflash_jax.formats.quant_methods.quant_method import Module, QuantMethod
from treeflash_jax.formats.storage import Tensor

FORMATS = ("float-quantized", "pack-quantized", "nvfp4-pack-quantized")


class CompressedTensors(QuantMethod):
    name = "compressed-tensors"

    def check(self, config: Keys) -> None:
        config.check_only({"transform_config": ({}, None)})
        sparsity = config.raw.get("sparsity_config") or {}
        config.expect(sparsity.get("format", "dense") == "dense", "sparsity_config", sparsity, "the format 'dense'")
        file_format = config.raw.get("format", FORMATS[0])
        expected = f"one of {', '.join(FORMATS)}: load the model's bfloat16 files"
        groups = config.table("config_groups")
        for name in groups.raw:
            group = groups.table(name)
            group_format = group.raw.get("format") or file_format
            weights = group.table("weights")
            group.expect(group_format in FORMATS, "format", group_format, expected)
            if group_format == "pack-quantized":
                weights.check_only({"num_bits": (4, 8), "type": ("int",), "strategy": ("group", "channel")})
        is_mixed = file_format == "mixed-precision" and bool(groups.raw)
        config.expect(file_format in FORMATS or is_mixed, "format", file_format, expected)
        fp8.check_block_size(config)

    def join(self, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        marks = ("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
        joined = quant_method.join_modules(tensors, "weight_packed", (*marks[1:], "weight_scale"), _join_module, marks)
        return fp8.join_scales(config, joined)


def _join_module(module: Module) -> GroupedTensor:
    if "weight_global_scale" not in module:
        return _join_whole_numbers(module)
    if "weight_zero_point" in module:
        raise ValueError(f"got {module.prefix}.weight_zero_point, expected none: zero points of NVFP4 are not implemented")
    return nvfp4.join_module(module, "weight_packed", "weight_global_scale", is_divisor=True)


def _join_whole_numbers(module: Module) -> GroupedTensor:
    axes = len(module.tensors["weight_packed"].get_shape())
    shape = tuple(module.checked_tensor("weight_shape", ("I64", "I32"), (max(2, axes),))[...].tolist())
    *experts, outputs, inputs = shape
    packed = module.checked_tensor("weight_packed", ("I32",), (*experts, outputs, None))
    width = packed.get_shape()[-1]
    packings = quant_method.PACKINGS.values()
    packing = next((packing for packing in packings if width == -(-inputs // packing.factor)), None)
    if packing is None:
        raise ValueError(
            f"tensor {module.prefix}.weight_packed has {width} words for {inputs} inputs, expected 4 or 8 bits each"
        )
    scales = module.checked_tensor("weight_scale", quant_method.SCALE_DTYPES, (*experts, outputs, None))
    group = quant_method.find_group_size(f"{module.prefix}.weight_scale", scales, inputs)
    groups = inputs // group
    order = None
    if "weight_g_idx" in module and groups > 1:
        group_ids = module.checked_tensor("weight_g_idx", ("I32",), (inputs,))[...]
        if (group_ids >= 0).all():  # -1: group not set
            order = quant_method.find_input_order(f"{module.prefix}.weight_g_idx", group_ids, group)
    zeros: Any = 8 if packing.code_book == "int4" else 0
    if "weight_zero_point" in module:
        words = (*experts, -(-outputs // packing.factor), groups)
        packed_zeros = module.checked_tensor("weight_zero_point", ("I32",), words)
        zeros = quant_method.unpack_outputs(
            (*experts, outputs, groups), packing, lambda rows: packed_zeros[rows].swapaxes(-1, -2)
        )
    return GroupedTensor(
        code_book=packing.code_book,
        group=group,
        codes=quant_method.unpack_inputs(shape, packing, order, lambda rows: packed[rows]),
        scales=scales,
        zeros=zeros,
        order=order,
    )
