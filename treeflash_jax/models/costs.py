"""Counts of bytes and FLOPs, for memory checks, time floors and MFU, and the rates at which devices move and compute them.

Bytes are those of one device of the mesh. FLOPs are those of matrix products, two per multiply-add. Activations inside a
part, embeddings, positions and masks are not counted. Of a mixture of experts, only experts that some token goes through
are read, and a token is multiplied by its own.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from treeflash_jax.core import devices, sharding
from treeflash_jax.core.parameters import is_spec
from treeflash_jax.models import kv_cache, verifier
from treeflash_jax.models.backend import products
from treeflash_jax.models.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device. A copy counts each byte twice: read and written."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float


@dataclass(frozen=True)
class Work:
    """Lower bound of the work of one device."""

    bytes: float = 0
    flops: float = 0

    def __add__(self, other: Self) -> Self:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def over(self, parts: float) -> Self:
        return Work(self.bytes / parts, self.flops / parts)

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.bytes / ceilings.copy_bytes_per_second, self.flops / ceilings.matmul_flops_per_second)


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Returns the expected number of distinct experts if every token chooses at random: E (1 - (1 - k / E)^n).

    Tokens of one text choose alike, so real counts are lower: `treeflash bench latency` measures them.
    """
    return experts * (1 - (1 - per_token / experts) ** tokens)


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Counts the work of one device for a batch of sequences with `context` committed positions each."""

    dtype: Any
    batch: int = 0
    context: int = 0
    mesh: Any = None

    @property
    def width(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def sequences(self) -> int:
        """Number of sequences on one device."""
        return self.local(("batch",), (self.batch,))

    def local(self, axes: sharding.Axes, shape: tuple[int, ...]) -> int:
        """Returns the size of one device's shard of an array."""
        shard = shape if self.mesh is None else sharding.sharding(axes, shape, self.mesh).shard_shape(shape)
        return math.prod(shard)

    def array_bytes(self, array: jax.ShapeDtypeStruct, axes: sharding.Axes) -> int:
        """Returns the bytes of one device's shard of a state array; 0 for a vector, which does not grow."""
        return self.local(axes, array.shape) * array.dtype.itemsize if array.ndim > 1 else 0

    def numbers(self, axes: sharding.Axes, shape: tuple[int, ...]) -> Work:
        """Counts moving an array of every sequence once."""
        return Work(self.width * self.local(("batch", *axes), (self.batch, *shape)))

    def weights(self, specs: Any, tokens: float = 0) -> Work:
        """Counts reading weights once and multiplying them by `tokens` tokens per sequence; norms are not products."""
        sizes = [(spec, self.local(spec.axes, spec.shape)) for spec in jax.tree.leaves(specs, is_leaf=is_spec)]
        multiplied = sum(size for spec, size in sizes if len(spec.shape) > 1 and spec.init != "ones")
        read = sum(size * spec.dtype_in(self.dtype).itemsize for spec, size in sizes)
        return Work(read, 2 * self.sequences * tokens * multiplied)

    def lookups(self, width: int, count: int, tokens: float) -> Work:
        """Counts reading `count` vectors of a table per sequence and multiplying them by `tokens` tokens of it."""
        size = self.sequences * count * width
        return Work(self.width * size, 2 * tokens * size)

    def attention(self, config: ModelConfig, tokens: float, seen: float) -> Work:
        """Counts both products of `tokens` queries per sequence with the `seen` positions of each, in all layers."""
        heads = self.local(("batch", "heads"), (self.batch, config.num_heads))
        return Work(0, 4 * config.num_layers * heads * config.head_dim * tokens * seen)

    def cached(self, config: ModelConfig, positions: int) -> Work:
        """Counts moving keys and values of `positions` positions per sequence once, in all layers."""
        shape = (self.batch, config.num_kv_heads, 1, config.head_dim)
        return Work(2 * config.num_layers * positions * self.width * self.local(kv_cache.AXES, shape))

    def layers(
        self, config: ModelConfig, tokens: float, seen: float, quantize: str | None = None, experts: float | None = None
    ) -> Work:
        """Counts a verifier's pass over new tokens, without vocabulary and cache.

        Args:
          tokens: new tokens per sequence.
          seen: positions that each token attends to.
          experts: measured number of distinct experts per layer and device; None: that of random routing
            (`distinct_experts`).
        """
        specs = verifier.specs(config, quantize)
        leaves = jax.tree.leaves([specs["groups"], specs["norm"]], is_leaf=is_spec)
        expert_specs = [spec for spec in leaves if spec.axes[0] == "experts"]
        work = self.weights([spec for spec in leaves if spec.axes[0] != "experts"], tokens)
        if expert_specs:
            if experts is None:
                experts = distinct_experts(config.num_experts, config.experts_per_token, self.sequences * tokens)
            whole, count = self.weights(expert_specs, tokens), config.num_experts
            work += Work(whole.bytes * experts / count, whole.flops * config.experts_per_token / count)
        return work + self.attention(config, tokens, seen)

    def vocabulary(self, config: ModelConfig, tokens: float, quantize: str | None = None) -> Work:
        """Counts logits of `tokens` tokens per sequence, in one pass over the vocabulary table."""
        return self.weights(verifier.specs(config, quantize)["embed"], tokens)


def measure_ceilings(dtype: Any) -> Ceilings:
    """Measures the first device with a large copy and a large matrix product."""
    size, calls = (2**27, 1) if devices.here().is_cpu else (2**30, 8)
    negate = devices.jit(jnp.negative, donate_argnums=0)  # in place, so that a CPU does not spend the time on fresh pages
    numbers = devices.jit(lambda: jnp.arange(size // 4, dtype=jnp.float32))()
    return Ceilings(2 * size / _seconds(negate, numbers, calls), measure_flops(dtype))


def measure_flops(dtype: Any) -> float:
    """Measures FLOP/s of a large matrix product on the first device, in the form that the model's products have there.

    Operands are random, since zeros multiply faster, and the precision is JAX's ambient one.
    """
    side, calls = (1024, 1) if devices.here().is_cpu else (8192, 8)
    left, right = (jax.random.normal(jax.random.key(i), (side, side), dtype) for i in range(2))
    multiply = devices.jit(partial(products.product, "ri,io->ro"))
    return 2 * side**3 / _seconds(lambda _: multiply(left, right), None, calls)


def peak_flops(count: int, dtype: Any) -> float | None:
    """Returns the peak FLOP/s of `count` devices: the data sheet's in bfloat16 or, on one CPU, measured; None if not known.

    `dtype` is that of the measurement on a CPU.
    """
    device = devices.here()
    if device.peak_rates:
        return device.peak_rates[0] * count
    return measure_flops(dtype) if device.is_cpu and jax.process_count() == 1 else None  # its devices share the cores


def _seconds(step: Callable[[Any], Any], carry: Any, calls: int) -> float:
    """Returns the median seconds per step over 8 samples of `calls` consecutive steps; the first sample is warm-up."""
    seconds = []
    for _ in range(8):
        since = time.perf_counter()
        for _ in range(calls):
            carry = step(carry)
        jax.block_until_ready(carry)
        seconds.append((time.perf_counter() - since) / calls)
    return statistics.median(seconds[1:])
