"""Weights of FP8 files: float8_e4m3fn values with a scale per block, output channel or tensor, read a slice at a time."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from treeflash_jax.formats.storage import Tensor

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # by byte: faster than astype


@dataclass(frozen=True)
class ScaledTensor:
    """A matrix, or one per expert. Reading it multiplies it with its scales, in float32.

    Attributes:
      values: [..., outputs, inputs], float8_e4m3fn.
      scales: a number per block, in any shape with that number of elements.
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
        values = _VALUES.take(np.asarray(self.values[index]).view(np.uint8))
        values *= BlockScales(self, (1,) * len(self.block))[index]
        return values


@dataclass(frozen=True)
class BlockScales:
    """The scales of a tensor, each repeated for the smaller blocks of size `block` that it covers."""

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
