"""Settings of drafters, inherited by `engine.settings.GenerateConfig`."""

from dataclasses import dataclass
from functools import partial

from treeflash_jax.core.checks import bounded
from treeflash_jax.drafters.block.block_drafter import VOCABULARIES
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.trees.shape import MAX_NODES

option = partial(bounded, kind="speed")  # no option of a drafter changes the distribution of the output


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Options of drafters; each kind takes some of them (`DrafterConfig.settings`)."""

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
    depths: int | None = option(
        None,
        "deepest level of the tree, or length of the chain, for drafters whose network runs once per level",
        unset="the drafter's; 4 for the default tree on a CPU not using amx_bf16",
        least=1,
        most=MAX_NODES - 1,
        unit="levels",
    )
    candidates: int | None = option(
        None,
        "most likely tokens per depth: the candidates that trees are built from (M in the paper)",
        unset="16; on a CPU not using amx_bf16 8",
        least=1,
        unit="tokens",
    )
    children: int = option(16, "most likely next tokens kept for every candidate (K in the paper)", least=1, unit="tokens")
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
    ngrams: int | None = option(
        None,
        "earlier occurrences of the last tokens in the text whose continuations join the tree (prompt lookup); 0: none",
        unset="0; for trees on a CPU 8",
        least=0,
        unit="matches",
    )
