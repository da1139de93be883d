"""Sizes of known models by name, for timing and compiling programs without weight files.

Sources: the models' config.json files, or transformers' defaults for Qwen3.5-9B and Qwen3.6-35B-A3B; DFlash (arXiv
2602.06036) for the drafters.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.core import parameters, sharding
from treeflash_jax.core.parameters import Spec, is_spec
from treeflash_jax.core.settings import field_names, setting
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.drafters import AssistantDrafter, Drafter, MtpDrafter
from treeflash_jax.drafters.block.block_drafter import BlockDrafter, default_target_layers, fresh_layers
from treeflash_jax.drafters.language_model_drafter import LanguageModelDrafter
from treeflash_jax.drafters.mtp_drafter import layer_sizes
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.settings.defaults import merges_weights
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.pairs import DRAFTERS, MTP, locate
from treeflash_jax.formats import draft_vocabulary, model_files
from treeflash_jax.formats.architectures.architecture import Architecture
from treeflash_jax.formats.architectures.gemma4 import GEMMA4, GEMMA4_UNIFIED
from treeflash_jax.formats.architectures.gpt_oss import GPT_OSS
from treeflash_jax.formats.architectures.rope import attention_growth
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models import decoder, quantized
from treeflash_jax.models.config import DeltaSizes, ModelConfig, Rope
from treeflash_jax.models.layer_kinds import KINDS
from treeflash_jax.trees import BUILDERS

_QWEN3 = dict(
    vocab_size=151_936, num_kv_heads=8, head_dim=128, rope=Rope(theta=1e6), max_positions=40_960, eos_token_ids=(151_645,)
)
_QWEN3_MOE = _QWEN3 | dict(num_kv_heads=4, num_experts=128, experts_per_token=8, expert_size=768)
_QWEN3_MOE |= dict(normalize_experts=True, model_type="qwen3_moe")
_QWEN3_5 = dict(
    vocab_size=248_320, head_dim=256, rope=Rope(theta=1e7, fraction=0.25), max_positions=262_144, eos_token_ids=(248_044,),
    offset_norms=True, gates_attention=True, model_type="qwen3_5_text",
)  # fmt: skip
_QWEN3_5_MOE = dict(num_experts=256, experts_per_token=8, expert_size=512, shared_expert_size=512)
_QWEN3_5_MOE |= dict(normalize_experts=True, model_type="qwen3_5_moe_text")

_GPT_OSS = dict(
    vocab_size=201_088, num_kv_heads=8, head_dim=64, max_positions=131_072, rms_norm_eps=1e-5, eos_token_ids=(200_002,),
    rope=Rope(
        theta=150_000.0, kind="yarn", factor=32.0, original_max_positions=4096, attention_factor=attention_growth(32.0),
        truncate=False,
    ),
    experts_per_token=4, expert_size=2880, swiglu_limit=7.0, window=128, model_type="gpt_oss",
    **GPT_OSS.constants,
)  # fmt: skip


def _config(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, **sizes: Any) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size, intermediate_size=intermediate_size, num_layers=num_layers, num_heads=num_heads, **sizes
    )


def _qwen3_5(num_layers: int, value_heads: int) -> dict[str, Any]:
    """Returns the sizes that Qwen3.5 and Qwen3.6 share. Every fourth layer has full attention, the others delta rules."""
    types = ("linear_attention", "linear_attention", "linear_attention", "full_attention") * (num_layers // 4)
    delta = DeltaSizes(key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, conv_width=4)
    return _QWEN3_5 | dict(layer_types=types, delta=delta)


def _gpt_oss(num_layers: int) -> dict[str, Any]:
    return _GPT_OSS | dict(layer_types=("sliding_attention", "full_attention") * (num_layers // 2))


def _gemma4(family: Architecture, **keys: Any) -> ModelConfig:
    """Returns the sizes in a config.json whose every sixth layer has full attention."""
    common = {"vocab_size": 262_144, "head_dim": 256, "global_head_dim": 512, "final_logit_softcapping": 30.0}
    return family.read(Keys(common | {"eos_token_id": [1, 106]} | keys, "shape"))


def _dense_gemma4(width: int, ffn: int, num_layers: int, heads: tuple[int, int, int]) -> dict[str, Any]:
    """Returns config keys of models without layer inputs. `heads`: heads of queries, of keys in a window, of other keys."""
    return {
        "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": num_layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "num_global_key_value_heads": heads[2], "attention_k_eq_v": True,
        "sliding_window": 1024, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144,
    }  # fmt: skip


SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": _config(1024, 3072, 28, 16, tie_embeddings=True, **_QWEN3),
    "qwen3-4b": _config(2560, 9728, 36, 32, tie_embeddings=True, **_QWEN3),
    "qwen3-8b": _config(4096, 12_288, 36, 32, **_QWEN3),
    "qwen3-30b-a3b": _config(2048, 6144, 48, 32, **_QWEN3_MOE),
    "qwen3.5-9b": _config(4096, 12_288, 32, 16, num_kv_heads=4, **_qwen3_5(32, value_heads=32)),
    "qwen3.6-27b": _config(5120, 17_408, 64, 24, num_kv_heads=4, **_qwen3_5(64, value_heads=48)),
    # No layer of the verifier is dense; 6144 is the width of its published drafter.
    "qwen3.6-35b-a3b": _config(2048, 6144, 40, 16, num_kv_heads=2, **_qwen3_5(40, value_heads=32) | _QWEN3_5_MOE),
    "gpt-oss-20b": _config(2880, 2880, 24, 64, num_experts=32, **_gpt_oss(24)),
    "gpt-oss-120b": _config(2880, 2880, 36, 64, num_experts=128, **_gpt_oss(36)),
    "gemma4-e4b": _gemma4(
        GEMMA4, hidden_size=2560, intermediate_size=10_240, num_hidden_layers=42, num_attention_heads=8,
        num_key_value_heads=2, num_kv_shared_layers=18,
    ),
    "gemma4-12b": _gemma4(GEMMA4_UNIFIED, **_dense_gemma4(3840, 15_360, 48, (16, 8, 1))),
    "gemma4-26b-a4b": _gemma4(
        GEMMA4, enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
        **_dense_gemma4(2816, 2112, 30, (16, 8, 2)),
    ),
    "gemma4-31b": _gemma4(GEMMA4, **_dense_gemma4(5376, 21_504, 60, (32, 16, 4))),
    "smollm2": _config(
        576, 1536, 30, 9, vocab_size=49_152, num_kv_heads=3, head_dim=64, max_positions=8192, rope=Rope(theta=1e5),
        tie_embeddings=True, eos_token_ids=(0, 2), rms_norm_eps=1e-5, qk_norm=False, model_type="llama",
    ),
    "tiny": _config(
        256, 768, 6, 8, vocab_size=2048, num_kv_heads=4, head_dim=32, max_positions=2048, rope=Rope(theta=1e4),
        tie_embeddings=True, eos_token_ids=(2,),
    ),
}  # fmt: skip


TREE_OPTIONS = sorted(
    {"attention", "kernels", *field_names(GenerateConfig, "drafting", "tree")}
    - {"nodes", "drafter_temperature", "selector"}
)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of a pair."""

    shape: str | None = setting(
        None,
        f"one of {', '.join(SHAPES)}, or a verifier's config.json or its folder",
        unset="the pair of --verifier and --drafter, with its weights",
        unit="shape",
    )
    drafter_shape: str | None = setting(
        None,
        "a drafter's config.json, the name of a language model, mtp or ngram",
        unset="the published sizes",
        unit="file",
    )


def describe_tree(plan: DecodePlan) -> dict[str, Any]:
    """Returns the settings of a plan's rounds, for a record."""
    values = plan.configured_drafter.setting_values() if plan.drafts else {}
    drafting = {option: values.get(option) for option in field_names(GenerateConfig, "drafting")}
    read = BUILDERS[plan.builder].reads if plan.drafts else ()
    shape = {name: value for name, value in asdict(plan.shape).items() if name in read}
    if plan.shape.selector is not None:  # as JSON, without the sizes that the selector chooses
        shape = {"selector": json.loads(json.dumps(shape["selector"])), "leaves": plan.shape.leaves}
    rule = {"builder": plan.builder, "acceptance": plan.rule, "attention": plan.attention}
    if plan.shared.kernels:
        rule["kernels"] = plan.shared.kernels
    return {"nodes": plan.num_nodes, **drafting, **shape, **rule}


def find_pair(shape: str, drafter_shape: str | None = None) -> tuple[ModelConfig, Drafter]:
    """Returns the sizes of a verifier and its drafter. Reads no weights.

    Args:
      shape: a key of SHAPES, a config.json, its folder, or a GGUF file.
      drafter_shape: key of SHAPES, "mtp", or name, config.json or folder of a drafter. None: result of `find_drafter`.

    Raises ValueError for an unknown name, a config that is not implemented, or a drafter that does not fit.
    """
    verifier = find_verifier(shape)
    if drafter_shape is None:
        return verifier, find_drafter(verifier).fitted(verifier)
    if drafter_shape in SHAPES:
        return verifier, LanguageModelDrafter(layers=SHAPES[drafter_shape]).fitted(verifier)
    if drafter_shape == MTP:
        return verifier, make_included_drafter(verifier).fitted(verifier)
    path = locate(drafter_shape, "drafter") if drafter_shape in DRAFTERS else Path(drafter_shape)
    drafter = model_files.read_drafter_config(path).fitted(verifier)
    return verifier, draft_vocabulary.limit(drafter, path, verifier.vocab_size)


def find_verifier(name: str) -> ModelConfig:
    if name in SHAPES:
        return SHAPES[name]
    if not Path(name).exists():
        known = ", ".join(SHAPES)
        raise ValueError(f"got shape {name!r}, expected one of {known}, or a config.json, its folder or a GGUF file")
    return model_files.read_verifier_config(name)


def make_included_drafter(verifier: ModelConfig) -> Drafter:
    """Returns a multi-token prediction layer for a verifier, or an assistant for a Gemma.

    An assistant has the sizes of the assistants of E4B and 31B, with the verifier's heads.
    """
    if not verifier.model_type.startswith("gemma4"):
        return MtpDrafter(layers=layer_sizes(verifier))
    is_edge = verifier.layer_input_size > 0
    width, ffn, num_heads = (256, 2048, 4) if is_edge else (1024, 8192, verifier.num_heads)
    kind_sizes = {kind: replace(sizes, intermediate_size=ffn) for kind, sizes in verifier.sizes}
    kinds = ("shared_sliding_attention",) * 3 + ("shared_full_attention",)
    layers = replace(
        verifier, hidden_size=width, intermediate_size=ffn, num_layers=4, num_heads=num_heads, layer_types=kinds,
        sizes=tuple((kind, kind_sizes[KINDS[kind].shares]) for kind in dict.fromkeys(kinds)), window=verifier.window + 1,
        layer_input_size=0, num_experts=0, dense_beside_experts=False,
    )  # fmt: skip
    clusters = {"num_clusters": 2048, "top_clusters": 32} if is_edge else {}
    return AssistantDrafter(layers=layers, target_hidden_size=verifier.hidden_size, **clusters)


def find_drafter(verifier: ModelConfig, *, num_layers: int | None = None) -> Drafter:
    """Returns the shipped drafter for the shipped verifier; for others, a TreeFlash drafter of the published sizes.

    This drafter has the verifier's widths, five layers (eight for a mixture of experts) and blocks of 16. It reads five of
    the verifier's layers, or fewer if the verifier has fewer than eight.
    """
    if verifier == SHAPES["tiny"]:
        return model_files.read_drafter_config(locate("tiny", "drafter"))
    return BlockDrafter(
        layers=fresh_layers(verifier, num_layers or (8 if verifier.num_experts else 5)),
        block_size=16,
        mask_token_id=verifier.vocab_size - 1,
        taps=default_target_layers(verifier.num_layers, max(1, min(num_layers or 5, verifier.num_layers - 3))),
        num_target_layers=verifier.num_layers,
        head="mlp",
    )


def short_name(path: str) -> str:
    """Returns the name of a shape, path or Hub id for a record, without this machine's folders."""
    if path in SHAPES:
        return path
    file = Path(path).absolute() if Path(path).exists() else Path(path)
    if file.name == "config.json":
        return file.parent.name
    return file.stem if file.is_file() else file.name


def random_pair(
    verifier: ModelConfig, drafter: Drafter, dtype: DTypeLike, mesh: Mesh | None = None, quantize: str | None = None
) -> TreeFlash:
    """Makes a pair with random weights. They are drawn one by one in their dtype, and the verifier's are then quantised.

    No matrix is zero, because zeros multiply faster than other numbers. Weights that are zero at the start of training are
    small here, so that trees fill up as with a trained head.
    """
    specs = decoder.specs(verifier, is_merged=merges_weights(sharding.device(mesh)), mesh=mesh), drafter.specs()
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(specs, is_leaf=is_spec))))

    def draw(spec: Spec, scheme: str | None = None) -> jax.Array:
        key = next(keys)
        if spec.dtype is None:
            center, scale = {"normal": (0.0, 0.02), "ones": (1.0, 0.02), "zeros": (0.0, 1e-3)}[spec.init]
            weight = center + scale * jax.random.normal(key, spec.shape, dtype)
        else:  # ids
            weight = parameters.initialize(spec, key)
        if mesh is not None:
            weight = jax.device_put(weight, sharding.sharding(spec.axes, spec.shape, mesh))
        return quantized.compress(weight, spec, scheme=scheme, mesh=mesh)

    weights = jax.tree.map(partial(draw, scheme=quantize), specs[0], is_leaf=is_spec)
    return TreeFlash(verifier, Weights(weights, jax.tree.map(draw, specs[1], is_leaf=is_spec)), drafter=drafter, mesh=mesh)
