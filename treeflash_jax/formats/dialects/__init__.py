"""File dialects: the forms in which verifiers and drafters are published.

A dialect is one file with a subclass of `dialect.Dialect`, whose docstrings say what it must answer, and one line in
DIALECTS. `load`, `convert`, `train.export` and the command line then read it, and write it where it has `to_hf`. Dialects
are asked from the last to the first whether a folder is theirs: one that refines another stands after it.

A dialect of another kind of drafter returns that drafter's own config, whose `kind` says where its specs are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeflash_jax.checks import quoted
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.dialects.dflash import DFlash
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.dialects.eagle3 import DeepSpec, Eagle3, Speculators
from treeflash_jax.formats.dialects.gguf import Gguf
from treeflash_jax.formats.dialects.huggingface import HuggingFace
from treeflash_jax.formats.dialects.language_model import LanguageModel
from treeflash_jax.formats.dialects.ngram import Ngram
from treeflash_jax.formats.dialects.treeflash import TreeFlash
from treeflash_jax.formats.keys import Keys

KNOWN = (
    HuggingFace(),
    Gguf(),
    DFlash(),
    TreeFlash(),
    Eagle3(),
    Speculators(),
    DeepSpec(),
    LanguageModel(HuggingFace()),
    Ngram(),
)
DIALECTS: dict[str, Dialect] = {one.name: one for one in KNOWN}


def of(path: Path, keys: Keys, part: str) -> Dialect:
    """The dialect of a folder or file.

    Args:
      part: "verifier" or "drafter", what it has to hold. Where a drafter is asked for, verifiers are language models that
        draft.

    Raises:
      ValueError: it holds another part.
    """
    found = next(one for one in reversed(DIALECTS.values()) if one.recognises(path, keys))
    if found.part == part:
        return found
    model_type = keys.raw.get("model_type")
    is_known = isinstance(model_type, str) and model_type in ARCHITECTURES
    if part == "drafter" and (is_known or found.name != HuggingFace.name):
        return LanguageModel(found)
    if part == "verifier":
        raise ValueError(
            f"{keys.where}: got a {found.part}'s config (it has {' and '.join(found.marks)}), expected a verifier's"
        )
    known = dict.fromkeys(one.marks[0] for one in DIALECTS.values() if one.part == part and one.marks)
    raise ValueError(
        f"{keys.where}: got model_type {quoted(model_type)}, expected a drafter's config with {' or '.join(known)}, or a "
        f"language model of {', '.join(map(repr, ARCHITECTURES))}"
    )


def parse(part: str, raw: Mapping[str, Any], where: str = "config.json") -> Any:
    """The config that the object of a config.json states.

    Raises:
      ValueError: another part's config; a key or value that is not implemented; or a missing size.
    """
    keys, path = Keys(raw, where), Path(where)
    return of(path, keys, part).read_config(path, keys)


def written(part: str) -> tuple[str, ...]:
    """Names of the dialects that can be written."""
    return tuple(name for name, one in DIALECTS.items() if one.part == part and type(one).to_hf is not Dialect.to_hf)
