"""The arguments of `tf.load` as options of commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from treeflash_jax.core.settings import setting
from treeflash_jax.engine import pairs
from treeflash_jax.models.quantized import SCHEMES


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    verifier: str | None = setting(
        None,
        f"language model to serve: a name ({', '.join(pairs.VERIFIERS)}), or the folder, GGUF file or Hub id of a Qwen3, "
        "Qwen2 or Llama model",
        unset="smollm2 if its weights are on this machine, otherwise tiny",
        unit="model",
        basic=True,
    )
    drafter: str | None = setting(
        None,
        "a name, folder or Hub id of a DFlash, TreeFlash or EAGLE-3 drafter, or of a small language model; 'ngram'; or "
        "'none' to decode one token at a time",
        unset="the drafter that ships for the named verifier, otherwise none",
        unit="model",
        basic=True,
    )
    revision: str | None = setting(None, "Hub revision of the verifier", unit="rev")
    drafter_revision: str | None = setting(None, "Hub revision of the drafter", unit="rev")
    steering: str | None = setting(
        None,
        "folder of steering weights for a language model that drafts (SD squared)",
        unset="those in the drafter's folder, if any",
        unit="folder",
    )
    local_files_only: bool = setting(False, "use the local cache of the Hub only")
    dtype: Literal["float32", "bfloat16", "float64"] | None = setting(
        None,
        "dtype of weights, caches and activations",
        unset="bfloat16, but float32 on a CPU without bfloat16 instructions",
        basic=True,
    )
    quantize: str | None = setting(
        None, "quantize the verifier's matrices while loading", unset="none", choices=lambda: tuple(SCHEMES)
    )
    mesh: str | None = setting(
        None,
        "use D x M devices: split the batch D ways, weights and vocabulary M ways; with DxMxE, experts E ways",
        unset="one device",
        unit="DxM",
    )
    thinking: bool = setting(False, "value of `enable_thinking` for the chat template; some templates ignore it")
    template: Mapping[str, Any] | None = setting(
        None, 'further arguments of the chat template, such as {"reasoning_effort": "high"}', unset="none", unit="json"
    )
