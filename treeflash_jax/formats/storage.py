"""Trees of weights: read slice by slice from the tensors of any file format into their shardings, and written back.

An `Entry` locates a weight on disk. Trees of specs, entries and weights have the same structure. Output is safetensors.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.core import files, sharding
from treeflash_jax.core.dtypes import bits
from treeflash_jax.core.error_text import LONGEST_VALUE, clipped
from treeflash_jax.core.parameters import Entry, Params, Spec, inside, is_spec

MARK = {"written_by": "treeflash_jax"}  # metadata of files that `save` writes
METADATA = {"format": "pt", **MARK}
_HEADER_BYTES = 100_000_000  # limit of the safetensors format
CHECKED_AT_ONCE = 2**17
READ_AT_ONCE = 2**20  # numbers to read before converting: new memory costs more time than reading
FLOAT8 = "F8_E4M3"
_FLOATS = ("F64", "F32", "F16", "BF16")
_NARROW_FLOATS = (FLOAT8, "F8_E8M0", "F4")
STORED_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int8": "I8"}
WHOLE = ("I64", "I32", "U32", "I16", "U16", "I8", "U8", "I4")


class Tensor(Protocol):
    """A tensor in a file, which is read in slices of its first two axes; if it is a vector, in slices of its elements."""

    def get_shape(self) -> Sequence[int]: ...

    def get_dtype(self) -> str:
        """Returns the name of the dtype of slices in safetensors files."""

    def __getitem__(self, index: Any) -> np.ndarray: ...


def load(
    where: Path,
    tensors: Mapping[str, Tensor],
    specs: Any,
    entries: Any,
    dtype: DTypeLike,
    mesh: Mesh | None,
    finish: Callable[[jax.Array, Spec], Any] = lambda weight, _: weight,
) -> Any:
    """Reads a tree of weights. Each host reads only the slices of its devices.

    Args:
      dtype: dtype of weights whose spec has none; bfloat16 files load bit for bit into bfloat16.
      mesh: mesh to shard the weights over; None: the default device.
      finish: function applied to each weight as soon as it is read.

    Raises ValueError for tensors that are missing, unknown, of wrong shape or type, or contain NaN or infinity.
    """
    _check(where, tensors, specs, entries, dtype)

    def leaf(spec: Spec, entry: Entry) -> Any:
        read = partial(_read, where, tensors, spec, entry, spec.dtype_in(dtype))
        if mesh is None:
            return finish(jax.device_put(read((slice(None),) * len(spec.shape)), may_alias=True), spec)
        place = sharding.sharding(spec.axes, spec.shape, mesh)
        return finish(jax.make_array_from_callback(spec.shape, place, read), spec)

    return jax.tree.map(leaf, specs, entries, is_leaf=is_spec)


def _read(
    where: Path, tensors: Mapping[str, Tensor], spec: Spec, entry: Entry, dtype: DTypeLike, index: tuple[slice, ...]
) -> np.ndarray:
    """Reads and checks one slice of a weight, in pieces that save memory: one expert, or READ_AT_ONCE numbers."""
    spans = [range(size)[at] for size, at in zip(spec.shape, index, strict=True)]
    part = _empty([len(span) for span in spans], dtype)
    if entry.is_apart or entry.is_stacked:
        for number, i in enumerate(spans[0]):
            expert, plane = entry.at(i), i if entry.is_stacked else None
            part[number] = read_slice(tensors[expert.name], inside(spec), expert, index[1:], plane)
            _check_finite(where, expert.name, part[number])
        return part
    axis = entry.order[0]  # the weight's axis that is outermost on disk
    step = max(1, READ_AT_ONCE * len(spans[axis]) // max(1, part.size))
    for begin in range(0, len(spans[axis]), step):
        span = spans[axis][begin : begin + step]
        piece = (*index[:axis], slice(span.start, span.stop), *index[axis + 1 :])
        target = (*(slice(None),) * axis, slice(begin, begin + len(span)))
        part[target] = read_slice(tensors[entry.name], spec, entry, piece)
    _check_finite(where, entry.name, part)
    return part


def _check_finite(where: Path, name: str, part: np.ndarray) -> None:
    may_be_infinite = not jnp.issubdtype(part.dtype, jnp.integer) and bits(part.dtype) > 4
    if may_be_infinite and not all_finite(part):
        raise ValueError(f"{where}: tensor {name} holds NaN or infinity in {part.dtype}, expected numbers")


def _check(where: Path, tensors: Mapping[str, Tensor], specs: Any, entries: Any, dtype: DTypeLike) -> None:
    """Raises ValueError if tensors are missing or unknown, or have another shape or type than `load` expects."""
    expected: dict[str, tuple[tuple[int, ...], jnp.dtype]] = {}
    for spec, entry in pair_entries(specs, entries):
        for name in entry.names(spec):
            expected[name] = entry.disk_shape(spec), spec.dtype_in(dtype)
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{where}: tensors missing: {len(missing)}, the first is {missing[0]}")
    unknown = sorted(name for name in tensors.keys() - expected.keys() if not name.endswith("rotary_emb.inv_freq"))
    unknown = [name for name in unknown if not name.endswith(".bias") or np.any(tensors[name][...])]  # GPTQ adds zeros
    if unknown:
        raise ValueError(f"{where}: unknown tensors: {len(unknown)}, the first is {clipped(unknown[0], LONGEST_VALUE)}")
    for name, (shape, kind) in expected.items():
        tensor = tensors[name]
        if tuple(tensor.get_shape()) != shape:
            raise ValueError(f"{where}: tensor {name} has shape {list(tensor.get_shape())}, expected {list(shape)}")
        if jnp.issubdtype(kind, jnp.integer):
            kinds = WHOLE
        else:
            kinds = _NARROW_FLOATS if kind.itemsize == 1 else _FLOATS
        if tensor.get_dtype() not in kinds:
            raise ValueError(f"{where}: tensor {name} has type {tensor.get_dtype()}, expected one of {kinds}")


def _empty(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Returns an array that begins at a multiple of 64 bytes. On a CPU, JAX shares such an array instead of copying it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


def all_finite(values: np.ndarray) -> bool:
    """Returns whether an array of any float type contains neither NaN nor infinity.

    NumPy has no fast `isfinite` for bfloat16. This compares exponent bits, which are all set if a number is not finite, in
    pieces that fit into a processor's cache. float8_e4m3fn has no infinity; its NaN has all bits set, and infinity is cast
    to it.
    """
    patterns = values.ravel(order="K").view(f"u{values.dtype.itemsize}")
    exponent = np.asarray(np.inf, values.dtype).view(patterns.dtype)[()]
    return not any(
        (patterns[begin : begin + CHECKED_AT_ONCE] & exponent).max() == exponent
        for begin in range(0, patterns.size, CHECKED_AT_ONCE)
    )


def read_slice(source: Tensor, spec: Spec, entry: Entry, index: tuple[slice, ...], plane: int | None = None) -> np.ndarray:
    """Reads one slice of a weight. From the file, it reads a range of the outermost axis and all of the other axes.

    Args:
      plane: index along the tensor's first axis at which the weight is; None: the tensor has no additional axis.
    """
    view, part = entry.view(spec), entry.part[0]
    outermost, *inner = (slice(*index[axis].indices(spec.shape[axis])[:2]) for axis in entry.order)
    height, width = math.prod(view[: entry.row_axes]), math.prod(view[entry.row_axes :])
    above, left = (part * height, 0) if entry.part_axis == 0 else (0, part * width)
    below = height // view[0]  # rows of the tensor for each index of the outermost axis
    at = [slice(above + outermost.start * below, above + outermost.stop * below)]
    if entry.has_middle:
        at.append(slice(0, 1))
    if entry.row_axes < len(view):
        at.append(slice(left, left + width))
    block = source[tuple(at)] if plane is None else source[(slice(plane, plane + 1), *at)][0]
    return block.reshape(-1, *view[1:])[(slice(None), *inner)].transpose(np.argsort(entry.order))


def are_equal(left: Tensor, right: Tensor) -> bool:
    """Returns whether two matrices have equal numbers. Reads a few rows at a time."""
    shape = tuple(left.get_shape())
    if shape != tuple(right.get_shape()):
        return False
    step = max(1, READ_AT_ONCE // shape[-1])
    spans = (slice(i, min(i + step, shape[0])) for i in range(0, shape[0], step))
    return all(np.array_equal(left[span], right[span]) for span in spans)


def pair_entries(specs: Any, entries: Any) -> list[tuple[Spec, Entry]]:
    """Returns each spec with its entry.

    Raises ValueError for a weight without an entry, and for an entry whose `order` does not match the weight's axes.
    """
    flat_entries = dict(jax.tree_util.tree_leaves_with_path(entries, is_leaf=lambda x: isinstance(x, Entry)))
    pairs = []
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        entry = flat_entries.get(path)
        if entry is None:
            raise ValueError(f"{name}: got no Entry, expected one that locates this weight in files")
        axes = len(spec.shape) - (entry.is_apart or entry.is_stacked)
        if sorted(entry.order) != list(range(axes)):
            raise ValueError(
                f"{name}: got an Entry with order {entry.order} for a Spec of shape {spec.shape}, expected the order of "
                f"{axes} axes on disk, such as {tuple(reversed(range(axes)))}"
            )
        pairs.append((spec, entry))
    return pairs


def save(path: Path, specs: Any, entries: Any, params: Params, dtype: DTypeLike) -> None:
    """Writes weights to a safetensors file, in `dtype` unless their spec has a dtype, with one tensor at a time in memory.

    The library's writer needs all tensors at once, and orders metadata at random. Raises ValueError for a wrong shape.
    """
    tensors: dict[str, list[_Part]] = {}
    for (spec, entry), leaf in zip(pair_entries(specs, entries), jax.tree.leaves(params), strict=True):
        if leaf.shape != spec.shape:
            raise ValueError(f"{entry.name}: got shape {leaf.shape}, expected {spec.shape}")
        for i in range(spec.shape[0]) if entry.is_apart else (None,):
            part = _Part(entry, spec, leaf) if i is None else _Part(entry.at(i), inside(spec), leaf, i)
            tensors.setdefault(part.entry.name, []).append(part)
    kinds = {name: parts[0].spec.dtype_in(dtype) for name, parts in tensors.items()}
    names = sorted(tensors, key=lambda name: (-kinds[name].itemsize, name))  # largest items first, which aligns all numbers
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name in names:
        shape = tensors[name][0].entry.disk_shape(tensors[name][0].spec)
        begin = end
        end += math.prod(shape) * kinds[name].itemsize
        header[name] = {"dtype": STORED_DTYPES[kinds[name].name], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)

    def content() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            parts = sorted(tensors[name], key=lambda part: part.entry.part)
            blocks = [part.block(kinds[name]) for part in parts]
            joined = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=parts[0].entry.part_axis)
            yield np.ascontiguousarray(joined).view(np.uint8).data

    files.write(path, content())


class _Part(NamedTuple):
    """A weight, or one index of its first axis, as a tensor on disk or as a block of a tensor."""

    entry: Entry
    spec: Spec
    leaf: Any
    index: int | None = None

    def block(self, dtype: DTypeLike) -> np.ndarray:
        weight = self.leaf if self.index is None else self.leaf[self.index]
        weight = np.asarray(weight).astype(dtype).transpose(self.entry.order)
        if self.entry.row_axes == weight.ndim:
            return weight.ravel()
        return weight.reshape(math.prod(weight.shape[: self.entry.row_axes]), -1)


def is_own(path: Any) -> bool:
    """Returns whether a file was written by `save`; `path` may be any epath.Path."""
    if not path.exists():
        return False
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _HEADER_BYTES)))
        return MARK.items() <= header["__metadata__"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
