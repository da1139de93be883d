"""Sizes of a DFlash block drafter and of the head on top of it."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from treeflash_jax.drafters.protocol import DrafterSizes, require_fit
from treeflash_jax.models.config import ModelConfig, Rope

VOCABULARIES = FREQUENT, ALL = "frequent", "all"


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DrafterSizes):
    """A DFlash block drafter and the head on top of it.

    Attributes:
      layers: sizes of the drafter's own decoder layers.
      block_size: length of the drafted block, anchor included; draft depths run 1 .. block_size - 1.
      mask_token_id: the token that fills the block's open slots.
      target_layer_ids: 0-based verifier layers whose output (residual stream) the drafter reads, in file order.
      num_target_layers: number of layers of the verifier that it was trained for.
      head: name in `heads.HEADS`; it determines how a drafted token depends on the one before it.
      head_rank: rank of a low-rank head; 256 in published files, and at most the drafter's width.
      draft_vocab_size: number of the verifier's tokens that it drafts, the weight `offsets`; 0: all.
      verifier: name of the verifier that it was trained for, and its classes in transformers; () if its files do not say.
    """

    kind: ClassVar[str] = "block"
    lent: ClassVar[tuple[str, ...]] = ("unembed",)

    layers: ModelConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    head: str = "marginal"
    head_rank: int = 256
    draft_vocab_size: int = 0
    verifier: tuple[str, ...] = ()
    thinking: bool | None = None

    @property
    def draft_vocabulary(self) -> str:
        """Value of the option `draft_vocabulary`, for records."""
        return FREQUENT if self.draft_vocab_size else ALL

    @property
    def num_depths(self) -> int:
        return self.block_size - 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.target_layer_ids

    def fitted(self, verifier: ModelConfig) -> Self:
        """Returns this config. Raises ValueError if the drafter was made for another verifier."""
        require_fit(
            hidden_size=(self.layers.hidden_size, verifier.hidden_size),
            number_of_verifier_layers=(self.num_target_layers, verifier.num_layers),
            vocabulary_size=(self.layers.vocab_size, verifier.vocab_size),
        )
        outside = [i for i in self.target_layer_ids if not 0 <= i < verifier.num_layers]
        if outside:
            raise ValueError(
                f"drafter does not fit the verifier: it reads verifier layers {outside}, "
                f"but the verifier has layers 0 to {verifier.num_layers - 1}"
            )
        if not 0 <= self.mask_token_id < verifier.vocab_size:
            raise ValueError(
                f"drafter does not fit the verifier: mask id {self.mask_token_id} lies outside "
                f"the verifier's vocabulary of {verifier.vocab_size}"
            )
        return self

    def limited(self, draft_vocab_size: int) -> Self:
        return replace(self, draft_vocab_size=draft_vocab_size)


def fresh_layers(verifier: ModelConfig, num_layers: int) -> ModelConfig:
    """Returns layers for a new drafter: dense layers of Qwen3 or Llama with the verifier's widths and rotary base, no YaRN.

    The published PyTorch drafters have Qwen3's dense layers, so a drafter for a Qwen2 or a mixture of experts has them too.
    """
    sizes = "vocab_size hidden_size intermediate_size num_heads num_kv_heads head_dim rms_norm_eps rope max_positions"
    sizes += " tie_embeddings eos_token_ids"
    if verifier.model_type in ("qwen3", "llama"):
        layers = replace(verifier, num_layers=num_layers)
    else:
        layers = ModelConfig(**{name: getattr(verifier, name) for name in sizes.split()}, num_layers=num_layers)
    return replace(layers, rope=Rope(theta=layers.rope.theta)) if layers.rope.kind == "yarn" else layers


def default_target_layers(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Returns the tapped layers for configs that name none. Source: DFlash (arXiv 2602.06036) section 4."""
    if num_features == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_features - 1)
    return tuple(round(1 + i * step) for i in range(num_features))
