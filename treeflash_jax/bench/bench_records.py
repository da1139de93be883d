"""Files of results: records of answers, one a line and all of one run; and JSON files to which commands add."""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from treeflash_jax.core import files
from treeflash_jax.core.checks import parse_json, quoted, read_json
from treeflash_jax.core.settings import field_names
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.trees import TreeShape

Record = dict[str, Any]

SCHEMA = 3
# Settings that are equal in all records of a file, and in all of a system. Temperature and seed may vary.
SHARED = "verifier template quantize format max_new_tokens batch_size top_k top_p stop_ids expected_lengths".split()
SYSTEM = "dtype drafter drafter_source drafter_temperature drafter_temperature_rule builder acceptance nodes".split()
SYSTEM += "attention command".split()
SYSTEM += field_names(GenerateConfig, "drafting") + [field.name for field in fields(TreeShape)]
PEER = "another program"  # the builder of a system that is no model of this library
RECORD_START = b'{"schema": '  # of every line of results


def read_jsonl(path: str | Path, *, unfinished_tail: bool = False) -> tuple[list[tuple[int, Record]], int]:
    """Reads the objects of a JSONL file with their line numbers, and the number of bytes that they take.

    With `unfinished_tail`, a last line that was cut off in the middle is left out, with a warning. Raises ValueError for a
    file that cannot be read, or a line that is no JSON object.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"cannot read {path}: {error.strerror}") from None
    objects, size = [], 0
    for number, line in enumerate(lines, start=1):
        size += len(line)
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            if unfinished_tail and number == len(lines) and not line.endswith(b"\n"):
                warnings.warn(f"{path}:{number}: the last line is cut off and left out", stacklevel=2)
                return objects, size - len(line)
            raise ValueError(f"{path}:{number}: got malformed JSON ({error}), expected one object a line") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: got {type(value).__name__}, expected a JSON object")
        objects.append((number, value))
    return objects, size


def read_records(path: str | Path) -> tuple[list[Record], int]:
    """Reads the records of one run, and the number of bytes that they take. A last record that was cut off is left out.

    Raises ValueError for malformed lines, another schema version, an answer given twice, records of several runs.
    """
    objects, size = read_jsonl(path, unfinished_tail=True)
    seen, firsts = set(), dict[str, Record]()
    for number, record in objects:
        where = f"{path}:{number}"
        if (schema := record.get("schema")) != SCHEMA:
            raise ValueError(f"{where}: got schema {quoted(schema)}, expected {SCHEMA}; write to another file")
        if missing := {"settings", "versions", "hardware", "system", "prompt_id"} - record.keys():
            raise ValueError(f"{where}: got no {min(missing)}, expected a record of treeflash bench run")
        if (key := record_key(record)) in seen:
            raise ValueError(f"{where}: got a second answer to {quoted(key, 120)}, expected one")
        seen.add(key)
        firsts.setdefault(record["system"], record)
        for first in (objects[0][1], firsts[record["system"]]):
            if change := difference(record, first):
                raise ValueError(f"{where}: {change} in earlier lines; results of several runs cannot be compared")
    return [record for _, record in objects], size


def record_key(record: Record) -> tuple[str, str, float, int]:
    """Returns (prompt, system, temperature, seed), which identify a record of a file."""
    settings = record["settings"]
    return record["prompt_id"], record["system"], settings["temperature"], settings["seed"]


def difference(record: Record, other: Record) -> str | None:
    """Describes the first difference that two records of one run cannot have; None if there is none."""
    names = SHARED + (SYSTEM if record["system"] == other["system"] else [])
    for part in ("settings", "versions", "hardware"):
        ours, theirs = record[part], other[part]
        for name in names if part == "settings" else sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                return f"got {name} {quoted(ours.get(name))}, but {quoted(theirs.get(name))}"
    return None


def is_comparable(record: Record, other: Record) -> bool:
    """Returns whether one record is a one-token answer and the other is drafted, but must be equal up to near-ties."""
    ours, theirs = record["settings"], other["settings"]
    builders = {ours["builder"], theirs["builder"]}
    rules = {settings.get("acceptance") for settings in (ours, theirs)} - {None, "sample-and-match"}
    is_exact = not (rules and ours["temperature"] > 0) and ours["dtype"] == theirs["dtype"]
    return is_exact and "none" in builders and len(builders - {"none", PEER}) == 1


def read_results(path: str | Path) -> tuple[list[Record], int]:
    """Like `read_records`, but the file may not exist yet. Also raises ValueError if it cannot be written."""
    records, size = read_records(path) if Path(path).is_file() else ([], 0)
    files.check_output(path, lambda content: RECORD_START.startswith(content[size:][: len(RECORD_START)]))
    return records, size


@contextmanager
def held(path: str | Path) -> Iterator[None]:
    """Holds a results file, so that no other process on this machine writes to it. Raises ValueError if one does."""
    from filelock import FileLock, Timeout

    path = Path(path)
    files.check_output(path)
    lock = path.with_name(f".{path.name}.lock")
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except Timeout:
        raise ValueError(f"{path}: another process writes to it; wait for it, or write to another file") from None


def rewrite(path: str | Path, records: Sequence[Record]) -> int:
    """Replaces a results file by these records; returns its number of bytes."""
    content = "".join(json.dumps(record) + "\n" for record in records)
    if records:
        files.write(path, content)
    return len(content.encode())


def open_results(path: str | Path, size: int) -> BinaryIO:
    """Opens a results file for appending after its first `size` bytes, which `read_results` returned."""
    file = open(path, "a+b")
    file.truncate(size)
    file.seek(max(size - 1, 0))
    if file.read(1) not in (b"", b"\n"):
        file.write(b"\n")
    return file


def read_kept(path: str | Path | None, *keys: str, inside: bool = False) -> dict[str, Any]:
    """Reads the JSON file to which a command adds its results; {} for None, or if there is none yet.

    Raises ValueError for a file without these keys or, with `inside`, with values that lack them; it must not be replaced.
    """
    if path is None:
        return {}
    files.check_output(path)
    if not Path(path).exists() or not Path(path).stat().st_size:
        return {}
    with suppress(ValueError, AttributeError):  # no JSON object, or not one of objects
        kept = read_json(path)
        if all(set(keys) <= part.keys() for part in (kept.values() if inside else [kept])):
            return kept
    raise ValueError(f"{path} holds something else than results of this command; write to another file")
