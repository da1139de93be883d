"""Default settings of `train.pair` that depend on the device.

Measurements: notebooks/results/recipe_smollm2.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingDefaults:
    """Defaults of one kind of device.

    Attributes:
      slots: number of answers to training prompts that are decoded together.
      block: block size of a new drafter.
      tokens: largest number of tokens of an answer that a new drafter is trained on.
      anchors: number of tokens of a sequence per anchor.
      vocabulary: number of vocabulary tokens per token of a sequence that a backbone is trained on; 0: all.
      batch: least number of sequences of a training step.
      passes: number of passes over the answers.
      optimizer: optimiser of a backbone and its learning rate.
      records: whether training records the verifier's outputs once, and reads them in every pass.
    """

    slots: int
    block: int
    tokens: int
    anchors: int
    vocabulary: int
    batch: int
    passes: float
    optimizer: tuple[str, float]
    records: bool


CPU = TrainingDefaults(
    slots=32,  # with 16 or 64, fewer tokens per second
    block=5,  # as good as 8 in less time
    tokens=256,
    anchors=16,  # in equal time, half as many per sequence as 8 and more steps have a higher tau
    vocabulary=4,  # a sample saves most of a step's time
    batch=4,
    passes=16,  # six passes over twice the answers take longer and hardly raise tau
    optimizer=("adamw", 1e-3),  # an update by Muon takes longer than the gradient of four sequences
    records=True,
)
ACCELERATOR = TrainingDefaults(
    slots=64,
    block=16,  # as published
    tokens=1024,
    anchors=8,
    vocabulary=0,  # a sample was never compared
    batch=8,
    passes=6,  # as for the published backbones
    optimizer=("muon", 6e-3),
    records=False,  # its disk was never timed against a pass
)
