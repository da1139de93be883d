"""Runs and results behind gs:// URLs, without a network: every file ends up there, and none in a folder named gs:."""

import json
import statistics
from dataclasses import replace
from unittest.mock import Mock

import fsspec
import jax
import numpy as np
import pytest
import toy_training
import yaml
from answers import random_weights
from buckets import reopened
from etils import epath
from refusals import refused, snapshot

import treeflash_jax as tf
from train import export, head
from train.data import documents, packing
from train.eagle3 import Eagle3Stage
from train.runtime import loop, picture, run_config, watch
from train.runtime.checkpoint import claim
from train.stages import drafting
from train.stages.evaluation import held_out_prompts
from train.stages.registry import read_stage
from train.stages.rollout import RolloutConfig
from treeflash_jax.core import files
from treeflash_jax.drafters.block.block_drafter import fresh_layers
from treeflash_jax.drafters.eagle3_drafter import Eagle3Drafter
from treeflash_jax.formats import draft_vocabulary, model_files
from treeflash_jax.formats.dialects import block_folder


def fetched(folder, target):
    """Copies a folder of the bucket to a new one on this machine."""
    target.mkdir()
    for path in epath.Path(folder).iterdir():
        path.copy(target / path.name)
    return target


@pytest.fixture
def untrained(monkeypatch):
    """Runs end before their first step: a checkpoint holds the head that they began with."""

    def fit(stage, *, params, settings, **_):
        claim(files.absolute(settings.run), settings)
        return params

    monkeypatch.setattr(loop, "fit", fit)
    monkeypatch.setattr(export, "read_params", lambda *_: (2, {"head": toy_training.fresh_head()}))
    monkeypatch.setattr(drafting, "step_flops", lambda *_: 1.0)


@pytest.fixture
def unmeasured(untrained, monkeypatch):
    """Exports do not measure tau either."""
    monkeypatch.setattr(export, "measure_tau", lambda *_: (None, ""))


def test_settings_logs_models_and_exports_lie_there(bucket, toy, tmp_path, unmeasured, capsys):
    settings = toy_training.settings(toy, "run=gs://bucket/run")
    folder = files.absolute(settings.run)
    claim(folder, settings)
    other = toy_training.settings(toy, "run=gs://bucket/run", "loop.batch=16")
    refused(lambda: claim(folder, other), "was begun with loop.batch = 8, got 16")
    head.main(settings)
    printed = capsys.readouterr().out
    assert "process 1 of 1: 8 of 8 devices (cpu), mesh data=1 model=1, run=gs://bucket/run\n" in printed
    assert "gs://bucket/run/model: " in printed
    with watch.Watch(folder, steps=4, resumed_at=0) as log:
        for step, tau in ((2, 3.5), (4, 4.5)):
            log.write(step, {"held_out/tau_64": tau})
    trained = model_files.load_drafter(fetched("gs://bucket/run/model", tmp_path / "model"))[1]
    export.main(export.ExportConfig(run=settings.run, out="gs://bucket/out"))
    exported = fetched("gs://bucket/out", tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, model_files.load_drafter(exported)[1], trained)
    card = (exported / "README.md").read_text()
    assert "step 2" in card and "| tau_64 | 3.500 |" in card, "what was measured up to that step"
    assert f"]({picture.NAME})" in card, "a picture of the log, beside the card and beside the log"
    log = [{"step": 2, "held_out/tau_64": 3.5}]
    assert (exported / picture.NAME).read_bytes() == picture.draw(log)
    assert bucket["/bucket/run/training.png"].getvalue() == picture.draw([])
    assert {name.split("/")[2] for name in bucket} == {"run", "out"}


@pytest.fixture
def trained(toy, tmp_path, untrained):
    """The settings of such a run."""
    settings = toy_training.settings(toy, f"run={tmp_path}/run")
    claim(files.absolute(settings.run), settings)
    return settings


def test_exports_replace_exports_alone(trained, unmeasured, tmp_path):
    exported = lambda out, **more: export.main(export.ExportConfig(run=trained.run, out=str(out), **more))  # noqa: E731
    (tmp_path / "project").mkdir()
    for name in ("README.md", "config.json", "model.safetensors"):
        (tmp_path / "project" / name).write_text("mine")
    before = snapshot(tmp_path / "project")
    refused(lambda: exported(tmp_path / "project"), "exists; give a new folder")
    refused(lambda: exported(tmp_path / "project", overwrite=True), "did not write")
    assert snapshot(tmp_path / "project") == before
    (tmp_path / "out" / ".out.part-0123456789abcdef").mkdir(parents=True)  # of an export that was killed
    exported(tmp_path / "out")
    written = snapshot(tmp_path / "out")
    (tmp_path / "out" / "notes").write_text("mine")
    exported(tmp_path / "out", overwrite=True, drafter_temperature=0.5)
    assert snapshot(tmp_path / "out").keys() == {*written, "notes"}
    assert model_files.read_drafter_config(tmp_path / "out").drafter_temperature == 0.5


def test_a_card_states_what_readers_of_the_folder_get(toy, unmeasured, tmp_path, monkeypatch):
    toml = toy_training.write_stage(toy.parent, 'stage = "drafter"', without=("drafter",))
    settings = read_stage(toml, ["num_layers=1", "mask_token_id=3", f"run={tmp_path}/run"])
    claim(files.absolute(settings.run), settings)
    weights = random_weights(settings.drafter_config(toy_training.MODEL, None).specs()["backbone"])
    monkeypatch.setattr(export, "read_params", lambda *_: (2, {"backbone": weights}))
    for temperature in (0.5, 1.0):
        out = tmp_path / str(temperature)
        export.main(export.ExportConfig(run=settings.run, out=str(out), dialect="dflash", drafter_temperature=0.5))
        assert model_files.read_drafter_config(out).drafter_temperature == temperature
        assert f"| drafter temperature | {temperature} |" in (out / "README.md").read_text()
        monkeypatch.setattr(block_folder, "write_our_fields", lambda *_, **__: {})  # as a dialect without our fields


def test_the_base_model_of_a_card_is_a_hub_id(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    settings = export.ExportConfig(run="runs/head", out=str(toy.parent / "drafter"), licence="no: 1")
    qwen = "Qwen/Qwen3-4B"
    base_models = {qwen: qwen, "smollm2": export.HUB_IDS["smollm2"], str(toy): None, "models/mine": None, "tiny": None}
    for verifier, base_model in base_models.items():
        trained = toy_training.settings(toy, f"verifier={verifier}")
        card = export.card(settings, trained, toy_training.WITH_HEAD, "dflash", 2, [])
        header = {"license": "no: 1", "library_name": "treeflash-jax", "tags": ["speculative-decoding", "dflash"]}
        expected = header if base_model is None else header | {"base_model": base_model}
        assert yaml.safe_load(card.split("---\n")[1]) == expected, verifier
        shown = verifier.rpartition("/")[2] if base_model is None else verifier
        usage = card.partition("## Held out")[0]
        assert usage.count(shown) >= 3 and str(toy.parent) not in usage and "--drafter drafter" in usage


def test_exports_store_what_was_found_after_training(toy, trained, tmp_path, monkeypatch, capsys):
    settings = trained
    listed = files.absolute(settings.run) / "model" / draft_vocabulary.NAME
    listed.parent.mkdir()
    listed.write_text(json.dumps({"ids": [*range(20)]}))
    chosen, read, parsed = dict(drafter_temperature=0.7, tau=2.5), documents.read_records, []
    monkeypatch.setattr(documents, "read_records", lambda *how: (parsed.append(record) or record for record in read(*how)))
    export.main(export.ExportConfig(run=settings.run, out=str(tmp_path / "out"), dtype="float32", **chosen))
    stored = model_files.read_drafter_config(tmp_path / "out")
    assert {name: getattr(stored, name) for name in chosen} == chosen
    assert stored.verifier == (settings.verifier, "Qwen3ForCausalLM")
    assert (tmp_path / "out" / draft_vocabulary.NAME).read_text() == listed.read_text()
    assert len(parsed) == 80, "of 120 records, eight for each of ten that are held out"
    part = replace(settings, sources=(replace(settings.sources[0], limit=80),))
    model = tf.load(verifier=settings.verifier, drafter=tmp_path / "out")
    prompts = held_out_prompts(packing.load_corpus(part.sources, part.data, None, part.loop.seed), 8)
    results = model.generate(prompts, builder="best-first", nodes=8, ngrams=8, max_new_tokens=64)
    tau = statistics.mean(length for result in results for length in result.accept_lengths)
    assert f"\ntau {tau:.2f} of the folder loaded again: {len(prompts)} held-out prompts" in capsys.readouterr().out
    del chosen["tau"]
    export.main(export.ExportConfig(run=settings.run, out=str(tmp_path / "measured"), dtype="float32", **chosen))
    assert model_files.read_drafter_config(tmp_path / "measured") == replace(stored, tau=round(tau, 2))
    assert f"tau of 8 nodes | {tau:.2f}".rstrip("0") in (tmp_path / "measured" / "README.md").read_text()
    other = export.ExportConfig(run=str(tmp_path), out=str(tmp_path / "new"))
    refused(lambda: export.main(other), "got no settings.toml, expected the run= of a stage")
    without_data = toy_training.settings(toy, "sources.0.hold_out=0")
    no_prompt = None, "tau was not measured: the sources hold out no prompt"
    assert export.measure_tau(without_data, None, tmp_path / "out") == no_prompt
    with monkeypatch.context() as patch:
        patch.setattr(tf, "load", Mock(side_effect=jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: of memory\nand more")))
        shown = export.measure_tau(settings, None, tmp_path / "out")
    assert shown == (None, "tau was not measured: RESOURCE_EXHAUSTED: of memory and more")


@pytest.mark.parametrize("answered, given, expected", [
    (None, [], None), ("seed = 0", [], False), ("thinking = true", [], True),
    ("thinking = true", ["data.thinking=false"], False), (None, ["data.thinking=true"], True),
])  # fmt: skip
def test_drafters_record_how_the_answers_were_made(tmp_path, unmeasured, answered, given, expected):
    toml, beside = toy_training.write(tmp_path), tmp_path / "responses.jsonl.settings.toml"
    if answered is not None:
        beside.write_text(answered)
    head.main(toy_training.settings(toml, *given))
    beside.unlink(missing_ok=True)
    export.main(export.ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out")))
    for folder in ("run/model", "out"):
        assert model_files.read_drafter_config(tmp_path / folder).thinking is expected
    *_, tokenizer = drafting.read_verifier(toy_training.settings(toml, "verifier=tiny", *given))
    assert tokenizer.template == {"enable_thinking": bool(given) and bool(expected)}


@pytest.mark.parametrize("step", ["last", "best", "2"])
def test_a_run_without_checkpoints_has_nothing_to_export(step):
    config = loop.LoopConfig(steps=9, batch=2, save_every=7)
    refused(lambda: export.choose_step({2: {}}, "²", config), "got step '²', expected last, best or one of [2]")
    refused(lambda: export.choose_step({}, step, config), "loop.save_every = 7 steps; continue it")


def test_what_failed_is_not_sent(bucket):
    with pytest.raises(FileNotFoundError), files.filled("gs://bucket/x") as folder:
        (folder / "half").write_text("1")
        (folder / "other").read_text()
    assert not bucket
    with files.filled("gs://bucket/x") as folder:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "c").write_text("2")
    assert {name: file.getvalue() for name, file in bucket.items()} == {"/bucket/x/a/b/c": b"2"}


def test_urls_that_cannot_be_opened_are_one_line(monkeypatch):
    missing = ImportError("Please install gcsfs to access Google Storage\nand more")
    reopened()
    monkeypatch.setattr(fsspec, "filesystem", Mock(side_effect=missing))
    message = refused(lambda: files.absolute("gs://b/run"))
    assert message == "gs://b/run: gs:// cannot be opened here (Please install gcsfs to access Google Storage)"
    refused(lambda: files.absolute("ftp://b"), "ftp://", "; expected a local path or a URL like gs://")


def test_the_vocabulary_of_a_drafter_is_that_of_its_run(bucket):
    """Even if the answers have changed since, and the run has not finished."""
    config = Eagle3Drafter(
        layers=fresh_layers(toy_training.MODEL, 1), target_hidden_size=16, draft_vocab_size=9, taps=(0, 1, 2)
    )
    loops = dict(optimizer=run_config.OptimizerConfig(learning_rate=1e-3), loop=run_config.LoopConfig(batch=1))

    def draft_vocabulary(first):
        stage = Eagle3Stage(run="gs://bucket/run", sources=(), objective=RolloutConfig(), **loops)
        stored = drafting.read_stored(stage, config, (np.arange(64) >= first).astype(int))
        return (np.arange(9) + stored["offsets"]).tolist()

    assert draft_vocabulary(20) == draft_vocabulary(30) == [*range(20, 29)]
