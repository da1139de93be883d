"""Recognises Hub ids, and downloads configs, tokenizers and safetensors into the Hub's cache."""

import re
from pathlib import Path

from treeflash_jax.core.error_text import clipped
from treeflash_jax.formats import tensor_files

LONGEST_ID = 96  # the Hub's limit, in characters


def is_hub_id(name: str | Path) -> bool:
    """Returns whether a name has the form of a Hub id, owner/model. Both parts begin and end with a letter or digit."""
    return len(str(name)) <= LONGEST_ID and re.fullmatch(r"\b[\w.-]+\b/\b[\w.-]+\b", str(name)) is not None


def cached(hub_id: str, revision: str | None = None) -> Path | None:
    """Returns the folder of a Hub id in the Hub's local cache; None if config or part of the weights are missing there."""
    try:
        folder = download(hub_id, revision, local_files_only=True)
        names = "config.json", *tensor_files.file_names(folder)
    except ValueError:
        return None
    return folder if all((folder / name).exists() for name in names) else None


def download(hub_id: str, revision: str | None = None, local_files_only: bool = False) -> Path:
    """Downloads missing files of a Hub id; returns its folder in the local cache. Raises ValueError if it cannot."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            ignore_patterns=["[!a]*/*"],  # keeps "assistant", which is read; "original" holds the same weights again
            local_files_only=local_files_only,
        )
        return Path(folder)
    except Exception as error:  # errors of the Hub's client, or of its HTTP library
        text = re.sub(r" \([^()]* ID: [^()]*\)", "", str(error))  # without the id of the request
        cause = f"{type(error).__name__}: {clipped(text, 90)}"
        raise ValueError(
            f"{hub_id} is no local folder and could not be downloaded from the Hub ({cause}); "
            "check id and revision, retry (downloads resume), or give a local folder"
        ) from None
