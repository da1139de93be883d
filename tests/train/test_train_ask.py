"""Questions are functions of seed and number; a file that was stopped or is added to is that of a single run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from train import ask, respond
from train.ask import AskConfig
from train.records import Source
from treeflash_jax.model import TreeFlash


@pytest.fixture
def stage(tiny, monkeypatch, tmp_path) -> AskConfig:
    monkeypatch.setattr(ask, "load_model", lambda settings: tiny)
    monkeypatch.setattr(ask, "TURN", 8)
    return AskConfig(verifier="tiny", out=str(tmp_path / "questions.jsonl"), count=14, max_tokens=48, batch=8, seed=3)


def lines_of(settings: AskConfig) -> list[str]:
    return Path(settings.out).read_text(encoding="utf-8").splitlines()


def test_a_question_stands_between_what_the_template_puts_around_it(tiny):
    first, last = ask.around(tiny.tokenizer)
    ids = tiny.encode([{"role": "user", "content": "How many pens?"}])
    assert ids[: len(first)] == first
    middle = tiny.tokenizer.encode("How many pens?")
    assert ids[len(first) : len(first) + len(middle) + 1] == [*middle, last]


def test_a_file_that_goes_on_is_that_of_a_single_run(stage, tmp_path):
    whole = replace(stage, out=str(tmp_path / "whole.jsonl"))
    ask.main(whole)
    questions = [json.loads(line)["turns"][0] for line in lines_of(whole)]
    assert len(questions) == len({ask.key_of(text) for text in questions}) == 14 and all(map(str.strip, questions))
    assert int(json.loads(lines_of(whole)[-1])["id"]) >= 8, "not all in one turn"
    ask.main(replace(stage, count=3))
    assert lines_of(stage) == lines_of(whole)[:3]
    ask.main(replace(stage, batch=4))
    assert lines_of(stage) == lines_of(whole)
    text = Path(stage.out).read_text(encoding="utf-8")
    Path(stage.out).write_text(text[:-7], encoding="utf-8")  # stopped while it wrote
    ask.main(stage)
    assert lines_of(stage) == lines_of(whole)
    assert lines_of(whole) != lines_of(_after(ask.main, replace(stage, out=str(tmp_path / "other.jsonl"), seed=4)))


def _after(main, settings: AskConfig) -> AskConfig:
    main(settings)
    return settings


def test_a_finished_file_stays_as_it_is(stage, tiny, monkeypatch):
    few = _after(ask.main, replace(stage, count=2))
    monkeypatch.setattr(TreeFlash, "generate", lambda *_, **__: pytest.fail("asked again"))
    before = lines_of(few)
    ask.main(few)
    ask.main(replace(few, count=1))
    assert lines_of(few) == before


def test_questions_are_prompts_of_the_next_stage(stage, tiny):
    few = _after(ask.main, replace(stage, count=2))
    asked = respond.RespondConfig(verifier="tiny", out="unused.jsonl", sources=(Source(path=few.out, hold_out=0),))
    prompts = respond.collect_prompts(asked, tiny)
    texts = [json.loads(line)["turns"][0] for line in lines_of(few)]
    assert sorted(prompt.ids for prompt in prompts) == sorted(
        tiny.encode([{"role": "user", "content": text}]) for text in texts
    )


def test_what_cannot_be_asked_is_refused_in_one_line(stage, tiny, monkeypatch, tmp_path):
    few = _after(ask.main, replace(stage, count=2))
    with pytest.raises(ValueError, match="was begun with seed = 3, got 5"):
        ask.main(replace(few, seed=5))
    Path(few.out).write_text("no question\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: got no question"):
        ask.main(few)
    fresh = replace(few, out=str(tmp_path / "fresh.jsonl"))
    with pytest.raises(ValueError, match="got no new question in 32 tries"):
        ask.main(replace(fresh, max_tokens=1))
    monkeypatch.setattr(tiny.tokenizer.inner, "chat_template", "{{ messages[0].role }}")
    with pytest.raises(ValueError, match="does not show where a user's turn begins"):
        ask.main(replace(fresh, out=str(tmp_path / "other.jsonl")))
