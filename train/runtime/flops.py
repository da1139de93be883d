"""Floating-point operations of a training step, two per multiply-add of a matrix product, and the peak rates of devices."""

import math
import statistics
import time
from functools import partial
from typing import Any

import jax

from treeflash_jax.core import devices
from treeflash_jax.core.parameters import is_spec
from treeflash_jax.models import verifier
from treeflash_jax.models.backend import products
from treeflash_jax.models.config import ModelConfig


def product_flops(specs: Any, tokens: float) -> float:
    """Counts multiplying `tokens` tokens by every weight that products read (`Spec.inputs`)."""
    return 2 * tokens * sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec) if spec.inputs)


def attention_flops(config: ModelConfig, tokens: float, seen: float) -> float:
    """Counts both products of `tokens` queries with the `seen` positions of each, in all layers."""
    return 4 * config.num_layers * config.num_heads * config.head_dim * tokens * seen


def layer_flops(config: ModelConfig, tokens: float, seen: float) -> float:
    """Counts a pass of `tokens` tokens, each of which sees `seen` positions, through all layers; of experts, the chosen."""
    specs = jax.tree.leaves(verifier.specs(config)["groups"], is_leaf=is_spec)
    experts = [spec for spec in specs if spec.axes[0] == "experts"]
    flops = product_flops([spec for spec in specs if spec.axes[0] != "experts"], tokens)
    if experts:
        flops += product_flops(experts, tokens) * config.experts_per_token / config.num_experts
    return flops + attention_flops(config, tokens, seen)


def vocabulary_flops(config: ModelConfig, tokens: float) -> float:
    """Counts the logits of `tokens` tokens."""
    return 2 * tokens * config.vocab_size * config.hidden_size


def measure_flops(dtype: Any) -> float:
    """Measures FLOP/s of a large matrix product on the first device, in the form that the model's products have there.

    Operands are random, since zeros multiply faster, and the precision is JAX's ambient one.
    """
    side, calls = (1024, 1) if devices.here().is_cpu else (8192, 8)
    left, right = (jax.random.normal(jax.random.key(i), (side, side), dtype) for i in range(2))
    multiply, seconds = devices.jit(partial(products.product, "ri,io->ro")), []
    for _ in range(8):
        since = time.perf_counter()
        jax.block_until_ready([multiply(left, right) for _ in range(calls)])
        seconds.append((time.perf_counter() - since) / calls)
    return 2 * side**3 / statistics.median(seconds[1:])  # the first sample compiles


def peak_flops(count: int, dtype: Any) -> float | None:
    """Returns the peak FLOP/s of `count` devices: the data sheet's in bfloat16 or, on one CPU, measured; None if not known.

    `dtype` is that of the measurement on a CPU.
    """
    device = devices.here()
    if device.peak_rates:
        return device.peak_rates[0] * count
    return measure_flops(dtype) if device.is_cpu and jax.process_count() == 1 else None  # its devices share the cores
