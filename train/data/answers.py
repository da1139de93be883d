"""The resumable JSONL file of `train.respond`: its parts, its settings, the prompts it lacks, and its order.

Beside OUT there may be OUT.part-N (one per host, until they are merged), OUT.cut (answers that reached the limit, if they
are dropped), OUT.settings.toml and OUT.lock.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

from train.runtime import run_config
from treeflash_jax.core import files


def part_path(out: Path, host: int) -> Path:
    return out.with_name(f"{out.name}.part-{host}")


def cut_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.cut")


def settings_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.settings.toml")


def _files(out: Path) -> list[Path]:
    """Returns the files that may hold answers: `out`, the dropped ones, and the parts of hosts."""
    return [out, cut_path(out), *_parts(out)]


def _parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.part-*"))


def save_settings(settings: Any, out: Path) -> None:
    """Writes the settings of a new file, or of one whose sources have larger limits now (see `check_settings`)."""
    path = settings_path(out)
    if not path.exists() or "sources" in run_config.changes(settings, path, ()):
        files.write(path, run_config.dump(run_config.to_dict(settings)))


def read_thinking(source: str) -> bool | None:
    """Returns whether the answers of a source were made with thinking; None if there are no settings beside it."""
    path = settings_path(Path(source))
    return run_config.read(path).get("thinking", False) if path.exists() else None


def check_settings(settings: Any, out: Path, free: Collection[str]) -> None:
    """Refuses to continue a file of answers, or of questions, with settings that would have made another one.

    Args:
      free: names of settings that do not affect its content.

    Raises:
      ValueError: no regular file, a file without its settings, or other settings.
    """
    for path in _files(out):
        if files.regular(path).is_dir():
            raise ValueError(f"{path} is a folder, expected a file: give another out")
    path = settings_path(out)
    if not path.exists():
        if any(path.exists() for path in _files(out)):
            raise ValueError(f"{out} exists without its settings ({path.name}), expected a new file: give another out")
        return
    changed = run_config.changes(settings, path, free)
    if changed and not (changed.keys() == {"sources"} and _only_grew(*changed["sources"])):
        name, (old, new) = next(iter(changed.items()))
        raise ValueError(f"{out} was begun with {name} = {old!r}, got {new!r}: give another out, or delete it")


def _only_grew(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> bool:
    """Returns whether sources differ only in larger limits, of which 0 is the largest."""
    if [{**source, "limit": 0} for source in old] != [{**source, "limit": 0} for source in new]:
        return False
    return all(not b["limit"] or 0 < a["limit"] <= b["limit"] for a, b in zip(old, new, strict=True))


class Place(NamedTuple):
    """Location of an answer, file, line number and first byte; and whether it reached the length limit."""

    path: Path
    number: int
    start: int
    is_cut: bool


def match(out: Path, prompts: Sequence[Any]) -> tuple[list[Any], dict[int, Place]]:
    """Matches the answers of a file with prompts, by their ids.

    Returns:
      The prompts in the order of the answers, those without an answer in the gaps; and the places of the answers by index:
      of several with one index the first, and no unfinished line.

    Raises:
      ValueError: a line that answers another prompt, because the data changed.
    """
    numbers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        numbers.setdefault(str(prompt.ids), []).append(number)
    matched: dict[int, int] = {}
    places: dict[int, Place] = {}
    for place, index, ids in _answered(out):
        if index in places and prompts[matched[index]].ids == ids:
            continue
        same = numbers.get(str(ids), [])
        if not same or not 0 <= index < len(prompts) or index in places:
            raise ValueError(
                f"{place.path}, line {place.number} answers another prompt than number {index} of these sources: "
                "the data changed; give another out"
            )
        matched[index] = same.pop(same.index(index) if index in same else 0)
        places[index] = place
    others = iter(sorted({*range(len(prompts))} - {*matched.values()}))
    return [prompts[matched[index] if index in matched else next(others)] for index in range(len(prompts))], places


def _answered(out: Path) -> Iterator[tuple[Place, int, list[int]]]:
    """Yields the place of every answer, and the index and ids of its prompt."""
    for path in (path for path in _files(out) if path.exists()):
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
                yield Place(path, number, start, record.get("finished") == "length"), index, ids
                start += len(line)


def drop_unfinished_line(path: Path) -> None:
    """Truncates a file after its last line end."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def merge(out: Path, count: int, cut: Literal["keep", "drop"]) -> int:
    """Merges `count` answers of all hosts in order; returns the number of those dropped to OUT.cut."""
    places: dict[int, Place] = {}
    for place, index, _ in _answered(out):
        places.setdefault(index, place)
    if len(places) < count:
        raise ValueError(f"{out}: {count - len(places)} answers are missing; expected all hosts to see this folder")
    parts, dropped = _parts(out), [index for index in range(count) if cut == "drop" and places[index].is_cut]
    shares = {cut_path(out): dropped, out: sorted({*range(count)} - {*dropped})}
    # Whenever the process is killed, every line is in one of the files at least.
    merged = {path: path.with_name(f"{path.name}.merging") for path in shares}
    with ExitStack() as stack:
        sources = {path: stack.enter_context(path.open("rb")) for path in {place.path for place in places.values()}}
        for path, share in shares.items():
            with merged[path].open("wb") as file:
                for place in (places[index] for index in share):
                    sources[place.path].seek(place.start)
                    file.write(sources[place.path].readline())
    for path in shares if cut == "drop" else reversed(shares):
        os.replace(merged[path], path)
    for part in parts:
        part.unlink()
    if not dropped:
        cut_path(out).unlink()
    return len(dropped)
