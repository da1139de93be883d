"""Sizes and numerics of a verifier, whatever file they were read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    `llama3` and `yarn` slow low frequencies by `factor`, `longrope` divides each frequency by a divisor of its own.

    Attributes:
      attention_factor: multiplies cosines and sines, so attention scores grow by its square.
      beta_fast, beta_slow: turns within the original context above which `yarn` keeps a frequency, and below which it is
        slowed in full.
      truncate: whether `yarn` rounds the first and last pair between these two outwards to whole pairs.
    """

    theta: float = 10_000.0
    kind: Literal["default", "llama3", "longrope", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A stack of decoder layers: a verifier's, or the layers of a DFlash drafter.

    Example:
      >>> import treeflash_jax as tf
      >>> tf.load("tiny").verifier.num_layers
      6

    Attributes:
      qk_norm: whether queries and keys are normalised before the rotation.
      qkv_bias: whether queries, keys and values have biases.
      model_type: the architecture, by its name in `formats.architectures`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    max_positions: int = 2048
    tie_embeddings: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False
    model_type: str = "qwen3"
    eos_token_ids: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Sizes of the runs of identical layers. All layers are alike in the models supported today: one run."""
        return (self.num_layers,)
