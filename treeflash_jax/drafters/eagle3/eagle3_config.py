"""Sizes of an EAGLE-3 drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from treeflash_jax.drafters.protocol import require_fit
from treeflash_jax.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """An EAGLE-3 drafter: one decoder layer over pairs of a verifier feature and the token that follows it.

    Attributes:
      layers: sizes of that layer; `vocab_size` is the verifier's.
      target_hidden_size: hidden size of the verifier.
      taps: 0-based verifier layers whose output (residual stream) it reads; None: the rule of the EAGLE repository, which
        depends on the verifier's depth (`fitted`).
      num_taps: number of tapped layers.
      taps_are_inputs: whether the file names layers by their inputs; for messages, since `taps` are outputs.
      draft_vocab_size: number of tokens that it can draft; if smaller than the verifier's vocabulary, the weight `offsets`
        lists them.
      own_embedding: whether it has an embedding table; else it reads the verifier's.
      fc_norm: whether the feature of every tapped layer is normalised before they are joined (EAGLE-3.1).
      norm_before_fc: whether the joined features are.
      norm_before_residual: whether the residual of the layer is what the attention reads, normalised.
      norm_output: whether the next step is fed the normalised output of the layer (EAGLE-3.1).
      num_depths: default depth of a draft.
      lanes: default number of nodes per level that are followed.
      verifier: name of the verifier that it was trained for, and its classes in transformers; () if its files do not say.
      num_nodes, drafter_temperature, sampled_above, thinking: see `DrafterSizes`.

    Source: EAGLE-3 (arXiv 2503.01840); EAGLE-3.1 (arXiv 2605.09992) for the options; EAGLE-2 (arXiv 2406.16858) for lanes.
    """

    kind: ClassVar[str] = "eagle3"

    layers: ModelConfig
    target_hidden_size: int
    taps: tuple[int, ...] | None = None
    num_taps: int = 3
    taps_are_inputs: bool = False
    draft_vocab_size: int
    own_embedding: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    num_depths: int = 7
    lanes: int | None = 10
    verifier: tuple[str, ...] = ()
    num_nodes: int = 16
    drafter_temperature: float = 1.0
    sampled_above: float | None = None
    thinking: bool | None = None

    def fitted(self, verifier: ModelConfig) -> EagleConfig:
        """Returns this config with its tapped layers.

        Raises:
          ValueError: the drafter was made for another verifier.
        """
        require_fit(
            hidden_size=(self.target_hidden_size, verifier.hidden_size),
            vocabulary_size=(self.layers.vocab_size, verifier.vocab_size),
        )
        taps = default_taps(verifier.num_layers) if self.taps is None else self.taps
        outside = [tap for tap in taps if not 0 <= tap < verifier.num_layers]
        if outside:
            shift, read = (1, "inputs") if self.taps_are_inputs else (0, "outputs")
            raise ValueError(
                f"drafter does not fit the verifier: its layer ids {[tap + shift for tap in outside]}, read as {read} of "
                f"layers, are outputs of layers {outside}, but the verifier has layers 0 to {verifier.num_layers - 1}"
            )
        return replace(self, taps=taps)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the tapped layers for files that name none: the inputs of layers 2, L // 2 and L - 3.

    Source: the EAGLE repository.
    """
    return (1, num_layers // 2 - 1, num_layers - 4)
