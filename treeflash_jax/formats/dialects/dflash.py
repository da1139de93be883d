"""DFlash: block drafters without a head; `dflash_config` in config.json, tensors without a prefix.

Source: DFlash (arXiv 2602.06036), the published PyTorch code.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeflash_jax.core.checks import INT32, quoted
from treeflash_jax.core.parameters import Entry
from treeflash_jax.drafters.block.block_config import DrafterConfig, default_target_layers
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.formats import architectures, safetensors
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.architectures.common import LINEAR
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.trees.shape import MAX_NODES

BACKBONE = {"fc": Entry("fc.weight", **LINEAR), "hidden_norm": Entry("hidden_norm.weight"), "norm": Entry("norm.weight")}


class DFlash(Dialect):
    """The dialect of the published DFlash drafters."""

    name = "dflash"
    part = "drafter"
    marks = ("dflash_config",)
    kind = "block"
    class_name = "DFlashDraftModel"
    # Beside those of the layers; `thinking` and `verifier` are ours, and other programs ignore them.
    keys: tuple[str, ...] = ("dflash_config", "block_size", "num_target_layers", "auto_map", "thinking", "verifier")
    heads: Collection[str] = ("marginal",)  # that its files can hold
    prefix = ""  # of the backbone's tensors where they are written; both are read

    def read_config(self, path: Path, keys: Keys) -> DrafterConfig:
        dflash = keys.table("dflash_config", required=True)
        dflash.check_known({"mask_token_id", "target_layer_ids", "block_size"})
        layers = architectures.of(keys).read(keys, self.keys, safetensors.names(path))
        if layers.num_experts:
            kind = quoted(layers.model_type)
            raise ValueError(f"{keys.where}: got a drafter of model_type {kind}, expected one without experts")
        num_target_layers = keys.whole("num_target_layers")
        if "target_layer_ids" in dflash:
            taps = dflash.ids("target_layer_ids", INT32)
        else:
            taps = default_target_layers(num_target_layers, layers.num_layers)
        sizes = [table.raw["block_size"] for table in (keys, dflash) if "block_size" in table.raw]
        if sizes[1:] not in ([], sizes[:1]):
            got = " and ".join(map(quoted, sizes))
            raise ValueError(f"{keys.where}: got block_size both {got}, expected one")
        return DrafterConfig(
            layers=layers,
            block_size=Keys({**dflash.raw, **keys.raw}, keys.where).whole("block_size", least=2, most=MAX_NODES),
            mask_token_id=dflash.whole("mask_token_id", least=0),
            target_layer_ids=taps,
            num_target_layers=num_target_layers,
            thinking=keys.value(bool | None, "thinking", None, "true or false"),
            verifier=tuple(keys.value(list[str], "verifier", [], "a list of names")),
        )

    def entries(self, config: DrafterConfig, specs: Any, names: Collection[str]) -> dict[str, Any]:
        prefix = self.prefix
        if names:
            prefix = "model." if any(name.startswith("model.") for name in names) else ""
        table = ARCHITECTURES[config.layers.model_type]
        backbone = {name: replace(entry, name=prefix + entry.name) for name, entry in BACKBONE.items()}
        backbone["groups"] = table.layer_entries(specs["backbone"]["groups"], prefix)
        return {"backbone": backbone, "head": dict(HEADS[config.head].ENTRIES)}

    def to_hf(self, config: DrafterConfig) -> dict[str, Any]:
        if config.head not in self.heads:
            raise ValueError(
                f"got a {config.head} head, expected none: {self.name} files hold no head, and "
                "`treeflash convert --drop-head` leaves it behind"
            )
        return {
            "architectures": [self.class_name],
            **ARCHITECTURES[config.layers.model_type].to_hf(config.layers),
            "block_size": config.block_size,
            "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
            "num_target_layers": config.num_target_layers,
            "layer_types": ["full_attention"] * config.layers.num_layers,
            **({} if config.thinking is None else {"thinking": config.thinking}),
            **({"verifier": list(config.verifier)} if config.verifier else {}),
        }
