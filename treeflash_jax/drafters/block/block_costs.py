"""Bytes and FLOPs of a block drafter.

The vocabulary table counts once per reduction over it that has to wait for an earlier one: twice in the second stage of a
conditional head, which needs its candidates first.

Shape suffixes: q block slots, m previous-token contexts, c children.
"""

from __future__ import annotations

from treeflash_jax.drafters.block import backbone
from treeflash_jax.drafters.block.block_config import DrafterConfig
from treeflash_jax.drafters.block.heads import HEADS, DraftSettings
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.costs import Counter, Work


def extend_work(count: Counter, config: DrafterConfig, tokens: float) -> Work:
    """Counts adding the features of new tokens to the context."""
    specs = backbone.specs(config)
    keys_values = [{name: layer[name] for name in ("k", "v")} for group in specs["groups"] for layer in group]
    used = {"fc": specs["fc"], "norm": specs["hidden_norm"], "layers": keys_values}
    return count.weights(used, tokens) + count.cached(config.layers, tokens)


def block(count: Counter, config: DrafterConfig, tokens: float, seen: float) -> Work:
    """Counts the pass over block slots, each seeing `seen` positions, without reading the context."""
    specs = backbone.specs(config)
    used = {name: specs[name] for name in ("groups", "norm")}
    return count.weights(used, tokens) + count.attention(config.layers, tokens, seen)


def work(
    count: Counter, config: DrafterConfig, draft: DraftSettings, verifier: ModelConfig, quantize: str | None = None
) -> dict[str, tuple[Work, Work]]:
    """See `Drafter.work`."""
    size, depths = config.block_size, config.num_depths
    drafted = block(count, config, size, count.context + size) + count.cached(config.layers, count.context)
    head = HEADS[draft.head or config.head]
    specs = head.specs(config)
    contexts = draft.candidates if head.READS_PREVIOUS else 1
    transitions = Work(count.sequences * depths * contexts * draft.children * 12)  # token, log-probability and next context
    listed = draft.shortlist if head.SECOND_PASS else max(contexts, draft.children, draft.shortlist)
    again = head.SECOND_PASS and not listed  # the last depth's marginals are not scored
    second = count.vocabulary(verifier, depths - 1 if again else depths, quantize)
    for name in head.LOOKED_UP:  # vectors of the contexts' tokens and of the tokens that may follow
        second += count.lookups(specs.pop(name).shape[1], depths * listed, contexts / len(head.LOOKED_UP))
    pairs = 1 + (depths - 1) * contexts
    if again:
        second += count.vocabulary(verifier, pairs, quantize)
    elif head.SECOND_PASS:
        second += count.lookups(verifier.hidden_size, depths * listed, pairs)
    slots = {name: specs.pop(name) for name in list(specs) if specs[name].once_per_slot}
    second += count.weights(slots, depths) + count.weights(specs, pairs)
    return {
        "draft": (drafted, count.numbers((None, None), (size, verifier.hidden_size))),
        "expand": (second, transitions),
    }
