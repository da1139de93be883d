"""DFlash block drafters with or without a head on top: marginal trees (DDTree), TreeFlash, and heads of other kinds.

This module is what `drafters.Drafter` describes; backbone.py has the forward pass, heads/ what turns a block into a tree.

Shape suffixes: b batch, t rows, j tapped layers x model, q block slots, d model.

Source: DFlash (arXiv 2602.06036), TreeFlash (arXiv 2606.03819).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from treeflash_jax.checks import quoted
from treeflash_jax.drafters.block import backbone
from treeflash_jax.drafters.block.backbone import DrafterState, init
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.drafters.block.costs import extend_work, work
from treeflash_jax.drafters.block.heads import HEADS, DraftSettings, Unembed
from treeflash_jax.drafters.inputs import Inputs
from treeflash_jax.trees import TransitionTable

OPTIONS = ("head", "block_size", "candidates", "children", "shortlist")
READS_TOKENS = False
MOST_LINKS = 2**26  # of a level: a table compares every child with every candidate below it
DIALECT = "treeflash"


def choose(config: DrafterConfig, options: Any) -> tuple[DrafterConfig, DraftSettings]:
    """The config and the settings of a draft that a user's options ask for; see `drafters.Drafter`.

    Raises:
      ValueError: a head or a block that this drafter does not have, or more tokens than the vocabulary has.
    """
    vocabulary, own = config.layers.vocab_size, config.block_size

    def expect(ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ValueError(f"got {name} {quoted(getattr(options, name))}, expected {expected}")

    size = options.block_size or own
    expect(2 <= size <= own, "block_size", f"2 to {own}, as the drafter was trained")
    candidates = options.candidates or DraftSettings.candidates
    expect(candidates <= vocabulary, "candidates", f"1 to {vocabulary} (the vocabulary)")
    expect(options.children <= vocabulary, "children", f"1 to {vocabulary} (the vocabulary)")
    links = candidates**2 * options.children
    expect(
        links <= MOST_LINKS, "candidates", f"at most {MOST_LINKS:,} for candidates x candidates x children, not {links:,}"
    )
    shortlist = options.shortlist or 0
    expect(shortlist <= vocabulary, "shortlist", f"0 (all tokens) to {vocabulary} (the vocabulary)")
    heads = ("marginal", config.head)
    expect(options.head in (None, *heads), "head", f"one of {heads}, what this drafter has")
    settings = DraftSettings(
        candidates=candidates,
        children=options.children,
        shortlist=shortlist,
        head=options.head or config.head,
    )
    return replace(config, block_size=size), settings


def specs(config: DrafterConfig) -> dict[str, Any]:
    """Weights of backbone and head. Embedding and vocabulary matrix are the verifier's."""
    return {"backbone": backbone.specs(config), "head": HEADS[config.head].specs(config)}


def extend(
    params: Any,
    tables: Any,
    config: DrafterConfig,
    state: DrafterState,
    features_btj: jax.Array,
    tokens_bt: jax.Array,
    count_b: jax.Array,
) -> DrafterState:
    """Adds verifier features of the next committed positions to the context; tables and tokens are not read."""
    return backbone.extend(params["backbone"], config, state, features_btj, count_b)


def draft_block(inputs: Inputs, _: None) -> jax.Array:
    """The block after each anchor, [b, q, d], before its final norm."""
    return backbone.block(
        inputs.params["backbone"],
        inputs.config,
        inputs.state,
        inputs.tables["embed"],
        inputs.anchor_b,
        attention=inputs.attention,
    )


def expand_block(inputs: Inputs, hidden_bqd: jax.Array) -> TransitionTable:
    """The second stage: next-token laws at every depth, given the token before."""
    unembed = Unembed(
        embed_vd=inputs.tables["embed"],
        unembed_vd=inputs.tables.get("unembed", inputs.tables["embed"]),
        norm=inputs.params["backbone"]["norm"],
        eps=inputs.config.layers.rms_norm_eps,
    )
    head = HEADS[inputs.settings.head or inputs.config.head]
    return head.expand(inputs.params["head"], unembed, hidden_bqd, inputs.anchor_b, inputs.settings, inputs.temperature_b)


def stages(config: DrafterConfig) -> Mapping[str, Callable[[Inputs, Any], Any]]:
    """One pass over the block, then the head."""
    return {"draft": draft_block, "expand": expand_block}


def identity(config: DrafterConfig, settings: DraftSettings) -> dict[str, Any]:
    return {
        "head": settings.head or config.head,
        "block_size": config.block_size,
        "candidates": settings.candidates,
        "children": settings.children,
        "shortlist": settings.shortlist,
    }


__all__ = [
    "DIALECT", "OPTIONS", "READS_TOKENS", "DraftSettings", "DrafterState", "HEADS", "Unembed", "choose", "draft_block",
    "expand_block", "extend", "extend_work", "identity", "init", "specs", "stages", "work",
]  # fmt: skip
