"""compressed-tensors: FP8 values ("float-quantized"), whole numbers ("pack-quantized") and NVFP4 ("nvfp4-pack-quantized").

Packed numbers of 4 or 8 bits fill words of 32 bits, the first one lowest; they are stored plus 8 or 128. Zero points are
packed along the outputs. The second-level scale of NVFP4 is a divisor. The tensors of a module tell the format, so that
files of "mixed-precision" are read, too.

Source: compressed-tensors, compressors/pack_quantized and compressors/nvfp4.
"""

from collections.abc import Mapping
from typing import Any

from treeflash_jax.formats import fp8
from treeflash_jax.formats.grouped_tensors import GroupedTensor, Part
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods import nvfp4
from treeflash_jax.formats.quant_methods.quant_method import find, group_size, input_order, join_parts, nibbles, signed
from treeflash_jax.formats.storage import Tensor

FORMATS = ("float-quantized", "pack-quantized", "nvfp4-pack-quantized")
_FLOATS = ("BF16", "F16", "F32")


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
    apart = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
    packed = {name.rpartition(".")[0] for name in tensors if name.endswith((".weight_packed", *apart[1:]))}
    ours = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in packed}
    others = {name: tensor for name, tensor in tensors.items() if name not in ours}
    return fp8.join(stated, others) | join_parts(ours, "weight_packed", apart, _module)


def _module(module: str, held: dict[str, Tensor]) -> GroupedTensor:
    if "weight_global_scale" in held:
        if "weight_zero_point" in held:
            raise ValueError(f"got {module}.weight_zero_point, expected none: zero points of NVFP4 are not implemented")
        return nvfp4.tensor(module, held, "weight_packed", "weight_global_scale", is_divisor=True)
    axes = len(held["weight_packed"].get_shape())
    *experts, outputs, inputs = find(module, held, "weight_shape", ("I64", "I32"), (max(2, axes),))[...].tolist()
    words = find(module, held, "weight_packed", ("I32",), (*experts, outputs, None)).get_shape()[-1]
    bits = next((bits for bits in (4, 8) if words == -(-inputs * bits // 32)), None)
    if bits is None:
        raise ValueError(f"tensor {module}.weight_packed has {words} words for {inputs} inputs, expected 4 or 8 bits each")
    packed, unpack = held["weight_packed"], nibbles if bits == 4 else signed
    dtype = "U8" if bits == 4 else "I8"
    scales = find(module, held, "weight_scale", _FLOATS, (*experts, outputs, None))
    group = group_size(f"{module}.weight_scale", scales, inputs)
    order = None
    if "weight_g_idx" in held and inputs > group:
        groups = find(module, held, "weight_g_idx", ("I32",), (inputs,))[...]
        if (groups >= 0).all():  # -1: not set
            order = input_order(f"{module}.weight_g_idx", groups, group)

    def codes(rows: tuple[Any, ...]) -> Any:
        numbers = unpack(packed[rows])[..., :inputs]
        return numbers if order is None else numbers.take(order, axis=-1)

    zeros: Any = 8 if bits == 4 else 0
    if "weight_zero_point" in held:
        zeros = _zeros(module, held, (*experts, outputs, inputs // group), bits)
    return GroupedTensor(
        code_book="int4" if bits == 4 else "int8",
        group=group,
        codes=Part((*experts, outputs, inputs), dtype, codes),
        scales=scales,
        zeros=zeros,
        order=order,
    )


def _zeros(module: str, held: dict[str, Tensor], shape: tuple[int, ...], bits: int) -> Part:
    *experts, outputs, groups = shape
    each, unpack = 32 // bits, nibbles if bits == 4 else signed
    words = find(module, held, "weight_zero_point", ("I32",), (*experts, -(-outputs // each), groups))

    def read(rows: tuple[Any, ...]) -> Any:
        first, last, _ = rows[-1].indices(outputs)
        at = slice(first // each, -(-last // each))
        numbers = unpack(words[(*rows[:-1], at)].swapaxes(-1, -2)).swapaxes(-1, -2)
        return numbers[..., first - at.start * each : last - at.start * each, :]

    return Part(shape, "U8" if bits == 4 else "I8", read)
