"""Prompts of a benchmark: JSON lines of {"id", "turns": [...]}, or of any form of `read_messages`."""

import hashlib
import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treeflash_jax.core.json_files import read_jsonl
from treeflash_jax.engine.call.prompts import Prompt, read_messages

BUNDLED = Path(__file__).parent / "prompts.jsonl"
PUBLISHED_DRAW = 42  # the published benchmarks choose prompts by random.Random(42).sample


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """A prompt: user turns, possibly with a system message, or token ids.

    `hash` identifies the prompt's text. `set` is the name of its file if there are several files.

    Example:
      >>> BenchPrompt(id="words-1", turns=("A box holds 6 pens. How many do 3 boxes hold?",)).hash
    """

    id: str
    turns: tuple[str, ...] = ("",)
    system: str | None = None
    ids: list[int] | None = None
    set: str | None = None

    @property
    def hash(self) -> str:
        texts = self.ids or (self.turns if self.system is None else (self.system, self.turns))
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]

    def seed(self, seed: int) -> int:
        """Makes the seed of this prompt's random numbers, from a seed and the prompt's id."""
        return zlib.crc32(f"{seed} {self.id}".encode())


def choose_prompts(paths: Sequence[str | Path], limit: int | None = None) -> list[BenchPrompt]:
    """Reads up to `limit` prompts of each file. If there are several files, ids begin with the name of the file."""
    sets = {Path(path).stem: draw(read_prompts(path), limit) for path in paths}
    if len(sets) < len(paths):
        raise ValueError(f"got --prompts {' '.join(map(str, paths))}, expected files of different names")
    if len(sets) == 1:
        return next(iter(sets.values()))
    return [replace(prompt, id=f"{name}/{prompt.id}", set=name) for name, prompts in sets.items() for prompt in prompts]


def read_prompts(path: str | Path) -> list[BenchPrompt]:
    """Reads prompts from a JSONL file, in any form of `read_messages`. Leaves out the file's answers.

    A prompt without an id is named after the file and its line number. Raises ValueError, with the line, for any other
    file.
    """
    prompts: dict[str, BenchPrompt] = {}
    for number, value in read_jsonl(path):
        name = value.get("id", f"{Path(path).stem}-{number}")
        if not isinstance(name, str | int) or name == "" or str(name) in prompts:
            raise ValueError(f"{path}:{number}: got id {name!r}, expected one that no other prompt has")
        try:
            messages = read_messages(value)
            system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
            if others := [message["role"] for message in messages if message["role"] not in ("user", "assistant")]:
                raise ValueError(f"got a message of the role {others[0]!r}, expected a system message, then user turns")
            turns = tuple(message["content"] for message in messages if message["role"] == "user")
            if not turns or not all(turns):
                raise ValueError("got no user turn, or an empty one, expected one or more texts")
            prompts[str(name)] = BenchPrompt(id=str(name), turns=turns, system=system)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path}: got no prompts, expected at least one line")
    return list(prompts.values())


def draw(prompts: list[BenchPrompt], limit: int | None) -> list[BenchPrompt]:
    """Draws `limit` of the prompts, as the published benchmarks do, and keeps their order. None: returns all prompts."""
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i] for i in sorted(random.Random(PUBLISHED_DRAW).sample(range(len(prompts)), limit))]


def make_chat(prompt: BenchPrompt, answers: Sequence[str | None]) -> Prompt:
    """Makes the prompt of the turn that follows these answers, in a form that `generate` takes."""
    if prompt.ids is not None:
        return prompt.ids
    if len(prompt.turns) == 1 and prompt.system is None:
        return prompt.turns[0]  # works also for verifiers without a chat template
    chat = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    for turn, answer in zip(prompt.turns, answers, strict=False):
        chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*chat, {"role": "user", "content": prompt.turns[len(answers)]}]
