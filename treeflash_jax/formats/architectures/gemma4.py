"""Gemma 4: windows in most layers, and layers of full attention with other head sizes in between; dense or with experts.

In the edge models (E2B, E4B), each layer has an additional input, and some layers share keys and values. Files on the Hub
hold image-and-text models (`image_and_text`), of two types with the same text model.

Source: transformers, models gemma4 and gemma4_unified.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures import gemma4_gguf, rope
from treeflash_jax.formats.architectures.architecture import FULL, SLIDING, Architecture, Key
from treeflash_jax.formats.architectures.dense import AS_ON_DISK, INERT, LAYER, LINEAR, OUTSIDE, size_keys
from treeflash_jax.formats.architectures.image_and_text import text_tensors
from treeflash_jax.formats.architectures.qwen3_moe import FUSED, MAX_EXPERTS
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models.config import KindSizes, ModelConfig, Rope

_NOT_TEXT = tuple(f"model.{name}." for name in "vision_tower audio_tower embed_vision embed_audio vision_embedder".split())
_ROPE = {  # rope settings of files that state none
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_LAYER = LAYER | {
    "q_norm": Entry("self_attn.q_norm.weight"),
    "k_norm": Entry("self_attn.k_norm.weight"),
    "attention_post_norm": Entry("post_attention_layernorm.weight"),
    "mlp_norm": Entry("pre_feedforward_layernorm.weight"),
    "mlp_post_norm": Entry("post_feedforward_layernorm.weight"),
    "input_gate": Entry("per_layer_input_gate.weight", **AS_ON_DISK),
    "input_out": Entry("per_layer_projection.weight", **AS_ON_DISK),
    "input_norm": Entry("post_per_layer_input_norm.weight"),
    "scalar": Entry("layer_scalar"),
}
_EXPERTS = {name: replace(entry, name=entry.name.removeprefix("mlp.")) for name, entry in FUSED.items()} | {
    "router": Entry("router.proj.weight", **LINEAR),
    "router_norm": Entry("router.scale"),
    "expert_scale": Entry("router.per_expert_scale"),
    "experts_norm": Entry("pre_feedforward_layernorm_2.weight"),
    "dense_post_norm": Entry("post_feedforward_layernorm_1.weight"),
    "experts_post_norm": Entry("post_feedforward_layernorm_2.weight"),
}
_OUTSIDE = OUTSIDE | {
    "input_embed": Entry("model.embed_tokens_per_layer.weight", **AS_ON_DISK),
    "input_map": Entry("model.per_layer_model_projection.weight", **AS_ON_DISK),
    "input_norm": Entry("model.per_layer_projection_norm.weight"),
}
_SHARED_WEIGHTS = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")


def _keys(max_positions: int) -> tuple[Key, ...]:
    sizes = size_keys(head_dim=lambda keys, fields: 256, kv_heads=4)
    changed = {"max_position_embeddings": max_positions, "tie_word_embeddings": True}
    cap = Key(name="final_logit_softcapping", field="logit_cap", kind=float, default=lambda keys, fields: 0.0)
    return (*(replace(key, default=changed.get(key.name, key.default)) for key in sizes), cap)


def _derive(keys: Keys, fields: Mapping[str, Any], input_size: int, window: int) -> dict[str, Any]:
    """Returns the kinds of layers with their sizes, the width of the additional layer inputs, and the experts."""
    num_layers, vocab_size = fields["num_layers"], fields["vocab_size"]
    types = keys.raw.get("layer_types") or [FULL if i % 6 == 5 else SLIDING for i in range(num_layers - 1)] + [FULL]
    keys.expect(types[-1] == FULL, "last of layer_types", types[-1], FULL)
    num_shared = keys.integer("num_kv_shared_layers", 0, least=0, most=num_layers - 1)
    has_own = {*types[: num_layers - num_shared]}
    keys.expect({*types} == has_own, "num_kv_shared_layers", num_shared, "a layer of each kind before these")
    kinds = [name if i < num_layers - num_shared else f"shared_{name}" for i, name in enumerate(types)]
    input_size = keys.integer("hidden_size_per_layer_input", input_size, least=0)
    if input_size:
        rows = keys.integer("vocab_size_per_layer_input", 262_144)
        keys.expect(rows == vocab_size, "vocab_size_per_layer_input", rows, f"the vocabulary of {vocab_size}")
    kind_sizes = _sizes(keys, fields, types)
    wide = 2 if keys.truth("use_double_wide_mlp", False) else 1
    shared = {f"shared_{name}": replace(x, intermediate_size=wide * x.intermediate_size) for name, x in kind_sizes.items()}
    all_sizes = {name: sizes for name, sizes in (kind_sizes | shared).items() if name in kinds}
    return {
        "layer_types": tuple(kinds),
        "sizes": tuple(all_sizes.items()),
        "rope": kind_sizes[SLIDING].rope,
        "window": keys.integer("sliding_window", window),
        "layer_input_size": input_size,
        "embedding_factor": math.sqrt(fields["hidden_size"]),
        **_experts(keys),
    }


def _sizes(keys: Keys, fields: Mapping[str, Any], types: list[str]) -> dict[str, KindSizes]:
    """Returns the sizes of layers with a window and of other layers, in either spelling."""
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    usual = {key: fields[field] for key, field in names.items()}
    is_same = keys.truth("attention_k_eq_v", False)
    full = {**usual, "head_dim": keys.integer("global_head_dim", 512)}
    if is_same and "num_global_key_value_heads" in keys:
        full["num_key_value_heads"] = keys.integer("num_global_key_value_heads")
    if "per_layer_config" in keys:
        full = _listed_sizes(keys.table("per_layer_config"), usual, types)
    heads, kv_heads = fields["num_heads"], full["num_key_value_heads"]
    keys.expect(heads % kv_heads == 0, "num_attention_heads", heads, f"a multiple of {kv_heads} key/value heads")
    settings = keys.table("rope_parameters") if "rope_parameters" in keys else Keys(_ROPE, keys.where)
    settings.check_known(_ROPE)
    sizes = {}
    for kind, values in ((SLIDING, usual), (FULL, full)):
        rotation = _rotation(settings.table(kind, required=True), values["head_dim"], fields["max_positions"])
        sizes[kind] = KindSizes(
            **{field: values[key] for key, field in names.items()},
            rope=rotation,
            intermediate_size=fields["intermediate_size"],
            keys_are_values=is_same and kind == FULL,
        )
    return sizes


def _listed_sizes(listed: Keys, usual: Mapping[str, int], types: list[str]) -> dict[str, int]:
    """Returns the sizes of full attention in `per_layer_config`. Raises ValueError if layers of the same kind differ."""
    by_kind: dict[str, list[dict[str, int]]] = {FULL: [], SLIDING: [dict(usual)]}
    listed.check_known({str(layer) for layer in range(len(types))})
    for layer, kind in enumerate(types):
        given = listed.table(str(layer))
        given.check_known(usual)
        by_kind[kind].append({key: given.integer(key, value) for key, value in usual.items()})
    for kind, sizes in by_kind.items():
        is_one = all(size == sizes[0] for size in sizes)
        listed.expect(is_one, f"sizes of {kind} layers", sizes[-1], f"those of all layers of the kind, {sizes[0]}")
    return by_kind[FULL][0]


def _rotation(settings: Keys, head_dim: int, max_positions: int) -> Rope:
    """Returns the rotation of a kind of layers. It also undoes the scaling of scores, which Gemma does not have.

    Attention divides scores by sqrt(head_dim), so rotated queries and keys are each multiplied by the fourth root of
    head_dim.
    """
    settings.expect(head_dim % 2 == 0, "head_dim", head_dim, "an even number (its halves are rotated)")
    usual = 0.25 if settings.raw.get("rope_type") == "proportional" else 1.0
    keys = Keys({"rope_parameters": settings.raw}, settings.where)
    rotation = rope.read(keys, head_dim, max_positions, usual, 10_000.0, {})
    return replace(rotation, attention_factor=rotation.attention_factor * head_dim**0.25)


def _experts(keys: Keys) -> dict[str, Any]:
    """Returns the fields of the experts; {} for dense models."""
    if not keys.truth("enable_moe_block", False):
        return {}
    num_experts = keys.integer("num_experts", most=MAX_EXPERTS)
    each = keys.integer("top_k_experts")
    keys.expect(each <= num_experts, "top_k_experts", each, f"at most {num_experts}, the number of experts")
    return {
        "num_experts": num_experts,
        "experts_per_token": each,
        "expert_size": keys.integer("moe_intermediate_size"),
        "normalize_experts": True,
        "dense_beside_experts": True,
    }


def _adapt_tensors(config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the text model's tensors, without keys and values of layers that share another layer's."""
    tensors = text_tensors(config, tensors, _NOT_TEXT)
    shares = [kind.startswith("shared_") for kind in config.kinds]

    def is_read(name: str) -> bool:
        match = _SHARED_WEIGHTS.match(name)
        return not (match and int(match[1]) < len(shares) and shares[int(match[1])])

    return {name: tensor for name, tensor in tensors.items() if is_read(name)}


GEMMA4 = Architecture(
    model_type="gemma4_text",
    class_name="Gemma4ForCausalLM",
    keys=_keys(131_072),
    constants={
        "qk_norm": True, "value_norm": True, "wide_norms": True, "post_norms": True, "layer_scalars": True,
        "activation": "gelu",
    },
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False, None),
        "use_bidirectional_attention": (None, "vision"),  # "vision": only among the tokens of an image
        **dict.fromkeys({*rope.KEYS} - {"rope_parameters", "rope_interleaved"}, (None,)),
    },
    inert=INERT - {"sliding_window"},
    layer_types=(SLIDING, FULL),
    derive=partial(_derive, input_size=256, window=512),
    derived=tuple(
        """sliding_window global_head_dim num_global_key_value_heads per_layer_config attention_k_eq_v num_kv_shared_layers
        use_double_wide_mlp hidden_size_per_layer_input vocab_size_per_layer_input enable_moe_block num_experts
        top_k_experts moe_intermediate_size""".split()
    ),
    layer=_LAYER | _EXPERTS,
    outside=_OUTSIDE,
    adapt_tensors=_adapt_tensors,
    is_written=False,
    gguf="gemma4",
    gguf_keys=gemma4_gguf.split_keys,
    gguf_names=gemma4_gguf.NAMES,
    gguf_reads=gemma4_gguf.is_read,
)  # fmt: skip
GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    class_name="Gemma4UnifiedForCausalLM",
    keys=_keys(262_144),
    derive=partial(_derive, input_size=0, window=1024),
    gguf=None,  # GGUF files of both types have the same name
)
