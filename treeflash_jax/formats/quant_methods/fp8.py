"""FP8 files: float8_e4m3fn values beside scales, one per block, output channel or tensor.

The scales of "X.weight" are in "X.weight_scale_inv" or "X.weight_scale". A weight is its values times its scales. If it is
expanded, the product is rounded once from float32. If it stays quantised, its scales are rounded to the model's dtype. In
both cases, a weight changes by at most half a unit in the last place of that dtype. Tensors without scales are read as they
are.

Source: transformers, quantisation method "fp8", as published for DeepSeek-V3 and Qwen3; compressed-tensors,
"float-quantized".
"""

from collections.abc import Mapping
from typing import Any

from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods.quant_method import QuantMethod
from treeflash_jax.formats.scaled_tensors import ScaledTensor
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.models import quantized

_ENDINGS = ("_scale_inv", ".weight_scale")


class Fp8(QuantMethod):
    """Blocks of 128 outputs and 128 inputs, unless the configuration has other sizes."""

    name = "fp8"

    def check(self, config: Keys) -> None:
        config.check_only({"fmt": ("e4m3", None), "activation_scheme": ("dynamic", "static", None)})
        check_block_size(config)

    def join(self, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return join_scales(config, tensors)


def check_block_size(config: Keys) -> None:
    """Raises ValueError if the size of a block is not two whole numbers of at least 1."""
    block = _block_size(config.raw)
    is_pair = isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    config.expect(is_pair, "weight_block_size", block, "two whole numbers of at least 1")


def _block_size(config: Mapping[str, Any]) -> Any:
    """Returns the configured numbers of outputs and inputs of a block, by default 128 and 128."""
    sizes = [config.get("weight_block_size")]
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            sizes.append(weights.get("block_structure"))
    return next(filter(None, sizes), [quantized.SCALE_BLOCK] * 2)


def join_scales(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a folder's tensors, in which each FP8 weight and its scales are one ScaledTensor with the name of the weight.

    Raises ValueError for scales without a weight, and for scales of another shape.
    """
    joined = {name: tensor for name, tensor in tensors.items() if not name.endswith(_ENDINGS)}
    for name in tensors:
        if name.endswith(_ENDINGS):
            weight = name[: name.rindex("_scale")]
            if weight not in joined or joined[weight].get_dtype() != "F8_E4M3":
                got = "no tensor" if weight not in joined else f"type {joined[weight].get_dtype()}"
                raise ValueError(f"got {got} {weight} for the scales {name}, expected a tensor of type F8_E4M3")
            joined[weight] = _join_weight(name, joined[weight], tensors[name], _block_size(config))
    return joined


def _join_weight(name: str, values: Tensor, scales: Tensor, block: tuple[int, int]) -> ScaledTensor:
    shape, counts = tuple(values.get_shape()), tuple(scales.get_shape())
    *experts, outputs, inputs = shape
    block_counts = (*experts, *(-(-size // part) for size, part in zip((outputs, inputs), block, strict=True)))
    layouts = [block_counts, (*experts, outputs, 1), (*experts, 1, 1)]  # scales of blocks, channels and whole tensors
    matches = [layout for layout in layouts if counts == layout]
    matches += [layout for layout in layouts if [n for n in counts if n > 1] == [n for n in layout if n > 1]]
    layout = next(iter(matches), None)
    if layout is None or scales.get_dtype() not in ("F32", "BF16", "F16"):
        got = f"{list(counts)} of type {scales.get_dtype()}"
        raise ValueError(
            f"tensor {name} has shape {got}, expected {list(block_counts)}, one float per {block[0]} x {block[1]} block"
        )
    sizes = block if layout == block_counts else (1 if layout[-2] == outputs else outputs, inputs)
    return ScaledTensor(values, scales, layout, (*(1,) * len(experts), *sizes))
