"""Trees of weights, read slice by slice from the tensors of any file format into their shardings, and written back.

An `Entry` says where a weight lies on disk; specs, entries and weights are trees of one shape. No names are known here, and
nothing needs torch. `formats` opens files; what is written is safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save as serialize

from treeflash_jax import files
from treeflash_jax import mesh as meshes
from treeflash_jax.params import Entry, Spec, is_spec

MARK = {"written_by": "treeflash_jax"}  # in the metadata of files that `save` writes
_HEADER_BYTES = 100_000_000  # the format's own limit
CHECKED_AT_ONCE = 2**17
_FLOATS = ("F64", "F32", "F16", "BF16")
WHOLE = ("I64", "I32", "U32", "I16", "U16", "I8", "U8")


class Tensor(Protocol):
    """A tensor of a file, read in slices of its rows and columns (or of its elements, where it is a vector)."""

    def get_shape(self) -> Sequence[int]: ...

    def get_dtype(self) -> str:
        """The type of what is read, as safetensors files call it."""

    def __getitem__(self, index: Any) -> np.ndarray: ...


def load(
    where: Path,
    tensors: Mapping[str, Tensor],
    specs: Any,
    entries: Any,
    dtype: Any,
    mesh,
    spare: tuple[str, ...] = (),
    finish: Callable[[jax.Array, Spec], Any] = lambda weight, _: weight,
) -> Any:
    """Reads a tree of weights, each device's host its own slices only.

    Args:
      where: the file or folder they come from, for messages.
      tensors: of an open file or folder.
      specs: tree of Spec.
      entries: tree of Entry.
      dtype: of the weights whose spec has none of its own; bfloat16 files load bit for bit into bfloat16.
      mesh: where they go; None: the default device.
      spare: names that may be in the files though no weight wants them.
      finish: what takes a weight's place, as soon as it is read.

    Raises:
      ValueError: tensors missing, unknown, of the wrong shape or type, or with NaN or infinity in them.
    """
    wanted = {entry.name: (entry.disk_shape(spec), spec.dtype_in(dtype)) for spec, entry in _pairs(specs, entries)}
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise ValueError(f"{where}: {len(missing)} tensors missing, the first is {missing[0]}")
    unknown = sorted(n for n in set(tensors) - set(wanted) - set(spare) if not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise ValueError(f"{where}: {len(unknown)} unknown tensors, the first is {unknown[0]}")
    for name, (shape, kind) in wanted.items():
        found = tensors[name]
        if tuple(found.get_shape()) != shape:
            raise ValueError(f"{where}: tensor {name} has shape {list(found.get_shape())}, expected {list(shape)}")
        kinds = WHOLE if jnp.issubdtype(kind, jnp.integer) else _FLOATS
        if found.get_dtype() not in kinds:
            raise ValueError(f"{where}: tensor {name} has type {found.get_dtype()}, expected one of {kinds}")

    def leaf(spec: Spec, entry: Entry) -> Any:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            kind = spec.dtype_in(dtype)
            part = read_slice(tensors[entry.name], spec, entry, index).astype(kind)
            if not jnp.issubdtype(kind, jnp.integer) and not all_finite(part):
                raise ValueError(f"{where}: tensor {entry.name} holds NaN or infinity in {kind}, expected numbers")
            return part

        if mesh is None:
            return finish(jnp.asarray(read((slice(None),) * len(spec.shape))), spec)
        place = meshes.sharding(spec.axes, spec.shape, mesh)
        return finish(jax.make_array_from_callback(spec.shape, place, read), spec)

    return jax.tree.map(leaf, specs, entries, is_leaf=is_spec)


def all_finite(values: np.ndarray) -> bool:
    """Whether an array of any float type holds no NaN and no infinity.

    Bits are compared, a piece that fits into a processor's cache at a time: NumPy has no fast `isfinite` for bfloat16. A
    number is not finite where all bits of its exponent are set.
    """
    bits = values.ravel(order="K").view(f"u{values.dtype.itemsize}")
    exponent = np.asarray(np.inf, values.dtype).view(bits.dtype)[()]
    return not any(
        (bits[begin : begin + CHECKED_AT_ONCE] & exponent).max() == exponent
        for begin in range(0, bits.size, CHECKED_AT_ONCE)
    )


def read_slice(source: Tensor, spec: Spec, entry: Entry, index: tuple[slice, ...]) -> np.ndarray:
    """One slice of a weight, reading only the tensor rows it needs."""
    view = entry.view(spec)
    spans = [slice(*index[axis].indices(spec.shape[axis])[:2]) for axis in entry.order]
    inner = view[entry.rows :]
    width = math.prod(inner)
    first = entry.part[0] * width
    blocks = []
    for rows in _row_ranges(view[: entry.rows], spans[: entry.rows]):
        block = source[rows.start : rows.stop, first : first + width] if inner else source[rows.start : rows.stop]
        blocks.append(block.reshape(-1, *inner)[(slice(None), *spans[entry.rows :])])
    rows_shape = [span.stop - span.start for span in spans[: entry.rows]]
    joined = np.concatenate(blocks).reshape(*rows_shape, *blocks[0].shape[1:])
    return joined.transpose(np.argsort(entry.order))


def _row_ranges(view: tuple[int, ...], spans: list[slice]) -> Iterator[slice]:
    """Contiguous ranges of the flattened row axes that cover `spans`."""
    below = math.prod(view[1:])
    if all(span == slice(0, size) for span, size in zip(spans[1:], view[1:], strict=True)):
        yield slice(spans[0].start * below, spans[0].stop * below)
        return
    for i in range(spans[0].start, spans[0].stop):
        for rows in _row_ranges(view[1:], spans[1:]):
            yield slice(i * below + rows.start, i * below + rows.stop)


def _pairs(specs: Any, entries: Any) -> Iterator[tuple[Spec, Entry]]:
    flat_entries = jax.tree.leaves(entries, is_leaf=lambda x: isinstance(x, Entry))
    return zip(jax.tree.leaves(specs, is_leaf=is_spec), flat_entries, strict=True)


def save(path: Path, specs: Any, entries: Any, params: Any, dtype: Any) -> None:
    """Writes a tree of weights to one safetensors file, converted to `dtype` where their specs have none of their own.

    Raises:
      ValueError: a weight whose shape is not its spec's.
    """
    parts: dict[str, list[tuple[int, np.ndarray]]] = {}
    leaves = jax.tree.leaves(params)
    for (spec, entry), leaf in zip(_pairs(specs, entries), leaves, strict=True):
        if leaf.shape != spec.shape:
            raise ValueError(f"{entry.name}: got shape {leaf.shape}, expected {spec.shape}")
        rows, *columns = entry.disk_shape(spec)
        width = [columns[0] // entry.part[1]] if columns else []
        block = np.asarray(leaf).astype(spec.dtype_in(dtype)).transpose(entry.order).reshape(rows, *width)
        parts.setdefault(entry.name, []).append((entry.part[0], block))
    tensors = {
        name: np.ascontiguousarray(np.concatenate([block for _, block in sorted(blocks, key=lambda b: b[0])], axis=-1))
        for name, blocks in parts.items()
    }
    files.write(path, serialize(tensors, metadata={"format": "pt", **MARK}))  # save_file's are for their owner alone


def is_own(path: Any) -> bool:
    """Whether a file was written by `save`.

    Args:
      path: with `exists` and `open`, here or behind a URL.
    """
    if not path.exists():
        return False
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _HEADER_BYTES)))
        return MARK.items() <= header["__metadata__"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
