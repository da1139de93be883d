"""Qwen3 with mixtures of experts in place of most or all feed-forward parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeflash_jax.core.checks import INT32
from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures import common
from treeflash_jax.formats.architectures.architecture import Key
from treeflash_jax.formats.architectures.qwen3 import QWEN3
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models.config import ModelConfig

APART = {  # a tensor for each expert
    "router": Entry("mlp.gate.weight", **common.LINEAR),
    "expert_gate": Entry("mlp.experts.{}.gate_proj.weight", **common.LINEAR),
    "expert_up": Entry("mlp.experts.{}.up_proj.weight", **common.LINEAR),
    "expert_down": Entry("mlp.experts.{}.down_proj.weight", **common.LINEAR),
}
_FUSED: dict[str, Any] = common.LINEAR | {"is_stacked": True, "part_axis": 0}
FUSED = {  # one tensor for all experts of a layer, gate and up in one
    "router": APART["router"],
    "expert_gate": Entry("mlp.experts.gate_up_proj", **_FUSED, part=(0, 2)),
    "expert_up": Entry("mlp.experts.gate_up_proj", **_FUSED, part=(1, 2)),
    "expert_down": Entry("mlp.experts.down_proj", **_FUSED),
}


def _derive(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Number and choice of the experts, and which layers have none."""
    spellings = {keys.whole(key, least=0) for key in ("num_experts", "num_local_experts") if key in keys}
    if len(spellings) > 1:
        got = f"num_experts {keys.raw['num_experts']} and num_local_experts {keys.raw['num_local_experts']}"
        raise ValueError(f"{keys.where}: got {got}, expected one number")
    experts = spellings.pop() if spellings else 128
    count, step = fields["num_layers"], keys.whole("decoder_sparse_step", 1)
    listed = keys.ids("mlp_only_layers", INT32) if keys.raw.get("mlp_only_layers") not in (None, []) else ()
    if listed and max(listed) >= count:
        raise ValueError(f"{keys.where}: got mlp_only_layers {list(listed)}, expected layers from 0 to {count - 1}")
    if experts == 0:
        return {}
    if fields["experts_per_token"] > experts:
        raise ValueError(
            f"{keys.where}: got num_experts_per_tok {fields['experts_per_token']} of {experts} experts, "
            f"expected at most {experts}"
        )
    dense = tuple(i for i in range(count) if i in listed or (i + 1) % step)
    return {"num_experts": experts, "dense_layers": dense}


def _write(config: ModelConfig) -> dict[str, Any]:
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
        *common.keys(head_dim=common.even_heads),
        Key(name="num_experts_per_tok", field="experts_per_token", default=8),
        Key(name="moe_intermediate_size", field="expert_size", default=768),
        Key(name="norm_topk_prob", field="normalize_experts", kind=bool, default=False),
    ),
    only=common.ONLY
    | {"shared_expert_intermediate_size": (0, None), "use_qk_norm": (True, None), "qkv_bias": (False, None)},
    inert=common.INERT | {"router_aux_loss_coef", "output_router_logits"},
    derive=_derive,
    derived=("num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
    write=_write,
    layer=QWEN3.layer | APART,
    layouts=(QWEN3.layer | FUSED,),
    gguf="qwen3moe",
    gguf_sizes={
        "expert_count": "num_experts",
        "expert_used_count": "experts_per_token",
        "expert_feed_forward_length": "expert_size",
    },
)
