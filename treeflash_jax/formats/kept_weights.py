"""Weights of quantised files, kept as they are stored. Each weight becomes a `Quantized`.

Scales of groups or blocks are repeated if a shard of a mesh would otherwise hold part of a group. Codes of four bits become
int4, numbers around zero: products of these with scales are rounded as finely as the weight.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.core.parameters import Entry, Spec, is_spec
from treeflash_jax.formats import storage
from treeflash_jax.formats.grouped_tensors import ComputedTensor, GroupedTensor
from treeflash_jax.formats.scaled_tensors import BlockScales, ScaledTensor
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.models import quantized
from treeflash_jax.models.quantized_weight import Quantized

_DTYPES = {
    "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F4": ml_dtypes.float4_e2m1fn, "I4": ml_dtypes.int4, "I8": np.int8,
    "U8": np.uint8, "I16": np.int16, "I32": np.int32,
}  # fmt: skip
_FACTORS = {"scale": "scales", "outer": "outer", "minimum": "minimums", "outer_minimum": "outer_minimums"}
_CENTER = 8  # code of four bits that becomes 0


def find_scheme(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns the scheme (`quantized.SCHEMES`) for keeping quantised tensors as they are; None: nothing is quantised."""
    grouped = [tensor for tensor in tensors.values() if isinstance(tensor, GroupedTensor)]
    if grouped:
        is_mxfp4 = all(tensor.scales.get_dtype() == "F8_E8M0" for tensor in grouped)
        return "mxfp4" if is_mxfp4 else "int4"
    return "fp8" if any(isinstance(tensor, ScaledTensor) for tensor in tensors.values()) else None


def can_keep(scheme: str | None, stored: str | None) -> bool:
    """Returns whether a requested scheme keeps tensors of the scheme `stored` (`find_scheme`). "int4" keeps all but FP8."""
    return scheme is not None and (scheme == stored or (scheme == "int4" and stored == "mxfp4"))


def load(where: Path, tensors: Mapping[str, Tensor], specs: Any, entries: Any, dtype: DTypeLike, mesh: Mesh | None) -> Any:
    """Reads a tree of weights like `storage.load`, but keeps quantised weights as they are stored.

    Weights that are never quantised become arrays. So do weights whose tensors have several layouts.
    """
    kept, located, parts = divide(tensors, specs, entries, dtype, mesh)
    weights = storage.load(where, parts, kept, located, dtype, mesh)
    return jax.tree.map(_drop_inputs, specs, weights, is_leaf=is_spec)


def divide(
    tensors: Mapping[str, Tensor], specs: Any, entries: Any, dtype: DTypeLike, mesh: Mesh | None
) -> tuple[Any, Any, dict[str, Tensor]]:
    """Returns specs and entries of weights as they are kept, and all tensors, including parts of kept weights."""
    stored_parts = dict(tensors)

    def split(spec: Spec, entry: Entry) -> tuple[Any, Any]:
        names = entry.names(spec)
        stored = [_parts(spec, tensors.get(name), mesh, dtype) for name in names]
        layouts = {weight for weight, _ in stored}
        weight = layouts.pop()
        if weight is None or layouts:
            return spec, entry
        located = {field: replace(entry, name=f"{entry.name}.{field}") for field in stored[0][1]} | {"values": entry}
        if "order" in located:
            located["order"] = Entry(f"{entry.name}.order")
        for name, (_, parts) in zip(names, stored, strict=True):
            stored_parts[name] = parts.pop("values")
            for field, part in parts.items():
                stored_parts[f"{name}.{field}"] = _fitted(part, located[field].disk_shape(getattr(weight, field)))
        return weight, weight.replace(**located)

    pairs = jax.tree.map(split, specs, entries, is_leaf=is_spec)

    def is_pair(x: Any) -> bool:
        return isinstance(x, tuple)

    kept = jax.tree.map(lambda pair: pair[0], pairs, is_leaf=is_pair)
    located = jax.tree.map(lambda pair: pair[1], pairs, is_leaf=is_pair)
    return kept, located, stored_parts


def _parts(
    spec: Spec, tensor: Tensor | None, mesh: Mesh | None, dtype: DTypeLike
) -> tuple[Quantized | None, dict[str, Any]]:
    """Returns the specs of a weight's parts and the tensors that hold them; None and {} if the weight must be expanded."""
    if not spec.inputs or not spec.can_quantize:
        return None, {}
    if isinstance(tensor, ScaledTensor) and quantized.applies("fp8", spec):
        scale = Spec(_count(spec, mesh, tensor.get_shape()[-1], *tensor.block[-2:]), spec.axes, "ones")
        values = replace(spec, inputs=(), dtype=quantized.DTYPES["fp8"])
        return Quantized(values, scale), {"values": tensor.values, "scale": tensor}
    if not isinstance(tensor, GroupedTensor):
        return None, {}
    is_permuted = tensor.order is not None
    if is_permuted and ("vocab" in spec.axes or spec.inputs[-1] != len(spec.shape) - 1):
        return None, {}
    factors = {field: getattr(tensor, name) for field, name in _FACTORS.items()}
    parts = {field: part for field, part in factors.items() if part is not None} | _numbers(tensor)
    inputs = tensor.get_shape()[-1]
    specs = {}
    for field, part in parts.items():
        counts = spec.shape if field == "values" else _count(spec, mesh, inputs, 1, inputs // part.get_shape()[-1])
        specs[field] = Spec(counts, spec.axes, "ones", dtype=jnp.dtype(_DTYPES[part.get_dtype()]))
    if is_permuted:
        parts["order"] = ComputedTensor((inputs,), "I32", lambda _: tensor.order)
        specs["order"] = Spec((inputs,), (None,), dtype=jnp.dtype(jnp.int32))
    return Quantized(**specs, is_divisor=tensor.is_divisor, compute_dtype=jnp.dtype(dtype)), parts


def _count(spec: Spec, mesh: Mesh | None, inputs: int, *block: int) -> tuple[int, ...]:
    """Returns the number of blocks along each axis of a weight. If `block` has all inputs, each output has one block."""
    if block[1] < inputs:
        return quantized.count_blocks(spec, mesh, block)
    return tuple(1 if axis in spec.inputs else size for axis, size in enumerate(spec.shape))


def _numbers(tensor: GroupedTensor) -> dict[str, Tensor]:
    """Returns the tensors of values and zero points for codes."""
    codes, zeros = tensor.codes, tensor.zeros
    if tensor.code_book == "e2m1":
        return {"values": ComputedTensor(codes.get_shape(), "F4", lambda rows: codes[rows].view(ml_dtypes.float4_e2m1fn))}
    if tensor.code_book == "int8":
        values, center = codes, 0
    else:
        values, center = _less(codes, _CENTER, "I4"), _CENTER
    if not isinstance(zeros, int):
        return {"values": values, "zero": _less(zeros, center, "I8") if center else zeros}
    if zeros == center:
        return {"values": values}
    zero = np.broadcast_to(np.int8(zeros - center), (*codes.get_shape()[:-1], 1))
    return {"values": values, "zero": ComputedTensor(zero.shape, "I8", lambda rows: zero[rows])}


def _less(part: Tensor, center: int, dtype: str) -> ComputedTensor:
    """Returns whole numbers minus `center`."""
    target = _DTYPES[dtype]
    return ComputedTensor(part.get_shape(), dtype, lambda rows: (part[rows].astype(np.int16) - center).astype(target))


def _fitted(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns scales as a tensor of this shape. Scales are repeated if the shape has smaller blocks."""
    if isinstance(part, ScaledTensor):
        sizes = zip(part.get_shape(), shape, strict=True)
        return BlockScales(part, tuple(size // count for size, count in sizes))
    times = shape[-1] // part.get_shape()[-1] if len(shape) > 1 else 1
    return part if times == 1 else ComputedTensor(shape, part.get_dtype(), lambda rows: part[rows].repeat(times, axis=-1))


def _drop_inputs(spec: Spec, weight: Any) -> Any:
    """Removes the input axes from the scale of a weight that has a scale per channel and nothing else."""
    if not isinstance(weight, Quantized) or len(jax.tree.leaves(weight)) > 2:
        return weight
    if any(weight.scale.shape[axis] > 1 for axis in spec.inputs):
        return weight
    return weight.replace(scale=jnp.squeeze(weight.scale, spec.inputs))
