"""The file that `treeflash bench run` writes: a JSON record a line, all of one run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, BinaryIO, Literal

from treeflash_jax import files
from treeflash_jax.checks import Bounds, clipped, fit, parse_json, quoted
from treeflash_jax.settings import renamed
from treeflash_jax.trees import BUILDERS

Record = dict[str, Any]
Answers = dict[tuple[str, int], Record]  # one system's records at one temperature, by (prompt, seed)

SCHEMA = 2
SCHEMAS = 1, 2  # 1 counts the last round of an answer in full, also where a stop or the limit cut it
KEYS = (
    "prompt_id prompt_hash system settings rounds committed accept_lengths accepted_by_depth ids tokens seconds "
    "compile_seconds finished thinking versions hardware"
).split()
# What is computed with; the other keys are only compared.
COUNT, SECONDS = Bounds(least=0, most=2**53), Bounds(least=0)
KINDS = {
    "prompt_id": (str, Bounds()),
    "system": (str, Bounds(nonempty=True)),
    "settings": (dict[str, Any], Bounds()),
    "versions": (dict[str, Any], Bounds()),
    "hardware": (dict[str, Any], Bounds()),
    "rounds": (int, COUNT),
    "committed": (int, COUNT),
    "tokens": (int, COUNT),
    "seconds": (float, SECONDS),
    "accept_lengths": (list[list[int]], COUNT),
    "accepted_by_depth": (list[int], COUNT),
    "cut": (list[int], COUNT),
    "expected": (float, SECONDS),
}
SETTINGS_KINDS = {"temperature": float, "seed": int, "builder": str, "nodes": int | Literal["auto"] | None, "top_p": float}
HARDWARE = "device backend cores".split()
# Settings that all records of a file share; the others are a system's own. Temperature and seed tell records apart.
SHARED = "verifier drafter dtype format max_new_tokens batch_size top_k top_p".split()
QUANTIZE = "quantize"  # shared too; absent from older files
OWN = "builder head nodes candidates children drafter_temperature drafter_temperature_rule".split()
SAMPLED = (
    "shortlist depths acceptance branches trunk selector skeleton leaves lanes".split()
)  # own too; absent from older files
RECORD_START = b'{"schema": '  # of every line of results


def read_jsonl(path: str | Path, *, unfinished_tail: bool = False) -> tuple[list[tuple[int, Record]], int]:
    """Objects of a JSONL file with their line numbers, and how many bytes of the file they take.

    Args:
      path: the file; blank lines are skipped.
      unfinished_tail: a last line cut off in the middle is left out with a warning.

    Raises:
      ValueError: a file that cannot be read, or a line that is no JSON object.
    """
    try:
        lines = files.regular(path, streams=True).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    objects, size = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_json(line) if line.strip() else None
        except ValueError as error:
            if unfinished_tail and number == len(lines) and not line.endswith(b"\n"):
                warnings.warn(f"{path}:{number}: the last line is cut off and left out", stacklevel=2)
                break
            raise ValueError(f"{path}:{number}: got malformed JSON ({error}), expected one object a line") from None
        if line.strip():
            if not isinstance(value, dict):
                raise ValueError(f"{path}:{number}: got {type(value).__name__}, expected a JSON object")
            objects.append((number, value))
        size += len(line)
    return objects, size


def read_records(path: str | Path) -> tuple[list[Record], int]:
    """Records of one run, and how many bytes of the file they take. A last line that was cut off is left out.

    Raises:
      ValueError: malformed lines, another schema version, missing keys, an answer given twice, records of several runs.
    """
    objects, size = read_jsonl(path, unfinished_tail=True)
    seen: set[tuple[str, str, float, int]] = set()
    firsts: dict[str, Record] = {}
    for number, record in objects:
        at = f"{path}:{number}"
        if record.get("schema") not in SCHEMAS:
            raise ValueError(f"{at}: got schema {quoted(record.get('schema'))}, expected {SCHEMA}; write to another file")
        missing = [key for key in KEYS if key not in record]
        for key, (kind, bounds) in KINDS.items():
            if key in record:
                fit(kind, record[key], key, bounds, at)
        record["settings"] = settings = _renamed(record.get("settings", {}))
        missing += [f"hardware.{key}" for key in HARDWARE if key not in record.get("hardware", {})]
        missing += [f"settings.{key}" for key in (*SHARED, *OWN, "temperature", "seed") if key not in settings]
        if missing:
            raise ValueError(f"{at}: got a record without {clipped(', '.join(missing), 120)}")
        for key, kind in SETTINGS_KINDS.items():
            fit(kind, settings[key], f"settings.{key}", Bounds(least=0), at)
        if len(record["accepted_by_depth"]) and not record["rounds"]:
            raise ValueError(f"{at}: got accepted_by_depth without rounds, expected an empty list")
        if key_of(record) in seen:
            raise ValueError(f"{at}: got a second answer to {quoted(key_of(record), 120)}, expected one")
        seen.add(key_of(record))
        firsts.setdefault(record["system"], record)
        for first in (next(iter(firsts.values())), firsts[record["system"]]):
            if change := difference(record, first):
                raise ValueError(f"{at}: {change} in earlier lines; results of several runs cannot be compared")
    return [record for _, record in objects], size


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of the first edition, which had a method, as they are recorded now."""
    found = renamed(settings)
    is_chain = found.get("builder") in BUILDERS and BUILDERS[found["builder"]].is_chain
    if "method" in settings and "acceptance" in found and is_chain:
        found["acceptance"] = "sample-and-match"
    return found


def key_of(record: Record) -> tuple[str, str, float, int]:
    """(prompt, system, temperature, seed): what tells the records of a file apart."""
    settings = record["settings"]
    return record["prompt_id"], record["system"], settings["temperature"], settings["seed"]


def difference(record: Record, other: Record) -> str | None:
    """The first thing that keeps two records from belonging to one run, in words; None where they do."""
    if record["schema"] != other["schema"]:
        return f"got schema {record['schema']}, but {other['schema']}"
    names = [*SHARED, QUANTIZE] + (OWN + SAMPLED if record["system"] == other["system"] else [])
    for part in ("settings", "versions", "hardware"):
        ours, theirs = record[part], other[part]
        for name in names if part == "settings" else sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                return f"got {name} {quoted(ours.get(name))}, but {quoted(theirs.get(name))}"
    return None


def read_results(path: str | Path) -> tuple[list[Record], int]:
    """Records of a results file, none where there is no file yet, and how many bytes of it they take. Writes nothing.

    Raises:
      ValueError: a path that cannot be written, or a file that holds anything but records of one run.
    """
    files.check_output(path)
    if not Path(path).exists():
        return [], 0
    records, size = read_records(path)
    tail = Path(path).read_bytes()[size:]
    if not tail.startswith(RECORD_START[: len(tail)]):
        raise ValueError(f"{path} holds something else than results of this command; write to another file")
    return records, size


def open_results(path: str | Path) -> BinaryIO:
    """The results file, open for appending. A last record that was cut off is removed; all before it stays.

    Raises:
      ValueError: as `read_results`.
    """
    _, size = read_results(path)
    try:
        file = open(path, "a+b")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    file.truncate(size)
    file.seek(max(size - 1, 0))
    if file.read(1) not in (b"", b"\n"):
        file.write(b"\n")
        file.flush()
    return file
