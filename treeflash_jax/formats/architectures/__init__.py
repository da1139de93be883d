"""Architectures: what the published files of each family of verifiers hold, and how it maps to ours.

A family is one file that makes an `Architecture`, and one line in ARCHITECTURES. Config keys and tensor names stand
together in that record; `record.Architecture` says what each field means, `common` has what the families share. A family
whose layers have other weights or other maths also needs them in `verifiers.layers.layer_specs`, by fields of
`ModelConfig`.

`qwen2` is one: `constants` says `qk_norm=False` and that queries, keys and values have biases, and `layer` names them.
`qwen3_moe`, a mixture of experts, is another: `keys` adds the sizes of the experts, `derive` finds which layers are dense,
`layer` names the weights of both kinds, of which every layer takes those that its specs ask for, and `layouts` has another
form of them.

    from treeflash_jax.formats.architectures import ARCHITECTURES, common
    from treeflash_jax.formats.architectures.record import Architecture

    ARCHITECTURES["mine"] = Architecture(
        model_type="mine",                                      # in config.json
        class_name="MineForCausalLM",
        keys=common.keys(head_dim=lambda fields: 64),           # sizes, and the default of head_dim
        constants={"qk_norm": False},
        only=common.ONLY | {"logit_scale": (1.0,)},             # a key that must not change the numbers
        inert=common.INERT | {"training_recipe"},               # a key that cannot
        layer=common.LAYER,                                     # or a table of its own
        outside=common.OUTSIDE,
    )

`load`, `convert`, training and the command line then read folders of that family.
"""

from __future__ import annotations

from treeflash_jax.core.checks import quoted
from treeflash_jax.formats.architectures.architecture import Architecture
from treeflash_jax.formats.architectures.llama import LLAMA
from treeflash_jax.formats.architectures.qwen2 import QWEN2
from treeflash_jax.formats.architectures.qwen3 import QWEN3
from treeflash_jax.formats.architectures.qwen3_moe import QWEN3_MOE
from treeflash_jax.formats.keys import Keys

ARCHITECTURES = {architecture.model_type: architecture for architecture in (QWEN3, LLAMA, QWEN2, QWEN3_MOE)}


def of(keys: Keys) -> Architecture:
    """The family of a config.json. Raises ValueError where it is not implemented."""
    model_type = keys.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise ValueError(f"{keys.where}: got model_type {quoted(model_type)}, expected one of {known}")
    return ARCHITECTURES[model_type]
