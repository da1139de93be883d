"""Published block drafters with heads, which can be read but not written: Domino, DSpark, DFlash2 and LiLiCorr.

    domino      projector_type "domino" in dflash_config; a GRU over the path
    dspark      projector_type "dspark" in dflash_config (SpecForge, ModelOpt), or its keys at top level (DeepSpec)
    dflash2     selector_rank in dflash_config (z-lab, NeMo AutoModel): convolutions, and scores of adjacent candidates
    lilicorr    projector_type "lilicorr" in dflash_config (ModelOpt)

Confidence heads are not read. They estimate how much of a chain will be accepted, and trees do not use them.

Source: sgl-project/SpecForge, deepseek-ai/DeepSpec, NVIDIA/Model-Optimizer, NVIDIA-NeMo/Automodel, z-lab/dflash.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treeflash_jax.core.checks import INT32
from treeflash_jax.drafters.block.block_drafter import BlockDrafter
from treeflash_jax.drafters.block.heads.candidate_selector import CandidateSelectorSizes
from treeflash_jax.drafters.block.heads.gru import GruSizes
from treeflash_jax.drafters.block.heads.lilicorr import LiLiCorrSizes
from treeflash_jax.drafters.block.heads.path_head import PathHead
from treeflash_jax.formats.dialects.block_folder import ALIGNMENT, BlockFolder
from treeflash_jax.formats.keys import Keys, find_key
from treeflash_jax.formats.storage import STORED_DTYPES, Tensor


class Domino(BlockFolder):
    """The dialect of Domino drafters, from SpecForge or the authors' code."""

    name = "domino"
    projectors = ("domino",)
    known = (*BlockFolder.known, "emb_dim")
    head_keys = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
    shifted = None  # files must state it: the published default differs from what training writes
    inert = ("confidence_head.",)
    renamed = {r"^logit_head\.": ""}

    def read_head(self, keys: Keys, dflash: Keys, config: BlockDrafter) -> dict[str, Any]:
        table, key = find_key((dflash, "emb_dim"), (keys, "emb_dim"))
        sizes = GruSizes(dflash.integer("gru_hidden_dim"), dflash.integer("pure_draft_prefix_len", 0, least=0))
        most = config.block_size - 1
        dflash.expect(sizes.prefix <= most, "pure_draft_prefix_len", sizes.prefix, f"at most {most}")
        return {"head": "gru", "head_rank": table.integer(key), "head_sizes": sizes}


class DSpark(BlockFolder):
    """The dialect of DSpark drafters by SpecForge and ModelOpt, and by DeepSpec with the keys at top level."""

    name = "dspark"
    projectors = ("dspark",)
    top_keys = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    confidence_keys = tuple(
        """enable_confidence_head use_confidence_head confidence_head_with_markov confidence_head_alpha
        num_anchors target_model_type target_text_model_type""".split()
    )
    head_keys = (*top_keys, *confidence_keys, "dspark_backbone_conv_enabled")
    shifted = None
    candidates = PathHead.candidates  # for heads without a state too
    inert = ("confidence_head.", "confidence_proj.")
    renamed = {r"^(markov_w[12]|gate_proj|joint_proj)\.": r"markov_head.\1."}

    def recognises(self, path: Path, keys: Keys) -> bool:
        return super().recognises(path, keys) or all(key in keys.raw for key in ("markov_rank", "target_layer_ids"))

    def read_config(self, path: Path, keys: Keys) -> BlockDrafter:
        raw = dict(keys.raw)
        inside = keys.table("dflash_config").raw
        is_deepspec = "dflash_config" not in keys
        if is_deepspec:
            keys.ids("target_layer_ids", INT32)  # refuses null, for which DeepSpec has no rule
            inside = {key: raw.pop(key) for key in self.head_keys if key in raw}
        is_stated = any(table.get(key) is not None for table in (raw, inside) for key in ALIGNMENT)
        if not is_stated and (is_deepspec or "attention_mode" in inside):  # DeepSpec and SpecForge do not state it
            inside = {**inside, "shift_label": True}
        return super().read_config(path, Keys(raw | {"dflash_config": inside}, keys.where))

    def read_head(self, keys: Keys, dflash: Keys, config: BlockDrafter) -> dict[str, Any]:
        dflash.check_only({"dspark_backbone_conv_enabled": (False, None)})
        heads = {"vanilla": "lowrank", "gated": "lowrank-gated", "rnn": "lowrank-rnn"}
        kind = dflash.raw.get("markov_head_type", "vanilla")
        dflash.expect(kind in [*heads], "markov_head_type", kind, f"one of {', '.join(heads)}")
        return {"head": heads[kind], "head_rank": dflash.integer("markov_rank")}


class DFlash2(BlockFolder):
    """The dialect of DFlash2 drafters."""

    name = "dflash2"
    projectors = (None, "dflash2", "dflash")
    head_keys = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
    renamed = {r"^(candidate_selector\.\w+_codebook)\.weight$": r"\1"}

    def recognises(self, path: Path, keys: Keys) -> bool:
        return super().recognises(path, keys) and "selector_rank" in keys.raw["dflash_config"]

    def read_head(self, keys: Keys, dflash: Keys, config: BlockDrafter) -> dict[str, Any]:
        top_k = dflash.integer("selector_top_k", most=config.layers.vocab_size)
        return {
            "head": "selector",
            "head_rank": dflash.integer("selector_rank"),
            "head_sizes": CandidateSelectorSizes(top_k),
            "candidates": top_k,
            **read_convolution(dflash, config),
        }


class LiLiCorr(BlockFolder):
    """The dialect of LiLiCorr drafters, with tensor names of ModelOpt or SGLang."""

    name = "lilicorr"
    projectors = ("lilicorr",)
    sizes = tuple(
        """candidate_topk hidden_size num_layers num_heads mlp_ratio factor_dim vector_eps logit_scale enabled""".split()
    )
    head_keys = (*(f"lilicorr_{key}" for key in sizes), "conv_kernel_size", "conv_group_size")
    renamed = {  # SGLang's names, each with the replacement
        r"^lilicorr\.feature_norm\.": "lilicorr.feature_mlp.0.",
        r"^lilicorr\.feature_mlp\.up_proj\.": "lilicorr.feature_mlp.1.",
        r"^lilicorr\.feature_mlp\.down_proj\.": "lilicorr.feature_mlp.3.",
        r"^(lilicorr\.layers\.\d+\.mlp)\.up_proj\.": r"\1.0.",
        r"^(lilicorr\.layers\.\d+\.mlp)\.down_proj\.": r"\1.2.",
    }

    def read_head(self, keys: Keys, dflash: Keys, config: BlockDrafter) -> dict[str, Any]:
        dflash.check_only({"lilicorr_enabled": (True,)})
        width = dflash.integer("lilicorr_hidden_size", least=0) or config.layers.hidden_size
        num_heads = dflash.integer("lilicorr_num_heads")
        dflash.expect(width % num_heads == 0, "lilicorr_num_heads", num_heads, f"a divisor of width {width}")
        sizes = LiLiCorrSizes(
            width=width,
            top_k=dflash.integer("lilicorr_candidate_topk", most=config.layers.vocab_size),
            num_layers=dflash.integer("lilicorr_num_layers"),
            num_heads=num_heads,
            mlp_width=int(width * dflash.number("lilicorr_mlp_ratio")),
            factor_dim=dflash.integer("lilicorr_factor_dim"),
            vector_eps=dflash.number("lilicorr_vector_eps"),
            logit_scale=dflash.number("lilicorr_logit_scale"),
        )
        fields = {"head": "lilicorr", "head_sizes": sizes, "candidates": sizes.top_k}
        is_convolved = any(dflash.raw.get(key) for key in ("conv_kernel_size", "conv_group_size"))  # 0: no convolutions
        return fields | (read_convolution(dflash, config) if is_convolved else {})

    def select(self, path: Path, config: BlockDrafter, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = super().select(path, config, tensors)
        for name in {"lilicorr.slot_embedding", "lilicorr.rank_embedding"} & tensors.keys():  # have axes of size 1
            tensors[name] = Squeezed(tensors[name][:].reshape(-1, tensors[name].get_shape()[-1]))
        return tensors


@dataclass(frozen=True)
class Squeezed:
    """A small tensor without its axes of size 1."""

    values: np.ndarray

    def get_shape(self) -> tuple[int, ...]:
        return self.values.shape

    def get_dtype(self) -> str:
        return STORED_DTYPES.get(self.values.dtype.name, self.values.dtype.name)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.values[index]


def read_convolution(dflash: Keys, config: BlockDrafter) -> dict[str, int]:
    """Returns the channels per group of DFlash2's convolutions."""
    dflash.check_only({"conv_kernel_size": (2,)})
    group = dflash.integer("conv_group_size")
    width = config.layers.hidden_size
    dflash.expect(width % group == 0, "conv_group_size", group, f"a divisor of {width}")
    return {"conv_group": group}
