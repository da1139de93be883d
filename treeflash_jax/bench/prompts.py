"""Prompts of a benchmark: JSON lines, {"id", "turns": [...], "reference"}, in the published formats."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeflash_jax.bench.report import read_jsonl

BUNDLED = Path(__file__).parent / "prompts.jsonl"
# What a user turn becomes, in the words of the published benchmarks. All but raw go through the chat template.
FORMATS = {
    "chat": "{turn}",
    "raw": "{turn}",
    "math": "{turn}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "humaneval": (
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{turn}\n```"
    ),
}
PUBLISHED_DRAW = 42  # random.Random(42).sample picks the prompts of the published benchmarks


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """A prompt with its user turns; `hash` tells two texts under one id apart.

    Example:
      >>> BenchPrompt(id="words-1", turns=("A box holds 6 pens. How many do 3 boxes hold?",)).hash
    """

    id: str
    turns: tuple[str, ...]

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:16]


def read_prompts(path: str | Path) -> list[BenchPrompt]:
    """Prompts of a JSONL file.

    Raises:
      ValueError: a file that cannot be read or is empty; by line: malformed JSON, no id, no turns, an id given twice.
    """
    prompts: dict[str, BenchPrompt] = {}
    for number, row in read_jsonl(path)[0]:
        name, turns = row.get("id"), row.get("turns")
        if not isinstance(name, str | int) or name == "" or str(name) in prompts:
            raise ValueError(f"{path}:{number}: got id {name!r}, expected one that no other prompt has")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f"{path}:{number}: got turns {turns!r}, expected a list of one or more texts")
        prompts[str(name)] = BenchPrompt(id=str(name), turns=tuple(turns))
    if not prompts:
        raise ValueError(f"{path}: got no prompts, expected at least one line")
    return list(prompts.values())


def draw(prompts: list[BenchPrompt], limit: int | None) -> list[BenchPrompt]:
    """`limit` of the prompts, in their order, drawn as the published benchmarks draw theirs; all if None."""
    if limit is not None and limit < 1:
        raise ValueError(f"got limit {limit}, expected at least 1")
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i] for i in sorted(random.Random(PUBLISHED_DRAW).sample(range(len(prompts)), limit))]


def format_turn(turn: str, format: str) -> str:
    """A user turn in a published prompt format."""
    return FORMATS[format].replace("{turn}", turn)


def empty_chat(prompt: BenchPrompt, format: str) -> Any:
    """The conversation as it reads before the last answer, the earlier ones being empty."""
    turns = [format_turn(turn, format) for turn in prompt.turns]
    if format == "raw":
        return turns[0]
    chat = [{"role": "user", "content": turns[0]}]
    for turn in turns[1:]:
        chat += [{"role": "assistant", "content": ""}, {"role": "user", "content": turn}]
    return chat
