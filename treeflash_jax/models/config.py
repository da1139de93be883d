"""Sizes and numerics of a language model."""

from dataclasses import dataclass
from itertools import groupby
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    `llama3` and `yarn` slow low frequencies by `factor`, `longrope` divides every frequency by its entry of `divisors`.

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
      num_experts: experts per sparse layer; 0: all layers are dense.
      experts_per_token: experts that a sparse layer runs each token through.
      expert_size: feed-forward width of an expert; `intermediate_size` is that of the dense layers.
      normalize_experts: whether the weights of a token's experts are divided by their sum.
      dense_layers: dense layers of a mixture of experts.
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
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_experts: bool = False
    dense_layers: tuple[int, ...] = ()

    @property
    def runs(self) -> tuple[tuple[bool, int], ...]:
        """Runs of equal layers, each as (is sparse, number of layers)."""
        sparse = (self.num_experts > 0 and i not in self.dense_layers for i in range(self.num_layers))
        return tuple((is_sparse, len(list(run))) for is_sparse, run in groupby(sparse))
