"""What an EAGLE-3 drafter has to do, in bytes and FLOPs."""

from __future__ import annotations

from treeflash_jax.costs import Counter, Work
from treeflash_jax.drafters.eagle3 import layer
from treeflash_jax.drafters.eagle3.config import EagleConfig
from treeflash_jax.drafters.lanes import LaneSettings
from treeflash_jax.verifiers.config import ModelConfig


def extend_work(count: Counter, config: EagleConfig, tokens: float) -> Work:
    """Of taking so many new tokens a sequence into its context: keys and values of all, the rest of the layer of one."""
    own = layer.specs(config)
    keys_values = {name: own["layer"].pop(name) for name in ("k", "v")}
    work = count.weights({"fc": own["fc"]} | keys_values, tokens) + count.weights(own["layer"], 1)
    seen = count.context + tokens
    return work + count.attention(config.layers, 1, seen) + count.cached(config.layers, count.context + tokens)


def work(
    count: Counter, config: EagleConfig, settings: LaneSettings, verifier: ModelConfig, quantize: str | None = None
) -> dict[str, tuple[Work, Work]]:
    """Of the anchor's children one pass over the vocabulary matrix; of every level below, the layer and that pass again."""
    own, rows = layer.specs(config), settings.rows
    first = count.weights({"unembed": own["unembed"], "norm": own["norm"]}, 1)
    level = count.weights({name: own[name] for name in ("layer", "norm", "unembed")}, rows)
    level += count.attention(config.layers, rows, count.context + 1) + count.cached(config.layers, count.context)
    return {"draft": (first, Work()), "tree": (sum([level] * (config.num_depths - 1), Work()), Work())}
