"""Questions are functions of seed and number; a file that was stopped or extended equals a single run's."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused
from toy_training import change_weights

from train import ask, respond
from train.ask import AskConfig
from train.data.records import Source
from treeflash_jax.core.files import absolute
from treeflash_jax.engine.answers.results import Result
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.settings.pairs import locate


@pytest.fixture
def stage(tiny, monkeypatch, tmp_path) -> AskConfig:
    monkeypatch.setattr(ask, "load", lambda **named: tiny)
    monkeypatch.setattr(ask, "TRIES", 8)
    return AskConfig(verifier="tiny", out=str(tmp_path / "questions.jsonl"), count=10, max_tokens=48, batch=4, seed=3)


def lines_of(settings: AskConfig) -> list[str]:
    return Path(settings.out).read_text(encoding="utf-8").splitlines()


def test_a_question_stands_between_what_the_template_puts_around_it(tiny):
    first, last = ask.question_tokens(tiny.tokenizer)
    ids = tiny.encode([{"role": "user", "content": "How many pens?"}])
    assert ids[: len(first)] == first
    middle = tiny.tokenizer.encode("How many pens?")
    assert ids[len(first) : len(first) + len(middle) + 1] == [*middle, last]


def made(settings: AskConfig, **changed) -> AskConfig:
    """Runs the stage; returns its settings."""
    settings = replace(settings, **changed)
    ask.main(settings)
    return settings


@pytest.mark.slow
def test_a_file_that_continues_is_that_of_a_single_run(stage, tmp_path):
    whole = lines_of(made(stage, out=str(tmp_path / "whole.jsonl")))
    questions = [json.loads(line)["turns"][0] for line in whole]
    assert len(questions) == len({ask.normalised(text) for text in questions}) == 10 and all(map(str.strip, questions))
    assert int(json.loads(whole[-1])["id"]) >= 8, "not all at once"
    assert lines_of(made(stage, count=3)) == whole[:3]
    assert lines_of(made(stage, batch=8)) == whole


def test_a_finished_file_stays_as_it_is_and_holds_prompts(stage, tiny, monkeypatch):
    few = made(stage, count=2)
    monkeypatch.setattr(TreeFlash, "generate", lambda *_, **__: pytest.fail("asked again"))
    before = lines_of(few)
    assert lines_of(made(few)) == lines_of(made(few, count=1)) == before
    responding = respond.RespondConfig(verifier="tiny", out="unused.jsonl", sources=(Source(path=few.out, hold_out=0),))
    prompts = respond.collect_prompts(responding, tiny)
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in before]
    assert sorted(prompt.ids for prompt in prompts) == sorted(map(tiny.encode, chats))


def test_questions_stay_as_they_are_in_every_locale(stage, monkeypatch):
    """Text behind a URL is opened in the locale's encoding, such as Latin-1."""
    few, question = made(stage, count=1), '{"id": "3", "turns": ["Où est le café?"]}\n'
    Path(few.out).write_text(question, encoding="utf-8")
    monkeypatch.setattr(type(absolute(few.out)), "read_text", lambda path: path.read_bytes().decode("latin-1"))
    made(few, count=2)
    assert Path(few.out).read_text(encoding="utf-8").startswith(question)


def test_bad_input_is_refused_in_one_line(stage, tiny, monkeypatch, tmp_path):
    few = made(stage, count=2)
    refused(lambda: made(few, seed=5), "was begun with seed = 3, got 5")
    shutil.copytree(locate("tiny"), tmp_path / "verifier")
    copied = made(stage, count=1, verifier=str(tmp_path / "verifier"), out=str(tmp_path / "copied.jsonl"))
    change_weights(tmp_path / "verifier")
    refused(lambda: made(copied, count=2), "verifier: got a verifier that changed after out=")
    refused(lambda: made(few, out=str(tmp_path / "fresh.jsonl"), max_tokens=1), "got no new question in 32 tries")
    monkeypatch.setattr(tiny.tokenizer.inner, "chat_template", "{{ messages[0].role }}")
    refused(lambda: made(few, out=str(tmp_path / "other.jsonl")), "does not show where a user's turn begins")


def test_ctrl_c_ends_with_its_status_and_what_to_do(stage, monkeypatch, capsys):
    monkeypatch.setattr(TreeFlash, "generate", lambda self, prompts, **_: [Result.unanswered([1]) for _ in prompts])
    with pytest.raises(SystemExit, match="130"):
        ask.main(stage)
    assert "interrupted; the same command continues from here\n" in capsys.readouterr().out
