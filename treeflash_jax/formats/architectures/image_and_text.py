"""Image-and-text files. Only their text model is read.

Their config.json has the text model's keys in `text_config`. Names of its tensors begin with "model.language_model.".
Text-only files of the same families have these keys and tensors at the top level.
"""

from collections.abc import Collection
from typing import Any

from treeflash_jax.core.error_text import warn
from treeflash_jax.formats import quant_methods
from treeflash_jax.formats.architectures.dense import INERT
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models.config import ModelConfig

IMAGE_AND_TEXT = {  # model types, each with the type of its text model
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
}
_TIED = ("gemma4", "gemma4_unified")  # types whose tables are tied by default
_OUTSIDE_TEXT = {"text_config", "vision_config", "audio_config", "model_type", "tie_word_embeddings", "language_model_only"}
_OUTSIDE_TEXT |= {f"{name}_token_id" for name in "image video audio vision_start vision_end boi eoi boa".split()}
_OUTSIDE_TEXT |= {"eoa_token_index", "eoa_token_id", "vision_soft_tokens_per_image"}


def text_keys(keys: Keys) -> Keys:
    """Returns the keys of the text model in an image-and-text file; for any other file, its keys.

    Raises ValueError if an outer key changes numbers, or if there is no `text_config`.
    """
    model_type = keys.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in IMAGE_AND_TEXT:
        return keys
    text = keys.table("text_config", required=True)
    keys.check_known(_OUTSIDE_TEXT | INERT | {"eos_token_id", quant_methods.KEY})
    text.check_only({"model_type": (IMAGE_AND_TEXT[model_type],)})
    raw = {**text.raw, "model_type": IMAGE_AND_TEXT[model_type]}
    raw["tie_word_embeddings"] = keys.truth("tie_word_embeddings", model_type in _TIED)
    outside = {key: keys.raw[key] for key in ("eos_token_id", quant_methods.KEY) if key in keys}
    return Keys({**outside, **raw}, text.where)


def text_tensors(config: ModelConfig, tensors: dict[str, Any], unread: Collection[str]) -> dict[str, Any]:
    """Returns the text model's tensors under the names of text-only files. Leaves out tensors that begin with `unread`."""
    for prefix in unread:
        if any(name.startswith(prefix) for name in tensors):
            warn(f"{prefix}* of a {config.model_type} file is not read")
    return {
        name.replace("model.language_model.", "model.", 1): tensor
        for name, tensor in tensors.items()
        if not name.startswith(tuple(unread))
    }
