"""The stages that train drafters, by name; `drafting.DraftingStage` is their protocol."""

from collections.abc import Sequence
from os import PathLike

from train.drafter import DrafterStage
from train.eagle3 import Eagle3Stage
from train.head import HeadStage
from train.language_model import LanguageModelStage
from train.runtime import run_config
from train.stages.drafting import DraftingStage
from treeflash_jax.core.settings import dotted, setting_names

STAGES: dict[str, type[DraftingStage]] = {
    "head": HeadStage,
    "drafter": DrafterStage,
    "eagle3": Eagle3Stage,
    "language_model": LanguageModelStage,
}


def read_stage(path: str | PathLike, overrides: Sequence[str] = ()) -> DraftingStage:
    """Reads the settings of the stage that knows most of a file's keys; among equals, of the first in STAGES."""
    keys = dotted(run_config.read(path, overrides)).keys()
    kind = max(STAGES.values(), key=lambda stage: len(keys & setting_names(stage)))
    return run_config.load(kind, path, overrides)
