"""Floating-point operations of a training step, two per multiply-add of a matrix product, and the peak rates of devices."""

import math
from typing import Any

import jax

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import is_spec
from treeflash_jax.models import verifier
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


def peak_flops(count: int) -> float | None:
    """Returns the peak FLOP/s of `count` devices in bfloat16, by their data sheet; None if not known, as on CPUs."""
    rates = sharding.device().peak_rates
    return rates[0] * count if rates else None
