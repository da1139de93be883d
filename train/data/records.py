"""Records of training text: chats, answers and plain texts, read from files, folders, the Hub, or Python itself.

Records are read one by one. The number of a record is its position in the source, independent of seed and limit. So a
record that one stage holds out for validation is held out in all stages.
"""

import glob
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from treeflash_jax.core.checks import expect
from treeflash_jax.core.files import fetch
from treeflash_jax.core.json_files import parse_json
from treeflash_jax.core.settings import setting
from treeflash_jax.engine.call import prompts

Messages = list[dict[str, str]]

STDLIB = "python:stdlib"
HUB = "hub:"
EXPECTED = f'expected a JSONL file, a text file, a folder of either, a glob of files, "{HUB}owner/name" or "{STDLIB}"'
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of training text: a [[sources]] table of a stage's TOML."""

    path: str = setting(
        help='a JSONL file, a text file, a folder of either (globs too; all but globs also at gs://), "python:stdlib", the '
        'source of the running Python\'s standard library, or "hub:owner/name[:config[:split]]" through `datasets` '
        '(split "train" if none is given)',
    )
    format: Literal["chat", "responses", "text"] = setting(
        "chat", 'chat, responses (as `train.respond` writes them) or text (files, or records with a "text")'
    )
    weight: float = setting(1.0, "share of a batch's sequences relative to the other sources", above=0)
    limit: int = setting(0, "number of records, in a seeded random order; 0: all", least=0, most=2**53)
    hold_out: int = setting(50, "every n-th document is held out for validation; 0: none", least=0)

    def __post_init__(self) -> None:
        expect(self.hold_out != 1, "hold_out", 1, "0 (none), or 2 or more", f"source {self.path}")

    @property
    def name(self) -> str:
        """Name in logs and responses: the file's stem, or the last part of the path."""
        if self.path.startswith(HUB):
            return self.path.removeprefix(HUB).split(":")[0].split("/")[-1]
        return "stdlib" if self.path == STDLIB else Path(self.path).stem

    def holds_out(self, number: int) -> bool:
        return bool(self.hold_out) and number % self.hold_out == self.hold_out - 1


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt and of the verifier's answer, with a flag that the answer ended before the length limit."""

    prompt: list[int]
    response: list[int]
    is_finished: bool


@dataclass(frozen=True)
class Record:
    """Number in the source, place for error messages, and content of a record."""

    number: int
    where: str
    content: Messages | Answer | str


def read_records(source: Source, seed: int, skipped: Counter[str] | None = None) -> Iterator[Record]:
    """Yields the records of a source within its limit, in the order of the source.

    Args:
      seed: seed of the order to which the limit applies.
      skipped: counter whose "malformed" counts records that are not in the source's format; None refuses such records.

    Raises:
      FileNotFoundError: a source that does not exist.
      ValueError: a malformed record, with its place, or an empty source.
    """
    loaders = _open(source)
    if not loaders:
        raise ValueError(f"{source.path}: got no records, expected at least one")
    parse = {"chat": parse_chat, "responses": parse_answer, "text": parse_text}[source.format]
    numbers: Sequence[int] = range(len(loaders))
    if source.limit:
        numbers = sorted(np.random.default_rng(seed).permutation(len(loaders))[: source.limit].tolist())
    for number in numbers:
        where, load = loaders[number]
        try:
            record = Record(number, where, parse(load()))
        except ValueError as error:
            if skipped is None:
                raise ValueError(f"{where}: {error}") from None
            skipped["malformed"] += 1
        else:
            yield record


def parse_chat(raw: Any) -> Messages:
    """Parses messages in any form of `engine.call.prompts.read_messages`, or of a prompt file for benchmarks.

    Line ends become "\\n", and space around messages is removed. Of a chat that has user turns alone, only the first turn
    is kept, because later turns need the answers in between. A reference program ("reference": {"code"}) becomes the
    assistant's answer.
    """
    messages = prompts.read_messages(raw)
    if len(messages) > 1 and {message["role"] for message in messages} == {"user"}:
        messages = messages[:1]
    reference = raw.get("reference")
    if len(messages) == 1 and isinstance(reference, dict) and isinstance(reference.get("code"), str):
        messages.append({"role": "assistant", "content": reference["code"]})
    return [message | {"content": message["content"].replace("\r\n", "\n").strip()} for message in messages]


def parse_answer(raw: Any) -> Answer:
    """Parses the ids of a prompt and its response, which must not be empty."""
    lists = [raw.get(name) if isinstance(raw, dict) else None for name in ("prompt", "response")]
    for name, ids in zip(("prompt", "response"), lists, strict=True):
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise ValueError(f"got no {name!r}, expected a list of token ids")
    return Answer(*lists, is_finished=raw.get("finished") != "length")


def parse_text(raw: Any) -> str:
    text = raw.get("text") if isinstance(raw, dict) else raw
    if not isinstance(text, str):
        raise ValueError("got no 'text', expected a string")
    return text


def _open(source: Source) -> list[tuple[str, Callable[[], Any]]]:
    """Returns a pair for every record of a source: its place for error messages, and a function that loads it."""
    if source.path.startswith(HUB):
        records = _load_hub(source.path)
        return [(f"{source.path}, record {i}", partial(records.__getitem__, i)) for i in range(len(records))]
    files = _find_files(source)
    if source.format == "text" and not all(path.suffix == ".jsonl" for path in files):
        return [(str(path), partial(path.read_text, encoding="utf-8")) for path in files]
    return [line for path in files for line in _find_lines(path)]


def _find_files(source: Source) -> list[Path]:
    """Returns the files of a source in order. Raises FileNotFoundError if there is none."""
    if source.path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return [path for path in sorted(root.rglob("*.py")) if not STDLIB_LEFT_OUT & {*path.relative_to(root).parts}]
    named = fetch(source.path, ".*") if "://" in source.path else Path(source.path).expanduser()
    if any(character in source.path for character in "*?["):
        files = map(Path, glob.glob(str(named), recursive=True))
    elif named.is_dir():
        inside = named.rglob("*" if source.format == "text" else "*.jsonl")
        files = [path for path in inside if not any(part.startswith(".") for part in path.relative_to(named).parts)]
    else:
        files = [named]
    files = sorted(path for path in files if path.is_file())
    if not files:
        raise FileNotFoundError(f"{source.path}: no such file; {EXPECTED}")
    return files


def _find_lines(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the place and the load function of every line that is not blank."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if start == 0 and line.lstrip().startswith(b"["):
                raise ValueError(f"{path}: got a JSON list, expected one JSON object a line (jq -c '.[]' makes it)")
            if line.strip():
                yield f"{path}, line {number}", partial(_load_line, path, start)
            start += len(line)


def _load_line(path: Path, start: int) -> Any:
    with path.open("rb") as file:
        file.seek(start)
        return parse_json(file.readline())


def _load_hub(path: str) -> Any:
    from datasets import load_dataset  # slow to import, and local files do not need it

    name, config, split = (path.removeprefix(HUB).split(":") + ["", ""])[:3]
    try:
        return load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # errors of `datasets`, HTTP and file systems have no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(
            f"{path}: {reason}; without a way to the Hub, give the path of a JSONL file that "
            "datasets.load_dataset(...).to_json(...) wrote elsewhere"
        ) from None
