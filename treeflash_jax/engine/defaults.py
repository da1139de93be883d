"""Defaults of a draft that depend on the device. Times of SmolLM2-135M are at batch 1 on two cores with avx512_bf16."""

from typing import Any

from treeflash_jax.core.devices import Device
from treeflash_jax.drafters import DrafterConfig
from treeflash_jax.trees import Builder

SMALL_CANDIDATES = 8  # 16 add 3 ms to a round of 8 nodes and nothing to tau
SMALL_DEPTHS, SMALL_LANES = 4, 2  # in trees of 8 nodes 3 to 5 % faster than the drafters' own
MATCHES = 8  # of n-grams that join a tree; on accelerators they were never timed
# The second stage of a head takes 85 ms over 49,152 tokens and 16 ms over 32 per depth, at equal tau. Accelerators read the
# vocabulary table once for all contexts of that stage.
SHORTLIST, LARGE_VOCABULARY = 32, 2**14


def draft_defaults(
    drafter: DrafterConfig, vocab_size: int, builder: Builder, has_nodes: bool, device: Device
) -> dict[str, Any]:
    """Returns the settings of a draft (`DrafterConfig.settings`) whose defaults the device changes.

    Args:
      vocab_size: number of the verifier's tokens.
      has_nodes: whether the call gives the number of tree nodes.
    """
    defaults: dict[str, Any] = {}
    if device.is_cpu and not builder.is_chain:
        defaults["ngrams"] = MATCHES
    if device.is_cpu and vocab_size >= LARGE_VOCABULARY:
        defaults["shortlist"] = SHORTLIST
    if device.pays_per_token:
        defaults["candidates"] = min(SMALL_CANDIDATES, vocab_size)
    if device.pays_per_token and not builder.is_chain and not has_nodes:
        most = device.tree_nodes(drafter.num_nodes)  # a tree is at most nodes - 1 deep
        defaults["block_size"] = max(2, min(drafter.num_depths + 1, most))
        if drafter.lanes is not None and not builder.draws:
            defaults["depths"] = min(drafter.num_depths, SMALL_DEPTHS)
    return {name: value for name, value in defaults.items() if name in drafter.settings}


def default_lanes(drafter: DrafterConfig, has_nodes: bool, device: Device) -> int | None:
    """Returns the number of nodes per level that a best-first tree may expand; None: all."""
    return SMALL_LANES if drafter.lanes is not None and device.pays_per_token and not has_nodes else drafter.lanes
