"""`ModelConfig`: sizes and numerics of the decoder layers of a verifier or drafter."""

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, Self


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    `llama3` and `yarn` slow low frequencies by `factor`. `longrope` divides every frequency by its entry of `divisors`.
    `proportional` rotates only the first pairs of the whole head.

    Attributes:
      attention_factor: factor of cosines and sines; attention scores grow by its square.
      beta_fast, beta_slow: turns within the original context; `yarn` keeps frequencies with more than `beta_fast`, and
        slows frequencies with fewer than `beta_slow` by the full factor.
      truncate: whether `yarn` rounds the first and the last pair between these limits outwards to whole pairs.
      fraction: share of a head's elements that is rotated, from the first one on; for `proportional`, share of its pairs.
    """

    theta: float = 10_000.0
    kind: Literal["default", "llama3", "longrope", "proportional", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    fraction: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Sizes of gated delta-rule layers.

    Attributes:
      key_heads: number of heads of queries and keys; each serves value_heads / key_heads consecutive value heads.
      conv_width: number of inputs of the convolution, including the position itself.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: all channels of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class KindSizes:
    """Sizes of the layers of one kind, in a model with kinds of different sizes; names are as in `ModelConfig`."""

    num_kv_heads: int
    head_dim: int
    rope: Rope
    intermediate_size: int
    keys_are_values: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Config of a stack of decoder layers: a verifier, or the layers of a DFlash drafter.

    Example:
      >>> import treeflash_jax as tf
      >>> tf.load("tiny").verifier.num_layers
      6

    Attributes:
      qk_norm: whether queries and keys are normalised before the rotation.
      qkv_bias: whether queries, keys and values have biases.
      o_bias: whether attention's output has a bias.
      model_type: name of the architecture in `formats.architectures`.
      num_experts: number of experts per sparse layer; 0: all layers are dense.
      experts_per_token: number of experts that process each token in a sparse layer.
      expert_size: feed-forward width of an expert; `intermediate_size` is the width of dense layers.
      normalize_experts: whether the weights of a token's experts are divided by their sum.
      expert_biases: whether the router and the maps of experts have biases.
      swiglu_limit: bound to which an expert's gate and up maps are clamped (`expert_sums`); 0: not clamped, silu(gate) *
        up.
      dense_layers: indices of the dense layers in a mixture of experts.
      dense_beside_experts: whether sparse layers add a dense feed-forward part to the sum of the experts, with separate
        norms. The router then reads the residual stream and scales each expert.
      activation: name of the activation in feed-forward parts (`layers.ACTIVATIONS`).
      offset_norms: whether norms store scale - 1.
      wide_norms: whether norms multiply by their scale before they round; with `offset_norms`, they always do.
      post_norms: whether outputs of attention and feed-forward part are normed before the residual addition.
      value_norm: whether values are normed, without a scale.
      keys_are_values: whether values have no map; they are then the keys before norm and rotation.
      layer_scalars: whether each layer multiplies its output by a number.
      layer_input_size: width of the additional input that each layer gets from the tokens; 0: no such input.
      embedding_factor: factor of token embeddings; rounded to their dtype.
      logit_cap: bound c of logits, which become c tanh(logit / c); 0: no bound.
      gates_attention: whether the query map also produces gates, one for each element of attention's output, head by head.
      attention_sinks: whether attention's softmax has an additional logit per head; its weight is dropped.
      window: number of positions that a layer of kind "sliding_attention" sees, including the query's.
      layer_types: name of each layer's kind in `layer_kinds.KINDS`; (): all layers are "full_attention".
      sizes: sizes of kinds of layers that differ from the model's, each with the name of the kind.
      shared_expert_size: in sparse layers, feed-forward width of the expert that sees every token; 0: no such expert.
      delta: sizes of layers of kind "linear_attention".
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
    o_bias: bool = False
    model_type: str = "qwen3"
    eos_token_ids: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_experts: bool = False
    expert_biases: bool = False
    swiglu_limit: float = 0.0
    dense_layers: tuple[int, ...] = ()
    dense_beside_experts: bool = False
    activation: str = "silu"
    offset_norms: bool = False
    wide_norms: bool = False
    post_norms: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    layer_scalars: bool = False
    layer_input_size: int = 0
    embedding_factor: float = 1.0
    logit_cap: float = 0.0
    gates_attention: bool = False
    attention_sinks: bool = False
    window: int = 0
    layer_types: tuple[str, ...] = ()
    sizes: tuple[tuple[str, KindSizes], ...] = ()
    shared_expert_size: int = 0
    delta: DeltaSizes | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Name of the kind of each layer."""
        return self.layer_types or ("full_attention",) * self.num_layers

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Sizes of the heads of all kinds of layers."""
        return tuple({self.of_kind(kind).head_dim for kind in self.kinds})

    def of_kind(self, kind: str) -> Self:
        """Returns the config with the sizes of a kind of layers."""
        sizes = dict(self.sizes).get(kind)
        return self if sizes is None else replace(self, sizes=(), **vars(sizes))

    @property
    def runs(self) -> tuple[tuple[str, bool, int], ...]:
        """Runs of consecutive equal layers, each as (kind, is sparse, number of layers)."""
        sparse = [self.num_experts > 0 and i not in self.dense_layers for i in range(self.num_layers)]
        runs = groupby(zip(self.kinds, sparse, strict=True))
        return tuple((kind, is_sparse, len(list(run))) for (kind, is_sparse), run in runs)
