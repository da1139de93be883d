"""The stages that train drafters, by name; `drafting.DraftingStage` says what a stage answers."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from train import config
from train.drafter import DrafterStage
from train.drafting import DraftingStage
from train.eagle3 import Eagle3Stage
from train.head import HeadStage
from train.language_model import LanguageModelStage

STAGES: dict[str, type[DraftingStage]] = {
    "head": HeadStage,
    "drafter": DrafterStage,
    "eagle3": Eagle3Stage,
    "language_model": LanguageModelStage,
}


def read_stage(path: str | PathLike, overrides: Sequence[str] = ()) -> DraftingStage:
    """Settings of whichever stage a file is for. Stages are asked from the last to the first.

    Raises:
      ValueError: a file that cannot be read, or settings that are not of a stage.
    """
    raw = config.read(path, overrides)
    kind = next((one for one in reversed(STAGES.values()) if one.recognises(raw)), HeadStage)
    return config.load(kind, path, overrides)
