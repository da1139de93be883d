"""The file of answers that `train.respond` writes: its parts, its settings, what it lacks, and putting it in order.

Beside OUT may lie OUT.part-N (one for every host, until they are merged), OUT.cut (answers that reached the limit, where
they are left out), OUT.settings.toml and OUT.lock.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from train import config
from treeflash_jax import files

SETTINGS_OF = "# Settings of train."  # what a record of settings begins with
RECORDED = {"verifier", "sources", "out", "temperatures", "max_new_tokens", "max_prompt_tokens", "batch", "seed"}


def part_path(out: Path, host: int) -> Path:
    return out.with_name(f"{out.name}.part-{host}")


def cut_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.cut")


def settings_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.settings.toml")


def save_settings(settings: Any, out: Path, stage: str = "train.respond") -> None:
    """Notes the settings of a new file, or of one whose sources have larger limits now (see `check_settings`)."""
    path = settings_path(out)
    if not path.exists() or "sources" in config.changes(settings, path, ()):
        heading = SETTINGS_OF + f"{stage.removeprefix('train.')}, written by it for {out.name}\n"
        files.write(path, heading + config.dump(config.to_dict(settings)))


def check_settings(settings: Any, out: Path, free: Collection[str]) -> None:
    """Refuses a file of answers, or of questions, that these settings cannot go on with.

    Args:
      free: names of settings that nothing in it depends on.

    Raises:
      ValueError: no regular file, a file without its settings, or answers of other settings.
    """
    for path in (out, cut_path(out), *_parts(out)):
        if files.regular(path).is_dir():
            raise ValueError(f"{path} is a folder, expected a file: give another out")
    path = settings_path(out)
    if path.exists():
        if not files.regular(path).read_bytes().startswith(SETTINGS_OF.encode()):
            raise ValueError(f"{path} is in the way, expected no file or what this stage wrote: give another out")
    else:
        path = out.with_suffix(".toml")  # where records stood before
        if not (out.exists() or cut_path(out).exists() or _parts(out)):
            return
        if not _is_record(path):
            name = settings_path(out).name
            raise ValueError(f"{out} exists without its settings ({name}), expected a new file: give another out")
    changed = config.changes(settings, path, free)
    if changed.keys() == {"sources"} and _only_grew(*changed["sources"]):
        return
    if changed:
        name, (old, new) = next(iter(changed.items()))
        raise ValueError(f"{out} was begun with {name} = {old!r}, got {new!r}: give another out, or delete it")


def _only_grew(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> bool:
    """Tells whether sources differ only in larger limits, of which 0 is the largest."""
    if [{**source, "limit": 0} for source in old] != [{**source, "limit": 0} for source in new]:
        return False
    return all(not b["limit"] or 0 < a["limit"] <= b["limit"] for a, b in zip(old, new, strict=True))


def in_order(out: Path, prompts: Sequence[Any]) -> list[Any]:
    """Returns prompts in the order of the answers in a file; those without an answer fill the gaps, in order."""
    numbers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        numbers.setdefault(str(prompt.ids), []).append(number)
    placed: dict[int, int] = {}
    for _, index, ids in _answered(out):
        same = numbers.get(str(ids), [])
        if same and 0 <= index < len(prompts) and index not in placed:
            placed[index] = same.pop(same.index(index) if index in same else 0)
    new = iter(sorted({*range(len(prompts))} - {*placed.values()}))
    return [prompts[placed[index] if index in placed else next(new)] for index in range(len(prompts))]


def _is_record(path: Path) -> bool:
    """Whether a file has the form in which settings are saved: all of them, in order, and not a word more."""
    try:
        text = files.regular(path).read_text(encoding="utf-8")
        raw = config.read(path)
        return RECORDED <= raw.keys() and config.dump(raw) == text
    except (OSError, ValueError):
        return False


class Place(NamedTuple):
    """File, line number and first byte of an answer, its bytes, and whether it was cut."""

    path: Path
    number: int
    start: int
    size: int
    is_cut: bool


def finished(out: Path, prompts: Sequence[list[int]]) -> dict[int, Place]:
    """The lines of answered prompts, in the file, beside it or in a part of it; an unfinished last line does not count.

    Raises:
      ValueError: a line that answers another prompt, as where the data changed in between.
    """
    places: dict[int, Place] = {}
    for place, index, ids in _answered(out):
        if not 0 <= index < len(prompts) or prompts[index] != ids:
            raise ValueError(
                f"{place.path}, line {place.number} answers another prompt than number {index} of these sources: "
                "the data changed; give another out"
            )
        places.setdefault(index, place)
    return places


def _answered(out: Path) -> Iterator[tuple[Place, int, list[int]]]:
    """Yields the place of every answer in a file and in those beside it, and the index and ids of its prompt."""
    for path in (out, cut_path(out), *_parts(out)):
        if not path.exists():
            continue
        with path.open("rb") as file:
            start = 0
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                    index, ids = operator.index(record["index"]), record["prompt"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise ValueError(f"{path}, line {number}: got no answer, expected what this stage writes") from None
                yield Place(path, number, start, len(line), record.get("finished") == "length"), index, ids
                start += len(line)


def drop_unfinished_line(path: Path) -> None:
    """Cuts a file after its last line end."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def merge(out: Path, prompts: Sequence[list[int]], cut: Literal["keep", "drop"]) -> int:
    """One file in the order of the prompts, whoever wrote the lines, and one of answers left out; returns their number.

    Of several answers to a prompt the first is kept.
    """
    places, parts, apart = finished(out, prompts), _parts(out), cut_path(out)
    if len(places) < len(prompts):
        raise ValueError(f"{out}: {len(prompts) - len(places)} answers are missing; expected all hosts to see this folder")
    shares: dict[Path, list[int]] = {apart: [], out: []}
    for index in range(len(prompts)):
        shares[apart if cut == "drop" and places[index].is_cut else out].append(index)
    if parts or not all(_is_in_order(path, share, places) for path, share in shares.items()):
        # A kill in between leaves every line in one of the files at least.
        merged = {path: path.with_name(f"{path.name}.merging") for path in shares}
        for path, share in shares.items():
            with merged[path].open("wb") as file:
                for index in share:
                    with places[index].path.open("rb") as source:
                        source.seek(places[index].start)
                        file.write(source.readline())
        for path in shares if cut == "drop" else reversed(shares):
            os.replace(merged[path], path)
        for part in parts:
            part.unlink()
    if not shares[apart]:
        apart.unlink(missing_ok=True)
    return len(shares[apart])


def _is_in_order(path: Path, share: list[int], places: dict[int, Place]) -> bool:
    """Whether a file holds the answers of its share, in order, and nothing else."""
    size = path.stat().st_size if path.exists() else 0
    return share == [i for i in places if places[i].path == path] and size == sum(places[i].size for i in share)


def _parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.part-*"))
