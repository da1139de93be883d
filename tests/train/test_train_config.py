"""Settings of the stages: what a TOML file and overrides may say, and that every file in configs/ says nothing else."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from refusals import mistake, refused

from train import ask, drafter, from_scratch, head, respond, selector
from train.pairing import compose
from train.runtime import run_config
from train.stages import registry
from treeflash_jax.models.packed_attention import MAX_BLOCKS, MAX_CONTEXT

CONFIGS = Path(__file__).parents[2] / "configs"
STAGES = {
    **registry.STAGES,
    "from_scratch": from_scratch.FromScratchConfig,
    "ask": ask.AskConfig,
    "respond": respond.RespondConfig,
    "selector": selector.SelectorConfig,
}
FILES = sorted(CONFIGS.rglob("*.toml"))
HEAD, DRAFTER = CONFIGS / "tiny" / "head.toml", CONFIGS / "tiny" / "drafter.toml"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_file_is_understood_and_survives_being_saved(path, tmp_path):
    settings = run_config.load(STAGES[path.stem], path)
    if path.stem in registry.STAGES:
        assert registry.read_stage(path) == settings
    run_config.save(settings, tmp_path / "settings.toml")
    assert run_config.load(STAGES[path.stem], tmp_path / "settings.toml") == settings


def test_a_file_says_of_which_stage_it_is(tmp_path):
    """Not its keys, which stages share: a file without the line is refused by name, and so is another stage's file."""
    path = tmp_path / "settings.toml"
    path.write_text(HEAD.read_text().replace('stage = "head"\n', ""))
    refused(lambda: registry.read_stage(path), "settings.toml: got stage = None", 'such as stage = "head" (one of head, ')
    refused(lambda: run_config.load(drafter.DrafterStage, HEAD), "head.toml", "stage = 'head', expected 'drafter'")


def test_overrides_win_and_reach_into_lists():
    words = ["loop.steps=7", "sources.0.path=a b.jsonl", "optimizer.learning_rate=1e-3", "train_backbone=true", "run=3"]
    settings = run_config.load(head.HeadStage, HEAD, [*words, "evaluate.nodes=[4, 8]"])
    assert settings.loop.steps == 7 and settings.sources[0].path == "a b.jsonl" and settings.run == "3"
    assert settings.optimizer.learning_rate == 1e-3 and settings.train_backbone and settings.evaluate.nodes == (4, 8)


@pytest.mark.parametrize(("override", "message"), [
    ("loop.stesp=4", "unknown setting loop.stesp; did you mean loop.steps"),
    ("zzz=4", "unknown setting zzz; expected one of stage, run, verifier"),
    ("loop.steps=many", "loop.steps = 'many', expected an integer"),
    ("optimizer.learning_rate=nan", "expected a finite number"),
    ("optimizer=3", "optimizer = 3, expected a dictionary"),
    ("optimizer.name=sgd", "expected 'adamw' or 'muon'"),
    ("sources.3.path=x", "got sources.3.path, expected a setting of a table that there is"),
    ("train_backbone=yesno", "expected true or false"),
    ("objective.chunk=5", "expected a multiple of objective.chunk 5"),
    ("loop.batch=0", "got loop.batch = 0, expected at least 1"),
    # Blocks and positions share the 32 bits of a packed mask; the keys of random numbers have as many.
    (f"objective.chunk={MAX_BLOCKS * 2}", f"expected at most {MAX_BLOCKS}"),
    (f"data.sequence_length={MAX_CONTEXT * 2}", f"expected at most {MAX_CONTEXT}"),
    ("loop.seed=4294967296", "expected at most 4294967295"),
    ("optimizer.learning_rate=1e30", "learning_rate = 1e+30, expected at most 10"),
    ("evaluate.nodes=[0]", "evaluate.nodes"),
    ("run=", "got run = "),
])  # fmt: skip
def test_what_is_not_understood_is_named(override, message):
    refused(lambda: run_config.load(head.HeadStage, HEAD, [override]), message)


def test_any_path_survives_being_saved(tmp_path):
    settings = run_config.load(head.HeadStage, HEAD)
    names = ("data/\U0001f600.jsonl", 'say "hi".jsonl', "C:\\new\\table", "a\x7fb\tc\nd", "é [x] = 'y' # z")
    sources = tuple(dataclasses.replace(settings.sources[0], path=name) for name in names)
    settings = dataclasses.replace(settings, run=names[-1], sources=sources)
    run_config.save(settings, tmp_path / "settings.toml")
    assert run_config.load(head.HeadStage, tmp_path / "settings.toml") == settings
    assert run_config.changes(settings, tmp_path / "settings.toml", ()) == {}


def test_changes_name_what_differs(tmp_path):
    saved = tmp_path / "settings.toml"
    settings = run_config.load(head.HeadStage, HEAD)
    words = ["loop.batch=16", "sources.0.limit=3", "mesh.data=4", "run=x", "loop.keep=5"]
    now = run_config.load(head.HeadStage, HEAD, words)
    saved.write_text(run_config.dump(dataclasses.replace(settings, init_scale=0.5)))
    changed = run_config.changes(now, saved, {"run", "mesh", "loop.keep"})
    assert changed.pop("sources")[1][0]["limit"] == 3
    assert changed == {"loop.batch": (4, 16), "init_scale": (0.5, 0.04)}
    without = [line for line in saved.read_text().splitlines() if not line.startswith(("init_scale", "clip"))]
    saved.write_text("\n".join(without))
    assert run_config.changes(settings, saved, ()) == {"init_scale": (0.02, 0.04)}, "what was not written had its default"
    run_config.save(run_config.load(drafter.DrafterStage, DRAFTER), saved)
    other_stage = run_config.changes(settings, saved, ())
    assert other_stage["num_layers"] == (2, None) and other_stage["drafter"] == (None, "tiny")
    saved.write_text("run = = 3")
    refused(lambda: run_config.changes(settings, saved, ()), "settings.toml is not valid TOML")


def test_missing_values_and_files_are_named(tmp_path):
    refused(lambda: run_config.load(head.HeadStage, None), "got no run, expected a value")
    refused(lambda: run_config.load(compose.PairConfig, None, ["verifer=tiny"]), "verifer; did you mean verifier")
    refused(lambda: run_config.load(head.HeadStage, tmp_path / "no.toml"), "no.toml: No such file", "or settings as name=")


@pytest.mark.parametrize(("words", "message"), [
    (["a.toml", "b.toml"], "got 2 files"),
    (["no.toml"], "no.toml: No such file"),
    (["--verifier", "tiny"], "got option --verifier; settings are given as verifier=..."),
    (["--verifer=tiny"], "settings are given as verifier=..."),
    (["verifer=tiny"], "unknown setting verifer; did you mean verifier"),
])  # fmt: skip
def test_command_lines_end_with_one_line(capsys, monkeypatch, words, message):
    monkeypatch.setattr("sys.argv", ["train/head.py"])
    line = mistake(capsys, partial(run_config.run_command, head.main, head.HeadStage, "doc"), words, message)
    assert line.startswith("train.head: error: ") and line.endswith(" (see python -m train.head --help)\n")


def test_help_of_a_command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train/head.py"])
    run_config.run_command(head.main, head.HeadStage, "doc\n\nShape suffixes: b batch.\n", ["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m train.head [FILE.toml] [name=value ...]\n\ndoc\n\nsettings:\n")
    assert "(one of adamw, muon; default: adamw)" in shown
    assert shown.index("drafter: ") < shown.index("sources[].path: "), "plain settings before tables"
