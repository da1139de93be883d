"""compressed-tensors: FP8 values ("float-quantized"), whole numbers ("pack-quantized") and NVFP4 ("nvfp4-pack-quantized").

Packed numbers of 4 or 8 bits fill words of 32 bits, the first one lowest; they are stored plus 8 or 128. Zero points are
packed along the outputs. The second-level scale of NVFP4 is a divisor. The tensors of a module tell the format, so that
files of "mixed-precision" are read, too.

Source: compressed-tensors, compressors/pack_quantized and compressors/nvfp4.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from treeflash_jax.formats import fp8
from treeflash_jax.formats.grouped_tensors import GroupedTensor, Part
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods import nvfp4
from treeflash_jax.formats.quant_methods.quant_method import (
    WORDS,
    find,
    group_size,
    input_order,
    join_parts,
    packed_outputs,
)
from treeflash_jax.formats.storage import Tensor

FORMATS = ("float-quantized", "pack-quantized", "nvfp4-pack-quantized")


def check(stated: Keys) -> None:
    """Raises ValueError for another format, or weights of other bits."""
    stated.check_only({"transform_config": ({}, None)})
    sparsity = stated.raw.get("sparsity_config") or {}
    stated.expect(sparsity.get("format", "dense") == "dense", "sparsity_config", sparsity, "the format 'dense'")
    form = stated.raw.get("format", FORMATS[0])
    groups = stated.table("config_groups")
    for name in groups.raw:
        group = groups.table(name)
        own, weights = group.raw.get("format") or form, group.table("weights")
        is_read = own in FORMATS
        group.expect(is_read, "format", own, f"one of {', '.join(FORMATS)}: load the model's bfloat16 files")
        if own == "pack-quantized":
            weights.check_only({"num_bits": (4, 8), "type": ("int",), "strategy": ("group", "channel")})
    is_read = form in FORMATS or (form == "mixed-precision" and groups.raw)
    stated.expect(is_read, "format", form, f"one of {', '.join(FORMATS)}: load the model's bfloat16 files")
    fp8.check_block(stated)


def join(stated: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    marks = ("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
    joined = join_parts(tensors, "weight_packed", (*marks[1:], "weight_scale"), _module, marks)
    return fp8.join(stated, joined)


def _module(module: str, held: dict[str, Tensor]) -> GroupedTensor:
    if "weight_global_scale" in held:
        if "weight_zero_point" in held:
            raise ValueError(f"got {module}.weight_zero_point, expected none: zero points of NVFP4 are not implemented")
        return nvfp4.tensor(module, held, "weight_packed", "weight_global_scale", is_divisor=True)
    axes = len(held["weight_packed"].get_shape())
    *experts, outputs, inputs = find(module, held, "weight_shape", ("I64", "I32"), (max(2, axes),))[...].tolist()
    packed = find(module, held, "weight_packed", ("I32",), (*experts, outputs, None))
    width = packed.get_shape()[-1]
    words = next((words for words in WORDS.values() if width == -(-inputs // words.each)), None)
    if words is None:
        raise ValueError(f"tensor {module}.weight_packed has {width} words for {inputs} inputs, expected 4 or 8 bits each")
    scales = find(module, held, "weight_scale", ("BF16", "F16", "F32"), (*experts, outputs, None))
    group = group_size(f"{module}.weight_scale", scales, inputs)
    groups, order = inputs // group, None
    if "weight_g_idx" in held and groups > 1:
        listed = find(module, held, "weight_g_idx", ("I32",), (inputs,))[...]
        if (listed >= 0).all():  # -1: not set
            order = input_order(f"{module}.weight_g_idx", listed, group)

    def codes(rows: tuple[slice, ...]) -> np.ndarray:
        numbers = words.unpack(packed[rows])[..., :inputs]
        return numbers if order is None else numbers.take(order, axis=-1)

    zeros: Any = 8 if words.code_book == "int4" else 0
    if "weight_zero_point" in held:
        stored = find(module, held, "weight_zero_point", ("I32",), (*experts, -(-outputs // words.each), groups))
        zeros = packed_outputs((*experts, outputs, groups), words, lambda at: stored[at].swapaxes(-1, -2))
    return GroupedTensor(
        code_book=words.code_book,
        group=group,
        codes=Part((*experts, outputs, inputs), words.dtype, codes),
        scales=scales,
        zeros=zeros,
        order=order,
    )
