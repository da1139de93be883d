"""Architectures: how the config keys and tensor names of each verifier family map to names of this package.

A family is an `Architecture` and a line in ARCHITECTURES. `architecture.Architecture` describes its fields; `dense` has the
parts that families share. If a family has other layer weights or mathematics, `models` also needs them, as a kind of layer
(`models.layer_protocol`) or as a choice by fields of `ModelConfig`. Two examples:

- `dense.QWEN2` sets `qkv_bias` in `constants` and names the biases in `layer`.
- In `qwen3_moe`, a mixture of experts, `keys` adds the sizes of the experts, `derive` lists the dense layers, `layer` names
  the weights of both kinds of layers, and `layouts` has the names of a second file layout.

This adds a family:

    from treeflash_jax.formats.architectures import ARCHITECTURES, dense
    from treeflash_jax.formats.architectures.architecture import Architecture

    ARCHITECTURES["mine"] = Architecture(
        model_type="mine",                                     # in config.json
        class_name="MineForCausalLM",
        keys=dense.size_keys(lambda keys, fields: 64),         # sizes, and the default of head_dim
        constants={"qk_norm": False},
        only=dense.ONLY | {"logit_scale": (1.0,)},             # a key with one implemented value
        inert=dense.INERT | {"training_recipe"},               # a key without effect on the forward pass
        layer=dense.LAYER,                                     # names of the layers' tensors
        outside=dense.OUTSIDE,
    )

`load`, `convert`, training and the command line then read folders of this family.
"""

from treeflash_jax.core.error_text import LONGEST_PATH, clipped, quoted
from treeflash_jax.formats.architectures.architecture import Architecture
from treeflash_jax.formats.architectures.dense import LLAMA, QWEN2, QWEN3
from treeflash_jax.formats.architectures.gemma4 import GEMMA4, GEMMA4_UNIFIED
from treeflash_jax.formats.architectures.gpt_oss import GPT_OSS
from treeflash_jax.formats.architectures.image_and_text import IMAGE_AND_TEXT, text_keys
from treeflash_jax.formats.architectures.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from treeflash_jax.formats.architectures.qwen3_moe import QWEN3_MOE
from treeflash_jax.formats.keys import Keys

ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        QWEN3, LLAMA, QWEN2, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, GPT_OSS, GEMMA4, GEMMA4_UNIFIED
    )
}  # fmt: skip


__all__ = ["ARCHITECTURES", "recognise", "text_keys"]


def recognise(keys: Keys) -> Architecture:
    """Returns the family of a config.json. Raises ValueError if it is not implemented."""
    model_type = keys.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(name for name in (*ARCHITECTURES, *IMAGE_AND_TEXT) if not name.endswith("_text"))
        where = clipped(keys.where, LONGEST_PATH)
        raise ValueError(f"{where}: got model_type {quoted(model_type)}, expected one of {known}")
    return ARCHITECTURES[model_type]
