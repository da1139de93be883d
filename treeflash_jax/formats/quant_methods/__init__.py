"""Quantised weights in folders, by `quant_method` in config.json: one module per method (`formats.fp8` for "fp8").

To add one, list a `quant_method.QuantMethod` in METHODS: folders of every family are then read. Weights become tensors that
expand when they are sliced (`grouped_tensors.GroupedTensor`, `fp8.ScaledTensor`); a weight without scales is read as it is.
Activations and caches are not quantised even if a file asks for it, and scales for them are not read: the result is closer
to the model before quantisation.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from treeflash_jax.core.checks import quoted, read_json, warn
from treeflash_jax.formats import fp8
from treeflash_jax.formats.grouped_tensors import GroupedTensor
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods import awq, compressed_tensors, gptq, modelopt, mxfp4
from treeflash_jax.formats.quant_methods.quant_method import QuantMethod
from treeflash_jax.formats.storage import Tensor

KEY = "quantization_config"
METHODS = {
    "fp8": QuantMethod(fp8.join, fp8.check),
    "compressed-tensors": QuantMethod(compressed_tensors.join, compressed_tensors.check),
    "modelopt": QuantMethod(modelopt.join, modelopt.check),
    "awq": QuantMethod(awq.join, awq.check),
    "gptq": QuantMethod(gptq.join, gptq.check),
    "mxfp4": QuantMethod(mxfp4.join, mxfp4.check),
}
_UNUSED = tuple(
    """.input_scale .output_scale .q_scale .k_scale .v_scale .kv_scale .activation_scale .input_global_scale
    .input_zero_point .output_zero_point""".split()
)
_LISTS = ("ignore", "modules_to_not_convert", "exclude_modules")  # of modules that are not quantised


def check_config(keys: Keys) -> None:
    """Raises ValueError for a config.json whose weights are quantised in a way that is not implemented."""
    if KEY not in keys:
        return
    stated = keys.table(KEY)
    method = stated.raw.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"{stated.where}: got weights quantised by {quoted(method)}, expected {', '.join(METHODS)}: load files of "
            "one of these, or the model's bfloat16 files"
        )
    METHODS[method].check(stated)


def join(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a folder's tensors with each quantised weight and its scales as one, by the name of the weight.

    Raises ValueError for tensors that are missing or do not fit, or a weight that the configuration lists as not quantised.
    """
    stated = _stated(folder)
    if stated.get("quant_method") not in METHODS:
        return tensors
    unused = [name for name in tensors if name.endswith(_UNUSED)]
    if unused:
        warn(f"{folder}: scales of activations and caches, such as {unused[0]}, are not read: neither is quantised here")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_UNUSED)}
    joined = METHODS[stated["quant_method"]].join(stated, kept)
    lists = [stated[key] for key in _LISTS if isinstance(stated.get(key), list)]
    listed = [entry for entries in lists for entry in entries if isinstance(entry, str)]
    for name, tensor in joined.items():
        if isinstance(tensor, GroupedTensor) and any(_matches(name.removesuffix(".weight"), entry) for entry in listed):
            raise ValueError(f"got quantised weights {name}, expected others: {KEY} lists them as not quantised")
    return joined


def _stated(folder: Path) -> dict[str, Any]:
    """Returns how config.json, or the hf_quant_config.json beside it, says that weights are quantised; {}: it does not."""
    raw = read_json(folder / "config.json")
    text = raw.get("text_config")
    stated = raw.get(KEY) or (text.get(KEY) if isinstance(text, dict) else None)
    beside = folder / "hf_quant_config.json"
    if not stated and beside.exists():
        keys = Keys(read_json(beside), beside.name)
        stated = {**keys.table("quantization").raw, "quant_method": "modelopt"}
        modelopt.check(Keys(stated, beside.name))
    return stated if isinstance(stated, dict) else {}


def _matches(module: str, entry: str) -> bool:
    """Returns whether a list's entry, a name with wildcards or "re:" and a regular expression, stands for a module."""
    if not entry.startswith("re:"):
        return fnmatchcase(module, entry)
    try:
        return bool(re.match(entry[3:], module))
    except re.error as error:
        raise ValueError(f"got {quoted(entry)} in {KEY}, expected a regular expression: {error}") from None
