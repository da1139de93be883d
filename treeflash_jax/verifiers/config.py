"""Sizes and numerics of a verifier, whatever file they were read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding; `llama3` slows low frequencies by `factor`, `longrope` each by a divisor of its own."""

    theta: float = 10_000.0
    kind: Literal["default", "llama3", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A stack of decoder layers: a verifier's, or the layers of a DFlash drafter.

    Example:
      >>> import treeflash_jax as tf
      >>> tf.load("tiny").verifier.num_layers
      6

    Attributes:
      qk_norm: whether queries and keys are normalised before the rotation.
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
    model_type: str = "qwen3"
    eos_token_ids: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Sizes of the runs of identical layers. All layers are alike in the models supported today: one run."""
        return (self.num_layers,)
