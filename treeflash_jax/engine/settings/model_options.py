"""`ModelOptions`: the arguments of `tf.load`, which are also options of commands, each declared once."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from treeflash_jax.core.dtypes import FLOATS, dtype_setting
from treeflash_jax.core.setting_options import option_values
from treeflash_jax.core.settings import setting, validate
from treeflash_jax.engine.settings import pairs
from treeflash_jax.models.quantized import NO_SCHEME, SCHEMES


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Models to load, the devices that hold them, and the form of their weights."""

    verifier: str | Path | None = setting(
        None,
        f"language model to serve: a name ({', '.join(pairs.VERIFIERS)}), or the folder, GGUF file, URL "
        "(gs://bucket/model) or Hub id of a Qwen (2 to 3.8, dense or a mixture of experts), Gemma 4, gpt-oss or "
        "Llama model",
        unset="smollm2 if its weights are on this machine, otherwise tiny",
        unit="model",
        basic=True,
    )
    drafter: str | Path | None = setting(
        None,
        "a name, folder, URL or Hub id of a block drafter (DFlash, TreeFlash, Domino, DSpark, DFlash2, JetSpec, LiLiCorr), "
        "an EAGLE-3 drafter, an assistant of Gemma 4, or a small language model of the same vocabulary; mtp, the layer of "
        "multi-token prediction or the assistant in the verifier's files; ngram, which copies what followed the last "
        "tokens earlier in the text; or none to decode one token at a time",
        unset="the drafter that ships for the named verifier, or mtp if its files have it, otherwise none",
        unit="model",
        basic=True,
    )
    revision: str | None = setting(None, "Hub revision of the verifier", unit="rev")
    drafter_revision: str | None = setting(None, "Hub revision of the drafter", unit="rev")
    local_files_only: bool = setting(False, "read Hub ids from the local cache only")
    dtype: Any = dtype_setting(
        None,
        "dtype of weights, caches and activations",
        *FLOATS,
        unset="bfloat16, but float32 on a CPU without bfloat16 instructions",
        basic=True,
    )
    quantize: str | None = setting(
        None,
        "store the verifier's matrices in fewer bits: int8, with a scale per output channel; fp8, with a scale per block "
        "of 128 x 128, or with the scales of an FP8 file; int4, with a scale per output and 128 inputs, or with the groups "
        "of a quantised file; mxfp4, for the experts, as in gpt-oss. Drafted output then equals the one-token output of "
        "the quantised verifier. none expands quantised files to the dtype",
        unset="none; but quantised files are kept as they are on GPUs and TPUs if that reads fewer bytes, or if expanded "
        "weights do not fit",
        choices=lambda: (*SCHEMES, NO_SCHEME),
    )
    mesh: Mesh | str | None = setting(
        None,
        "devices to use: DxM splits the batch D ways, weights and vocabulary M ways; with DxMxE, experts E ways. In Python "
        "also a mesh of `make_mesh`",
        unset="one device",
        unit="DxM",
    )
    thinking: bool = setting(False, "value of `enable_thinking` for the chat template; some templates ignore it")
    template: Mapping[str, Any] | None = setting(
        None, 'further arguments of the chat template, such as {"reasoning_effort": "high"}', unset="none", unit="json"
    )

    def __post_init__(self) -> None:
        validate(self)


def load_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `load` from a parsed command line. Without a verifier, they name the default one."""
    options = option_values(arguments, ModelOptions)
    return options | {"verifier": options.get("verifier") or pairs.default_verifier()}
