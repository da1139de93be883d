"""Counts bytes and FLOPs: the one count that memory checks, floors and MFU read.

Bytes are those of one device of the mesh. FLOPs are those of matrix products, two per multiply-add. Activations inside a
part, embedding rows, positions and masks count as nothing. Of a mixture of experts, only experts that some row goes through
are read, and a row is multiplied by its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax import mesh as meshes
from treeflash_jax.devices import Ceilings
from treeflash_jax.params import is_spec
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers import forward as verifiers
from treeflash_jax.verifiers.config import ModelConfig


@dataclass(frozen=True)
class Work:
    """The least a device has to do."""

    bytes: float = 0
    flops: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def over(self, parts: float) -> Work:
        return Work(self.bytes / parts, self.flops / parts)

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.bytes / ceilings.copy_bytes_per_second, self.flops / ceilings.matmul_flops_per_second)


def distinct_experts(experts: int, per_row: int, rows: float) -> float:
    """Experts that so many rows go through together, if each chooses among all of them at random: E (1 - (1 - k / E)^n).

    Rows of one text choose alike, so that real counts are lower: `treeflash bench latency` measures them.
    """
    return experts * (1 - (1 - per_row / experts) ** rows)


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Counts the work of one device for a batch of sequences.

    Attributes:
      context: committed positions of each of them.
      mesh: sizes of one device's share; None: one device.
    """

    dtype: Any
    batch: int = 0
    context: int = 0
    mesh: Any = None

    @property
    def width(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def sequences(self) -> int:
        """Of one device."""
        return self.local(("batch",), (self.batch,))

    def local(self, axes: meshes.Axes, shape: tuple[int, ...]) -> int:
        """Numbers that one device holds of an array."""
        shard = shape if self.mesh is None else meshes.sharding(axes, shape, self.mesh).shard_shape(shape)
        return math.prod(shard)

    def slots(self, array: jax.ShapeDtypeStruct, axes: meshes.Axes) -> int:
        """Bytes that one device holds of an array of a state; 0 for one that does not grow with the positions."""
        return self.local(axes, array.shape) * array.dtype.itemsize if array.ndim > 1 else 0

    def numbers(self, axes: meshes.Axes, shape: tuple[int, ...]) -> Work:
        """An array of every sequence, moved once."""
        return Work(self.width * self.local(("batch", *axes), (self.batch, *shape)))

    def weights(self, specs: Any, tokens: float = 0) -> Work:
        """Weights read once, and their products with so many tokens of every sequence. Norms and scales are no products."""
        sizes = [(spec, self.local(spec.axes, spec.shape)) for spec in jax.tree.leaves(specs, is_leaf=is_spec)]
        products = sum(size for spec, size in sizes if len(spec.shape) > 1 and spec.init != "ones")
        read = sum(size * spec.dtype_in(self.dtype).itemsize for spec, size in sizes)
        return Work(read, 2 * self.sequences * tokens * products)

    def listed(self, width: int, listed: int, tokens: float) -> Work:
        """So many rows of a table, of every sequence its own, and their products with so many tokens of it."""
        size = self.sequences * listed * width
        return Work(self.width * size, 2 * tokens * size)

    def attention(self, config: ModelConfig, tokens: float, seen: float) -> Work:
        """Both products of so many queries a sequence with the positions that each sees, in all layers."""
        heads = self.local(("batch", "heads"), (self.batch, config.num_heads))
        return Work(0, 4 * config.num_layers * heads * config.head_dim * tokens * seen)

    def cached(self, config: ModelConfig, positions: int) -> Work:
        """Keys and values of so many positions a sequence, moved once, in all layers."""
        shape = (self.batch, config.num_kv_heads, 1, config.head_dim)
        return Work(2 * config.num_layers * positions * self.width * self.local(caches.AXES, shape))

    def layers(
        self,
        config: ModelConfig,
        tokens: float,
        seen: float,
        quantize: str | None = None,
        experts: float | None = None,
    ) -> Work:
        """A verifier's pass over so many new tokens a sequence, each seeing so many positions; no vocabulary, no cache.

        Args:
          tokens: of a sequence.
          seen: positions that each of them attends to.
          experts: distinct experts of a layer that the tokens of one device go through, as measured; None: as many as
            routing at random would choose (`distinct_experts`).
        """
        specs = verifiers.specs(config, quantize)
        leaves = jax.tree.leaves([specs["groups"], specs["norm"]], is_leaf=is_spec)
        of_experts = [spec for spec in leaves if spec.axes[0] == "experts"]
        work = self.weights([spec for spec in leaves if spec.axes[0] != "experts"], tokens)
        if of_experts:
            if experts is None:
                experts = distinct_experts(config.num_experts, config.experts_per_token, self.sequences * tokens)
            whole, count = self.weights(of_experts, tokens), config.num_experts
            work += Work(whole.bytes * experts / count, whole.flops * config.experts_per_token / count)
        return work + self.attention(config, tokens, seen)

    def vocabulary(self, config: ModelConfig, tokens: float, quantize: str | None = None) -> Work:
        """Logits of so many tokens a sequence, in one pass over the vocabulary table."""
        return self.weights(verifiers.specs(config, quantize)["embed"], tokens)
