"""Weights of quantised files: codes of a few bits with a scale per group of inputs, read a slice at a time.

The element for a code c, in a group with the scale s, the zero point z and the minimum m, is

    (book(c) - z) * s - m,    in float32

with s = scales * outer (or scales / outer, if `is_divisor`) and m = minimums * outer_minimums. The inputs of the arrays are
in group order: input j belongs to group j // group. If a file's groups are not consecutive inputs, `order` has the weight's
input for each of these places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from treeflash_jax.formats.storage import Tensor

_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array(_HALF + [-value for value in _HALF], np.float32)


@dataclass(frozen=True)
class ComputedTensor:
    """A tensor that slicing computes from stored tensors.

    Attributes:
      shape: [..., outputs, columns].
      dtype: name of the dtype in safetensors files.
      read: function that gets slices of all axes but the last, and returns all columns.
    """

    shape: Sequence[int]
    dtype: str
    read: Callable[[tuple[Any, ...]], np.ndarray]

    def get_shape(self) -> Sequence[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, columns = split_index(index, len(self.shape))
        return self.read(rows)[(..., *columns)]


@dataclass(frozen=True)
class GroupedTensor:
    """A matrix, or one per expert, [..., outputs, inputs]. Slicing expands it; its parts can also be read directly.

    Attributes:
      code_book: meaning of codes: "int4", numbers 0 to 15; "int8", numbers of 5, 6 or 8 bits; "e2m1", FP4 values of E2M1.
      group: number of inputs with a common scale; divides the number of inputs.
      codes: a code per element, not packed, [..., outputs, inputs] in group order; uint8, or int8 for "int8".
      scales: [..., outputs, inputs / group], in the type of the file: floats, or integers in a super-block.
      outer: factors of the scales, floats, [..., outputs, n]; each factor is for one of n equal parts of the groups.
      is_divisor: whether scales are divided by `outer`.
      zeros: zero points, shaped like `scales`, or one number for all groups.
      minimums: numbers to subtract, shaped like `scales`; None: 0.
      outer_minimums: factors of the minimums, shaped like `outer`.
      order: int32, [inputs]: the weight's input at each place in group order; None: inputs are in order.
    """

    code_book: Literal["int4", "int8", "e2m1"]
    group: int
    codes: Tensor
    scales: Tensor
    outer: Tensor | None = None
    is_divisor: bool = False
    zeros: Tensor | int = 0
    minimums: Tensor | None = None
    outer_minimums: Tensor | None = None
    order: np.ndarray | None = None
    is_quantized = True

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.codes.get_shape())

    def get_dtype(self) -> str:
        return "F32"

    def factors(self, rows: tuple[Any, ...]) -> np.ndarray:
        """Returns the scale of each group in float32. `rows` are indices of all axes but the last."""
        return _product(self.scales, self.outer, self.is_divisor, rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, columns = split_index(index, len(self.get_shape()))
        codes = self.codes[rows]
        values = E2M1.take(codes) if self.code_book == "e2m1" else codes.astype(np.float32)
        groups = values.reshape(*values.shape[:-1], -1, self.group)
        groups -= self.zeros if isinstance(self.zeros, int) else self.zeros[rows].astype(np.float32)[..., None]
        groups *= self.factors(rows)[..., None]
        if self.minimums is not None:
            groups -= _product(self.minimums, self.outer_minimums, False, rows)[..., None]
        if self.order is not None:
            values = values.take(np.argsort(self.order), axis=-1)
        return values[(..., *columns)]


def map_parts(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies a function that selects outputs to a tensor; for a GroupedTensor, to each of its parts."""
    if not isinstance(tensor, GroupedTensor):
        return function(tensor)
    names = ("codes", "scales", "outer", "zeros", "minimums", "outer_minimums")
    parts = {name: getattr(tensor, name) for name in names}
    stored = {name: part for name, part in parts.items() if part is not None and not isinstance(part, int)}
    return replace(tensor, **{name: function(part) for name, part in stored.items()})


def split_index(index: Any, axes: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the indices of all axes but the last, and the index of the last axis, if there is one, in a tuple."""
    if not isinstance(index, tuple):
        index = () if index is ... else (index,)
    rows = index[: axes - 1]
    return (*rows, *(slice(None),) * (axes - 1 - len(rows))), index[axes - 1 :]


def _product(numbers: Tensor, outer: Tensor | None, is_divisor: bool, rows: tuple[Any, ...]) -> np.ndarray:
    inner = numbers[rows].astype(np.float32)
    if outer is None:
        return inner
    factors = outer[rows].astype(np.float32)
    factors = factors.repeat(inner.shape[-1] // factors.shape[-1], axis=-1)
    return inner / factors if is_divisor else inner * factors
