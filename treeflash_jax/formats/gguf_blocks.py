"""Quantised types of GGUF files with codes and scales that can be read separately. Other types can only be expanded.

A row consists of blocks of bytes, each with its codes and scales. "K" types have super-blocks of 256 elements, which have
whole numbers as scales of groups.

Source: ggml-org/llama.cpp, gguf-py, gguf/quants.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import gguf
import numpy as np

from treeflash_jax.formats import gguf_reader
from treeflash_jax.formats.grouped_tensors import ComputedTensor, GroupedTensor
from treeflash_jax.formats.storage import Tensor


def _floats(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view("<f2")


def _nibbles(run: int, data: np.ndarray) -> np.ndarray:
    """Returns the low halves of the bytes of a run, then the high halves, and continues with the next run."""
    runs = data.reshape(*data.shape[:-1], -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=-2).reshape(*data.shape[:-1], -1)


def _five_bits(data: np.ndarray) -> np.ndarray:
    high = (data[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (_nibbles(32, data[..., 32:]) | high.reshape(*data.shape[:-1], -1) << 4).view(np.int8)


def _six_bits(data: np.ndarray) -> np.ndarray:
    high = data[..., 128:].reshape(*data.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return (_nibbles(64, data[..., :128]) | high.reshape(*data.shape[:-1], -1) << 4).view(np.int8) - np.int8(32)


def _k_scales(is_minimum: bool, data: np.ndarray) -> np.ndarray:
    """Returns the 8 scales or minimums of 6 bits each that 12 bytes of a super-block contain."""
    first, low = (data[..., 4:8], data[..., 8:] >> 4) if is_minimum else (data[..., :4], data[..., 8:] & 15)
    return np.concatenate([first & 63, low | first >> 2 & 48], axis=-1)


# Parts of a GroupedTensor (bytes of a block, function that reads them, type of the numbers), and its other fields.
_K = {
    "outer": (slice(0, 2), _floats, "F16"),
    "outer_minimums": (slice(2, 4), _floats, "F16"),
    "scales": (slice(4, 16), partial(_k_scales, False), "U8"),
    "minimums": (slice(4, 16), partial(_k_scales, True), "U8"),
    "group": 32,
}
TYPES: dict[str, dict[str, Any]] = {
    "Q4_0": {
        "scales": (slice(0, 2), _floats, "F16"),
        "codes": (slice(2, 18), partial(_nibbles, 16), "U8"),
        "zeros": 8,
        "group": 32,
        "code_book": "int4",
    },
    "Q4_1": {
        "scales": (slice(0, 2), _floats, "F16"),
        "minimums": (slice(2, 4), lambda data: -_floats(data), "F16"),
        "codes": (slice(4, 20), partial(_nibbles, 16), "U8"),
        "group": 32,
        "code_book": "int4",
    },
    "Q8_0": {
        "scales": (slice(0, 2), _floats, "F16"),
        "codes": (slice(2, 34), lambda data: data.view(np.int8), "I8"),
        "group": 32,
        "code_book": "int8",
    },
    "Q4_K": _K | {"codes": (slice(16, 144), partial(_nibbles, 32), "U8"), "code_book": "int4"},
    "Q5_K": _K | {"codes": (slice(16, 176), _five_bits, "I8"), "code_book": "int8"},
    "Q6_K": {
        "codes": (slice(0, 192), _six_bits, "I8"),
        "scales": (slice(192, 208), lambda data: data.view(np.int8), "I8"),
        "outer": (slice(208, 210), _floats, "F16"),
        "group": 16,
        "code_book": "int8",
    },
}


def grouped(tensor: gguf_reader.GgufTensor) -> Tensor:
    """Returns a matrix or stack of matrices as a GroupedTensor if its type is in TYPES; other tensors as they are."""
    fields, shape = TYPES.get(tensor.type.name), tensor.shape
    if fields is None or len(shape) == 1:
        return tensor
    block, size = gguf.GGML_QUANT_SIZES[tensor.type]
    blocks = tensor.raw.reshape(*shape[:-1], shape[-1] // block, size)

    def read(span: slice, meaning: Callable[[np.ndarray], np.ndarray], rows: tuple[Any, ...]) -> np.ndarray:
        rows = rows if tensor.order is None else (tensor.order[rows[0]], *rows[1:])
        numbers = meaning(blocks[rows][..., span])
        return numbers.reshape(*numbers.shape[:-2], -1)

    def part(span: slice, meaning: Callable[[np.ndarray], np.ndarray], dtype: str) -> ComputedTensor:
        count = meaning(np.zeros((1, 256), np.uint8)[:, span]).shape[-1]
        return ComputedTensor((*shape[:-1], shape[-1] // block * count), dtype, partial(read, span, meaning))

    return GroupedTensor(**{name: part(*x) if isinstance(x, tuple) else x for name, x in fields.items()})
