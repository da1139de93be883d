"""Reading of JSON texts, and of files of JSON and JSONL."""

import json
import os
from pathlib import Path
from typing import Any

from treeflash_jax.core.error_text import LONGEST_PATH, clipped, warn


def parse_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises ValueError, without a file's name, for invalid JSON, deep nesting, and integers with too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    except ValueError as error:  # wrong syntax or UTF-8, or an integer of over 4,300 digits
        raise ValueError(f"not valid JSON: {clipped(error, LONGEST_PATH)}") from None


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a JSON file that contains an object. Raises FileNotFoundError, and ValueError for any other content."""
    try:
        raw = parse_json(Path(path).read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found; expected a Hugging Face model folder") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); expected a JSON file") from None
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: got a JSON {type(raw).__name__}, expected an object")
    return raw


def read_jsonl(path: str | Path, *, start: bytes | None = None) -> list[tuple[int, dict[str, Any]]]:
    """Reads the objects of a JSONL file with their line numbers.

    If `start` is given, it is the text with which all lines begin. A last line that was cut off is then left out, with a
    warning.

    Raises FileNotFoundError. Raises ValueError for a file that cannot be read, or a line that is not a JSON object.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"cannot read {path}: {error.strerror}") from None
    objects = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            if start is not None and not line.endswith(b"\n") and start.startswith(line[: len(start)]):
                warn(f"{path}:{number}: the last line is cut off and left out")
                break
            raise ValueError(f"{path}:{number}: got malformed JSON ({error}), expected one object a line") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: got {type(value).__name__}, expected a JSON object")
        objects.append((number, value))
    return objects
