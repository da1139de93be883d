"""Frozen inputs: files that a run reads at every start and never changes, such as a verifier, a backbone or a tokenizer.

When a run begins, it notes a digest of each of them in its checkpoints, or beside the file of `train.respond` and
`train.ask`. These digests are compared when the run continues, and by `train.export` and `train.pair`.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from treeflash_jax.formats import tensor_files

PIECE = 2**24  # number of bytes that a thread reads and digests at a time

FrozenInputs = Mapping[str, Mapping[str, str]]  # for each input, by name: its "path" as given and its "digest"


def note(path: str, files: Path, *, weights: bool = True) -> dict[str, str]:
    """Returns the entry of an input, which is a folder or a GGUF file.

    Args:
      path: the setting that names the input.
      files: path of the input on this machine.
      weights: whether to digest weights and tokenizer, besides config.json.
    """
    return {"path": path, "digest": digest_model(files, weights=weights)}


def digest_model(path: Path, *, weights: bool = True) -> str:
    """Returns the SHA-256 of the files of a model, read in pieces by all cores.

    In a folder, these are config.json, tokenizer.json and the files of its tensors, as far as they exist.
    """
    names = ["config.json", "tokenizer.json", *tensor_files.file_names(path)] if weights else ["config.json"]
    files = [path] if path.is_file() else [path / name for name in names if (path / name).exists()]
    pieces = [(file, begin) for file in files for begin in range(0, file.stat().st_size, PIECE)]
    digest = hashlib.sha256()
    with ThreadPoolExecutor() as threads:
        for (file, begin), piece in zip(pieces, threads.map(_digest_piece, pieces), strict=True):
            digest.update(f"{file.name} {begin} ".encode() + piece)
    return digest.hexdigest()


def _digest_piece(piece: tuple[Path, int]) -> bytes:
    path, begin = piece
    with path.open("rb") as file:
        file.seek(begin)
        return hashlib.sha256(file.read(PIECE)).digest()


def compare(noted: FrozenInputs, now: FrozenInputs, run: str) -> None:
    """Raises ValueError that names the first input that changed since it was noted. Inputs that were not noted may change.

    Args:
      run: the setting of the run or file that noted the inputs, such as "run=runs/head".
    """
    for name, entry in now.items():
        if name in noted and noted[name]["digest"] != entry["digest"]:
            raise ValueError(
                f"{entry['path']}: got a {name} that changed after {run} had begun, expected the files of then; restore "
                f"them, or begin again with another {run.partition('=')[0]}="
            )
