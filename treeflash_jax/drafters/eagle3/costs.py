"""What an EAGLE-3 drafter has to do, in bytes and FLOPs. The layer runs once per level below the first."""

from __future__ import annotations

from typing import Any

from treeflash_jax.costs import Counter, Work
from treeflash_jax.drafters.eagle3 import layer
from treeflash_jax.drafters.eagle3.config import EagleConfig
from treeflash_jax.verifiers.config import ModelConfig


def extend_work(count: Counter, config: EagleConfig, tokens: float) -> Work:
    """Of taking so many new tokens a sequence into its context: keys and values of all, the rest of the layer of one."""
    own = layer.specs(config)
    keys_values = {name: own["layer"].pop(name) for name in ("k", "v")}
    work = count.weights({"fc": own["fc"]} | keys_values, tokens) + count.weights(own["layer"], 1)
    seen = count.context + tokens
    return work + count.attention(config.layers, 1, seen) + count.cached(config.layers, count.context + tokens)


def work(
    count: Counter, config: EagleConfig, draft: Any, verifier: ModelConfig, quantize: str | None = None
) -> dict[str, tuple[Work, Work]]:
    """By stage: what it has to do, and what it hands to the next one."""
    own = layer.specs(config)
    children = Work(count.sequences * draft.children * 8)  # tokens and log-probabilities
    return {"draft": (count.weights({"unembed": own["unembed"], "norm": own["norm"]}, 1), children)}
