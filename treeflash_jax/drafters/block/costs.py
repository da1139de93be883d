"""What a block drafter has to do, in bytes and FLOPs.

The vocabulary table counts once per reduction over it that has to wait for an earlier one: twice in the second stage of a
conditional head, which needs its candidates first.

Shape suffixes: q block slots, m previous-token contexts, c children.
"""

from __future__ import annotations

from treeflash_jax.costs import Counter, Work
from treeflash_jax.drafters.block import backbone
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.drafters.block.heads import HEADS, DraftSettings
from treeflash_jax.verifiers.config import ModelConfig


def extend_work(count: Counter, config: DrafterConfig, tokens: float) -> Work:
    """Of taking the features of so many new tokens a sequence into its context."""
    own = backbone.specs(config)
    keys_values = [{name: layer[name] for name in ("k", "v")} for group in own["groups"] for layer in group]
    used = {"fc": own["fc"], "norm": own["hidden_norm"], "layers": keys_values}
    return count.weights(used, tokens) + count.cached(config.layers, tokens)


def block(count: Counter, config: DrafterConfig, tokens: float, seen: float) -> Work:
    """The pass over so many tokens of blocks, each seeing so many positions; the context's keys and values not counted."""
    own = backbone.specs(config)
    used = {name: own[name] for name in ("groups", "norm")}
    return count.weights(used, tokens) + count.attention(config.layers, tokens, seen)


def work(
    count: Counter, config: DrafterConfig, draft: DraftSettings, verifier: ModelConfig, quantize: str | None = None
) -> dict[str, tuple[Work, Work]]:
    """By stage, in order: what it has to do, and what it hands to the next one."""
    size, depths = config.block_size, config.num_depths
    drafted = block(count, config, size, count.context + size) + count.cached(config.layers, count.context)
    name = draft.head or config.head
    head, specs = HEADS[name], HEADS[name].specs(config)
    contexts = 1 if name == "marginal" else draft.candidates
    transitions = Work(count.sequences * depths * contexts * draft.children * 12)  # token, log-probability and next context
    listed = draft.shortlist if head.SECOND_PASS else max(contexts, draft.children, draft.shortlist)
    again = head.SECOND_PASS and not listed  # what the table's second pass scores is no prediction of the last depth
    second = count.vocabulary(verifier, depths - 1 if again else depths, quantize)
    for name in head.LOOKED_UP:  # rows of the contexts' tokens and of the tokens that may follow
        second += count.listed(specs.pop(name).shape[1], depths * listed, contexts / len(head.LOOKED_UP))
    pairs = 1 + (depths - 1) * contexts
    if again:
        second += count.vocabulary(verifier, pairs, quantize)
    elif head.SECOND_PASS:
        second += count.listed(verifier.hidden_size, depths * listed, pairs)
    slots = {name: specs.pop(name) for name in list(specs) if name.startswith("hidden")}  # computed once a slot
    second += count.weights(slots, depths) + count.weights(specs, pairs)
    return {
        "draft": (drafted, count.numbers((None, None), (size, verifier.hidden_size))),
        "expand": (second, transitions),
    }
