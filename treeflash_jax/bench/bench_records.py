"""Files of results: JSONL files with a record per answer of a run, and JSON files to which commands add results."""

import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

import treeflash_jax as tf
from treeflash_jax.core import files
from treeflash_jax.core.error_text import clipped, quoted
from treeflash_jax.core.json_files import read_json, read_jsonl
from treeflash_jax.core.settings import field_names

BenchRecord = dict[str, Any]

SCHEMA = 4
VARYING = ("temperature", "seed", "processor")  # the first two differ between records, the third is a function
CALL_SETTINGS = [name for name in field_names(tf.GenerateConfig, "sampling") if name not in VARYING]
CALL_SETTINGS += ["batch_size", "attention"]
# In every record; other settings of CALL_SETTINGS only if they differ from their defaults.
RECORDED = ("max_new_tokens", "top_k", "top_p", "stop_ids", "batch_size", "attention")
# Settings that must be equal in all records of a file. Other settings differ between systems.
SHARED_SETTINGS = ["verifier", "template", "quantize", *CALL_SETTINGS]
PEER = "another program"  # value of "builder" for systems that are other programs
RECORD_START = b'{"schema": '  # start of every line of results


def print_progress(text: str) -> None:
    print(clipped(text), file=sys.stderr)


def environment(model: tf.TreeFlash) -> BenchRecord:
    """Returns versions and hardware. Records with different versions or hardware are never compared."""
    versions = {"jax": jax.__version__, "treeflash_jax": tf.__version__, "python": platform.python_version()}
    device = model.device
    count = 1 if model.mesh is None else model.mesh.size
    hardware = {"backend": device.backend, "device": device.kind, "devices": count, "cores": os.cpu_count()}
    return {"versions": versions, "hardware": hardware}


def read_records(path: str | Path) -> list[BenchRecord]:
    """Reads the records of one run. Leaves out a last record that was cut off.

    Raises ValueError for malformed lines, another schema version, or records of several runs.
    """
    objects = read_jsonl(path, start=RECORD_START)
    for number, record in objects:
        where = f"{path}:{number}"
        if (schema := record.get("schema")) != SCHEMA:
            raise ValueError(f"{where}: got schema {quoted(schema)}, expected {SCHEMA}; write to another file")
        if missing := {"settings", "versions", "hardware", "system", "prompt_id"} - record.keys():
            raise ValueError(f"{where}: got no {min(missing)}, expected a record of treeflash bench run")
    records = [record for _, record in objects]
    check_one_run(records, path)
    return records


def check_one_run(records: Sequence[BenchRecord], path: str | Path) -> None:
    """Raises ValueError if records differ in settings, versions or hardware. They could then not be compared."""
    firsts: dict[str, BenchRecord] = {}
    for record in records:
        system = record["system"]
        for other in (records[0], firsts.setdefault(system, record)):
            ours = _conditions(record, other["system"] == system)
            theirs = _conditions(other, other["system"] == system)
            for name in sorted({*ours, *theirs}):
                if ours.get(name) != theirs.get(name):
                    change = f"got {name} {quoted(ours.get(name))}, but {quoted(theirs.get(name))}"
                    raise ValueError(f"{path}: {change} in earlier records; write to another file")


def _conditions(record: BenchRecord, is_same_system: bool) -> BenchRecord:
    """Returns the fields that must be equal in all records of a run, or of one system."""
    settings = record["settings"]
    names = settings.keys() - {"temperature", "seed"} if is_same_system else SHARED_SETTINGS
    return {name: settings.get(name) for name in names} | record["versions"] | record["hardware"]


def record_key(record: BenchRecord) -> tuple[str, str, float, int]:
    """Returns (prompt, system, temperature, seed), which identifies a record in a file."""
    settings = record["settings"]
    return record["prompt_id"], record["system"], settings["temperature"], settings["seed"]


def is_comparable(record: BenchRecord, other: BenchRecord) -> bool:
    """Returns whether one record is of one-token decoding, and the other's answer must equal it up to near-ties."""
    ours, theirs = record["settings"], other["settings"]
    builders = {ours["builder"], theirs["builder"]}
    rules = {ours["acceptance"], theirs["acceptance"]} - {None, "sample-and-match"}
    is_exact = not (rules and ours["temperature"] > 0) and ours["dtype"] == theirs["dtype"]
    return is_exact and "none" in builders and len(builders - {"none", PEER}) == 1


def read_kept(path: str | Path | None, *keys: str, inside: bool = False) -> dict[str, Any]:
    """Reads the JSON file to which a command adds its results; {} if `path` is None or the file does not exist yet.

    Raises ValueError if the file lacks one of `keys`; with `inside`, if one of its values does. Such a file is therefore
    never replaced.
    """
    if path is None:
        return {}
    files.check_output(path)
    path = files.local(path)
    if not path.exists() or not path.stat().st_size:
        return {}
    with suppress(ValueError, AttributeError):  # no JSON object, or values that are no objects
        kept = read_json(path)
        if all(set(keys) <= part.keys() for part in (kept.values() if inside else [kept])):
            return kept
    raise ValueError(f"{path} holds something else than results of this command; write to another file")
