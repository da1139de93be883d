"""GGUF files: metadata, and tensors of all types that the `gguf` package dequantises, read a slice at a time.

The header is parsed here, because the package takes seconds for the lists of a vocabulary. Dequantised values are float32.
They are rounded only to the dtype in which weights are loaded.

Source: ggml-org/ggml, docs/gguf.md.
"""

import math
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from treeflash_jax.core.error_text import LONGEST_VALUE, clipped, quoted
from treeflash_jax.formats.keys import Keys

# Types of metadata values: for numbers, their dtypes; then other types.
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
_UINT32, _FLOAT, _STRING, _ARRAY, _UINT64 = 4, 6, 8, 9, 10
JOINED_BYTES = 2**13


@dataclass(frozen=True)
class GgufTensor:
    """A matrix, stack of matrices or vector of a file; slicing dequantises it to float32.

    Attributes:
      raw: uint8, [out, bytes]; a vector has one row of bytes.
      type: a `gguf.GGMLQuantizationType`.
      shape: [out, in], [experts, out, in], or [elements].
      order: index in the file of each output; None: outputs are in order.
    """

    raw: np.ndarray
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    order: np.ndarray | None = field(default=None, repr=False)

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return "F32"

    @property
    def is_quantized(self) -> bool:
        return self.type.name not in ("F32", "F16", "BF16")

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        if len(self.shape) == 1:
            return _dequantized(self.raw, self.type)[0][index]
        if self.order is not None:
            index = (self.order[index[0]], *index[1:])
        raw = self.raw.reshape(*self.shape[:-1], -1)
        outer = len(self.shape) - 1
        return _dequantized(raw[index[:outer]], self.type)[(..., *index[outer:])]


def _dequantized(raw: np.ndarray, type: gguf.GGMLQuantizationType) -> np.ndarray:
    """Returns the numbers that blocks of bytes contain, [..., elements].

    The package converts 16 rows of bytes at a time, in about ten NumPy calls. Short rows are therefore joined first.
    """
    count = math.prod(raw.shape[:-1])
    block, size = gguf.GGML_QUANT_SIZES[type]
    most = max(1, JOINED_BYTES // raw.shape[-1])
    joined = next(joined for joined in range(most, 0, -1) if count % joined == 0)
    lines = np.ascontiguousarray(raw).reshape(count // joined, joined * raw.shape[-1])
    return gguf.dequantize(lines, type).reshape(*raw.shape[:-1], raw.shape[-1] // size * block)


@dataclass(frozen=True)
class File:
    """Content of a GGUF file.

    Attributes:
      metadata: values by key; arrays are lists.
      tensors: tensors by name; their data is read later.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def keys(self) -> Keys:
        return Keys(self.metadata, str(self.path))


def is_gguf(path: str | Path) -> bool:
    """Returns whether a path names a GGUF file, by its suffix."""
    return Path(path).suffix.lower() == ".gguf" and not os.path.isdir(path)


def read(path: str | Path) -> File:
    """Reads the header of a file.

    Raises FileNotFoundError if there is no file. Raises ValueError if it is no GGUF file, is cut off, has another version
    or byte order, is one of several parts, or has tensors that overlap, are misaligned or have unknown types.
    """
    path = Path(path)
    try:
        state = path.stat()
        return _read(path, state.st_size, state.st_mtime_ns)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found; expected a GGUF file") from None


@lru_cache(maxsize=2)  # verifier and drafter; each is opened for config, tokenizer and weights
def _read(path: Path, size: int, changed: int) -> File:
    try:
        data = np.memmap(path, mode="r")
    except ValueError:
        raise ValueError(f"{path} is empty, expected a GGUF file; download it again") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}), expected a GGUF file") from None
    header = _Header(path, memoryview(data))
    num_tensors, num_values = header.begin()
    metadata = {}
    for _ in range(num_values):
        key = header.string()
        metadata[key] = header.value(header.number(_UINT32))
    if metadata.get("split.count") not in (None, 0, 1):
        raise ValueError(f"{path} is one of {quoted(metadata['split.count'])} parts; join them with gguf-split --merge")
    infos = [header.tensor_info() for _ in range(num_tensors)]
    alignment = Keys(metadata, str(path)).integer("general.alignment", 32)
    start = math.ceil(header.at / alignment) * alignment
    end = 0
    tensors: dict[str, GgufTensor] = {}
    for name, at, shape, kind in sorted(infos, key=lambda info: info[1]):
        if at % alignment or at < end or name in tensors:
            what = f"tensor {clipped(name, LONGEST_VALUE)} at byte {at}"
            expected = f"another name at a multiple of {alignment} that is at least {end}"
            raise ValueError(f"{path} is damaged: got {what}, expected {expected}; download it again")
        tensors[name] = _tensor(path, data, start + at, name, shape, kind)
        end = at + tensors[name].raw.nbytes
    return File(path, metadata, tensors)


class _Header:
    """A cursor in a file's header."""

    def __init__(self, path: Path, data: memoryview):
        self.path = path
        self.data = data
        self.at = 0

    def begin(self) -> tuple[int, int]:
        """Checks magic and version. Returns the number of tensors and the number of metadata values."""
        if bytes(self.data[:4]) != b"GGUF":
            raise ValueError(f"{self.path} is no GGUF file (it begins with {bytes(self.data[:4])!r}); download it again")
        self.at = 4
        version = self.number(_UINT32)
        if version not in (2, 3):
            what = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
            raise ValueError(f"{self.path}: got {what}, expected a little-endian GGUF file of version 2 or 3")
        return self.number(_UINT64), self.number(_UINT64)

    def expect(self, size: int) -> None:
        """Raises ValueError if fewer than `size` bytes are left."""
        if self.at + size > len(self.data):
            raise ValueError(f"{self.path} is cut off or damaged (its header does not end); download it again")

    def take(self, size: int) -> memoryview:
        self.expect(size)
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def number(self, kind: int) -> Any:
        return self.numbers(kind, 1)[0]

    def string(self) -> str:
        size = int.from_bytes(self.take(8), "little")
        return str(self.take(size), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.number(_UINT32), self.number(_UINT64)
            if kind in _NUMBERS:
                return self.numbers(kind, count)
            if kind == _STRING:
                self.expect(8 * count)  # each string begins with its length
                return [self.string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"{self.path} is damaged: got a metadata value of type {kind}; download it again")
        number = self.number(kind)
        return float(str(np.float32(number))) if kind == _FLOAT else number  # 1e-05, not 9.999999747e-06

    def tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        """Returns name, offset, shape (outermost axis first) and type number."""
        name = self.string()
        shape = tuple(self.numbers(_UINT64, self.number(_UINT32)))[::-1]
        kind = self.number(_UINT32)
        return name, self.number(_UINT64), shape, kind


def _tensor(path: Path, data: np.ndarray, start: int, name: str, shape: tuple[int, ...], number: int) -> GgufTensor:
    name = clipped(name, LONGEST_VALUE)
    try:
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        what = f"type {number}, which the gguf package does not dequantise; a newer package may"
        raise ValueError(f"{path}: tensor {name} has {what}") from None
    if not shape or shape[-1] % block:
        raise ValueError(f"{path}: tensor {name} has shape {list(shape)}, expected whole {kind.name} blocks ({block})")
    count, width = math.prod(shape[:-1]), shape[-1] // block * size
    end = start + count * width
    if end > data.size:
        raise ValueError(f"{path} is cut off: tensor {name} ends at byte {end}, the file at {data.size}; download it again")
    return GgufTensor(np.asarray(data[start:end]).reshape(count, width), kind, shape)
