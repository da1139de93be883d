"""gpt-oss: a window in every second layer, attention sinks, biases, and clamped experts in dense or MXFP4 tensors.

Gate and up alternate along an axis of one tensor. MXFP4 tensors (`quant_methods.mxfp4`) are named after their blocks.

Source: transformers, model gpt_oss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures import qwen3_moe
from treeflash_jax.formats.architectures.architecture import FULL, SLIDING, Key
from treeflash_jax.formats.architectures.dense import AS_ON_DISK, INERT, LINEAR, ONLY, QWEN2, size_keys
from treeflash_jax.formats.grouped_tensors import map_parts
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.models.config import ModelConfig

_STACKED: dict[str, Any] = {"is_stacked": True}
_DENSE = {  # [x, inputs, outputs]
    "expert_gate": Entry("mlp.experts.gate_proj", **AS_ON_DISK, **_STACKED),
    "expert_up": Entry("mlp.experts.up_proj", **AS_ON_DISK, **_STACKED),
    "expert_down": Entry("mlp.experts.down_proj", **AS_ON_DISK, **_STACKED),
}
_MXFP4 = {  # [x, outputs, inputs]
    "expert_gate": Entry("mlp.experts.gate_proj_blocks", **LINEAR, **_STACKED),
    "expert_up": Entry("mlp.experts.up_proj_blocks", **LINEAR, **_STACKED),
    "expert_down": Entry("mlp.experts.down_proj_blocks", **LINEAR, **_STACKED),
}
_LAYER = QWEN2.layer | {
    "o_bias": Entry("self_attn.o_proj.bias"),
    "sinks": Entry("self_attn.sinks"),
    "router": Entry("mlp.router.weight", **LINEAR),
    "router_bias": Entry("mlp.router.bias"),
    "expert_gate_bias": Entry("mlp.experts.gate_proj_bias", **AS_ON_DISK),
    "expert_up_bias": Entry("mlp.experts.up_proj_bias", **AS_ON_DISK),
    "expert_down_bias": Entry("mlp.experts.down_proj_bias", **AS_ON_DISK),
}


@dataclass(frozen=True)
class EverySecond:
    """Every second index along an axis of a tensor, beginning at `start`."""

    tensor: Any
    start: int
    axis: int

    def get_shape(self) -> tuple[int, ...]:
        shape = list(self.tensor.get_shape())
        shape[self.axis] = len(range(self.start, shape[self.axis], 2))
        return tuple(shape)

    def get_dtype(self) -> str:
        return self.tensor.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        shape = self.get_shape()
        at = [*index, *(slice(None),) * (len(shape) - len(index))]
        first, last, _ = at[self.axis].indices(shape[self.axis])
        at[self.axis] = slice(2 * first, 2 * last)
        return self.tensor[tuple(at)][(*(slice(None),) * self.axis, slice(self.start, None, 2))]


def _derive(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the number of experts, the kind of each layer and the window."""
    keys.table("quantization_config").check_only({"quant_method": ("mxfp4",)})
    window = keys.integer("sliding_window", 128)
    types = keys.raw.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(fields["num_layers"])]
    return {"layer_types": tuple(types), "window": window} | qwen3_moe.derive(keys, fields)


def _adapt_tensors(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Splits gate and up."""
    kept: dict[str, Any] = {}
    for name, tensor in tensors.items():
        stem, joined, part = name.partition("gate_up_proj")
        if not joined:
            kept[name] = tensor
            continue
        axis = 1 if part else 2  # 1 for MXFP4 tensors and biases; dense tensors have inputs first
        for start, half in enumerate(("gate", "up")):
            kept[f"{stem}{half}_proj{part}"] = map_parts(partial(EverySecond, start=start, axis=axis), tensor)
    return kept


GPT_OSS = replace(
    QWEN2,
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    keys=(
        *size_keys(head_dim=lambda keys, fields: 64, kv_heads=8, eps=1e-5),
        Key(name="intermediate_size", field="expert_size"),
        Key(name="num_experts_per_tok", field="experts_per_token", default=4),
        Key(name="swiglu_limit", field="swiglu_limit", kind=float, default=7.0),
    ),
    constants=dict(
        qk_norm=False, qkv_bias=True, o_bias=True, attention_sinks=True, normalize_experts=True, expert_biases=True
    ),
    only=ONLY | {"attention_bias": (True,), "swiglu_alpha": (1.702,)},
    layer_types=(SLIDING, FULL),
    rope_theta=150_000.0,
    rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    inert=INERT | {"router_aux_loss_coef", "output_router_logits", "experts_per_token", "initial_context_length"},
    derive=_derive,
    derived=("num_experts", "num_local_experts", "quantization_config"),
    layer=_LAYER | _DENSE,
    layouts=(_LAYER | _MXFP4,),
    adapt_tensors=_adapt_tensors,
    is_written=False,
    gguf=None,
)
