"""A drafter in one command: refusals, stage files, a kill between stages, and the line that uses the result."""

import functools
import json
import shlex
import shutil
from dataclasses import fields, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import toy_training
from answers import fresh_weights
from refusals import refused, snapshot
from toy_training import change_weights, read_lines, write_lines

import treeflash_jax as tf
from train import measure, pair
from train.data import packing
from train.pairing import compose, stages
from train.runtime import run_config, watch
from train.stages import choices, registry
from treeflash_jax.cli import commands
from treeflash_jax.decoding.state import Weights
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats import model_files
from treeflash_jax.models import decoder

THINGS = ("pens", "cows", "apples", "books", "coins")
SMALL = [
    "questions=0", "steps=6", "anyway=true", "mesh.data=1", "block_size=4", "num_layers=1",
    "respond.max_new_tokens=12", "respond.temperatures=[0]", "drafter.evaluate.prompts=0",
    "drafter.loop.save_every=2", "measure.prompts=2", "measure.new_tokens=6", "measure.nodes=4",
    "measure.temperatures=[0]",
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    lines = [{"turns": [f"A box holds {3 + i} {THINGS[i % 5]}. How many do 3 boxes hold?"]} for i in range(12)]
    return write_lines(tmp_path_factory.mktemp("prompts") / "asked.jsonl", lines)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> str:
    """The folder of a random verifier with recurrent layers and the tokenizer of the shipped one."""
    folder, shipped = tmp_path_factory.mktemp("hybrid"), locate("tiny")
    config = model_files.read_verifier_config(shipped)
    config = replace(toy_training.HYBRID, vocab_size=config.vocab_size, max_positions=config.max_positions, num_layers=4)
    config = replace(config, layer_types=("linear_attention", "full_attention") * 2)
    model_files.save_verifier(folder, config, fresh_weights(decoder.specs(config)))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(shipped / name, folder)
    return str(folder)


def settings_of(prompts, out, *more):
    return run_config.load(pair.PairConfig, None, ["verifier=tiny", f"prompts={prompts}", f"out={out}", *SMALL, *more])


@pytest.mark.slow
def test_one_command_makes_a_drafter_and_goes_on_where_it_was_killed(prompts, hybrid, tmp_path, monkeypatch, capsys):
    """Killed before the export; the same command then ends, and the last line it prints runs."""
    settings, ran = settings_of(prompts, tmp_path / "pair", "num_prompts=10", f"verifier={hybrid}"), []
    load, load_once = tf.load, functools.cache(tf.load)  # keeps the compiled programs
    monkeypatch.setattr(tf, "load", lambda **named: load_once(verifier=named["verifier"], drafter=named["drafter"]))

    def watched(stage):
        return replace(stage, main=lambda made, **how: (ran.append(stage.name), stage.main(made, **how)))

    def stopped(stage):
        return replace(stage, main=Mock(side_effect=KeyboardInterrupt)) if stage.name == "export" else stage

    monkeypatch.setattr(pair, "PAIR_STAGES", tuple(map(watched, stages.PAIR_STAGES)))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pair, "PAIR_STAGES", tuple(map(stopped, pair.PAIR_STAGES)))
        pair.main(settings)
    assert ran == ["respond", "drafter"]
    shown = capsys.readouterr().out
    for line in ("mask_token_id = 3", "loop.steps = 6", "sources.0.hold_out = 4", "the whole command will take about "):
        assert line in shown
    pair.main(settings)
    assert ran == ["respond", "drafter", "export", "measure"], "what was finished was not run again"
    *_, line = [line.strip() for line in capsys.readouterr().out.splitlines() if "treeflash generate" in line]
    words, model = shlex.split(line), str(tmp_path / "pair" / "model")
    assert words == ["treeflash", "generate", "--verifier", hybrid, "--drafter", model, "--nodes", "4", "Hello"]
    assert commands.main([*words[1:], "--max-new-tokens", "3"]) == 0
    trained = registry.read_stage(tmp_path / "pair" / "drafter.toml")
    assert trained.loop.steps == 6 and trained.mesh.data == 1
    measured = json.loads((tmp_path / "pair" / "measured.json").read_text())
    assert measured["prompts"] == 2 and measured["settings"]["nodes"] == 4
    drafted, alone, _ = sorted(measured["systems"], key=lambda system: system["system"])
    assert alone["system"] == measure.NGRAMS and alone["drafter"] == "ngram"
    assert drafted["over_ngrams"]["answers"] == alone["speedup"]["answers"] == 2
    assert drafted["identical"] == 2 and drafted["tau"] >= 1 and drafted["speedup"]["value"] > 0
    card = (tmp_path / "pair" / "model" / "README.md").read_text()
    [line] = [line.strip() for line in card.splitlines() if "tf.load(" in line]
    (tmp_path / "pair" / hybrid.rpartition("/")[2]).symlink_to(hybrid)
    scope = {"tf": SimpleNamespace(load=load)}
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "pair")  # the card has only the last part of local paths
        exec(line, scope)
    assert scope["model"].drafter.block_size == 4 and scope["model"].drafter.head == "mlp"
    ran.clear()
    pair.main(replace(settings, measure=settings.measure | {"new_tokens": 5}))
    assert ran == ["measure"] and "begins again, as measure.new_tokens was 6" in capsys.readouterr().out
    ran.clear()
    pair.main(replace(settings, num_prompts=12, steps=8))
    assert ran == ["respond", "drafter", "export", "measure"]
    steps = [line["step"] for line in watch.read_log(tmp_path / "pair" / "drafter")]
    assert 6 in steps and steps[-1] == 8, "more steps continue"
    before = tmp_path / "pair" / "before"
    assert not (before / "drafter").exists() and (before / "model").is_dir()


@pytest.mark.parametrize(("word", "message"), [
    ("drafter.loop.stesp=3", "unknown setting loop.stesp; did you mean loop.steps"),
    ("target_layer_ids=[1, 6]", "reads verifier layers [6]"),
    ("mask_token_id=5000", "mask id 5000 lies outside"),
    ("anyway=false", "got a plan of 6 optimiser steps, expected at least 50"),
    ("passes=2", "got steps 6 and passes 2, expected one of them"),
    ("num_prompts=3", "got 3 prompts, expected at least 8"),
    ("out=gs://bucket/pair", "got gs://bucket/pair, expected a local path"),
])  # fmt: skip
def test_mistakes_show_up_before_anything_runs(prompts, tmp_path, word, message):
    refused(lambda: pair.main(settings_of(prompts, tmp_path / "pair", word)), message)
    assert not (tmp_path / "pair").exists()


def test_answers_are_made_by_all_devices_and_without_prompts_that_may_be_skipped(prompts, tmp_path):
    """Answers have no fsdp axis; and prompts that cannot be read or asked are skipped before they are made, too."""
    unasked = {"conversations": [{"from": "gpt", "value": "Welcome."}, {"from": "human", "value": "Hello."}]}
    lines = write_lines(tmp_path / "some.jsonl", [*read_lines(prompts), unasked, {"no": "turns"}])
    composer = compose.Composer(settings_of(lines, tmp_path, "mesh.data=2", "mesh.fsdp=4", "respond.malformed=skip"))
    mesh = composer.respond().mesh
    assert (mesh.data, mesh.fsdp, mesh.model) == (8, 1, 1)
    refused(lambda: compose.Composer(settings_of(lines, tmp_path)).respond(), "some.jsonl")
    lines = write_lines(tmp_path / "other.jsonl", [*read_lines(prompts), unasked])
    refused(lambda: compose.Composer(settings_of(lines, tmp_path)).respond(), "other.jsonl", "that the assistant opens")
    lines = write_lines(tmp_path / "third.jsonl", [unasked] * 12)
    unusable = settings_of(lines, tmp_path, "respond.malformed=skip")
    refused(lambda: compose.Composer(unusable).respond(), "third.jsonl: got no prompt that can be asked")


@pytest.mark.parametrize(
    ("numbers", "hold_out"),
    [(range(8), 4), ([0, 1, 4, 5, 8, 9, 13, 16], 3), ([3, 7, 11, 15], 3), ([1], 4)],
)
def test_some_prompts_are_held_out_and_others_are_not(numbers, hold_out):
    """Eight of many prompts, drawn at random, may hold none of every fourth."""
    assert compose._hold_out(numbers) == hold_out


@pytest.mark.parametrize(("words", "sequences", "steps"), [
    ((), 50, 200),
    ((), 400, 1600),
    (("passes=4",), 50, 50),
    (("steps=70",), 50, 70),
    (("passes=3.5",), 50, None),
    (("passes=3.5", "anyway=true"), 50, 44),
])  # fmt: skip
def test_steps_follow_from_passes_and_too_few_are_refused(prompts, tmp_path, words, sequences, steps):
    settings = run_config.load(pair.PairConfig, None, ["verifier=tiny", f"prompts={prompts}", f"out={tmp_path}", *words])
    composer = compose.Composer(replace(settings, mesh=run_config.MeshConfig(data=1)))
    documents = [packing.Document(np.array([3, 4]), np.ones(2))] * sequences
    composer.answers.train["x"] = packing.pack(documents, 2)
    composer.stages["respond"] = composer.respond()
    if steps is None:
        refused(composer.drafter, "got a plan of 44 optimiser steps, expected at least 50; give more prompts, passes= or")
        return
    assert composer.drafter().loop.steps == steps


@pytest.fixture
def rehearsed(tmp_path, monkeypatch):
    """Stages that write what their settings say; returns a function that runs the command and returns which of them ran."""
    ran, seen = [], {}

    def rehearse(stage):
        def main(made, **_):
            ran.append(stage.name)
            seen[stage.name] = made
            out = tmp_path / "pair"
            target = out / stage.writes.rstrip("*")
            content = f"{run_config.dump(made)} from {stages.digest_files(out / (stage.reads or 'respond.toml'))}"
            if "." not in target.name:
                target /= "model/config.json"
                target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps({"content": content}))

        return replace(stage, main=main)

    def read_answers(composer):
        count = 8 * len(composer.prompts)
        composer.answers.train["x"] = packing.pack([packing.Document(np.array([3, 4]), np.ones(2))] * count, 2)

    monkeypatch.setattr(compose.Composer, "read_answers", read_answers)
    monkeypatch.setattr(pair, "PAIR_STAGES", tuple(map(rehearse, stages.PAIR_STAGES)))
    monkeypatch.setattr(pair, "conclude", lambda *_: None)

    def run(settings):
        ran.clear()
        pair.main(settings)
        return list(ran)

    run.seen = seen
    return run


def composed(settings, name):
    composer = compose.Composer(settings)
    composer.check_settings()
    return composer.stages[name]


EVERY = ["respond", "drafter", "export", "measure"]


@pytest.mark.parametrize(("word", "again"), [
    ("mesh.data=2", []),
    ("anyway=false", None),
    ("measure.prompts=3", ["measure"]),
    ("export.licence=mit", ["export", "measure"]),
    ("num_layers=2", ["drafter", "export", "measure"]),
    ("steps=7", ["drafter", "export", "measure"]),
    ("respond.max_new_tokens=13", EVERY),
    ("num_prompts=11", EVERY),
])  # fmt: skip
def test_a_rerun_redoes_what_depends_on_the_change(prompts, tmp_path, rehearsed, word, again):
    """The stages that ran write files by which the next ones know that something changed."""
    make = partial(settings_of, prompts, tmp_path / "pair", "num_prompts=10")
    assert rehearsed(make()) == EVERY and rehearsed(make()) == []
    if again is None:
        refused(lambda: rehearsed(make(word)), "got a plan of 6 optimiser steps")
        return
    assert rehearsed(make(word)) == again and rehearsed(make(word)) == []
    before = {path.name for path in (tmp_path / "pair" / "before").glob("*")}
    if word in ("steps=7", "num_prompts=11"):
        assert "model" in before and "responses.jsonl" not in before, "what grows continues"
        assert ("drafter" in before) == (word == "num_prompts=11"), "other answers, and no more steps"
    elif again:
        [first] = [stage.writes.rstrip("*") for stage in stages.PAIR_STAGES if stage.name == again[0]]
        assert first in before


def test_results_that_are_set_aside_stay(prompts, tmp_path, rehearsed, capsys):
    """A rerun with a wrong setting and another with the right one replace no results of the first run."""
    make = partial(settings_of, prompts, tmp_path / "pair")
    made = []
    for size in (4, 5, 4):
        rehearsed(make(f"block_size={size}"))
        made.append(snapshot(tmp_path / "pair" / "drafter"))
    before = tmp_path / "pair" / "before"
    assert [snapshot(before / "drafter"), snapshot(before / "2" / "drafter")] == made[:2] and made[0] != made[1]
    assert f"earlier results are kept in {before}/2\n" in capsys.readouterr().out


def test_the_verifier_asks_what_a_thousand_prompts_lack(prompts, tmp_path, rehearsed, monkeypatch, caplog):
    """More prompts or questions extend the answers, fewer begin again; no question is written without a chat template."""
    make = lambda *more: replace(settings_of(prompts, tmp_path / "pair", *more), questions=None)  # noqa: E731
    assert rehearsed(make("num_prompts=10")) == ["ask", *EVERY] and rehearsed(make("num_prompts=10")) == []
    assert not caplog.records
    first = rehearsed.seen["respond"]
    asked, usual = rehearsed.seen["ask"], composed(settings_of(prompts, tmp_path / "without"), "respond")
    assert "got 12 prompts and questions: a drafter that pays needs hundreds" in caplog.text
    assert asked.count == 990 and first.sources[1].path == asked.out
    assert usual.max_prompt_tokens < asked.max_tokens < first.max_prompt_tokens, "questions are not too long"
    assert rehearsed(make("num_prompts=12")) == EVERY, "as many questions as before"
    assert rehearsed(settings_of(prompts, tmp_path / "pair", "num_prompts=12", "questions=1000")) == ["ask", *EVERY]
    before = tmp_path / "pair" / "before"
    assert rehearsed.seen["ask"].count == 1000 and not {*before.glob("*.jsonl")}
    assert rehearsed.seen["respond"].sources == (replace(first.sources[0], limit=12), first.sources[1])
    (tmp_path / "pair" / "recorded").mkdir()
    assert rehearsed(settings_of(prompts, tmp_path / "pair", "num_prompts=12")) == EVERY
    assert not (tmp_path / "pair" / "recorded").exists()
    assert (before / "responses.jsonl").exists() and len(rehearsed.seen["respond"].sources) == 1
    shutil.rmtree(tmp_path / "pair")
    monkeypatch.setattr(compose.Composer, "tokenizer", None)
    monkeypatch.setattr(compose, "encode_question", lambda *_: [1, 2])
    assert rehearsed(make()) == EVERY


def test_questions_that_come_later_are_answered_too(prompts, tmp_path, rehearsed):
    """A finished OUT without questions stays so until some are demanded."""
    make = partial(settings_of, prompts, tmp_path / "pair")
    assert rehearsed(make()) == EVERY and rehearsed(replace(make(), questions=None)) == []
    assert rehearsed(make("questions=5")) == ["ask", *EVERY] and len(rehearsed.seen["respond"].sources) == 2
    assert rehearsed(replace(make("ask.count=6"), questions=None)) == ["ask", *EVERY]
    assert rehearsed.seen["ask"].count == 6


def test_other_prompts_are_answered_anew(tmp_path, rehearsed):
    for number in range(2):
        lines = [{"prompt": f"What is {number} and {other}?"} for other in range(9)]
        assert rehearsed(settings_of(write_lines(tmp_path / "asked.jsonl", lines), tmp_path / "pair"))[:1] == ["respond"]


def test_what_another_command_just_finished_is_not_run_again(prompts, tmp_path, rehearsed, monkeypatch):
    """It ends while this command checks its settings."""
    settings, record = settings_of(prompts, tmp_path / "pair"), tmp_path / "pair" / "stages.json"
    rehearsed(settings)
    finished, check = record.read_text(), compose.Composer.check_settings

    def finish(composer):
        check(composer)
        record.write_text(finished)

    monkeypatch.setattr(compose.Composer, "check_settings", finish)
    record.write_text(finished.replace("true", "false"))
    assert rehearsed(settings) == [] and record.read_text() == finished


def test_a_stage_that_goes_on_keeps_what_was_chosen_by_rule(prompts, tmp_path, rehearsed, monkeypatch):
    """Other answers would lead to another mask token; only size and mesh change."""
    make = partial(settings_of, prompts, tmp_path / "pair")
    rehearsed(make("num_prompts=8"))
    begun, asked = rehearsed.seen["drafter"], rehearsed.seen["respond"]
    monkeypatch.setattr(choices, "mask_token", lambda *_: 9)
    rehearsed(make("num_prompts=12", "steps=10", "mesh.data=2"))
    loop = replace(begun.loop, steps=10, evaluate_every=3)
    assert rehearsed.seen["drafter"] == replace(begun, loop=loop, mesh=replace(begun.mesh, data=2))
    assert rehearsed.seen["respond"].sources == (replace(asked.sources[0], limit=12),), "the same prompts are held out"


def test_another_verifier_is_refused(prompts, tmp_path, rehearsed, capsys):
    """Although all stages have finished; with the verifier as it was, they have. An OUT of an earlier version notes it."""
    shutil.copytree(locate("tiny"), tmp_path / "verifier")
    settings, out = settings_of(prompts, tmp_path / "pair", f"verifier={tmp_path}/verifier"), tmp_path / "pair"
    assert rehearsed(settings) == EVERY and rehearsed(settings) == []
    assert "responses.jsonl: begun by an earlier version, so the verifier" in capsys.readouterr().out
    change_weights(tmp_path / "verifier")
    before = snapshot(out)
    refused(
        lambda: rehearsed(settings), f"{tmp_path}/verifier: got a verifier that changed after out={out}/responses.jsonl"
    )
    assert snapshot(out) == before
    change_weights(tmp_path / "verifier")  # back to what it was
    assert rehearsed(settings) == []


def test_every_setting_belongs_to_a_stage():
    given = {name for stage in stages.PAIR_STAGES for name in (*stages.ALWAYS_GIVEN, *stage.given)}
    assert {field.name for field in fields(compose.PairConfig)} - given == {
        "out", "num_prompts", "questions", "steps", "passes", "anyway", "mesh",
    }  # fmt: skip


def test_a_folder_of_an_earlier_version_is_refused(prompts, tmp_path):
    settings = settings_of(prompts, tmp_path)
    run_config.save(settings, tmp_path / "pair.toml")
    refused(lambda: pair.main(settings), "was begun by an earlier version", "give another out=")


def test_n_grams_alone_need_no_memory_for_the_drafter(tiny):
    tiny.check_memory(batch=1, capacity=64, drafts=True, can_cut=False)  # counts the weights of the pair, once
    systems = measure.make_systems(tiny, measure.MeasureConfig(verifier="tiny", drafter="tiny", respond="x", out="x"))
    [alone] = (system.model for system in systems if system.name == measure.NGRAMS)
    assert alone._weight_bytes == (tiny._weight_bytes[0], 0) and alone.names == ("tiny", "ngram")
    assert (alone.stop_ids, alone.tokenizer, alone.recommended) == (tiny.stop_ids, tiny.tokenizer, tiny.recommended)


@pytest.mark.parametrize(("seconds", "count"), [(0.0, 16), (1.0, 2), (20.0, 3), (1000.0, 16)])
def test_a_measurement_keeps_to_its_time(tmp_path, monkeypatch, seconds, count):
    """An answer takes a second: four systems answer a prompt at two temperatures in 8 s. The faster baseline counts."""
    now, loaded = [0.0], []

    def answer(systems, prompts, *, temperatures, **_):
        for _, temperature, system in product(prompts, temperatures, systems):
            now[0] += 1.0
            is_slow = system.config.attention is not None
            yield {"system": system.name, "temperature": temperature, "tokens": 9, "seconds": 2.0 if is_slow else 1.0}

    monkeypatch.setattr(measure.harness, "measure", answer)
    monkeypatch.setattr(measure.report, "summarise", lambda records: {"settings": {}, "systems": [], "records": records})
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    answering = SimpleNamespace(thinking=True, template={"effort": "high"})
    plan, weights = SimpleNamespace(num_nodes=8, attention="streamed"), Weights(None, None)
    unused = dict.fromkeys(("verifier", "tokenizer", "mesh", "recommended"))
    model = SimpleNamespace(plan=lambda _: plan, weights=weights, names=("x", "x"), stop_ids=(), **unused)
    monkeypatch.setattr(measure.tf, "load", lambda **how: loaded.append(how) or model)
    monkeypatch.setattr(measure.run_config, "load", lambda *_: answering)
    asked = [SimpleNamespace(ids=[i]) for i in range(20)]
    monkeypatch.setattr(measure.respond, "collect_prompts", lambda *_, **named: asked)
    named = {"verifier": "x", "drafter": "x", "respond": "x", "out": f"{tmp_path}/out.json"}
    stage = measure.MeasureConfig(**named, seconds=seconds, devices=2)
    measured = measure.measure(stage)
    assert measured["prompts"] == count and len(measured["records"]) == 6 * count and measured["settings"]["nodes"] == 8
    names = {record["system"] for record in measured["records"]}
    assert names == {"drafted, 8 nodes", "n-grams alone", "one token, streamed attention"}
    assert vars(answering).items() <= loaded[0].items(), "prompts as those of the answers"
    assert dict(loaded[0]["mesh"].shape) == {"data": 1, "model": 2}


@pytest.mark.parametrize(("speedup", "low", "over", "pays"), [
    (1.2, 1.1, 1.1, True), (1.2, 0.9, 1.1, False), (0.8, 0.7, 1.1, False), (1.2, 1.1, 0.9, False),
])  # fmt: skip
def test_the_end_says_whether_the_drafter_pays_and_how_to_draft(prompts, tmp_path, capsys, speedup, low, over, pays):
    """It pays if it is faster than one token at a time, and than n-grams alone, with 95 % confidence."""
    settings = settings_of(prompts, tmp_path, "respond.thinking=true", "respond.template.effort=high")
    ratio = {"value": speedup, "low": low, "high": 2.0}
    shared = {"temperature": 0.7, "tau": 2.0, "speedup": ratio, "over_ngrams": ratio | {"value": 1.1, "low": over}}
    builders = {"drafted, 8 nodes": "best-first", measure.NGRAMS: "best-first", "one token": "none"}
    entries = [{"system": name, "builder": builder, **shared} for name, builder in builders.items()]
    responded = compose.Composer(settings).respond()
    pair.conclude(settings, responded, {"settings": {"nodes": 8}, "systems": entries})
    shown = capsys.readouterr().out
    speeds = f"{speedup:.2f} [{low:.2f}, 2.00] x one-token speed, 1.10 [{over:.2f}, 2.00] x the speed of n-grams alone"
    assert shown.count("T = 0.7: ") == 1 and f"T = 0.7: {speeds}" in shown
    assert ("the drafter pays" in shown) == pays and ("the drafter adds nothing yet: tau is 2.00" in shown) != pays
    words = shlex.split(shown)
    assert words[words.index("--nodes") + 1] == "8" and "--thinking" in words and words[-1] == "Hello"
    assert json.loads(words[words.index("--template") + 1]) == {"effort": "high"}
