"""Sizes of known models by name, so that programs can be timed or compiled without a single weight.

Sources: the models' config.json files; DFlash (arXiv 2602.06036) for the drafters.
"""

from __future__ import annotations

import dataclasses

from treeflash_jax.config import DrafterConfig, ModelConfig, Rope, default_target_layers

_QWEN3 = dict(
    vocab_size=151_936, num_kv_heads=8, head_dim=128, rope=Rope(theta=1e6), max_positions=40_960, eos_token_ids=(151_645,)
)
VERIFIERS: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(
        hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True, **_QWEN3
    ),
    "qwen3-4b": ModelConfig(
        hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, tie_embeddings=True, **_QWEN3
    ),
    "qwen3-8b": ModelConfig(hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32, **_QWEN3),
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
}


def drafter_of(verifier: ModelConfig, *, num_layers: int = 5, block_size: int = 16) -> DrafterConfig:
    """A TreeFlash drafter in the published sizes: the verifier's own widths, five layers, blocks of 16."""
    return DrafterConfig(
        layers=dataclasses.replace(verifier, num_layers=num_layers),
        block_size=block_size,
        mask_token_id=verifier.vocab_size - 1,
        target_layer_ids=default_target_layers(verifier.num_layers, num_layers),
        num_target_layers=verifier.num_layers,
        head="mlp",
    )


def named(name: str) -> ModelConfig:
    """Raises ValueError for a name nobody knows."""
    if name not in VERIFIERS:
        raise ValueError(f"got shape {name!r}, expected one of {', '.join(VERIFIERS)}")
    return VERIFIERS[name]
