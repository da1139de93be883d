"""A verifier without a drafter decodes one token at a time, with a note, and refuses settings of drafting."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from answers import refused
from conftest import DATA

from treeflash_jax import TreeFlash
from treeflash_jax.cli.chat import converse
from treeflash_jax.cli.check import check
from treeflash_jax.cli.commands import main
from treeflash_jax.core import devices
from treeflash_jax.core.devices import Device
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters.ngram import NgramConfig
from treeflash_jax.engine.results import Result
from treeflash_jax.engine.settings import GenerateConfig

PROMPT = [3, 4, 5, 17, 29]
VERIFIER = ["--verifier", str(DATA / "conformance" / "b_trained" / "verifier")]


@pytest.fixture(scope="module")
def alone(trained) -> TreeFlash:
    return TreeFlash(trained.verifier, Weights(trained.weights.verifier), stop_ids=trained.stop_ids)


@pytest.fixture(scope="module")
def talker(tiny) -> TreeFlash:
    """The shipped verifier alone."""
    return TreeFlash(tiny.verifier, Weights(tiny.weights.verifier), tokenizer=tiny.tokenizer, stop_ids=tiny.stop_ids)


class Lines:
    """A console with scripted input lines that records its output."""

    is_terminal = False

    def __init__(self, *lines: str):
        self.lines, self.printed = iter(lines), []

    def input(self, prompt: str = "") -> str:
        return next(self.lines)

    def print(self, *words, **_) -> None:
        self.printed += map(str, words)


def test_the_default_decodes_plainly_with_one_note(alone, trained, caplog):
    expected = trained.generate(PROMPT, max_new_tokens=8, builder="none")[0]
    with caplog.at_level(logging.INFO, logger="treeflash_jax"):
        first = alone.generate(PROMPT, max_new_tokens=8)[0]
        *_, again = alone.stream(PROMPT, max_new_tokens=8)
    assert first.ids == again.ids == expected.ids
    assert first.builder == again.builder == expected.builder == "none"
    [note] = [record.message for record in caplog.records if "no drafter" in record.message]
    assert "one token at a time" in note and "\n" not in note


@pytest.mark.parametrize(
    ("features", "most"), [(frozenset(), 0), (frozenset({"avx512_bf16"}), 1), (frozenset({"avx512_bf16", "amx_bf16"}), 8)]
)
def test_the_default_drafts_if_that_pays(features, most, trained, monkeypatch, caplog):
    """Not in float32 on a CPU, nor for several sequences without bfloat16 matrix instructions, unless requested."""
    monkeypatch.setattr(devices, "here", lambda: Device("cpu", features=features))
    bfloat16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trained.weights)
    wide, narrow = (TreeFlash(trained.verifier, x, drafter=trained.drafter) for x in (trained.weights, bfloat16))
    config = GenerateConfig(max_new_tokens=1)
    assert wide.resolve(config, {}).builder == "none" and wide.resolve(config, {"seed": 4}).builder == "none"
    assert len(caplog.records) == 1 and "does not pay on this CPU in float32" in caplog.text
    assert wide.plan(wide.resolve(config, {"nodes": 4})).builder == "best-first"
    assert wide.resolve(config, {"builder": "walk"}).builder == "walk"
    caplog.clear()
    for count, settings in ((1, {}), (2, {}), (1, {"samples": 3}), (5, {"batch_size": 1}), (99, {})):
        together = settings.get("batch_size") or min(8, count * settings.get("samples", 1))
        builder = narrow.plan(narrow.resolve(config, settings, count)).builder
        assert builder == ("best-first" if together <= most else "none"), (count, settings)
    assert ("for 2 sequences at a time" in caplog.text) == (most == 1)
    lookup = TreeFlash(trained.verifier, Weights(trained.weights.verifier, {}), drafter=NgramConfig())
    assert lookup.plan(lookup.resolve(config, {})).builder == "best-first", "without a match, it costs nothing"
    for device in (Device("gpu", "NVIDIA H200"), Device("tpu", "TPU v5 lite")):
        monkeypatch.setattr(devices, "here", lambda device=device: device)
        assert wide.plan(wide.resolve(config, {})).builder == "best-first"


def test_a_chat_says_why_nothing_is_drafted(tiny, monkeypatch, caplog):
    console = Lines("/exit")
    converse(tiny, console, max_new_tokens=1)
    assert "one token at a time: drafting does not pay on this CPU" in console.printed[0] and not caplog.records


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"builder": "chain"}, "builder 'chain', expected 'none'"),
        ({"nodes": 8}, "nodes 8"),
        ({"nodes": "auto"}, "nodes 'auto'"),
        ({"builder": "best-first"}, "builder 'best-first'"),
        ({"head": "marginal"}, "head 'marginal'"),
        ({"candidates": 4}, "candidates 4"),
        ({"drafter_temperature": 0.5}, "drafter_temperature 0.5"),
    ],
)
def test_requested_drafting_is_refused(alone, settings, words):
    with refused(f"(?=.*no drafter is loaded).*{words}"):
        alone.generate(PROMPT, **settings)


def test_settings_of_drafting_have_no_effect_on_plain_decoding(alone, trained):
    alike = {"builder": "none", "nodes": 8, "max_new_tokens": 8}
    assert alone.generate(PROMPT, **alike)[0].ids == trained.generate(PROMPT, **alike)[0].ids


def test_there_is_nothing_to_check_without_a_drafter(alone):
    with pytest.raises(ValueError, match="nothing to compare"):
        check(alone, [PROMPT])


def test_the_command_line_answers_with_a_note(capsys, caplog):
    assert main(["generate", *VERIFIER, "--prompt-ids", "3 4 5", "--max-new-tokens", "4"]) == 0
    assert len(capsys.readouterr().out.split()) == 4
    assert "no drafter is loaded" in caplog.text
    assert main(["generate", *VERIFIER, "--prompt-ids", "3 4 5", "--nodes", "8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "no drafter is loaded" in captured.err


def test_a_chat_goes_on_and_no_tree_ends_it(talker, caplog):
    console = Lines("/tree", "Name a colour.", "/tree", "And a river.", "/exit")
    converse(talker, console, max_new_tokens=1)
    printed = " ".join(console.printed)
    assert printed.count("one token at a time") == 2 and printed.count("tokens/s") == 2
    assert "no draft tree yet" in printed and "no draft tree: this answer was decoded one token at a time" in printed
    assert "error" not in printed and "no drafter" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"nodes": 8}, "no drafter"), ({"max_new_tokens": 10**6}, "context"), ({"temperature": -1}, "temperature -1")],
)
def test_a_chat_refuses_at_once_what_would_fail_at_every_message(talker, settings, words):
    console = Lines()
    with pytest.raises(ValueError, match=words):
        converse(talker, console, **settings)
    assert console.printed == []


def test_missing_rounds_are_named():
    answer = {"prompt_ids": [1], "ids": [5, 6, 7], "text": None, "finished": "length"}
    drafted = Result(builder="best-first", accept_lengths=[1, 1], draft_again=lambda index: f"tree {index}", **answer)
    assert drafted.tree(1) == "tree 1"
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"got round {index}, expected 0 to 1"):
            drafted.tree(index)
    with pytest.raises(ValueError, match="no rounds"):
        replace(drafted, accept_lengths=[]).tree(0)
    with pytest.raises(ValueError, match="no draft trees"):
        replace(drafted, draft_again=None, builder="none").tree(0)
