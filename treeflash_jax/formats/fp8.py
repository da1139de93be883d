"""FP8 weights in safetensors files: float8_e4m3fn values beside scales, one per block, output channel or tensor.

"X.weight" has its scales in "X.weight_scale_inv" or "X.weight_scale"; a weight is its values times its scales. If it
is expanded, the product is rounded once from float32; if it stays quantised, its scales are rounded to the model's dtype.
In both cases, a weight changes by at most half a unit in the last place of that dtype. Tensors without scales are read
as they are.

Source: transformers, quantization method "fp8", as published for DeepSeek-V3 and Qwen3; compressed-tensors,
"float-quantized".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.models import quantized

_ENDINGS = ("_scale_inv", ".weight_scale")
_NUMBERS = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)  # by byte: faster than a conversion


def check(stated: Keys) -> None:
    """Raises ValueError for a configuration of the method "fp8" that is not implemented."""
    stated.check_only({"fmt": ("e4m3", None), "activation_scheme": ("dynamic", "static", None)})
    check_block(stated)


def check_block(stated: Keys) -> None:
    """Raises ValueError for sizes of blocks that are none."""
    block = _block(stated.raw)
    is_pair = isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    stated.expect(is_pair, "weight_block_size", block, "two whole numbers of at least 1")


def _block(stated: Mapping[str, Any]) -> Any:
    """Returns the stated numbers of outputs and inputs of a block, by default 128 and 128."""
    groups = stated.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    )
    sizes = [group.get("block_structure") for group in weights if isinstance(group, dict)]
    return next(filter(None, [stated.get("weight_block_size"), *sizes]), [quantized.SCALE_BLOCK] * 2)


@dataclass(frozen=True)
class ScaledTensor:
    """A matrix, or one per expert, that is multiplied with its scales, in float32, when it is read.

    Attributes:
      values: [..., outputs, inputs], float8_e4m3fn.
      scales: one number per block, in any shape with that number of elements.
      counts: number of blocks along each axis.
      block: size of a block along each axis; the last one may be smaller.
    """

    values: Tensor
    scales: Tensor
    counts: tuple[int, ...]
    block: tuple[int, ...]
    is_quantized = True
    code_book = "fp8"

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.values.get_shape())

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.block) - len(index))
        values = _NUMBERS.take(np.asarray(self.values[index]).view(np.uint8))
        values *= BlockScales(self, (1,) * len(self.block))[index]
        return values


@dataclass(frozen=True)
class BlockScales:
    """The scales of a tensor, repeated for each of the smaller blocks of size `block`."""

    tensor: ScaledTensor
    block: tuple[int, ...]

    def get_shape(self) -> tuple[int, ...]:
        return tuple(size // part for size, part in zip(self.tensor.get_shape(), self.block, strict=True))

    def get_dtype(self) -> str:
        return self.tensor.scales.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        scales = np.asarray(self.tensor.scales[...]).astype(np.float32).reshape(self.tensor.counts)
        for axis, (at, size) in enumerate(zip(index, self.get_shape(), strict=True)):
            first, last, _ = at.indices(size)
            blocks = np.arange(first, last) * self.block[axis] // self.tensor.block[axis]
            scales = scales.take(blocks, axis=axis)
        return scales


def join(stated: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a folder's tensors with each FP8 weight and its scales as one ScaledTensor, by the name of the weight.

    Raises ValueError for scales without a weight, or of another shape.
    """
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_ENDINGS)}
    for name in tensors:
        if name.endswith(_ENDINGS):
            weight = name[: name.rindex("_scale")]
            if weight not in kept or kept[weight].get_dtype() != "F8_E4M3":
                got = "no tensor" if weight not in kept else f"type {kept[weight].get_dtype()}"
                raise ValueError(f"got {got} {weight} for the scales {name}, expected a tensor of type F8_E4M3")
            kept[weight] = _scaled(name, kept[weight], tensors[name], _block(stated))
    return kept


def _scaled(name: str, values: Tensor, scales: Tensor, block: tuple[int, int]) -> ScaledTensor:
    shape, counts = tuple(values.get_shape()), tuple(scales.get_shape())
    *experts, outputs, inputs = shape
    stated = (*experts, *(-(-size // part) for size, part in zip((outputs, inputs), block, strict=True)))
    forms = [stated, (*experts, outputs, 1), (*experts, 1, 1)]  # of blocks, channels and whole tensors
    same = [form for form in forms if counts == form]
    folded = [form for form in forms if [size for size in counts if size > 1] == [size for size in form if size > 1]]
    form = next(iter(same + folded), None)
    if form is None or scales.get_dtype() not in ("F32", "BF16", "F16"):
        got = f"{list(counts)} of type {scales.get_dtype()}"
        raise ValueError(
            f"tensor {name} has shape {got}, expected {list(stated)}, one float per {block[0]} x {block[1]} block"
        )
    sizes = block if form == stated else (1 if form[-2] == outputs else outputs, inputs)
    return ScaledTensor(values, scales, form, (*(1,) * len(experts), *sizes))
