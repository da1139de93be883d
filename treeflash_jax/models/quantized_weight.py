"""`Quantized`, a pytree that replaces a weight: values in 8 or 4 bits with scales, zero points and minimums."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Quantized:
    """A weight in 8 or 4 bits that replaces an array: `shape` is the weight's, `dtype` is the dtype in which it computes.

    An element is (value - zero) * scale * outer - minimum * outer_minimum. All fields but `order` have as many axes as the
    weight, each divided into equal blocks. A block of inputs is a group. No kind uses all fields:

    | kind | values | scales for | dtype of scales | other fields |
    |---|---|---|---|---|
    | scheme int8 | int8 | output channels | `dtype` | |
    | scheme fp8, FP8 files | float8_e4m3fn | blocks, or output channels | `dtype` | |
    | scheme int4 | int4 | outputs and groups | `dtype` | |
    | scheme mxfp4, MXFP4 files | float4_e2m1fn | outputs and groups | float8_e8m0fnu | `compute_dtype` |
    | NVFP4 files | float4_e2m1fn | outputs and groups | float8_e4m3fn | `outer`, `is_divisor`, `compute_dtype` |
    | AWQ, GPTQ, pack-quantized files | int4, int8 | outputs and groups | the file's | `zero`, `order`, `compute_dtype` |
    | GGUF Q4_0, Q8_0 | int4, int8 | outputs and groups | float16 | `compute_dtype` |
    | GGUF Q4_1 | int4 | outputs and groups | float16 | `zero`, `minimum`, `compute_dtype` |
    | GGUF Q4_K, Q5_K | int4, int8 | outputs and groups | uint8 | all but `order` and `is_divisor`; Q5_K no `zero` |
    | GGUF Q6_K | int8 | outputs and groups | int8 | `outer`, `compute_dtype` |

    Attributes:
      values: numbers in the weight's shape. Devices store two four-bit values in a byte.
      scale: scales of blocks, or of the output axes alone. Weights that are quantised here are rounded against the stored
        scale in the compute dtype, so a narrow scale costs no accuracy. Scales of FP8 files are rounded to the compute
        dtype, which changes a weight by no more than rounding the weight itself would, except in float16 if the scale is
        below 2 ** -14 (subnormal). Scales of other files keep their dtype.
      outer: factors of scales, for larger blocks; None: 1.
      zero: zero points; None: 0.
      minimum: numbers that are subtracted; None: 0.
      outer_minimum: factors of minimums; None: 1.
      order: index of the input at each place of the last axis, int32 [inputs]; None: inputs are in order.
      is_divisor: whether scales are divided by `outer`.
      compute_dtype: dtype in which the weight computes; None: the dtype of the scale.
      partition: for each axis of the values, the mesh axis that splits it, or None. It is known only in passes over layers
        on meshes with a model axis (`with_partitions`); otherwise None.
    """

    values: Any
    scale: Any
    outer: Any = None
    zero: Any = None
    minimum: Any = None
    outer_minimum: Any = None
    order: Any = None
    is_divisor: bool = struct.field(pytree_node=False, default=False)
    compute_dtype: jnp.dtype | None = struct.field(pytree_node=False, default=None)
    partition: tuple[str | None, ...] | None = struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.scale.dtype if self.compute_dtype is None else self.compute_dtype

    @property
    def block(self) -> tuple[int, ...] | None:
        """The size of a block along each axis; None for a scale per output channel."""
        if len(self.scale.shape) < len(self.shape):
            return None
        return tuple(size // count for size, count in zip(self.shape, self.scale.shape, strict=True))

    def reshape(self, *shape: int) -> Self:
        """Folds or splits input axes, and folds input axes of blocks. Output axes and the partition stay."""
        folded = self if self.block is None else jax.tree.map(lambda part: part.reshape(part.shape[0], -1), self)
        partition = None
        if self.partition and len(shape) == 2:
            partition = self.partition[0], next(filter(None, self.partition[1:]), None)
        return folded.replace(values=self.values.reshape(*shape), order=self.order, partition=partition)


def is_quantized(x: Any) -> bool:
    """Returns whether this is a Quantized, which tree functions then treat as a leaf."""
    return isinstance(x, Quantized)


def can_join(*weights: Any) -> bool:
    """Returns whether weights can be concatenated: none is quantised, or all are quantised alike with inputs in order."""

    def layout(weight: Any) -> Any:
        if not is_quantized(weight):
            return None
        return weight.block, jax.tree.structure(weight), tuple(part.dtype for part in jax.tree.leaves(weight))

    has_order = any(is_quantized(weight) and weight.order is not None for weight in weights)
    return not has_order and len({layout(weight) for weight in weights}) == 1
