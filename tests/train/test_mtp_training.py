"""Training of a layer of multi-token prediction: its tau rises over the original layer's in the verifier's files."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from answers import fresh_weights
from conftest import DATA
from model_files import assert_same
from refusals import refused
from safetensors.numpy import load_file, save_file

import treeflash_jax as tf
from train import mtp
from train.runtime import run_config
from train.stages import drafting
from treeflash_jax.drafters import MtpDrafter
from treeflash_jax.drafters.mtp_drafter import layer_sizes
from treeflash_jax.formats import model_files
from treeflash_jax.models import decoder
from treeflash_jax.models.config import DeltaSizes, Rope

MODEL = replace(
    toy_training.MODEL, num_layers=2, layer_types=("linear_attention", "full_attention"), model_type="qwen3_5_text",
    gates_attention=True, offset_norms=True, tie_embeddings=False, rope=Rope(fraction=0.25), eos_token_ids=(),
    delta=DeltaSizes(key_heads=2, value_heads=4, key_dim=4, value_dim=4, conv_width=4),
)  # fmt: skip
HYBRIDS = DATA / "hybrid"
LAYER = MtpDrafter(layers=layer_sizes(MODEL))
PROMPTS = [np.random.default_rng(i).integers(4, 64, 4).tolist() for i in range(60)]


@pytest.fixture
def toml(tmp_path):
    """A random verifier whose next token mostly depends on the last one, its random layer, and its own answers."""
    toy_training.write(tmp_path)
    folder = tmp_path / "hybrid"
    weights = fresh_weights(decoder.specs(MODEL), scale=0.1)
    weights |= fresh_weights({"embed": decoder.specs(MODEL)["embed"]}, scale=1.0)
    model_files.save_verifier(folder, MODEL, weights, jnp.float32)
    layer = fresh_weights(LAYER.specs(), 1, scale=0.1)
    model_files.save_drafter(tmp_path / "layer", LAYER, layer, dtype=jnp.float32)
    parts = [load_file(place / "model.safetensors") for place in (folder, tmp_path / "layer")]
    save_file(parts[0] | parts[1], folder / "model.safetensors")
    answers = tf.load(folder, drafter="none", dtype="float32").generate(PROMPTS, max_new_tokens=20, batch_size=8)
    lines = [{"prompt": prompt, "response": list(answer.ids)} for prompt, answer in zip(PROMPTS, answers, strict=True)]
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = "objective = { steps = 3, anchors = 16, chunk = 8 }"
    return toy_training.write_stage(tmp_path, 'stage = "mtp"', line, without=("drafter", "objective", "init_scale"))


@pytest.mark.slow
def test_a_run_raises_tau_and_is_exported_by_the_published_names(toml, tmp_path):
    folder, run = tmp_path / "hybrid", tmp_path / "run"
    mtp.main(run_config.load(mtp.MtpStage, toml, [f"verifier={folder}", "loop.steps=60", "loop.evaluate_every=60"]))
    log = toy_training.read_log(run)
    assert log[-1]["loss"] < log[0]["loss"]
    trained = toy_training.exported(run, folder)
    names = {name for name in load_file(folder / "model.safetensors") if name.startswith("mtp.")}
    assert {*load_file(tmp_path / "out" / "model.safetensors")} == names
    assert trained.drafter.kind == "mtp" and trained.drafter.tau > 1, "measured by the export"

    def tau(model: tf.TreeFlash) -> float:
        settings = {"builder": "walk", "depths": 3, "children": 8, "max_new_tokens": 30, "stop_ids": ()}
        results = model.generate([[5, 6, 7], [9, 20, 33], [50, 11, 4], [61, 62]], **settings)
        return np.mean([length for result in results for length in result.accept_lengths])

    before, after = tau(tf.load(folder, dtype="float32")), tau(trained)
    assert after > before + 0.5, (before, after)


@pytest.fixture
def stage(tmp_path):
    """A file of settings for the toy verifier, which has no such layer."""
    toy_training.write(tmp_path)
    line = "objective = { anchors = 4, chunk = 2 }"
    return toy_training.write_stage(tmp_path, 'stage = "mtp"', line, without=("drafter", "objective"))


def test_training_starts_from_the_layer_in_the_files(stage):
    settings = run_config.load(mtp.MtpStage, stage, [f"verifier={HYBRIDS / 'qwen3_5'}"])
    drafter = drafting.read_drafter_config(settings, model_files.read_verifier_config(settings.verifier))
    stored = drafting.read_stored(settings, drafter)
    assert_same(settings.fresh(drafter, {}, stored), model_files.load_drafter(settings.verifier)[1])


@pytest.mark.parametrize("changed, words", [
    ([], ("got a drafter of kind 'language_model'", "expected a verifier with a layer of")),
    ([f"verifier={HYBRIDS / 'qwen3_5_text'}"], ("qwen3_5_text: got no tensors mtp.*",)),
])  # fmt: skip
def test_a_verifier_without_the_layer_is_refused(stage, changed, words):
    settings = run_config.load(mtp.MtpStage, stage, changed)
    refused(lambda: mtp.main(settings), *words)
