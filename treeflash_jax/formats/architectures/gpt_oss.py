"""gpt-oss: windows in every second layer, attention sinks, biases, and clamped experts in dense or MXFP4 tensors.

Gate and up alternate along an axis of one tensor. An MXFP4 tensor is two: `_blocks` has the indices of two values in a byte
[x, rows, columns / 32, 16], `_scales` the exponent of each 32 values. They are expanded when a weight is read, one expert
after the other, so that memory holds one whole weight of one layer at a time. Weights kept in four bits on devices are not
implemented.

Source: transformers, model gpt_oss; OCP Microscaling Formats (MX) specification v1.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures import qwen3_moe
from treeflash_jax.formats.architectures.architecture import Key
from treeflash_jax.formats.architectures.dense import AS_ON_DISK, INERT, LINEAR, ONLY, QWEN2, size_keys
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.models.config import ModelConfig

_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 = np.array(_HALF + [-value for value in _HALF], np.float32)
_PAIRS = np.stack([np.tile(FP4, 16), np.repeat(FP4, 16)], axis=-1)  # the two values of a byte, low half first
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))  # by scale
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
    """Every second index of one axis of a tensor, from `start` on."""

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


@dataclass(frozen=True)
class Mxfp4:
    """Weights of experts [x, rows, columns], expanded when they are read: FP4 of an index times a power of two."""

    blocks: Any
    scales: Any
    is_quantized = True

    def get_shape(self) -> tuple[int, ...]:
        experts, rows, groups, size = self.blocks.get_shape()
        return experts, rows, groups * size * 2

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        values = _PAIRS[self.blocks[index[:2]]]
        values *= _POWERS[self.scales[index[:2]]][..., None, None]
        return values.reshape(*values.shape[:2], -1)[..., index[2]]


def _derive(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the number of experts, the kind of each layer and the window."""
    keys.table("quantization_config").check_only({"quant_method": ("mxfp4",)})
    window = keys.whole("sliding_window", 128)
    types = keys.raw.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(fields["num_layers"])
    ]
    return {"layer_types": tuple(types), "window": window} | qwen3_moe.derive(keys, fields)


def _adapt_tensors(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Splits gate and up, and joins blocks with their scales. Raises ValueError for other shapes or types."""
    kept: dict[str, Any] = {}
    for name, tensor in tensors.items():
        stem, joined, part = name.partition("gate_up_proj")
        if not joined:
            kept[name] = tensor
            continue
        axis = 1 if part else 2  # blocks, scales and biases; a dense tensor has inputs first
        for start, half in enumerate(("gate", "up")):
            kept[f"{stem}{half}_proj{part}"] = EverySecond(tensor, start, axis)
    for name in [name for name in kept if name.endswith("_scales")]:
        scales, blocks = kept.pop(name), name.replace("_scales", "_blocks")
        shape = list(scales.get_shape())
        if blocks not in kept or list(kept[blocks].get_shape()[:-1]) != shape:
            raise ValueError(f"tensor {name} has shape {shape}, expected that of {blocks} without its last axis")
        for part, tensor in ((name, scales), (blocks, kept[blocks])):
            if tensor.get_dtype() != "U8":
                raise ValueError(f"tensor {part} has type {tensor.get_dtype()}, expected U8: MXFP4 in bytes")
        kept[blocks] = Mxfp4(kept[blocks], scales)
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
    layer_types=("sliding_attention", "full_attention"),
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
