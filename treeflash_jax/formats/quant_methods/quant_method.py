"""The protocol of quantisation methods, and functions for tensors that several methods use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from treeflash_jax.formats.grouped_tensors import ComputedTensor, GroupedTensor
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor

SCALE_DTYPES = ("F16", "BF16", "F32")


class QuantMethod(ABC):
    """A form in which files store quantised weights.

    Attributes:
      name: `quant_method` in config.json.
    """

    name: ClassVar[str]

    @abstractmethod
    def check(self, config: Keys) -> None:
        """Raises ValueError for a `quantization_config` that is not implemented."""

    @abstractmethod
    def join(self, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a folder's tensors. In them, each quantised weight and its scales are one tensor, named like the weight.

        Raises ValueError for tensors that are missing, or have another type or shape.
        """


@dataclass(frozen=True)
class Module:
    """Tensors of a quantised module.

    Attributes:
      prefix: name of the module, for example "model.layers.0.mlp.up_proj".
      tensors: tensors of the module by the last word of their names, for example "qweight" for "PREFIX.qweight".
    """

    prefix: str
    tensors: Mapping[str, Tensor]

    def __contains__(self, word: str) -> bool:
        return word in self.tensors

    def checked_tensor(self, word: str, dtypes: Collection[str], shape: Any = None) -> Tensor:
        """Returns "PREFIX.word". Raises ValueError if it is missing, or has another type or shape. None fits any size."""
        if word not in self.tensors:
            raise ValueError(f"got no tensor {self.prefix}.{word} beside {self.prefix}.{min(self.tensors)}, expected both")
        tensor = self.tensors[word]
        got, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        fits = shape is None or (len(got) == len(shape) and all(b in (None, a) for a, b in zip(got, shape, strict=True)))
        if dtype not in dtypes or not fits:
            sizes = "" if shape is None else f"{['any' if size is None else size for size in shape]} of "
            expected = f"{sizes}type {' or '.join(dtypes)}".replace("'", "")
            raise ValueError(f"tensor {self.prefix}.{word} has shape {list(got)} of type {dtype}, expected {expected}")
        return tensor


def join_modules(
    tensors: dict[str, Tensor],
    packed: str,
    others: Collection[str],
    join: Callable[[Module], GroupedTensor],
    marks: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Returns the tensors, in which the tensors of each quantised module are joined to "PREFIX.weight".

    Args:
      packed: last word of the name of the tensor that every quantised module has, "PREFIX.packed".
      others: last words of the names of other tensors that it may have.
      join: function that joins the tensors of a module.
      marks: words that only quantised modules have; None: `packed` and `others`.

    Raises ValueError for a module without `packed`.
    """
    words = {name: name.rpartition(".") for name in tensors}
    marks = (packed, *others) if marks is None else marks
    modules: dict[str, dict[str, Tensor]] = {prefix: {} for prefix, _, word in words.values() if word in marks}
    joined = {}
    for name, (prefix, _, word) in words.items():
        if prefix in modules and (word == packed or word in others):
            modules[prefix][word] = tensors[name]
        else:
            joined[name] = tensors[name]
    for prefix, parts in modules.items():
        if packed not in parts:
            raise ValueError(f"got no tensor {prefix}.{packed} beside {prefix}.{min(parts)}, expected both")
        joined[f"{prefix}.weight"] = join(Module(prefix, parts))
    return joined


def find_group_size(name: str, scales: Tensor, inputs: int) -> int:
    """Returns the number of inputs with a common scale. Raises ValueError if inputs are not a whole number of groups."""
    groups = scales.get_shape()[-1]
    if min(groups, inputs) < 1 or inputs % groups:
        raise ValueError(f"tensor {name} has {groups} scales for {inputs} inputs, expected whole groups of equal size")
    return inputs // groups


def find_input_order(name: str, groups: Any, group: int) -> np.ndarray | None:
    """Returns the inputs in group order, given the group of each input; None if this is their order in the file.

    Raises ValueError for groups of other sizes than `group`.
    """
    groups, count = np.asarray(groups), len(groups) // group
    is_listed = ((groups >= 0) & (groups < count)).all()
    if not is_listed or not np.array_equal(np.bincount(groups, minlength=count), np.full(count, group)):
        raise ValueError(f"tensor {name} has groups of other sizes than {group} inputs, expected {count} of that size")
    order = groups.argsort(kind="stable").astype(np.int32)
    return None if (np.diff(order) == 1).all() else order


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns the halves of bytes or of little-endian words, low half first."""
    halves = np.ascontiguousarray(packed).view(np.uint8)
    return np.stack([halves & 15, halves >> 4], axis=-1).reshape(*halves.shape[:-1], -1)


def _unpack_bytes(packed: np.ndarray) -> np.ndarray:
    """Returns the bytes of little-endian words, minus 128."""
    return (np.ascontiguousarray(packed).view(np.uint8) ^ 0x80).view(np.int8)


class Packing(NamedTuple):
    """Unsigned numbers in words of 32 bits, the first number lowest. From numbers of 8 bits, 128 is subtracted.

    Attributes:
      code_book, dtype: as in GroupedTensor and ComputedTensor.
      factor: number of numbers per word.
      unpack: function of words [..., n] that returns numbers [..., n * factor].
    """

    code_book: Literal["int4", "int8"]
    dtype: str
    factor: int
    unpack: Callable[[np.ndarray], np.ndarray]


PACKINGS = {4: Packing("int4", "U8", 8, unpack_nibbles), 8: Packing("int8", "I8", 4, _unpack_bytes)}  # by bits


def unpack_inputs(
    shape: tuple[int, ...],
    packing: Packing,
    order: np.ndarray | None,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> ComputedTensor:
    """Returns codes that are packed along the inputs, in group order.

    Args:
      shape: [..., outputs, inputs].
      order: result of `find_input_order`.
      read: function of slices of all axes but the last; returns words [..., outputs, words].
    """

    def unpack(rows: tuple[slice, ...]) -> np.ndarray:
        codes = packing.unpack(read(rows))[..., : shape[-1]]
        return codes if order is None else codes.take(order, axis=-1)

    return ComputedTensor(shape, packing.dtype, unpack)


def unpack_outputs(
    shape: tuple[int, ...], packing: Packing, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> ComputedTensor:
    """Returns numbers that are packed along the outputs.

    Args:
      shape: [..., outputs, columns].
      read: function of slices of the first axes and of the words; returns [..., columns, words].
    """

    def unpack(rows: tuple[slice, ...]) -> np.ndarray:
        first, last, _ = rows[-1].indices(shape[-2])
        begin = first // packing.factor
        numbers = packing.unpack(read((*rows[:-1], slice(begin, -(-last // packing.factor)))))
        return numbers[..., first - begin * packing.factor : last - begin * packing.factor].swapaxes(-1, -2)

    return ComputedTensor(shape, packing.dtype, unpack)


def transpose(tensor: Tensor) -> ComputedTensor:
    """Returns a tensor [groups, outputs] as [outputs, groups]."""
    groups, outputs = tensor.get_shape()
    return ComputedTensor((outputs, groups), tensor.get_dtype(), lambda rows: tensor[(slice(None), *rows)].T)
