"""Compilation times of earlier processes, in a small file beside the programs that are kept on disk.

They predict how long a program will take. A program that was never compiled is expected to take as long as the last new
program of the same function and model. A known program is read from JAX's cache, which is expected to take as long as the
last time.
"""

import json
from contextlib import suppress
from pathlib import Path

from treeflash_jax.core import files
from treeflash_jax.core.json_files import read_json

MOST_ENTRIES = 1000  # further entries replace the oldest


def estimate(path: Path, program: str, model: str) -> float | None:
    """Returns the seconds that a program is expected to take; None if that is unknown.

    Args:
      program: digest of the program.
      model: name of its function and digest of the model.
    """
    times = _read(path)
    return times.get(program if program in times else model)


def record(path: Path, program: str, model: str, seconds: float) -> None:
    """Stores the seconds that a program took; does nothing if the file cannot be written."""
    times = _read(path)
    label = program if program in times else model
    times.setdefault(program, None)  # known from now on, but not yet read from JAX's cache
    times.pop(label, None)
    times[label] = round(seconds, 1)
    with suppress(OSError, ValueError):
        files.write(path, json.dumps(dict([*times.items()][-MOST_ENTRIES:]), indent=1))


def _read(path: Path) -> dict[str, float | None]:
    try:
        return read_json(path)
    except (OSError, ValueError):  # no file yet, or a damaged one
        return {}
