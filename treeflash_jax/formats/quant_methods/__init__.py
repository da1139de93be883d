"""Quantised weights in folders: a module for each value of `quant_method` in config.json.

To add a method, list an instance of your subclass of `quant_method.QuantMethod` in METHODS. Folders of all families are
then read. Weights become tensors that slicing expands (`grouped_tensors.GroupedTensor`, `scaled_tensors.ScaledTensor`). A
weight without scales is read as it is. Activations and caches are not quantised, even if a file requests it, and scales for
them are not read: the result is closer to the model before quantisation.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from treeflash_jax.core.error_text import quoted, warn
from treeflash_jax.core.json_files import read_json
from treeflash_jax.formats.grouped_tensors import GroupedTensor
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.quant_methods.awq import Awq
from treeflash_jax.formats.quant_methods.compressed_tensors import CompressedTensors
from treeflash_jax.formats.quant_methods.fp8 import Fp8
from treeflash_jax.formats.quant_methods.gptq import Gptq
from treeflash_jax.formats.quant_methods.modelopt import ModelOpt
from treeflash_jax.formats.quant_methods.mxfp4 import Mxfp4
from treeflash_jax.formats.quant_methods.quant_method import QuantMethod
from treeflash_jax.formats.storage import Tensor

KEY = "quantization_config"
METHODS: dict[str, QuantMethod] = {
    method.name: method for method in (Fp8(), CompressedTensors(), ModelOpt(), Awq(), Gptq(), Mxfp4())
}
_ACTIVATION_SCALES = tuple(  # scales of activations and caches, which are not read
    """.input_scale .output_scale .q_scale .k_scale .v_scale .kv_scale .activation_scale .input_global_scale
    .input_zero_point .output_zero_point""".split()
)
_IGNORE_KEYS = ("ignore", "modules_to_not_convert", "exclude_modules")  # lists of modules that are not quantised


def check_config(keys: Keys) -> None:
    """Raises ValueError for a config.json whose weights are quantised in a way that is not implemented."""
    if KEY not in keys:
        return
    config = keys.table(KEY)
    name = config.raw.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            f"{config.where}: got weights quantised by {quoted(name)}, expected {', '.join(METHODS)}: load files of "
            "one of these, or the model's bfloat16 files"
        )
    METHODS[name].check(config)


def join(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a folder's tensors, in which each quantised weight and its scales are one tensor with the name of the weight.

    Raises ValueError for tensors that are missing or do not fit, and for a quantised weight that the configuration lists as
    not quantised.
    """
    config = _read_config(folder)
    if config.get("quant_method") not in METHODS:
        return tensors
    scales = [name for name in tensors if name.endswith(_ACTIVATION_SCALES)]
    if scales:
        warn(f"{folder}: scales of activations and caches, such as {scales[0]}, are not read: neither is quantised here")
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(_ACTIVATION_SCALES)}
    joined = METHODS[config["quant_method"]].join(config, weights)
    lists = [config[key] for key in _IGNORE_KEYS if isinstance(config.get(key), list)]
    patterns = [pattern for patterns in lists for pattern in patterns if isinstance(pattern, str)]
    for name, tensor in joined.items():
        if isinstance(tensor, GroupedTensor) and any(_is_match(name.removesuffix(".weight"), p) for p in patterns):
            raise ValueError(f"got quantised weights {name}, expected others: {KEY} lists them as not quantised")
    return joined


def _read_config(folder: Path) -> dict[str, Any]:
    """Returns `quantization_config` of config.json, or the content of hf_quant_config.json beside it; {} without either."""
    raw = read_json(folder / "config.json")
    text = raw.get("text_config")
    config = raw.get(KEY) or (text.get(KEY) if isinstance(text, dict) else None)
    modelopt_file = folder / "hf_quant_config.json"
    if not config and modelopt_file.exists():
        keys = Keys(read_json(modelopt_file), modelopt_file.name)
        config = {**keys.table("quantization").raw, "quant_method": ModelOpt.name}
        METHODS[ModelOpt.name].check(Keys(config, modelopt_file.name))
    return config if isinstance(config, dict) else {}


def _is_match(prefix: str, pattern: str) -> bool:
    """Returns whether a pattern matches a module. A pattern is a name with wildcards, or "re:" and a regular expression."""
    if not pattern.startswith("re:"):
        return fnmatchcase(prefix, pattern)
    try:
        return bool(re.match(pattern[3:], prefix))
    except re.error as error:
        raise ValueError(f"got {quoted(pattern)} in {KEY}, expected a regular expression: {error}") from None
