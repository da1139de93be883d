"""Sizes of known models by name, so that programs can be timed or compiled without a single weight file.

Sources: the models' config.json files; DFlash (arXiv 2602.06036) for the drafters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax import devices, drafters, quantized
from treeflash_jax import mesh as meshes
from treeflash_jax.decoding.loops import Weights
from treeflash_jax.drafters.block.config import DrafterConfig, default_target_layers, fresh_layers
from treeflash_jax.drafters.language_model import LanguageModelConfig
from treeflash_jax.formats import models
from treeflash_jax.model import TreeFlash
from treeflash_jax.pairs import DRAFTERS, locate
from treeflash_jax.params import Spec, is_spec
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig, Rope

_QWEN3 = dict(
    vocab_size=151_936, num_kv_heads=8, head_dim=128, rope=Rope(theta=1e6), max_positions=40_960, eos_token_ids=(151_645,)
)
_QWEN3_MOE = _QWEN3 | dict(
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    num_experts=128,
    experts_per_token=8,
    expert_size=768,
    normalize_experts=True,
    model_type="qwen3_moe",
)
_QWEN25 = dict(
    rope=Rope(theta=1e6), max_positions=32_768, qk_norm=False, qkv_bias=True, model_type="qwen2", eos_token_ids=(151_645,)
)
VERIFIERS: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(
        hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True, **_QWEN3
    ),
    "qwen3-4b": ModelConfig(
        hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, tie_embeddings=True, **_QWEN3
    ),
    "qwen3-8b": ModelConfig(hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32, **_QWEN3),
    "qwen3-30b-a3b": ModelConfig(**_QWEN3_MOE),
    "qwen3-coder-30b-a3b": ModelConfig(**_QWEN3_MOE | {"rope": Rope(theta=1e7), "max_positions": 262_144}),
    "qwen2.5-0.5b": ModelConfig(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        tie_embeddings=True,
        **_QWEN25,
    ),
    "qwen2.5-1.5b": ModelConfig(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        tie_embeddings=True,
        **_QWEN25,
    ),
    "qwen2.5-3b": ModelConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=11_008,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        tie_embeddings=True,
        **_QWEN25,
    ),
    "qwen2.5-7b": ModelConfig(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        **_QWEN25,
    ),
    "llama-3.1-8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=Rope(theta=5e5, kind="llama3", factor=8.0),
        max_positions=131_072,
        qk_norm=False,
        model_type="llama",
    ),
    "smollm2": ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=Rope(theta=1e5),
        max_positions=8192,
        tie_embeddings=True,
        qk_norm=False,
        model_type="llama",
        eos_token_ids=(2,),
    ),
    "tiny": models.read_verifier_config(locate("tiny", "verifier")),
}


def drafter_of(verifier: ModelConfig, *, num_layers: int | None = None, block_size: int = 16) -> DrafterConfig:
    """The shipped drafter for the shipped verifier; else a TreeFlash drafter in the published sizes: the verifier's own
    widths, five layers (eight for a mixture of experts) that read five of its layers, blocks of 16."""
    if verifier == VERIFIERS["tiny"]:
        return models.read_drafter_config(locate("tiny", "drafter"))
    taps = num_layers or 5
    num_layers = num_layers or (8 if verifier.num_experts else 5)
    return DrafterConfig(
        layers=fresh_layers(verifier, num_layers),
        block_size=block_size,
        mask_token_id=verifier.vocab_size - 1,
        target_layer_ids=default_target_layers(verifier.num_layers, taps),
        num_target_layers=verifier.num_layers,
        head="mlp",
    )


def named(name: str) -> ModelConfig:
    """The sizes of a verifier by name, or those of a config.json, its folder, or a GGUF file.

    Raises:
      ValueError: an unknown name, or a config that is not implemented.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    if not Path(name).exists():
        raise ValueError(
            f"got shape {name!r}, expected one of {', '.join(VERIFIERS)}, or a config.json, its folder or a GGUF file"
        )
    return models.read_verifier_config(name)


def named_drafter(path: str) -> Any:
    """The sizes of a drafter from its config.json or folder, or of "ngram"; of a verifier, or by its name, a language model
    that drafts.

    Raises:
      ValueError: nothing there, or a config that is not implemented.
    """
    if path in VERIFIERS:
        return LanguageModelConfig(layers=VERIFIERS[path])
    if path in DRAFTERS:
        return models.read_drafter_config(locate(path, "drafter"))
    if not Path(path).exists():
        known = ", ".join((*DRAFTERS, *VERIFIERS))
        raise ValueError(f"{path} not found, expected a drafter's config.json or its folder, or one of {known}")
    return models.read_drafter_config(path)


def called(path: str) -> str:
    """What a shape, path or Hub id is called: a record names no place on a machine."""
    path = Path(path).absolute() if Path(path).exists() else Path(path)
    return path.parent.name if path.name == "config.json" else path.stem if path.is_file() else path.name


def random_pair(
    model: ModelConfig, drafter: DrafterConfig, dtype: Any, mesh: Any = None, quantize: str | None = None
) -> TreeFlash:
    """A pair of random weights, each drawn on the devices in its own dtype and shard; the verifier's quantised as drawn.

    No matrix is zero: zeros multiply faster than numbers do. Where a fresh head starts from zero, weights are small, so
    that its trees fill up as those of a trained head would.
    """
    quantized.check_scheme(quantize)
    specs = verifier.specs(model), drafters.of(drafter).specs(drafter)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(specs, is_leaf=is_spec))))

    def draw(specs: Any, scheme: str | None) -> Any:
        finish = partial(quantized.compress, scheme=scheme, mesh=mesh)
        return jax.tree.map(lambda spec: finish(_draw(next(keys), spec, dtype, mesh), spec), specs, is_leaf=is_spec)

    weights = Weights(*(draw(each, scheme) for each, scheme in zip(specs, (quantize, None), strict=True)))
    return TreeFlash(model, weights, drafter=drafter, mesh=mesh)


def _draw(key: jax.Array, spec: Spec, dtype: Any, mesh: Any) -> jax.Array:
    place = None if mesh is None else meshes.sharding(spec.axes, spec.shape, mesh)
    center, scale = {"normal": (0.0, 0.02), "ones": (1.0, 0.02), "zeros": (0.0, 1e-3)}[spec.init]
    return _normal(spec.shape, jnp.dtype(dtype), place)(key, center, scale)


@cache
def _normal(shape: tuple[int, ...], dtype: Any, place: Any) -> Callable[..., jax.Array]:
    """One small program per kind of weight: a single one for all of them takes minutes to compile."""

    def draw(key: jax.Array, center: float, scale: float) -> jax.Array:
        return center + scale * jax.random.normal(key, shape, dtype)

    return devices.jit(draw, out_shardings=place)
