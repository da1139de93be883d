"""Heads of block drafters: what a drafted token depends on besides the block, namely the token before it.

A head is one file with one line in HEADS. It has:

    specs(config) -> one `params.Spec` per weight; a fresh head should draft from the block's marginals
    expand(params, unembed, hidden_bqd, anchor_b, settings, temperature_b) -> Expander
        what trees are built from; table.py has what first-order heads share
    logits(params, unembed, previous_br, hidden_brd) -> [b, r, v]
        what training compares with the verifier: the next-token logits of block slots, the token before each being given
    SECOND_PASS    whether `expand` reads the whole vocabulary table again for its rows
    LOOKED_UP      names of weights of which `expand` reads single rows only; the first, if any, is read so in training too
    FILE_NAME      `ar_approximation` in a TreeFlash drafter's config.json; None: no head
    ENTRIES        name -> `params.Entry`: where each weight lies in a file

Shape suffixes: b batch, q block slots, r rows (a slot and the token before it), d model, v vocabulary.
"""

from __future__ import annotations

from treeflash_jax.drafters.block.heads import linear, lowrank, marginal, mlp
from treeflash_jax.drafters.block.heads.table import DraftSettings, Unembed

HEADS = {"marginal": marginal, "mlp": mlp, "linear": linear, "lowrank": lowrank}

__all__ = ["HEADS", "DraftSettings", "Unembed"]
