"""What a run reads and never trains is what it was when the run began, else continuing and exporting it are refused."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import toy_training
from answers import slow_unless
from conftest import DATA
from refusals import refused, snapshot
from toy_training import change_weights, write_lines

from train import export, from_scratch
from train.runtime import checkpoint, frozen_inputs, run_config, training_state, watch
from train.stages import drafting, registry
from treeflash_jax.engine.settings.pairs import locate

# Lines of settings that each stage adds to the toy head's, and names of the head's settings that it lacks.
ROLLOUT = "objective = { steps = 2, anchors = 16, chunk = 8 }"
STAGES = {
    "head": ((), ()),
    "drafter": (("num_layers = 1", "block_size = 4", "mask_token_id = 3", "target_layer_ids = [2]"), ("drafter",)),
    "eagle3": ((ROLLOUT, "draft_vocab_size = 20"), ("drafter", "objective")),
    "mtp": ((ROLLOUT,), ("drafter", "objective")),
    "language_model": (("num_layers = 2", "chunk = 16"), ("drafter", "objective")),
}


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    """Steps only count, so that none is compiled for long; nothing is measured or drawn."""
    monkeypatch.setattr(
        training_state, "make_update", lambda *_, **__: lambda state, *_: replace(state, step=state.step + 1)
    )
    monkeypatch.setattr(export, "measure_tau", lambda *_: (None, ""))
    monkeypatch.setattr(drafting, "step_flops", lambda *_: 1.0)
    monkeypatch.setattr(drafting.picture, "draw", lambda _: b"")


def make_stage(toy: Path, folder: Path, name: str, *words: str) -> drafting.DraftingStage:
    """Returns the settings of one step of a stage on a copy of the toy pair."""
    verifier = DATA / "hybrid" / "qwen3_5" if name == "mtp" else toy.parent / "verifier"
    shutil.copytree(verifier, folder / "verifier")
    shutil.copytree(toy.parent / "drafter", folder / "drafter")
    shutil.copy(toy, folder)
    lines, without = STAGES[name]
    toml = toy_training.write_stage(folder, f'stage = "{name}"', *lines, without=without)
    words = (f"run={folder}/run", f"verifier={folder}/verifier", "sources.0.hold_out=0", "loop.steps=1", *words)
    if name == "head":
        words += (f"drafter={folder}/drafter",)
    if name == "drafter":
        words += ("objective.loss=cross-entropy",)
    return registry.read_stage(toml, words)


def extended(stage: drafting.DraftingStage) -> drafting.DraftingStage:
    """Returns the settings of one step more; such a run may have other documents."""
    return replace(stage, loop=replace(stage.loop, steps=stage.loop.steps + 1))


def exported(folder: Path) -> None:
    export.main(export.ExportConfig(run=f"{folder}/run", out=f"{folder}/out", overwrite=True))


def change_config(folder: Path) -> None:
    """Changes a number of config.json that no shape depends on."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-4}))


def change_vocabulary(folder: Path) -> None:
    """Replaces the last token that can be drafted by the one before it."""
    path = folder / "derived.json"
    offsets = json.loads(path.read_text())["offsets"]
    path.write_text(json.dumps({"offsets": [*offsets[:-1], offsets[-1] - 1]}))


def refused_everywhere(stage: drafting.DraftingStage, folder: Path, words: str) -> None:
    """Asserts that the run is neither continued nor exported."""
    before = snapshot(folder)
    began = f"changed after run={folder}/run had begun"
    for call in (partial(drafting.train, stage), partial(drafting.train, extended(stage)), partial(exported, folder)):
        refused(call, words, began, "restore them, or begin again with another run=")
    assert snapshot(folder) == before


@pytest.mark.filterwarnings("ignore:.* is not read")
@pytest.mark.parametrize("name", [slow_unless(name == "head", name) for name in STAGES])
def test_another_verifier_is_refused_and_the_same_one_is_not(toy, tmp_path, name):
    stage = make_stage(toy, tmp_path, name)
    drafting.train(stage)
    before = snapshot(tmp_path / "verifier")
    change_weights(tmp_path / "verifier")
    refused_everywhere(stage, tmp_path, f"{tmp_path}/verifier: got a verifier that")
    for file, content in before.items():
        (tmp_path / "verifier" / file).write_bytes(content)
    drafting.train(extended(stage))
    exported(tmp_path)
    assert [line["step"] for line in watch.read_log(stage.run)] == [1, 2]


@pytest.mark.parametrize(("name", "words", "place", "change", "noun"), [
    ("head", (), "verifier", change_config, "verifier"),
    ("head", (), "drafter", change_weights, "drafter"),
    ("head", ("train_backbone=true",), "drafter", change_config, "drafter"),
    ("eagle3", (), "run", change_vocabulary, "draft vocabulary"),
])  # fmt: skip
def test_other_frozen_inputs_are_refused(toy, tmp_path, name, words, place, change, noun):
    stage = make_stage(toy, tmp_path, name, *words)
    drafting.train(stage)
    change(tmp_path / place)
    refused_everywhere(stage, tmp_path, f": got a {noun} that")


def test_weights_that_are_all_trained_may_change_where_they_came_from(toy, tmp_path):
    """Checkpoints have them."""
    stage = make_stage(toy, tmp_path, "head", "train_backbone=true")
    drafting.train(stage)
    change_weights(tmp_path / "drafter")
    drafting.train(extended(stage))
    exported(tmp_path)


def test_checkpoints_of_earlier_versions_are_continued(two_notes, capsys):
    """They say once that nothing is compared; those after them are bound to what is there now."""
    opened, state = two_notes
    with opened(None) as saved:
        saved.save(1, state, wait=True)
    with opened("a") as saved:
        saved.restore(state)
        assert capsys.readouterr().out.count("begun by an earlier version, so verifier cannot be compared") == 1
        saved.save(2, state, wait=True)
    with opened("a") as saved:
        saved.restore(state)
        assert "earlier version" not in capsys.readouterr().out
    with opened("b") as saved:
        refused(lambda: saved.restore(state), "x: got a verifier that changed after run=")
        saved.load(1, state)


@pytest.fixture
def two_notes(tmp_path):
    """A function that opens the checkpoints of a run with a verifier of this digest, and a state."""
    import jax.numpy as jnp

    def opened(digest):
        inputs = None if digest is None else {"verifier": {"path": "x", "digest": digest}}
        return closing(checkpoint.Checkpoints(f"{tmp_path}/run", run_config.LoopConfig(batch=1), "", inputs))

    return opened, {"x": jnp.arange(3.0)}


def test_another_tokenizer_is_refused(tmp_path):
    shutil.copytree(locate("tiny"), tmp_path / "tokenizer")
    write_lines(tmp_path / "texts.jsonl", [{"text": "One and two are three. " * 20}] * 4)
    sizes = "hidden_size = 16, intermediate_size = 32, num_attention_heads = 2, num_key_value_heads = 1, head_dim = 8"
    words = [
        f"run={tmp_path}/run", f"tokenizer={tmp_path}/tokenizer", "optimizer.learning_rate=0.01", "mesh.data=1",
        f"sources=[{{path = '{tmp_path}/texts.jsonl', format = 'text', hold_out = 0}}]", "data.sequence_length=16",
        f"model={{model_type = 'qwen3', num_hidden_layers = 1, {sizes}, max_position_embeddings = 64}}",
        "loop={steps = 1, batch = 2}",
    ]  # fmt: skip
    train = lambda *more: from_scratch.main(run_config.load(from_scratch.FromScratchConfig, None, [*words, *more]))  # noqa: E731
    train()
    train("loop.steps=2")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    refused(lambda: train("loop.steps=3"), f"{tmp_path}/tokenizer: got a tokenizer that changed after run=")


def test_outputs_of_another_verifier_are_recorded_anew(toy, tmp_path):
    """Even if a single number differs."""
    stage = make_stage(toy, tmp_path, "head", f"data.record={tmp_path}/outputs")
    drafting.train(stage)
    drafting.train(replace(stage, run=f"{tmp_path}/second"))
    assert len([*(tmp_path / "outputs").iterdir()]) == 1
    change_weights(tmp_path / "verifier")
    drafting.train(replace(stage, run=f"{tmp_path}/third"))
    assert len([*(tmp_path / "outputs").iterdir()]) == 2


@pytest.mark.parametrize("files", [("model.safetensors",), ("a.safetensors", "b.safetensors")])
def test_a_digest_is_that_of_every_byte_that_is_read(tmp_path, monkeypatch, files):
    monkeypatch.setattr(frozen_inputs, "PIECE", 8)
    for name in ("config.json", "tokenizer.json", *files):
        (tmp_path / name).write_bytes(b"0123456789abcdefghij")
    if len(files) > 1:
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict(zip("xy", files, strict=True))})
        )
    whole = frozen_inputs.digest_model(tmp_path)
    (tmp_path / "README.md").write_text("new")
    (tmp_path / "other.safetensors").write_text("new")
    assert frozen_inputs.digest_model(tmp_path) == whole
    digests = {whole, frozen_inputs.digest_model(tmp_path, weights=False), frozen_inputs.digest_model(tmp_path / files[0])}
    changes = [lambda x, at=at: x[:at] + b"!" + x[at + 1 :] for at in (0, 7, 8, 19)]
    changes += [lambda x: x[:-1], lambda x: x[:16], lambda x: x + b"k", lambda x: x[8:16] + x[:8] + x[16:]]
    for name in ("config.json", "tokenizer.json", *files):
        before = (tmp_path / name).read_bytes()
        for change in changes:
            (tmp_path / name).write_bytes(change(before))
            digests.add(frozen_inputs.digest_model(tmp_path))
        (tmp_path / name).write_bytes(before)
    assert len(digests) == 3 + len(changes) * (2 + len(files))
    assert frozen_inputs.digest_model(tmp_path) == whole
