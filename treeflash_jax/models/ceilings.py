"""Measured rates of the default device, and peak rates of known chips."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core import devices
from treeflash_jax.models.backend import products


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device. A copy counts each byte twice: read and written."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float


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
    multiply = devices.jit(functools.partial(products.product, "ri,io->ro"))
    return 2 * side**3 / _seconds(lambda _: multiply(left, right), None, calls)


def peak_flops(count: int, dtype: Any) -> float | None:
    """Returns the peak FLOP/s of `count` devices: the data sheet's in bfloat16 or, on one CPU, measured; None if not known.

    Args:
      dtype: of the measurement on a CPU.
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
