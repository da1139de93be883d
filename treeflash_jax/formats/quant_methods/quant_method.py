"""The protocol of methods of quantisation, and what their tensors have in common."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from treeflash_jax.formats.grouped_tensors import GroupedTensor, Part
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor


@dataclass(frozen=True)
class QuantMethod:
    """A way in which files hold quantised weights, by `quant_method` in config.json.

    Attributes:
      join: function of the stated configuration and a folder's tensors by name; returns them with each quantised weight as
        one tensor, by the name of the weight. May raise ValueError.
      check: function of the stated configuration that raises ValueError for what is not implemented.
    """

    join: Callable[[Mapping[str, Any], dict[str, Tensor]], dict[str, Tensor]]
    check: Callable[[Keys], None]


def join_parts(
    tensors: dict[str, Tensor],
    packed: str,
    parts: Collection[str],
    join: Callable[[str, dict[str, Tensor]], GroupedTensor],
    marks: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Returns the tensors with those of each quantised module as one, "MODULE.weight".

    Args:
      packed: last word of the name of the tensor that a quantised module must have, "MODULE.packed".
      parts: last words of the names of its other tensors, which it may lack.
      join: function of the module and its tensors by these words.
      marks: the words that no other module has; None: all.

    Raises ValueError for parts without `packed`.
    """
    words = {name: name.rpartition(".") for name in tensors}
    marks = (packed, *parts) if marks is None else marks
    modules: dict[str, dict[str, Tensor]] = {module: {} for module, _, word in words.values() if word in marks}
    kept = {}
    for name, (module, _, word) in words.items():
        if module in modules and (word == packed or word in parts):
            modules[module][word] = tensors[name]
        else:
            kept[name] = tensors[name]
    for module, held in modules.items():
        if packed not in held:
            raise ValueError(f"got no tensor {module}.{packed} beside {module}.{min(held)}, expected both")
        kept[f"{module}.weight"] = join(module, held)
    return kept


def find(module: str, held: Mapping[str, Tensor], part: str, dtypes: Collection[str], shape: Any = None) -> Tensor:
    """Returns a tensor of a module. Raises ValueError if it is missing, or has another type or shape (None: any size)."""
    if part not in held:
        raise ValueError(f"got no tensor {module}.{part} beside {module}.{min(held)}, expected both")
    got, dtype = tuple(held[part].get_shape()), held[part].get_dtype()
    fits = shape is None or (len(got) == len(shape) and all(b in (None, a) for a, b in zip(got, shape, strict=True)))
    if dtype not in dtypes or not fits:
        sizes = "" if shape is None else f"{['any' if size is None else size for size in shape]} of "
        expected = f"{sizes}type {' or '.join(dtypes)}".replace("'", "")
        raise ValueError(f"tensor {module}.{part} has shape {list(got)} of type {dtype}, expected {expected}")
    return held[part]


def group_size(name: str, scales: Tensor, inputs: int) -> int:
    """Returns the number of inputs with a common scale. Raises ValueError if inputs are no whole groups."""
    groups = scales.get_shape()[-1]
    if min(groups, inputs) < 1 or inputs % groups:
        raise ValueError(f"tensor {name} has {groups} scales for {inputs} inputs, expected whole groups of equal size")
    return inputs // groups


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns the halves of bytes, or of little-endian words, low half first."""
    halves = np.ascontiguousarray(packed).view(np.uint8)
    return np.stack([halves & 15, halves >> 4], axis=-1).reshape(*halves.shape[:-1], -1)


def signed(packed: np.ndarray) -> np.ndarray:
    """Returns the bytes of little-endian words, less 128."""
    return (np.ascontiguousarray(packed).view(np.uint8) ^ 0x80).view(np.int8)


class WholeNumbers(NamedTuple):
    """Numbers without a sign in words of 32 bits, the first one lowest; of 8 bits, 128 is subtracted from all."""

    code_book: Literal["int4", "int8"]
    dtype: str
    each: int
    unpack: Callable[[np.ndarray], np.ndarray]


WORDS = {4: WholeNumbers("int4", "U8", 8, nibbles), 8: WholeNumbers("int8", "I8", 4, signed)}


def packed_outputs(shape: tuple[int, ...], words: WholeNumbers, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Part:
    """Returns numbers that are packed along the outputs.

    Args:
      shape: [..., outputs, columns].
      read: function of slices of the first axes and of the words; returns [..., columns, words].
    """

    def unpacked(rows: tuple[slice, ...]) -> np.ndarray:
        first, last, _ = rows[-1].indices(shape[-2])
        begin = first // words.each
        numbers = words.unpack(read((*rows[:-1], slice(begin, -(-last // words.each)))))
        return numbers[..., first - begin * words.each : last - begin * words.each].swapaxes(-1, -2)

    return Part(shape, words.dtype, unpacked)


def transposed(tensor: Tensor) -> Part:
    """Returns a tensor [groups, outputs] as [outputs, groups]."""
    groups, outputs = tensor.get_shape()
    return Part((outputs, groups), tensor.get_dtype(), lambda rows: tensor[(slice(None), *rows)].T)


def input_order(name: str, groups: Any, group: int) -> np.ndarray | None:
    """Returns the inputs in group order, given the group of each; None if it is their order in the file.

    Raises ValueError for groups of other sizes than `group`.
    """
    groups, count = np.asarray(groups), len(groups) // group
    is_listed = ((groups >= 0) & (groups < count)).all()
    if not is_listed or not np.array_equal(np.bincount(groups, minlength=count), np.full(count, group)):
        raise ValueError(f"tensor {name} has groups of other sizes than {group} inputs, expected {count} of that size")
    order = groups.argsort(kind="stable").astype(np.int32)
    return None if (np.diff(order) == 1).all() else order
