"""TreeFlash: DFlash drafters with a head; `treeflash_config` in config.json, tensors of the backbone under "model.".

Source: TreeFlash (arXiv 2606.03819), the published PyTorch code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from treeflash_jax.core.checks import quoted
from treeflash_jax.drafters.block.block_config import DrafterConfig
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.formats.dialects.dflash import DFlash
from treeflash_jax.formats.keys import Keys
from treeflash_jax.trees.shape import MAX_NODES


class TreeFlash(DFlash):
    """The dialect of the published TreeFlash drafters. Heads say their own names in files: FILE_NAME and ENTRIES."""

    name = "treeflash"
    marks = ("dflash_config", "treeflash_config")
    class_name = "TreeFlashDraftModel"
    keys = (*DFlash.keys, "treeflash_config")
    heads = HEADS
    prefix = "model."

    def read_config(self, path: Path, keys: Keys) -> DrafterConfig:
        backbone = super().read_config(path, keys)
        treeflash = keys.table("treeflash_config")
        treeflash.check_known({"candidate_tokens", "ar_approximation", "drafter_temperature", "sampled_above"})
        head_of = {module.FILE_NAME: head for head, module in HEADS.items()}
        head = treeflash.raw.get("ar_approximation")
        if not isinstance(head, str | None) or head not in head_of:
            raise ValueError(f"{treeflash.where}: got ar_approximation {quoted(head)}, expected one of {list(head_of)}")
        return replace(
            backbone,
            head=head_of[head],
            num_nodes=treeflash.whole("candidate_tokens", 16, most=MAX_NODES),
            drafter_temperature=treeflash.number("drafter_temperature", 1.0),
            sampled_above=treeflash.number("sampled_above") if "sampled_above" in treeflash.raw else None,
        )

    def to_hf(self, config: DrafterConfig) -> dict[str, Any]:
        treeflash: dict[str, Any] = {
            "candidate_tokens": config.num_nodes,
            "ar_approximation": HEADS[config.head].FILE_NAME,
            "drafter_temperature": config.drafter_temperature,
        }
        if config.sampled_above is not None:
            treeflash["sampled_above"] = config.sampled_above
        return super().to_hf(config) | {"treeflash_config": treeflash}
