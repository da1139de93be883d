"""The resumable JSONL file of `train.respond`: its parts, settings, missing prompts, and order.

Files beside OUT: OUT.part-N (answers until all parts are merged), OUT.settings.toml, OUT.inputs.json (the digest of the
verifier that answers) and OUT.lock.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from etils import epath

from train.runtime import frozen_inputs, hosts, run_config
from train.runtime.frozen_inputs import FrozenInputs
from treeflash_jax.core import files
from treeflash_jax.engine.settings.pairs import locate

SECONDS_PER_PART = 30.0


def settings_path(out: epath.Path) -> epath.Path:
    return out.with_name(f"{out.name}.settings.toml")


def inputs_path(out: epath.Path) -> epath.Path:
    return out.with_name(f"{out.name}.inputs.json")


def read_inputs(settings: Any) -> FrozenInputs:
    return {"verifier": frozen_inputs.note(settings.verifier, locate(settings.verifier, "verifier"))}


def save_inputs(settings: Any, out: epath.Path) -> None:
    files.write(inputs_path(out), json.dumps(read_inputs(settings), indent=1) + "\n")


def _parts(out: epath.Path) -> list[epath.Path]:
    beside = out.parent.iterdir() if out.parent.exists() else ()
    return sorted(path for path in beside if path.name.startswith(f"{out.name}.part-"))


def save_settings(settings: Any, out: epath.Path) -> None:
    """Writes the inputs and settings of a new file, or of one whose sources got larger limits (see `check_settings`)."""
    path = settings_path(out)
    is_new = not path.exists()
    if is_new:
        save_inputs(settings, out)
    if is_new or "sources" in run_config.changes(settings, path, ()):
        run_config.save(settings, path)


def read_thinking(source: str) -> bool | None:
    """Returns whether the answers of a source were made with thinking; None if no settings are stored beside it."""
    path = settings_path(files.absolute(source))
    return run_config.read_toml(path).get("thinking", False) if path.exists() else None


def check_settings(settings: Any, out: epath.Path, free: Collection[str]) -> None:
    """Raises ValueError if a file of answers or questions was begun with other settings or by another verifier.

    Settings in `free` may differ.
    """
    path = settings_path(out)
    if not path.exists():
        if any(path.exists() for path in (out, *_parts(out))):
            raise ValueError(f"{out} exists without its settings ({path.name}), expected a new file: give another out")
        return
    changed = run_config.changes(settings, path, free)
    if not (changed.keys() == {"sources"} and _only_grew(*changed["sources"])):
        run_config.refuse(changed, out, "out")
    check_inputs(settings, out)


def check_inputs(settings: Any, out: epath.Path) -> None:
    """Raises ValueError if a file of answers or questions was begun by another verifier.

    If an earlier version of this program began the file and stored no digest of the verifier, it is stored now.
    """
    if inputs_path(out).exists():
        frozen_inputs.compare(json.loads(inputs_path(out).read_text()), read_inputs(settings), f"out={out}")
    elif hosts.is_first():
        hosts.say(f"{out}: begun by an earlier version, so the verifier cannot be compared")
        save_inputs(settings, out)


def _only_grew(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> bool:
    """Returns whether sources differ only in larger limits; 0 means no limit."""
    if [{**source, "limit": 0} for source in old] != [{**source, "limit": 0} for source in new]:
        return False
    return all(not b["limit"] or 0 < a["limit"] <= b["limit"] for a, b in zip(old, new, strict=True))


def match(out: epath.Path, prompts: Sequence[Any]) -> tuple[list[Any], set[int]]:
    """Matches the answers of a file with prompts, by the ids of the prompts.

    Returns the prompts in the order of the answers, with prompts without an answer in the gaps, and the indices of the
    answers. Raises ValueError for an answer to another prompt: the data has changed.
    """
    unmatched: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        unmatched.setdefault(tuple(prompt.ids), []).append(number)
    matched: dict[int, int] = {}
    for where, index, ids, _ in _answered(out):
        if index in matched and prompts[matched[index]].ids == ids:
            continue
        equal_prompts = unmatched.get(tuple(ids), [])
        if not equal_prompts or not 0 <= index < len(prompts) or index in matched:
            raise ValueError(
                f"{where} answers another prompt than number {index} of these sources: the data changed; give another out"
            )
        matched[index] = index if index in equal_prompts else equal_prompts[0]
        equal_prompts.remove(matched[index])
    unanswered = iter(sorted({*range(len(prompts))} - {*matched.values()}))
    order = [matched[index] if index in matched else next(unanswered) for index in range(len(prompts))]
    return [prompts[number] for number in order], {*matched}


def _answered(out: epath.Path) -> Iterator[tuple[str, int, list[int], bytes]]:
    """Yields, for every answer, its place, its index, the ids of its prompt, and its line."""
    for path in (out, *_parts(out)):
        content = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            record = json.loads(line)
            yield f"{path}, line {number}", record["index"], record["prompt"], line


@contextmanager
def adding(out: epath.Path) -> Iterator[Callable[[int, str], None]]:
    """Yields a function that adds an answer, given its index and line. Answers are written as whole parts of `out`."""
    lines: dict[int, str] = {}
    written = time.monotonic()

    def write() -> None:
        if lines:
            files.write(out.with_name(f"{out.name}.part-{min(lines)}"), "".join(lines.values()))
            lines.clear()

    def add(index: int, line: str) -> None:
        nonlocal written
        lines[index] = line
        if time.monotonic() - written > SECONDS_PER_PART:
            write()
            written = time.monotonic()

    try:
        yield add
    finally:
        write()


def merge(out: epath.Path, count: int) -> None:
    """Merges `count` answers of all hosts in order. If an index has several answers, the first one is kept."""
    lines: dict[int, bytes] = {}
    for _, index, _, line in _answered(out):
        lines.setdefault(index, line)
    if len(lines) < count:
        raise ValueError(f"{out}: {count - len(lines)} answers are missing; expected all hosts to see this folder")
    parts = _parts(out)
    files.write(out, b"".join(lines[index] for index in range(count)))
    for part in parts:
        part.unlink()
