"""Generates users' questions with the verifier, for use as training prompts.

    python -m train.ask verifier=smollm2 out=runs/smollm2/questions.jsonl count=1400

Given only the beginning of a user's turn, a chat model continues with a question like those in its training data.
Writes one JSON object per line, {"id", "turns": [text]}, for `train.respond` and `train.pair`. Questions that do not end
within `max_tokens`, and duplicates, are left out.

A question depends only on the seed and its number. So the same command continues an interrupted run, and a larger `count`
adds to the file; both result in the file of a single run. The settings are stored in OUT.settings.toml. The digest of the
verifier, which must stay the same, is stored in OUT.inputs.json.

Source: Magpie (arXiv 2406.08464).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from etils import epath

from train.data import answers
from train.runtime import hosts, run_config, watch
from treeflash_jax.core import files
from treeflash_jax.core.settings import setting
from treeflash_jax.engine.loading import load
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.settings.pairs import NO_DRAFTER, locate
from treeflash_jax.formats.tokenizer import Tokenizer

TRIES = 256  # number of questions generated between two writes, or twice the batch if that is larger
MOST_IDLE = 4  # number of successive writes without a new question after which the command fails
FREE = ("out", "count", "batch")  # settings that may change when a run continues: no question depends on them
MARK = "THE QUESTION"


@dataclass(frozen=True, kw_only=True)
class AskConfig:
    """Settings of this stage."""

    verifier: str = setting(help="name of a pair, folder, GGUF file or Hub id; with a chat template")
    out: str = setting(help="the JSONL file, local or gs://")
    count: int = setting(1000, "number of different questions", least=1)
    temperature: float = setting(1.0, "sampling temperature of the questions", above=0)
    top_p: float = setting(0.95, "top-p of the questions' sampling", above=0, most=1)
    max_tokens: int = setting(96, "largest number of tokens of a question", least=1)
    batch: int = setting(64, "number of questions decoded together", least=1, most=2**16)
    seed: int = setting(0, "random seed of the questions", least=0, most=run_config.MAX_SEED)


def main(settings: AskConfig) -> None:
    hosts.connect()
    if jax.process_count() > 1:
        raise ValueError(f"got {jax.process_count()} processes, expected one: questions are short")
    out = files.absolute(settings.out)
    with hosts.held(out.with_name(f"{out.name}.lock"), f"out={settings.out}"):
        answers.check_settings(settings, out, FREE)
        model = load(verifier=locate(settings.verifier, "verifier"), drafter=NO_DRAFTER)
        questions, next_number = read_questions(out)
        answers.save_settings(settings, out)
        with watch.Bar("questions", settings.count, len(questions)) as bar:
            for lines in ask(model, settings, questions, next_number):
                files.write(out, (out.read_bytes() if out.exists() else b"") + "".join(lines).encode())
                bar.show(len(questions))
                hosts.say(f"{len(questions):,} of {settings.count:,} questions")
    hosts.say(f"{len(questions):,} questions in {out}")


def question_tokens(tokenizer: Tokenizer | None) -> tuple[list[int], int]:
    """Returns the ids that come before a user's first words in a chat, and the id that ends the user's turn.

    Raises ValueError if they cannot be found in the chat template's output.
    """
    if tokenizer is None:
        raise ValueError("got a verifier without a tokenizer, expected one with a chat template")
    before, *after = tokenizer.render([{"role": "user", "content": MARK}]).split(MARK)
    if len(after) != 1 or not before or not after[0]:
        raise ValueError("got a chat template that does not show where a user's turn begins and ends; give prompts instead")
    opening, closing = tokenizer.encode_texts([before, after[0]], add_special_tokens=False)
    return opening, closing[0]


def read_questions(out: epath.Path) -> tuple[set[str], int]:
    """Returns the normalised questions of a file, and the number of the next question to try."""
    records = [json.loads(line) for line in out.read_bytes().splitlines()] if out.exists() else []
    next_number = int(records[-1]["id"]) + 1 if records else 0
    return {normalised(record["turns"][0]) for record in records}, next_number


def ask(model: TreeFlash, settings: AskConfig, questions: set[str], next_number: int) -> Iterator[list[str]]:
    """Yields lines of new questions, from number `next_number` on, until there are enough.

    Adds them, normalised, to `questions`.
    """
    opening, closing = question_tokens(model.tokenizer)
    num_idle = 0  # successive writes without a new question
    tries = max(TRIES, 2 * settings.batch)  # slots stay unused at the end of a call
    while len(questions) < settings.count:
        numbers = range(next_number, next_number + tries)
        lines = []
        results = model.generate(
            [opening] * tries,
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
                hosts.say("interrupted; the same command continues from here")
                raise SystemExit(130)
            text = result.text.strip()
            is_new = result.finished == "stop" and text and normalised(text) not in questions
            if is_new and len(questions) < settings.count:
                questions.add(normalised(text))
                lines.append(json.dumps({"id": str(number), "turns": [text]}, ensure_ascii=False) + "\n")
        num_idle = 0 if lines else num_idle + 1
        if num_idle == MOST_IDLE:
            raise ValueError(
                f"got no new question in {MOST_IDLE * tries:,} tries, expected some: {settings.verifier} does not write "
                "users' turns; give prompts instead (in train.pair: questions=0)"
            )
        next_number += tries
        yield lines


def normalised(text: str) -> str:
    """Returns a question without case and spacing. Duplicates are equal in this form."""
    return " ".join(text.casefold().split())


if __name__ == "__main__":
    run_config.run_command(main, AskConfig, __doc__)
