"""File dialects: the forms in which verifiers and drafters are published.

To add a dialect, list an instance of your subclass of `dialect.Dialect` in DIALECTS. `load`, `convert`, `train.export` and
the command line then read it, and write it if it has `to_hf`. A folder is read by the last dialect in the list that
recognises it, so a dialect that refines another comes after it. `read_config` of a drafter's dialect returns the drafter.
"""

from pathlib import Path

from treeflash_jax.core.error_text import quoted
from treeflash_jax.formats.architectures import ARCHITECTURES, text_keys
from treeflash_jax.formats.dialects.assistant_folder import Assistant
from treeflash_jax.formats.dialects.block_folder import DFlashFolder, TreeFlashFolder
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.dialects.eagle3_folder import DeepSpec, Eagle3, SpeculatorsEagle3
from treeflash_jax.formats.dialects.gguf import Gguf
from treeflash_jax.formats.dialects.huggingface import HuggingFace
from treeflash_jax.formats.dialects.language_model_folder import LanguageModel
from treeflash_jax.formats.dialects.mtp_folder import Mtp
from treeflash_jax.formats.dialects.ngram_folder import Ngram
from treeflash_jax.formats.dialects.published_heads import DFlash2, Domino, DSpark, LiLiCorr
from treeflash_jax.formats.dialects.speculators import SpeculatorsDFlash, SpeculatorsDFlash2, SpeculatorsDSpark
from treeflash_jax.formats.keys import Keys

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        HuggingFace(), Gguf(), DFlashFolder(), TreeFlashFolder(), Domino(), DSpark(), DFlash2(), LiLiCorr(), Eagle3(),
        SpeculatorsDFlash(), SpeculatorsDSpark(), SpeculatorsDFlash2(), SpeculatorsEagle3(), DeepSpec(),
        Ngram(), LanguageModel(HuggingFace()), Mtp(), Assistant(),
    )
}  # fmt: skip


def recognise(path: Path, keys: Keys, part: str) -> Dialect:
    """Returns the dialect of a folder or file that contains this part, "verifier" or "drafter".

    If a verifier's files are read as a drafter, they are a language model that drafts; if the family has a multi-token
    prediction layer, they are this layer. Raises ValueError if a drafter is read as a verifier, or for an unknown model.
    """
    dialect = next(dialect for dialect in reversed(DIALECTS.values()) if dialect.recognises(path, keys))
    if dialect.part == part:
        return dialect
    model_type = text_keys(keys).raw.get("model_type")
    is_known = isinstance(model_type, str) and model_type in ARCHITECTURES
    if part == "drafter" and is_known and ARCHITECTURES[model_type].mtp:
        return DIALECTS[Mtp.name]
    if part == "drafter" and (is_known or dialect.name != HuggingFace.name):
        return LanguageModel(dialect)
    if part == "verifier":
        raise ValueError(
            f"{keys.where}: got a {dialect.part}'s config (it has {' and '.join(dialect.marks)}), expected a verifier's"
        )
    known = dict.fromkeys(other.marks[0] for other in DIALECTS.values() if other.part == part and other.marks)
    raise ValueError(
        f"{keys.where}: got model_type {quoted(model_type)}, expected a drafter's ({', '.join(known)}) or that of a "
        "language model that can be a verifier"
    )


def written() -> tuple[str, ...]:
    """Returns the names of the dialects in which drafters can be written."""
    return tuple(name for name, d in DIALECTS.items() if d.part == "drafter" and type(d).to_hf is not Dialect.to_hf)
