"""Qwen3-MoE: Qwen3 with a mixture of experts as the feed-forward part of most or all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeflash_jax.core.checks import INT32
from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures.architecture import Key
from treeflash_jax.formats.architectures.dense import INERT, LINEAR, ONLY, QWEN3, even_heads, size_keys
from treeflash_jax.formats.keys import Keys, find_key
from treeflash_jax.models.config import ModelConfig

MAX_EXPERTS = 4096
APART = {  # files with a tensor per expert
    "router": Entry("mlp.gate.weight", **LINEAR),
    "expert_gate": Entry("mlp.experts.{}.gate_proj.weight", **LINEAR),
    "expert_up": Entry("mlp.experts.{}.up_proj.weight", **LINEAR),
    "expert_down": Entry("mlp.experts.{}.down_proj.weight", **LINEAR),
}
_FUSED: dict[str, Any] = LINEAR | {"is_stacked": True, "part_axis": 0}
FUSED = {  # files with a tensor for all experts of a layer; gate and up are concatenated
    "router": APART["router"],
    "expert_gate": Entry("mlp.experts.gate_up_proj", **_FUSED, part=(0, 2)),
    "expert_up": Entry("mlp.experts.gate_up_proj", **_FUSED, part=(1, 2)),
    "expert_down": Entry("mlp.experts.down_proj", **_FUSED),
}


def derive(keys: Keys, fields: Mapping[str, Any], default: int = 128) -> dict[str, Any]:
    """Returns the number of experts (`default` if a file does not state it) and the dense layers."""
    _, key = find_key((keys, "num_experts"), (keys, "num_local_experts"))
    experts = keys.integer(key, least=0, most=MAX_EXPERTS) if key in keys else default
    count = fields["num_layers"]
    step = keys.integer("decoder_sparse_step", 1)
    listed = keys.ids("mlp_only_layers", INT32, required=False)
    keys.expect(max(listed, default=0) < count, "mlp_only_layers", list(listed), f"layers from 0 to {count - 1}")
    if experts == 0:
        return {}
    per_token = fields["experts_per_token"]
    keys.expect(per_token <= experts, "num_experts_per_tok", per_token, f"at most {experts}, the number of experts")
    dense = tuple(i for i in range(count) if i in listed or (i + 1) % step)
    return {"num_experts": experts, "dense_layers": dense}


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `derive` reads, and keys without effect here."""
    return {
        "num_experts": config.num_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    keys=(
        *size_keys(head_dim=even_heads, kv_heads=4),
        Key(name="num_experts_per_tok", field="experts_per_token", default=8),
        Key(name="moe_intermediate_size", field="expert_size", default=768),
        Key(name="norm_topk_prob", field="normalize_experts", kind=bool, default=False),
    ),
    only=ONLY | {"shared_expert_intermediate_size": (0, None), "use_qk_norm": (True, None), "qkv_bias": (False, None)},
    inert=INERT | {"router_aux_loss_coef", "output_router_logits"},
    derive=derive,
    derived=("num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
    write=write,
    layer=QWEN3.layer | APART,
    layouts=(QWEN3.layer | FUSED,),
    gguf="qwen3moe",
    gguf_sizes={
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
)
