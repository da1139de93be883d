"""Heads of block drafters: they condition a drafted token on the token before it.

A head is one file with one line in HEADS. It has:

    specs(config) -> one `parameters.Spec` per weight; a fresh head should draft from the block's marginals
    expand(params, unembed, hidden_bqd, anchor_b, settings, temperature_b) -> Expander
        the continuations for tree builders; table.py has the part that first-order heads share
    logits(params, unembed, previous_bm, hidden_bmd) -> [b, m, v]
        for training: next-token logits of block slots, given the token before each
    READS_PREVIOUS whether drafts depend on the previous token
    SECOND_PASS    whether `expand` reads the whole vocabulary table again for its contexts
    LOOKED_UP      names of weights of which `expand` reads single vectors only; so does training of the first one
    FILE_NAME      `ar_approximation` in a TreeFlash drafter's config.json; None: no head
    ENTRIES        name -> `parameters.Entry`: location of each weight in a file

Shape suffixes: b batch, q block slots, m contexts (a slot and the token before it), d model, v vocabulary.
"""

from treeflash_jax.drafters.block.heads import linear, lowrank, marginal, mlp
from treeflash_jax.drafters.block.heads.table import DraftSettings, Unembed

MARGINAL = "marginal"  # has no weights: every block drafter can draft with it
HEADS = {MARGINAL: marginal, "mlp": mlp, "linear": linear, "lowrank": lowrank}

__all__ = ["HEADS", "MARGINAL", "DraftSettings", "Unembed"]
