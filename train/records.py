"""What training text is made of: chats, answers and plain texts, read from files, folders, the Hub, or Python itself.

A source is read record by record and never held in memory. Every record has a number, its place in the source, that depends
on neither seed nor limit: what one stage holds out for validation, every other stage holds out too.
"""

from __future__ import annotations

import glob
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from treeflash_jax import chats
from treeflash_jax.checks import bounded, parse_json

Messages = list[dict[str, str]]

STDLIB = "python:stdlib"
HUB = "hub:"
EXPECTED = f'expected a JSONL file, a text file, a folder of either, a glob of files, "{HUB}owner/name" or "{STDLIB}"'
EVALUATION = {"test", "dev", "eval", "evaluation", "val", "valid", "validation", "bench", "benchmark", "humaneval"}
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where training text comes from: a [[sources]] table of a stage's TOML.

    Evaluation prompts must not leak in: a file or a Hub set and split whose name says test, dev, validation, ... and not
    train is refused.

    Attributes:
      path: a JSONL file, a text file, a folder of either (globs too), "hub:owner/name[:config[:split]]" through `datasets`
        (split "train" if none is given), or "python:stdlib", the source of the running Python's standard library.
      format: "chat", "responses" (what `train.respond` writes) or "text" (files, or records with a "text").
      weight: share of a batch's rows relative to the other sources.
      limit: number of records, the first of a seeded order; of texts, number of characters. 0 takes all.
      hold_out: every n-th document is held out for validation; 0 holds none.
    """

    path: str
    format: Literal["chat", "responses", "text"] = "chat"
    weight: float = 1.0
    limit: int = bounded(0, least=0, most=2**53)
    hold_out: int = 50

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("path", bool(self.path), "a place"),
            ("weight", self.weight > 0, "above 0"),
            ("limit", self.limit >= 0, "0 (all) or more"),
            ("hold_out", self.hold_out == 0 or self.hold_out > 1, "0 (none), or 2 or more"),
        ):
            if not ok:
                raise ValueError(f"source {self.path}: got {name} {getattr(self, name)!r}, expected {expected}")

    @property
    def name(self) -> str:
        """Of logs and responses: the file's stem, or the last part of the place."""
        if self.path.startswith(HUB):
            return self.path.removeprefix(HUB).split(":")[0].split("/")[-1]
        return "stdlib" if self.path == STDLIB else Path(self.path).stem


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt and of what a verifier answered."""

    prompt: list[int]
    response: list[int]


@dataclass(frozen=True)
class Record:
    """One record: its number in the source, its place for error messages, and what it holds."""

    number: int
    where: str
    content: Messages | Answer | str


class Malformed(ValueError):
    """A record that cannot be used; the message names its place."""


def read(source: Source, seed: int, skip: Callable[[Malformed], None] | None = None) -> Iterator[Record]:
    """The records of a source that `limit` leaves, in the order of the source.

    Args:
      source: chats come with role names user, assistant, ...; line ends are "\\n", and messages have no space around them.
      seed: of the order that a limit counts in.
      skip: told of every record that cannot be used; None raises instead.

    Raises:
      Malformed: a record that is not what the source's format says, where `skip` is None.
      ValueError: no such place, nothing in it, or an evaluation set.
    """
    shelf = _open(source)
    if not len(shelf):
        raise ValueError(f"{source.path}: got no records, expected at least one")
    parse = {"chat": parse_chat, "responses": parse_answer, "text": parse_text}[source.format]
    for number in _chosen(shelf, source, seed):
        where = shelf.where(number)
        try:
            yield Record(number, where, parse(shelf.load(number)))
        except ValueError as error:
            malformed = Malformed(f"{where}: {error}")
            if skip is None:
                raise malformed from None
            skip(malformed)


def parse_chat(raw: Any) -> Messages:
    """Messages of a record in any form of `treeflash_jax.chats`, also of a prompt file for benchmarks.

    Of the user's turns in a row the first is kept, as later ones need the answers in between; a reference program
    ("reference": {"code"}) is the assistant's answer to it.
    """
    messages = chats.parse(raw)
    if len(messages) > 1 and {message["role"] for message in messages} == {"user"}:
        messages = messages[:1]
    reference = raw.get("reference")
    if len(messages) == 1 and isinstance(reference, dict) and isinstance(reference.get("code"), str):
        messages.append({"role": "assistant", "content": reference["code"]})
    return [message | {"content": message["content"].replace("\r\n", "\n").strip()} for message in messages]


def parse_answer(raw: Any) -> Answer:
    """Ids of a prompt and its response, neither of them empty."""
    lists = [raw.get(name) if isinstance(raw, dict) else None for name in ("prompt", "response")]
    for name, ids in zip(("prompt", "response"), lists, strict=True):
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ValueError(f"got no {name!r}, expected a list of token ids")
    return Answer(*lists)


def parse_text(raw: Any) -> str:
    text = raw.get("text") if isinstance(raw, dict) else raw
    if not isinstance(text, str):
        raise ValueError("got no 'text', expected a string")
    return text


class _Shelf(Protocol):
    """Records by number."""

    def __len__(self) -> int: ...

    def where(self, number: int) -> str: ...

    def load(self, number: int) -> Any: ...


class _Lines:
    """JSON lines of files; only where they start is kept."""

    def __init__(self, files: Sequence[Path]):
        self.lines: list[tuple[Path, int, int]] = []
        for path in files:
            start = 0
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not self.lines and line.lstrip().startswith(b"["):
                        raise ValueError(f"{path}: got a JSON list, expected one JSON object a line (jq -c '.[]' makes it)")
                    if line.strip():
                        self.lines.append((path, number, start))
                    start += len(line)

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, number: int) -> str:
        path, line, _ = self.lines[number]
        return f"{path}, line {line}"

    def load(self, number: int) -> Any:
        path, _, start = self.lines[number]
        with path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        return parse_json(line)


class _Texts:
    """Whole files, one text each."""

    def __init__(self, files: Sequence[Path]):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def where(self, number: int) -> str:
        return str(self.files[number])

    def load(self, number: int) -> str:
        try:
            return self.files[number].read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError("not UTF-8 text") from None


class _HubSet:
    """A data set of the Hub, through `datasets`."""

    def __init__(self, path: str):
        from datasets import load_dataset  # slow to import, and local files do not need it

        name, config, split = (path.removeprefix(HUB).split(":") + ["", ""])[:3]
        self.path = path
        try:
            self.rows = load_dataset(name, config or None, split=split or "train")
        except Exception as error:  # the kinds of failures of `datasets`, HTTP and file systems have no common ancestor
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ValueError(
                f"{path}: {reason}; without a way to the Hub, give the path of a JSONL file that "
                "datasets.load_dataset(...).to_json(...) wrote elsewhere"
            ) from None

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, number: int) -> str:
        return f"{self.path}, row {number}"

    def load(self, number: int) -> Any:
        return self.rows[number]


def _open(source: Source) -> _Shelf:
    if source.path == STDLIB:
        return _Texts(_stdlib())
    if source.path.startswith(HUB):
        _refuse_evaluation(source.path, "/".join(source.path.removeprefix(HUB).split("/")[1:]))
        return _HubSet(source.path)
    named = Path(source.path).expanduser()
    as_text = source.format == "text"
    if any(character in source.path for character in "*?["):
        files = sorted(path for path in map(Path, glob.glob(str(named), recursive=True)) if path.is_file())
    elif named.is_dir():
        inside = [path.relative_to(named) for path in named.rglob("*" if as_text else "*.jsonl") if path.is_file()]
        files = sorted(named / path for path in inside if not any(part.startswith(".") for part in path.parts))
    else:
        files = [named] if named.is_file() else []
    if not files:
        raise ValueError(f"{source.path}: no such file; {EXPECTED}")
    is_lines = not as_text or all(path.suffix == ".jsonl" for path in files)
    for path in files if is_lines or named.is_file() else ():  # a folder of texts may well hold files named test
        _refuse_evaluation(source.path, path.stem)
    return _Lines(files) if is_lines else _Texts(files)


def _chosen(shelf: _Shelf, source: Source, seed: int) -> Sequence[int]:
    if not source.limit:
        return range(len(shelf))
    order = np.random.default_rng(seed).permutation(len(shelf)).tolist()
    if source.format != "text":
        return sorted(order[: source.limit])
    chosen, characters = [], 0
    for number in order:
        if characters >= source.limit:
            break
        chosen.append(number)
        try:
            characters += len(parse_text(shelf.load(number)))
        except ValueError:
            pass  # reported where it is read
    return sorted(chosen)


def _refuse_evaluation(path: str, name: str) -> None:
    words = {word.removesuffix("s") for word in re.split(r"[^a-z]+", name.lower())}
    if words & EVALUATION and "train" not in words:
        found = sorted(words & EVALUATION)[0]
        raise ValueError(f"{path}: {name!r} says {found!r}, expected training data (rename it with 'train' if it is)")


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(root.rglob("*.py")) if not STDLIB_LEFT_OUT & set(path.relative_to(root).parts)]
