"""From settings to the plan of a compiled program: sizes in, plan out. Nothing here reads a weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treeflash_jax import devices
from treeflash_jax.config import DrafterConfig, ModelConfig
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.drafters.block.heads import DraftSettings
from treeflash_jax.settings import GenerateConfig, drafting, method_of
from treeflash_jax.trees.builders import SAMPLED, TreeShape


def plan_of(
    config: GenerateConfig,
    verifier: ModelConfig,
    drafter: DrafterConfig | None,
    dtype: Any,
    device: devices.Device | None = None,
) -> DecodePlan:
    """What `generate` compiles for these settings.

    Args:
      config: checked settings; `nodes` "auto" counts as None, since its buckets come from a calibration.
      verifier: sizes of the verifier.
      drafter: sizes of the drafter; None decodes one token at a time.
      dtype: of weights, caches and activations.
      device: that the program is for; None: the devices at hand.
    """
    device = device or devices.here()
    shared: dict[str, Any] = {
        "verifier": verifier,
        "log_probs": config.log_probs,
        "expected_lengths": config.expected_lengths,
        "attention": config.attention or device.attention(dtype),
        "prefill_chunk": device.prefill_chunk,
    }
    method = method_of(config, drafter)
    if method == "ar":
        return DecodePlan(method="ar", num_nodes=1, **shared)
    block = config.block_size or drafter.block_size
    nodes = None if config.nodes == "auto" else config.nodes
    builder, rule, shape = drafting(config)
    return DecodePlan(
        drafter=replace(drafter, block_size=block),
        method=method,
        head=config.head or drafter.head,
        num_nodes=(nodes or drafter.num_nodes) if method == "tree" else min(nodes or block, block),
        draft=DraftSettings(candidates=config.candidates, children=config.children, shortlist=config.shortlist),
        builder=builder,
        shape=shape if builder in SAMPLED else TreeShape(),
        rule=rule,
        **shared,
    )
