"""The verifier writes users' questions itself: prompts of the kind that it is asked in chats, where none are at hand.

    python -m train.ask verifier=smollm2 out=runs/smollm2/questions.jsonl count=1400

A chat model that reads the beginning of a user's turn, and nothing else, goes on with a question like those that it was
trained to answer. Writes one JSON object a line, {"id", "turns": [text]}, which is what `train.respond` and `train.pair`
take as prompts. A question that does not end within `max_tokens`, or that was there before, is left out.

A question depends on the seed and on its number alone, so the same command goes on where it was stopped, one with a larger
`count` adds to the file, and both end with the file that a single run writes. The settings stand beside it, in
OUT.settings.toml.

Source: Magpie (arXiv 2406.08464).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from train import answers, config, folders, hosts, lock, progress
from treeflash_jax.checks import bounded
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.loading import load
from treeflash_jax.model import TreeFlash
from treeflash_jax.pairs import locate

TURN = 256  # questions that are tried before the file is written to
MOST_IDLE = 4  # turns in a row without a new question, after which there will be none
FREE = ("out", "count", "batch")  # settings that may change when a file goes on: no question depends on them
MARK = "THE QUESTION"


@dataclass(frozen=True, kw_only=True)
class AskConfig:
    """Settings of this stage.

    Attributes:
      verifier: the name of a pair, a folder, a GGUF file or a Hub id; with a chat template.
      out: the JSONL file.
      count: number of different questions.
      temperature, top_p: sampling of their tokens.
      max_tokens: largest number of tokens of a question.
      batch: questions decoded together.
      seed: random seed of the questions.
    """

    verifier: str
    out: str
    count: int = bounded(1000, least=1)
    temperature: float = bounded(1.0, above=0)
    top_p: float = bounded(0.95, above=0, most=1)
    max_tokens: int = bounded(96, least=1)
    batch: int = bounded(64, least=1, most=2**16)
    seed: int = bounded(0, least=0)


def main(settings: AskConfig) -> None:
    """Writes the questions that the file lacks.

    Raises:
      ValueError: a file of other settings, a verifier without a chat template or with one that does not show where a user's
        turn begins, one that writes no questions, or several processes.
    """
    hosts.connect()
    if jax.process_count() > 1:
        raise ValueError(f"got {jax.process_count()} processes, expected one: questions are short")
    out = Path(settings.out).expanduser()
    answers.check_settings(settings, out, FREE)
    model = load_model(settings)
    with lock.held(folders.absolute(f"{out}.lock"), f"out={settings.out}") as mine:
        answers.check_settings(settings, out, FREE)  # another command may have begun the file meanwhile
        found, first = read(out)
        answers.save_settings(settings, out, "train.ask")
        began, before = time.perf_counter(), len(found)
        with progress.Bar("questions", settings.count, before) as bar:
            for lines in ask(model, settings, found, first):
                mine.check()
                with out.open("a", encoding="utf-8") as file:
                    file.write("".join(lines))
                bar.update(len(found))
                hosts.say(f"{len(found):,} of {settings.count:,} questions")
    new = len(found) - before
    rows = {"new": f"{new:,}", "time": progress.duration(time.perf_counter() - began)}
    progress.table(f"{len(found):,} questions in {out}", rows if new else {})


def load_model(settings: AskConfig) -> TreeFlash:
    return load(verifier=locate(settings.verifier, "verifier"))


def around(tokenizer: Tokenizer | None) -> tuple[list[int], int]:
    """The ids before the first words of a user in a chat, and the id that ends them.

    Raises:
      ValueError: no chat template, or one that does not repeat what a user says, once.
    """
    if tokenizer is None:
        raise ValueError("got a verifier without a tokenizer, expected one with a chat template")
    before, *after = tokenizer.render([{"role": "user", "content": MARK}]).split(MARK)
    if len(after) != 1 or not before or not after[0]:
        raise ValueError("got a chat template that does not show where a user's turn begins and ends; give prompts instead")
    first, last = tokenizer.encode_texts([before, after[0]], add_special_tokens=False)
    return first, last[0]


def read(out: Path) -> tuple[dict[str, str], int]:
    """Questions of a file by their keys, and the number to go on from.

    Raises:
      ValueError: a line that this stage did not write.
    """
    answers.drop_unfinished_line(out)
    found, first = {}, 0
    lines = out.read_bytes().splitlines() if out.exists() else []
    for at, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            text, first = str(record["turns"][0]), int(record["id"]) + 1
        except (ValueError, KeyError, TypeError, IndexError):
            raise ValueError(f"{out}, line {at}: got no question, expected what this stage writes") from None
        found[key_of(text)] = text
    return found, first


def ask(model: TreeFlash, settings: AskConfig, found: dict[str, str], first: int) -> Iterator[list[str]]:
    """Lines of new questions, a turn's at once, until there are enough; adds them to `found`.

    Args:
      found: questions so far, by their keys.
      first: number of the first question to try.

    Raises:
      ValueError: several turns brought nothing new.
    """
    opening, closing = around(model.tokenizer)
    idle = 0
    while len(found) < settings.count:
        numbers, lines = range(first, first + TURN), []
        results = model.generate(
            [opening] * TURN,
            indices=numbers,
            builder="none",
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            max_new_tokens=settings.max_tokens,
            batch_size=settings.batch,
            stop_ids=sorted({closing, *model.stop_ids}),
        )
        for number, result in zip(numbers, results, strict=True):
            if result.finished == "interrupted":
                raise SystemExit("interrupted; the same command goes on from here")
            text = (result.text or "").strip()
            is_new = result.finished == "stop" and text and key_of(text) not in found
            if is_new and len(found) < settings.count:
                found[key_of(text)] = text
                lines.append(line_of(number, text))
        idle = 0 if lines else idle + 1
        if idle == MOST_IDLE:
            raise ValueError(
                f"got no new question in {MOST_IDLE * TURN:,} tries, expected some: {settings.verifier} does not write "
                "what users say; give prompts instead"
            )
        first += TURN
        yield lines


def key_of(text: str) -> str:
    """What two questions have in common that count as one."""
    return " ".join(text.casefold().split())


def line_of(number: int, text: str) -> str:
    record: dict[str, Any] = {"id": str(number), "turns": [text]}
    return json.dumps(record, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    config.run(main, AskConfig, __doc__)
