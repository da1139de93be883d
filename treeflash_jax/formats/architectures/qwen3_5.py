"""Qwen3.5 and later, and Qwen3-Next: gated delta-rule layers with full attention in between; dense or with experts.

Files on the Hub hold image-and-text models (`image_and_text`); "model.visual.*" is not read. The multi-token prediction
layer, "mtp.*", is a drafter (`drafters.mtp_drafter`) and not part of the verifier.

Source: transformers, models qwen3_5, qwen3_5_moe and qwen3_next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures import qwen3_moe
from treeflash_jax.formats.architectures.architecture import Key
from treeflash_jax.formats.architectures.dense import AS_ON_DISK, LINEAR, ONLY, QWEN3, size_keys
from treeflash_jax.formats.architectures.image_and_text import text_tensors
from treeflash_jax.formats.grouped_tensors import map_parts
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models.config import DeltaSizes, ModelConfig

_VISION = "model.visual."
_SIZES = {  # for each key of delta-rule layers, the field of DeltaSizes and the default
    "linear_num_key_heads": ("key_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
    "linear_conv_kernel_dim": ("conv_width", 4),
}
_ONLY = ONLY | {
    "attn_output_gate": (True, None),
    "output_gate_type": ("swish", None),
    "mamba_ssm_dtype": ("float32", None),
    "mtp_num_hidden_layers": (1, 0, None),
    "mtp_use_dedicated_embeddings": (False, None),
}
_DELTA = {
    "delta_qkv": Entry("linear_attn.in_proj_qkv.weight", **AS_ON_DISK),
    "delta_z": Entry("linear_attn.in_proj_z.weight", **AS_ON_DISK),
    "delta_b": Entry("linear_attn.in_proj_b.weight", **AS_ON_DISK),
    "delta_a": Entry("linear_attn.in_proj_a.weight", **AS_ON_DISK),
    "conv": Entry("linear_attn.conv1d.weight", **AS_ON_DISK, has_middle=True),
    "log_rate": Entry("linear_attn.A_log"),
    "time_bias": Entry("linear_attn.dt_bias"),
    "gated_norm": Entry("linear_attn.norm.weight"),
    "delta_o": Entry("linear_attn.out_proj.weight", **AS_ON_DISK),
}
_MTP = {
    "fc": Entry("mtp.fc.weight", **LINEAR),
    "embed_norm": Entry("mtp.pre_fc_norm_embedding.weight"),
    "hidden_norm": Entry("mtp.pre_fc_norm_hidden.weight"),
    "norm": Entry("mtp.norm.weight"),
}
_SHARED = {
    "shared_gate": Entry("mlp.shared_expert.gate_proj.weight", **AS_ON_DISK),
    "shared_up": Entry("mlp.shared_expert.up_proj.weight", **AS_ON_DISK),
    "shared_down": Entry("mlp.shared_expert.down_proj.weight", **AS_ON_DISK),
    "shared_router": Entry("mlp.shared_expert_gate.weight", **AS_ON_DISK),
}


def _derive(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the kind of each layer and the sizes of delta-rule layers."""
    interval = keys.integer("full_attention_interval", 4)
    num_layers = fields["num_layers"]
    types = keys.raw.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)
    ]
    delta = DeltaSizes(**{field: keys.integer(key, default) for key, (field, default) in _SIZES.items()})
    got, key_heads = delta.value_heads, delta.key_heads
    keys.expect(got % key_heads == 0, "linear_num_value_heads", got, f"a multiple of {key_heads} key heads")
    keys.expect(delta.conv_width > 1, "linear_conv_kernel_dim", delta.conv_width, "a whole number of at least 2")
    return {"layer_types": tuple(types), "delta": delta}


def _write(config: ModelConfig) -> dict[str, Any]:
    sizes = {key: getattr(config.delta, field) for key, (field, _) in _SIZES.items()}
    return {"layer_types": list(config.layer_types), "partial_rotary_factor": config.rope.fraction, **sizes}


def _derive_sparse(keys: Keys, fields: Mapping[str, Any], experts: int) -> dict[str, Any]:
    return _derive(keys, fields) | qwen3_moe.derive(keys, fields, experts)


@dataclass(frozen=True)
class Rows:
    """Some rows of a matrix, in any order."""

    tensor: Any
    rows: np.ndarray

    def get_shape(self) -> tuple[int, int]:
        return len(self.rows), self.tensor.get_shape()[1]

    def get_dtype(self) -> str:
        return self.tensor.get_dtype()

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *others = index if isinstance(index, tuple) else (index,)
        rows = self.rows[first]
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        return np.concatenate([self.tensor[(slice(int(run[0]), int(run[-1]) + 1), *others)] for run in runs])


def _adapt_tensors(config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the text model's tensors under the names of text-only files, without the multi-token prediction layer."""
    tensors = text_tensors(config, tensors, [_VISION])
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}


def _adapt_by_key_head(config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """Splits the maps of Qwen3-Next, which contain query, key, values, gates, b and a of one key head after the other."""
    kept, delta = _adapt_tensors(config, tensors), config.delta
    each = delta.value_heads // delta.key_heads
    for joined, names, sizes in (
        ("qkvz", ("qkv", "z"), [delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim]),
        ("ba", ("b", "a"), [each, each]),
    ):
        ids_gx = np.arange(delta.key_heads * sum(sizes)).reshape(delta.key_heads, -1)
        parts = [part.ravel() for part in np.split(ids_gx, np.cumsum(sizes)[:-1], axis=1)]
        rows = np.concatenate(parts[:-1]), parts[-1]
        for name in [name for name in kept if name.endswith(f".in_proj_{joined}.weight")]:
            tensor = kept.pop(name)
            if tuple(tensor.get_shape()) != (ids_gx.size, config.hidden_size):
                shape = [ids_gx.size, config.hidden_size]
                raise ValueError(f"tensor {name} has shape {list(tensor.get_shape())}, expected {shape}")
            for part, ids in zip(names, rows, strict=True):
                kept[name.replace(f"in_proj_{joined}", f"in_proj_{part}")] = map_parts(partial(Rows, rows=ids), tensor)
    return kept


def _sparse_keys(experts_per_token: int, dense_size: Any) -> tuple[Key, ...]:
    """Returns the keys of a mixture of experts. `dense_size` is the default of `intermediate_size`, for dense layers."""
    return (
        *(key for key in size_keys(head_dim=lambda keys, fields: 256, kv_heads=2) if key.name != "intermediate_size"),
        Key(name="num_experts_per_tok", field="experts_per_token", default=experts_per_token),
        Key(name="moe_intermediate_size", field="expert_size", default=512),
        Key(name="shared_expert_intermediate_size", field="shared_expert_size", default=512),
        Key(name="intermediate_size", field="intermediate_size", default=dense_size),
    )


QWEN3_5 = replace(
    QWEN3,
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    keys=size_keys(head_dim=lambda keys, fields: 256, kv_heads=4),
    constants={"qk_norm": True, "gates_attention": True, "offset_norms": True},
    only=_ONLY,
    layer_types=("linear_attention", "full_attention"),
    derive=_derive,
    derived=(*_SIZES, "full_attention_interval"),
    write=_write,
    layer=QWEN3.layer | _DELTA,
    rotated=0.25,
    adapt_tensors=_adapt_tensors,
    mtp=_MTP,
    gguf=None,
)
_SPARSE = replace(
    QWEN3_5,
    inert=QWEN3_5.inert | {"router_aux_loss_coef", "output_router_logits"},
    derived=(*QWEN3_5.derived, *qwen3_moe.QWEN3_MOE.derived),
    layer=QWEN3_5.layer | qwen3_moe.APART | _SHARED,
    layouts=(QWEN3_5.layer | qwen3_moe.FUSED | _SHARED,),
    write=lambda config: _write(config) | qwen3_moe.write(config),
    is_written=False,
)
QWEN3_5_MOE = replace(
    _SPARSE,
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    keys=_sparse_keys(8, lambda keys, fields: fields["expert_size"]),  # the model has no dense layers
    constants=QWEN3_5.constants | {"normalize_experts": True},
    only=_ONLY | {"norm_topk_prob": (True, None)},
    derive=partial(_derive_sparse, experts=256),
)
QWEN3_NEXT = replace(
    _SPARSE,
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    keys=(*_sparse_keys(10, 5632), Key(name="norm_topk_prob", field="normalize_experts", kind=bool, default=True)),
    derive=partial(_derive_sparse, experts=512),
    adapt_tensors=_adapt_by_key_head,
)
