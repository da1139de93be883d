"""The stages that train drafters, by name. `drafting.DraftingStage` is their protocol."""

from collections.abc import Sequence
from os import PathLike

from train.drafter import DrafterStage
from train.eagle3 import Eagle3Stage
from train.head import HeadStage
from train.language_model import LanguageModelStage
from train.mtp import MtpStage
from train.runtime import run_config
from train.stages.drafting import DraftingStage
from treeflash_jax.core.error_text import quoted

STAGES: dict[str, type[DraftingStage]] = {
    "head": HeadStage,
    "drafter": DrafterStage,
    "eagle3": Eagle3Stage,
    "language_model": LanguageModelStage,
    "mtp": MtpStage,
}


def read_stage(path: str | PathLike, overrides: Sequence[str] = ()) -> DraftingStage:
    """Reads the settings of the stage that a file names.

    Raises ValueError if it names none, as files of earlier versions did.
    """
    name = run_config.read_toml(path, overrides).get("stage")
    if name not in STAGES:
        known = ", ".join(STAGES)
        raise ValueError(
            f'{path}: got stage = {quoted(name)}, expected a first line such as stage = "head" (one of {known})'
        )
    return run_config.load(STAGES[name], path, overrides)
