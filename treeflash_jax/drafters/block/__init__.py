"""DFlash block drafters with or without a head on top: marginal trees (DDTree), TreeFlash, and heads of other kinds.

This module implements `drafters.Drafter`; backbone.py has the network, heads/ turn a block into a transition table.

A draft is one pass over the block [anchor, mask, ..., mask] against the verifier's features. The cache holds the context
only: keys and values of fused features at positions 0 .. length - 1, written once. Block slots see the whole context and
each other, and are dropped after the pass. Slot i of the block predicts the token at position start + i, where start is the
anchor's.

Shape suffixes: b batch, t positions, j tapped layers x model, q block slots (anchor included), d model.

Source: DFlash (arXiv 2602.06036) section 4, TreeFlash (arXiv 2606.03819).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core.checks import expect
from treeflash_jax.core.devices import Device
from treeflash_jax.drafters import ngram
from treeflash_jax.drafters.block import backbone
from treeflash_jax.drafters.block.block_config import ALL, FREQUENT, VOCABULARIES, DrafterConfig
from treeflash_jax.drafters.block.heads import HEADS, MARGINAL, DraftSettings, Unembed
from treeflash_jax.drafters.protocol import ContextState, Inputs, JoinedOptions, draft_ids, listed_specs, option
from treeflash_jax.models import kv_cache, vocab
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.costs import Counter, Work
from treeflash_jax.trees import BUILDERS, Expander

READS_TOKENS = False
MAX_LINKS = 2**26  # per level: a table compares every child with every candidate below it
DIALECT = "treeflash"


@dataclass(frozen=True, kw_only=True)
class BlockOptions(JoinedOptions):
    """Options of block drafters."""

    head: str | None = option(
        None,
        "second stage of the drafter, which conditions a token on those before it; marginal turns it off",
        unset="the drafter's own",
        choices=lambda: tuple(HEADS),
    )
    block_size: int | None = option(
        None,
        "length of the drafted block, the last token of the text included, at most the drafter's; shorter blocks make "
        "rounds faster and trees shallower",
        unset="the drafter's, but at most 8 for trees on a CPU not using amx_bf16 unless their nodes are given",
        least=2,
        unit="tokens",
    )
    candidates: int | None = option(
        None,
        "most likely tokens per depth: the candidates that trees are built from (M in the paper)",
        unset="16; on a CPU not using amx_bf16 8",
        least=1,
        unit="tokens",
    )
    shortlist: int | None = option(
        None,
        "tokens per depth that the second stage of a conditional head scores, chosen over all depths together; 0 "
        "scores the whole vocabulary",
        unset="0; on a CPU 32 if the vocabulary has 16,384 tokens or more",
        least=0,
        unit="tokens",
    )
    draft_vocabulary: str | None = option(
        None,
        "tokens that may be drafted: the frequent ones that the drafter's folder lists, or all",
        unset="frequent if there is a list",
        choices=lambda: VOCABULARIES,
    )


OPTIONS = BlockOptions


def choose(config: DrafterConfig, options: Any, device: Device) -> tuple[DrafterConfig, DraftSettings]:
    """See `Drafter.choose`. Raises ValueError for a head or block size that this drafter lacks, and for too many tokens."""
    listed, trained_size, heads = config.draft_vocab_size, config.block_size, (MARGINAL, config.head)
    requested = options.draft_vocabulary
    expect(requested != FREQUENT or listed > 0, "draft_vocabulary", requested, "all: the drafter has no list of tokens")
    config = replace(config, draft_vocab_size=0 if requested == ALL else listed)
    vocabulary = config.draft_vocab_size or config.layers.vocab_size
    settings, size = _settings(config, options, device), options.block_size or trained_size
    is_tree = not BUILDERS[options.builder or "best-first"].is_chain
    if is_tree and options.block_size is None and options.nodes is None and device.pays_per_token:
        size = max(2, min(size, device.tree_nodes(config.num_nodes)))  # a tree is at most nodes - 1 deep
    expect(2 <= size <= trained_size, "block_size", size, f"2 to {trained_size}, as the drafter was trained")
    for name in ("candidates", "children", "shortlist"):
        count = getattr(options, name)
        expect((count or 0) <= vocabulary, name, count, f"at most {vocabulary} (the vocabulary)")
    links = settings.candidates**2 * settings.children
    most = f"at most {MAX_LINKS:,} for candidates x candidates x children, not {links:,}"
    expect(links <= MAX_LINKS, "candidates", options.candidates, most)
    expect(options.head in (None, *heads), "head", options.head, f"one of {heads}, this drafter's")
    measured = config.sampled_above if settings.head == config.head else None  # measured with the drafter's own head
    return replace(config, block_size=size, sampled_above=measured), settings


def _settings(config: DrafterConfig, options: Any, device: Device) -> DraftSettings:
    """Returns the options with their defaults for a device filled in.

    Times are of SmolLM2 (49,152 tokens) in bfloat16 at batch 1 on two cores with avx512_bf16: 16 candidates instead of 8
    add 3 ms to a round of 8 nodes and nothing to tau; the second stage takes 85 ms over the vocabulary and 16 ms over 32
    tokens per depth, at equal tau. Accelerators read the vocabulary table once for all contexts of that stage.
    """
    vocabulary = config.draft_vocab_size or config.layers.vocab_size
    shortlist = min(32, vocabulary) if device.is_cpu and config.layers.vocab_size >= 2**14 else 0
    return DraftSettings(
        candidates=options.candidates or min(8 if device.pays_per_token else 16, vocabulary),
        children=options.children,
        shortlist=shortlist if options.shortlist is None else options.shortlist,
        head=options.head or config.head,
        ngrams=ngram.default_matches(options, device),
    )


def specs(config: DrafterConfig) -> dict[str, Any]:
    """Weights of backbone and head. Embedding and vocabulary matrix are the verifier's; so are those of frequent tokens."""
    listed = listed_specs(config.draft_vocab_size, config.layers.hidden_size)
    return {"backbone": backbone.specs(config), "head": HEADS[config.head].specs(config)} | listed


def init(config: DrafterConfig, batch: int, capacity: int, dtype: Any) -> ContextState:
    return ContextState(kv_cache.allocate(config.layers, batch, capacity, dtype))


def extend(
    params, tables, config: DrafterConfig, state: ContextState, features_btj, tokens_bt, count_b, *, attention: str
) -> ContextState:
    """Adds verifier features of the next committed positions to the context."""
    positions_bt = state.context.length_b[:, None] + jnp.arange(features_btj.shape[1])
    new = backbone.context_kv(params["backbone"], config, features_btj, positions_bt)
    return ContextState(kv_cache.append(state.context, new, count_b))


def draft_block(inputs: Inputs, _: None) -> jax.Array:
    """Returns the block's hidden states before the final norm, [b, q, d]; slot 0 (the anchor) is not a prediction."""
    config, anchor_b, context = inputs.config, inputs.anchor_b, inputs.state.context
    batch, size, length_b = anchor_b.shape[0], config.block_size, context.length_b
    masks_bq = jnp.full((batch, size - 1), config.mask_token_id, anchor_b.dtype)
    x_bqd = vocab.embed(inputs.tables["embed"], jnp.concatenate([anchor_b[:, None], masks_bq], axis=1))
    everything_bqq = jnp.ones((batch, size, size), bool)

    def attend(q_bqhe, k_bqke, v_bqke, prefix):
        return tree_attention(q_bqhe, k_bqke, v_bqke, everything_bqq, prefix, length_b, implementation=inputs.attention)

    positions_bq = length_b[:, None] + jnp.arange(size)
    return backbone.through_layers(inputs.params["backbone"], config, x_bqd, positions_bq, context.layers, attend)


def expand_block(inputs: Inputs, hidden_bqd: jax.Array) -> Expander:
    """Returns next-token distributions at every depth, given the token before; with `ngrams`, joined with n-grams."""
    embed_vd, norm = inputs.tables["embed"], inputs.params["backbone"]["norm"]
    unembed = Unembed(embed_vd, inputs.tables.get("unembed", embed_vd), norm, inputs.config.layers.rms_norm_eps)
    if inputs.config.draft_vocab_size:
        unembed = unembed.replace(unembed_vd=inputs.params["unembed"], ids_v=draft_ids(inputs.params))
    head = HEADS[inputs.settings.head or inputs.config.head]
    table = head.expand(inputs.params["head"], unembed, hidden_bqd, inputs.anchor_b, inputs.settings, inputs.temperature_b)
    return ngram.join(table, inputs)


STAGES = {"draft": draft_block, "expand": expand_block}


def extend_work(count: Counter, config: DrafterConfig, tokens: float) -> Work:
    """Counts adding the features of new tokens to the context."""
    specs = backbone.specs(config)
    keys_values = [{name: layer[name] for name in ("k", "v")} for group in specs["groups"] for layer in group]
    used = {"fc": specs["fc"], "norm": specs["hidden_norm"], "layers": keys_values}
    return count.weights(used, tokens) + count.cached(config.layers, tokens)


def block_work(count: Counter, config: DrafterConfig, tokens: float, seen: float) -> Work:
    """Counts the pass over block slots, each seeing `seen` positions, without reading the context."""
    specs = backbone.specs(config)
    used = {name: specs[name] for name in ("groups", "norm")}
    return count.weights(used, tokens) + count.attention(config.layers, tokens, seen)


def work(
    count: Counter, config: DrafterConfig, settings: DraftSettings, verifier: ModelConfig, quantize: str | None = None
) -> dict[str, tuple[Work, Work]]:
    """See `Drafter.work`.

    The vocabulary table counts once per reduction over it that has to wait for an earlier one: twice in the second stage
    of a conditional head, which needs its candidates first.
    """
    size, depths = config.block_size, config.num_depths
    drafted = block_work(count, config, size, count.context + size) + count.cached(config.layers, count.context)
    head = HEADS[settings.head or config.head]
    specs = head.specs(config)
    contexts = settings.candidates if head.READS_PREVIOUS else 1
    entries = count.sequences * depths * contexts * settings.children
    transitions = Work(12 * entries)  # token, log-probability and next context
    listed = settings.shortlist if head.SECOND_PASS else max(contexts, settings.children, settings.shortlist)
    again = head.SECOND_PASS and not listed  # the last depth's marginals are not scored
    if config.draft_vocab_size:
        verifier, quantize = replace(verifier, vocab_size=config.draft_vocab_size), None
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
    block = count.numbers((None, None), (size, verifier.hidden_size))
    return {"draft": (drafted, block), "expand": (second, transitions)}


def identity(config: DrafterConfig, settings: DraftSettings) -> dict[str, Any]:
    sizes = {name: getattr(settings, name) for name in ("candidates", "children", "shortlist", "ngrams")}
    sizes |= {"draft_vocab_size": config.draft_vocab_size} if config.draft_vocab_size else {}
    return {"head": settings.head or config.head, "block_size": config.block_size} | sizes
