"""Folders of published block drafters: DFlash without a head, TreeFlash with a head, and what all such folders share.

    dflash       `dflash_config` in config.json, tensors without a prefix; JetSpec's have causal blocks
    treeflash    also `treeflash_config`, tensors of the backbone under "model."

`published_heads` is for folders with other heads.

Source: DFlash (arXiv 2602.06036), TreeFlash (arXiv 2606.03819), JetSpec (arXiv 2606.18394), their published PyTorch code.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from treeflash_jax.core.checks import INT32
from treeflash_jax.core.error_text import warn
from treeflash_jax.core.parameters import Entry, Params
from treeflash_jax.drafters.block.block_drafter import BlockDrafter, default_target_layers
from treeflash_jax.drafters.block.heads import HEADS, MARGINAL
from treeflash_jax.formats import architectures
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.architectures.architecture import FULL, SLIDING
from treeflash_jax.formats.architectures.dense import LINEAR
from treeflash_jax.formats.dialects.dialect import OUR_KEY, Dialect, read_our_fields, write_our_fields
from treeflash_jax.formats.keys import Keys, find_key
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.trees.tree_inputs import MAX_NODES

BACKBONE = {"fc": Entry("fc.weight", **LINEAR), "hidden_norm": Entry("hidden_norm.weight"), "norm": Entry("norm.weight")}
CONVOLUTIONS = {  # convolutions of a layer
    "attention_conv": Entry("attention_conv.base_kernel", order=(0, 1), is_stacked=True),
    "attention_conv_delta": Entry("attention_conv.kernel_projection.weight", order=(0, 1, 2, 3), row_axes=3),
    "mlp_conv": Entry("mlp_conv.base_kernel", order=(0, 1), is_stacked=True),
    "mlp_conv_delta": Entry("mlp_conv.kernel_projection.weight", order=(0, 1, 2, 3), row_axes=3),
}
LISTED = {"unembed": Entry("lm_head.weight", order=(0, 1)), "offsets": Entry("d2t")}  # tensors of a draft vocabulary
CAP = "final_logit_softcapping"
ALIGNMENT = ("shift_label", "sample_from_anchor")


class BlockFolder(Dialect):
    """A folder with `dflash_config` in its config.json.

    Attributes:
      projectors: accepted values of `projector_type`; a file without the key has the first.
      head_keys: keys of the head in dflash_config; includes CAP if heads of the dialect may have it.
      shifted: alignment if a file does not state it; None: files must state it.
      inert: name prefixes of tensors that do not affect drafts, such as confidence heads.
      renamed: patterns of tensor names in some files, each with the replacement.
      scales_embeddings: whether drafters in these files were trained with the verifier's embedding factor.
      candidates: candidates per depth if a file does not state them; None: the head's.
      our_names: names that `read_our_fields` reads under OUR_KEY.
      other_names: names that `read_head` reads under OUR_KEY.
    """

    part = "drafter"
    marks = ("dflash_config",)
    kind = "block"
    # Keys besides the layers'. `thinking` and `verifier` are ours; other programs ignore them.
    known: tuple[str, ...] = (
        "dflash_config", OUR_KEY, "block_size", "num_target_layers", "auto_map", "thinking", "verifier", "is_causal",
    )  # fmt: skip
    projectors: tuple[str | None, ...] = (None,)
    head_keys: tuple[str, ...] = ()
    shifted: bool | None = False
    inert: tuple[str, ...] = ()
    renamed: Mapping[str, str] = {}
    scales_embeddings = True
    candidates: int | None = None
    our_names: tuple[str, ...] = ("candidate_tokens", "drafter_temperature", "candidates", "tau")
    other_names: tuple[str, ...] = ()
    prefix = ""  # prefix of the backbone's tensors in new files; both prefixes can be read

    def recognises(self, path: Path, keys: Keys) -> bool:
        inside = keys.raw.get("dflash_config")
        return isinstance(inside, dict) and inside.get("projector_type") in self.projectors

    def read_config(self, path: Path, keys: Keys) -> BlockDrafter:
        dflash = keys.table("dflash_config", required=True)
        only = {
            "projector_type": self.projectors, "attention_mode": ("gqa", None), "use_swa": (False, None),
            "swa_window_size": (None, 0), "output_multiplier": (1.0, None),
        }  # fmt: skip
        shared = ("mask_token_id", "target_layer_ids", "block_size", "causal_head", "causal", *ALIGNMENT)
        if CAP not in self.head_keys:
            only[CAP] = (None,)
        dflash.check_only(only)
        dflash.check_known({*shared, *only, *self.head_keys})
        table, key = find_key((keys, CAP), (dflash, CAP))
        logit_cap = table.number(key) if key in table else 0.0
        keys, sliding, window = read_windows(keys)
        layers = architectures.recognise(keys).read(keys, {*self.known, *ALIGNMENT})
        keys.expect(not layers.num_experts, "a drafter of model_type", layers.model_type, "one without experts")
        keys.expect(not layers.delta, "a drafter of model_type", layers.model_type, "one of attention layers")
        keys.expect(not layers.sizes, "a drafter of model_type", layers.model_type, "one whose layers have the same sizes")
        if "target_layer_ids" in dflash:
            taps = dflash.ids("target_layer_ids", INT32)
        else:
            taps = default_target_layers(keys.integer("num_target_layers"), layers.num_layers)
            warn(f"{dflash.where} names no target_layer_ids: outputs of layers {list(taps)} are read, by DFlash's rule")
        table, key = find_key((keys, "block_size"), (dflash, "block_size"))
        block_size = table.integer(key, least=2, most=MAX_NODES)
        keys.expect(not sliding or window >= block_size, "sliding_window", window, f"at least block_size {block_size}")
        table, key = find_key(*product((keys, dflash), ALIGNMENT))
        shifted = table.truth(key) if key in table else self.shifted
        if shifted is None:
            why = "whether slot i of the block predicts draft depth i (true) or i - 1 (false)"
            raise ValueError(f"{keys.where}: got no shift_label in dflash_config, expected {why}")
        causal = sliding  # default if files do not state it
        table, key = find_key((dflash, "causal_head"), (dflash, "causal"), (keys, "is_causal"))
        if key in table:
            causal = tuple(range(layers.num_layers)) if table.truth(key) else ()
        config = BlockDrafter(
            layers=layers,
            block_size=block_size,
            mask_token_id=dflash.integer("mask_token_id", least=0),
            taps=taps,
            num_target_layers=keys.integer("num_target_layers") if "num_target_layers" in keys.raw else None,
            shifted=shifted,
            causal_layers=causal,
            sliding_layers=sliding,
            window=window,
            scales_embeddings=self.scales_embeddings,
            logit_cap=logit_cap,
            thinking=keys.value(bool | None, "thinking", None, "true or false"),
            verifier=tuple(keys.value(list[str], "verifier", [], "a list of names")),
        )
        head_fields = {"head": MARGINAL} | self.read_head(keys, dflash, config)
        candidates = self.candidates or HEADS[head_fields["head"]].candidates
        stated = read_our_fields(keys, self.our_names, self.other_names)
        return replace(config, **{"candidates": candidates} | head_fields | stated)

    def read_head(self, keys: Keys, dflash: Keys, config: BlockDrafter) -> dict[str, Any]:
        """Returns the fields of BlockDrafter that the head determines."""
        return {}

    def copies(self, config: BlockDrafter) -> dict[str, str]:
        return {"embed_tokens.weight": "embed"} | ({} if config.owns_vocabulary else {"lm_head.weight": "unembed"})

    def select(self, path: Path, config: BlockDrafter, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Renames tensors, and leaves out copies of the verifier's tensors and inert tensors."""
        selected = {}
        for name, tensor in tensors.items():
            for pattern, new in self.renamed.items():
                name = re.sub(pattern, new, name)
            if name not in self.copies(config) and not name.startswith(tuple(self.inert)):
                selected[name] = tensor
        return selected

    def entries(self, config: BlockDrafter, specs: Any, names: Collection[str]) -> dict[str, Any]:
        prefix = self.prefix
        if names:
            prefix = "model." if any(name.startswith("model.") for name in names) else ""
        architecture = ARCHITECTURES[config.layers.model_type]
        architecture = replace(architecture, layer={**architecture.layer, **CONVOLUTIONS})
        entries = {name: replace(entry, name=prefix + entry.name) for name, entry in BACKBONE.items()}
        entries["groups"] = architecture.layer_entries(specs["backbone"]["groups"], prefix)
        head = {name: entry for name, entry in HEADS[config.head].entries.items() if name in specs["head"]}
        listed = {name: entry for name, entry in LISTED.items() if name in specs}
        return {"backbone": entries, "head": head} | listed

    def without_head(self, config: BlockDrafter, params: Params) -> tuple[BlockDrafter, Params]:
        plain = {"head": MARGINAL, "head_sizes": None, "candidates": HEADS[MARGINAL].candidates}
        return replace(config, **plain), params | {"head": {}}


class DFlashFolder(BlockFolder):
    """The dialect of the published DFlash drafters.

    Attributes:
      heads: heads that files can store.
      options: names of `BlockDrafter.extras` that files can store.
    """

    name = "dflash"
    projectors = (None, "dflash")
    known = (*BlockFolder.known, CAP)
    head_keys = (CAP,)
    class_name = "DFlashDraftModel"
    heads: Collection[str] = (MARGINAL,)
    options: Collection[str] = ()

    def recognises(self, path: Path, keys: Keys) -> bool:
        return Dialect.recognises(self, path, keys)

    def to_hf(self, config: BlockDrafter) -> dict[str, Any]:
        if config.head not in self.heads:
            expected = "none" if self.heads == (MARGINAL,) else " or ".join(self.heads)
            raise ValueError(
                f"got a {config.head} head, expected {expected}: {self.name} files cannot store it; "
                "`treeflash convert --drop-head` removes it"
            )
        unsupported = [name for name in config.extras if name not in self.options]
        if unsupported:
            raise ValueError(
                f"got a drafter with {' and '.join(unsupported)}, expected none: {self.name} files cannot store it"
            )
        # Of all verifiers, only Gemma has a factor or a cap; the factor is 1 until the drafter is fitted to its verifier.
        has_factor = config.embedding_factor != 1 or config.logit_cap or "gemma" in " ".join(config.verifier).lower()
        if has_factor and config.scales_embeddings != self.scales_embeddings:
            got, expected = ("with", "without") if config.scales_embeddings else ("without", "with")
            raise ValueError(
                f"got a drafter trained {got} the verifier's embedding factor, expected one {expected} it in {self.name} "
                "files: use another dialect"
            )
        layers = {"num_target_layers": config.num_target_layers} if config.num_target_layers else {}
        cap = {CAP: config.logit_cap} if config.logit_cap else {}
        return {
            "architectures": [self.class_name],
            **ARCHITECTURES[config.layers.model_type].to_hf(config.layers),
            "block_size": config.block_size,
            "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps), **cap},
            **layers,
            "layer_types": [FULL] * config.layers.num_layers,
            **({} if config.thinking is None else {"thinking": config.thinking}),
            **({"verifier": list(config.verifier)} if config.verifier else {}),
            **write_our_fields(config, self.our_names, candidates=self.candidates or HEADS[config.head].candidates),
        }


class TreeFlashFolder(DFlashFolder):
    """The dialect of the published TreeFlash drafters. A head's `file_name` and `entries` are its names in these files."""

    name = "treeflash"
    marks = ("dflash_config", OUR_KEY)
    class_name = "TreeFlashDraftModel"
    heads = HEADS
    our_names = (*DFlashFolder.our_names, "head_rank")
    other_names = ("ar_approximation", "head_sizes")
    prefix = "model."

    def read_head(self, keys: Keys, dflash: Keys, config: BlockDrafter) -> dict[str, Any]:
        treeflash = keys.table(OUR_KEY)
        heads = {head.file_name: name for name, head in HEADS.items()}
        file_name = treeflash.raw.get("ar_approximation")
        is_known = isinstance(file_name, str | None) and file_name in heads
        treeflash.expect(is_known, "ar_approximation", file_name, f"one of {list(heads)}")
        head = heads[file_name]
        default_sizes = HEADS[head].sizes(config)
        if default_sizes is None or "head_sizes" not in treeflash:
            return {"head": head}
        table = treeflash.table("head_sizes")
        table.check_known(asdict(default_sizes))
        read = {int: partial(table.integer, least=0), float: table.number}
        stated = {name: read[type(value)](name) for name, value in asdict(default_sizes).items() if name in table}
        return {"head": head, "head_sizes": replace(default_sizes, **stated)}

    def to_hf(self, config: BlockDrafter) -> dict[str, Any]:
        raw = super().to_hf(config)
        sizes = HEADS[config.head].sizes(config)
        published = {
            "candidate_tokens": config.num_nodes,
            "ar_approximation": HEADS[config.head].file_name,
            "drafter_temperature": config.drafter_temperature,
        }
        head_sizes = {} if sizes is None else {"head_sizes": asdict(sizes)}
        return raw | {OUR_KEY: published | raw.get(OUR_KEY, {}) | head_sizes}


def read_windows(keys: Keys) -> tuple[Keys, tuple[int, ...], int]:
    """Returns the keys without windows, the layers that have a window, and the window's size (0: no window)."""
    types = keys.raw.get("layer_types")
    if not isinstance(types, list) or SLIDING not in types:
        return keys, (), 0
    keys.check_only({"use_sliding_window": (True,)})
    full = {"layer_types": [FULL if name == SLIDING else name for name in types], "use_sliding_window": False}
    sliding = tuple(number for number, name in enumerate(types) if name == SLIDING)
    return Keys({**keys.raw, **full}, keys.where), sliding, keys.integer("sliding_window")
