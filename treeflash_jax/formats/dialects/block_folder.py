"""Block drafters as published: DFlash without a head, TreeFlash with one.

    dflash       `dflash_config` in config.json, tensors without a prefix
    treeflash    also `treeflash_config`, tensors of the backbone under "model."

Source: DFlash (arXiv 2602.06036), TreeFlash (arXiv 2606.03819), their published PyTorch code.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeflash_jax.core.checks import INT32, quoted
from treeflash_jax.core.parameters import Entry
from treeflash_jax.drafters.block.block_drafter import BlockConfig, default_target_layers
from treeflash_jax.drafters.block.heads import HEADS, MARGINAL
from treeflash_jax.formats import architectures
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.architectures.dense import LINEAR
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
    # Keys beside those of the layers. `thinking` and `verifier` are ours; other programs ignore them.
    known: tuple[str, ...] = ("dflash_config", "block_size", "num_target_layers", "auto_map", "thinking", "verifier")
    heads: Collection[str] = (MARGINAL,)  # that files can store
    prefix = ""  # of the backbone's tensors in new files; both prefixes are read

    def read_config(self, path: Path, keys: Keys) -> BlockConfig:
        dflash = keys.table("dflash_config", required=True)
        dflash.check_known({"mask_token_id", "target_layer_ids", "block_size"})
        layers = architectures.recognise(keys).read(keys, self.known)
        if layers.num_experts:
            model_type = quoted(layers.model_type)
            raise ValueError(f"{keys.where}: got a drafter of model_type {model_type}, expected one without experts")
        num_target_layers = keys.whole("num_target_layers")
        if "target_layer_ids" in dflash:
            taps = dflash.ids("target_layer_ids", INT32)
        else:
            taps = default_target_layers(num_target_layers, layers.num_layers)
        sizes = [table.raw["block_size"] for table in (keys, dflash) if "block_size" in table.raw]
        if sizes[1:] not in ([], sizes[:1]):
            raise ValueError(f"{keys.where}: got block_size both {' and '.join(map(quoted, sizes))}, expected one")
        return BlockConfig(
            layers=layers,
            block_size=Keys({**dflash.raw, **keys.raw}, keys.where).whole("block_size", least=2, most=MAX_NODES),
            mask_token_id=dflash.whole("mask_token_id", least=0),
            target_layer_ids=taps,
            num_target_layers=num_target_layers,
            thinking=keys.value(bool | None, "thinking", None, "true or false"),
            verifier=tuple(keys.value(list[str], "verifier", [], "a list of names")),
        )

    def entries(self, config: BlockConfig, specs: Any, names: Collection[str]) -> dict[str, Any]:
        prefix = self.prefix
        if names:
            prefix = "model." if any(name.startswith("model.") for name in names) else ""
        table = ARCHITECTURES[config.layers.model_type]
        backbone = {name: replace(entry, name=prefix + entry.name) for name, entry in BACKBONE.items()}
        backbone["groups"] = table.layer_entries(specs["backbone"]["groups"], prefix)
        return {"backbone": backbone, "head": dict(HEADS[config.head].entries)}

    def without_head(self, config: BlockConfig, params: dict[str, Any]) -> tuple[BlockConfig, dict[str, Any]]:
        return replace(config, head=MARGINAL), params | {"head": {}}

    def to_hf(self, config: BlockConfig) -> dict[str, Any]:
        if config.head not in self.heads:
            raise ValueError(
                f"got a {config.head} head, expected none: {self.name} files cannot store it; "
                "`treeflash convert --drop-head` removes it"
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


class TreeFlash(DFlash):
    """The dialect of the published TreeFlash drafters. `file_name` and `entries` of a head are its names in files."""

    name = "treeflash"
    marks = ("dflash_config", "treeflash_config")
    class_name = "TreeFlashDraftModel"
    known = (*DFlash.known, "treeflash_config")
    heads = HEADS
    prefix = "model."

    def read_config(self, path: Path, keys: Keys) -> BlockConfig:
        treeflash = keys.table("treeflash_config")
        treeflash.check_known({"candidate_tokens", "ar_approximation", "drafter_temperature", "head_rank", "tau"})
        heads = {head.file_name: name for name, head in HEADS.items()}
        head = treeflash.raw.get("ar_approximation")
        if not isinstance(head, str | None) or head not in heads:
            raise ValueError(f"{treeflash.where}: got ar_approximation {quoted(head)}, expected one of {list(heads)}")
        return replace(
            super().read_config(path, keys),
            head=heads[head],
            head_rank=treeflash.whole("head_rank", BlockConfig.head_rank),
            num_nodes=treeflash.whole("candidate_tokens", 16, most=MAX_NODES),
            drafter_temperature=treeflash.number("drafter_temperature", 1.0),
            tau=treeflash.number("tau") if "tau" in treeflash.raw else None,
        )

    def to_hf(self, config: BlockConfig) -> dict[str, Any]:
        treeflash = {
            "candidate_tokens": config.num_nodes,
            "ar_approximation": HEADS[config.head].file_name,
            "drafter_temperature": config.drafter_temperature,
            **({} if config.tau is None else {"tau": config.tau}),
            **({} if config.head_rank == BlockConfig.head_rank else {"head_rank": config.head_rank}),
        }
        return super().to_hf(config) | {"treeflash_config": treeflash}
