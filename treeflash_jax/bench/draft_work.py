"""Bytes and FLOPs of the drafters' part of a round, by kind of drafter."""

from dataclasses import replace

from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.drafters import BlockConfig, DrafterConfig, Eagle3Config, LanguageModelConfig, NgramConfig
from treeflash_jax.models.costs import Counter, Work


def extend_work(count: Counter, drafter: DrafterConfig, tokens: float) -> Work:
    """Counts `extend` for `tokens` positions of every sequence."""
    if isinstance(drafter, BlockConfig):
        specs = drafter.specs()["backbone"]
        keys_values = [{name: layer[name] for name in ("k", "v")} for group in specs["groups"] for layer in group]
        used = {"fc": specs["fc"], "norm": specs["hidden_norm"], "layers": keys_values}
        return count.weights(used, tokens) + count.cached(drafter.layers, tokens)
    if isinstance(drafter, Eagle3Config):
        weights, seen = drafter.specs(), count.context + tokens
        keys_values = {name: weights["layer"].pop(name) for name in ("k", "v")}
        work = count.weights({"fc": weights["fc"]} | keys_values, tokens) + count.weights(weights["layer"], 1)
        return work + count.attention(drafter.layers, 1, seen) + count.cached(drafter.layers, seen)
    if isinstance(drafter, LanguageModelConfig):
        passed = count.layers(drafter.layers, tokens, count.context + tokens / 2)
        steered = Work() if drafter.steering is None else count.weights(drafter.specs()["steering"], 1)
        return passed + steered + count.cached(drafter.layers, count.context) + count.cached(drafter.layers, tokens)
    return Work(4 * count.sequences * tokens) if isinstance(drafter, NgramConfig) else Work()


def draft_work(count: Counter, plan: DecodePlan, quantize: str | None) -> tuple[Work, Work]:
    """Counts the draft, and the levels of a network that run while the tree is built."""
    drafter = plan.draft
    if isinstance(drafter, BlockConfig):
        return _block_work(count, plan, quantize), Work()
    if isinstance(drafter, Eagle3Config):
        table = {name: drafter.specs()[name] for name in ("norm", "unembed")}
        level = count.weights(table | {"layer": drafter.specs()["layer"]}, _width(plan))
        level += count.attention(drafter.layers, _width(plan), count.context + 1)
        level += count.cached(drafter.layers, count.context)
        return count.weights(table, 1), sum([level] * (drafter.num_depths - 1), Work())
    if isinstance(drafter, LanguageModelConfig):
        layers, width = drafter.layers, _width(plan)
        scored = replace(layers, vocab_size=drafter.draft_vocab_size or layers.vocab_size)
        level = count.layers(layers, width, count.context + 1) + count.vocabulary(scored, width)
        level += count.cached(layers, count.context)
        return count.vocabulary(scored, 1), sum([level] * (drafter.num_depths - 1), Work())
    return Work(4 * count.sequences * count.context) if isinstance(drafter, NgramConfig) else Work(), Work()


def _width(plan: DecodePlan) -> int:
    return min(plan.shape.lanes or plan.num_nodes, max(plan.num_nodes - 1, 1))


def _block_work(count: Counter, plan: DecodePlan, quantize: str | None) -> Work:
    """Counts a pass over the block, and the vocabulary table once, twice for heads that need its candidates first."""
    drafter, verifier = plan.draft, plan.verifier
    specs, size, depths = drafter.specs(), drafter.block_size, drafter.num_depths
    work = count.weights({name: specs["backbone"][name] for name in ("groups", "norm")}, size)
    work += count.attention(drafter.layers, size, count.context + size) + count.cached(drafter.layers, count.context)
    if drafter.draft_vocab_size:
        verifier, quantize = replace(verifier, vocab_size=drafter.draft_vocab_size), None
    work += count.vocabulary(verifier, depths, quantize)
    pairs = 1 + (depths - 1) * drafter.candidates
    if drafter.head in ("mlp", "linear") and not drafter.shortlist:
        work += count.vocabulary(verifier, pairs, quantize)
    return work + count.weights(specs["head"], pairs)
