"""Training for verifiers with layers of two kinds: states and windows start anew with each packed text, and stopped stages
go on.

Nothing else in a stage depends on the kinds of layers. `train.pair`: test_train_pair.py.
"""

from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from answers import random_weights, read_texts, slow, slow_unless, with_shared_layers, with_windows_and_sinks
from conftest import DATA
from refusals import refused
from toy_training import HYBRID, MODEL, read_log

from train import respond
from train.data import packing
from train.data.records import Source
from train.runtime.run_config import MeshConfig
from train.stages import drafting, registry
from train.stages.teacher import teach
from treeflash_jax import TreeFlash
from treeflash_jax.models import decoder

LENGTHS, SIZE = (50, 13, 1, 90, 2, 3, 20, 20, 150), 256  # they begin and end inside blocks of 64 positions
STAGES = {  # settings of head.toml that they lack, and added ones; a drafter's also over gpt-oss and Gemma
    "head": ((), ()),
    "drafter": (("drafter",), ("num_layers=1", "block_size=4", "mask_token_id=3", "objective.loss=cross-entropy")),
    "eagle3": (("drafter", "objective"), ("draft_vocab_size=20", "objective={steps = 2, anchors = 16, chunk = 8}")),
}
OF_OTHERS = [slow("drafter", DATA / "hybrid" / name) for name in ("gpt_oss", "gemma4_edge")]
STEPS = ("loop.steps=5", "loop.batch=4", "loop.save_every=9", "loop.log_every=1", "sources.0.hold_out=0")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    """The folder of a toy pair whose verifier has recurrent layers."""
    return toy_training.write(tmp_path_factory.mktemp("hybrid"), model=HYBRID).parent


@pytest.mark.parametrize(
    "model, attention",
    [
        (HYBRID, "chunked"),
        slow(with_windows_and_sinks(MODEL), "splash"),
        slow(with_shared_layers(MODEL), "chunked"),
    ],
)
def test_the_features_of_packed_texts_are_those_of_each_text_alone(float64, model, attention):
    """Kernels for packed sequences have no sinks, so that other forms take their place."""
    weights = random_weights(decoder.specs(model), dtype=jnp.float64)
    batch, count = toy_training.make_batch(LENGTHS, SIZE), 0
    packed = jax.jit(partial(teach, verifier=model, taps=(0, 1), attention=attention))(weights, batch=batch)
    packed = jax.device_get(packed)
    for b in range(2):
        for segment in range(1, batch.segments_bt[b].max() + 1):
            members = np.flatnonzero(batch.segments_bt[b] == segment)
            text = np.pad(batch.tokens_bt[b, members], (0, SIZE - len(members)))[None]
            alone, _ = jax.device_get(read_texts(weights, model, text, taps=(0, 1)))
            for got, want in ((packed.features_btj, alone.features_btj), (packed.hidden_btd, alone.hidden_btd)):
                np.testing.assert_allclose(got[b, members], want[0, : len(members)], atol=1e-10)
            count += 1
    assert count == len(LENGTHS)


@pytest.mark.parametrize("name, model", [slow_unless(name == "head", name, None) for name in STAGES] + OF_OTHERS)
def test_a_stopped_stage_goes_on_to_the_same_end(hybrid, tmp_path, monkeypatch, name, model):
    """Losses and weights equal an uninterrupted run's."""
    without, words = STAGES[name]
    monkeypatch.setattr(drafting, "step_flops", lambda *_: 1.0)
    toml, folder = toy_training.write_stage(hybrid, f'stage = "{name}"', without=without), model or hybrid / "verifier"
    words = f"verifier={folder}", *STEPS, *words
    runs = {run: registry.read_stage(toml, [f"run={tmp_path}/{run}", *words]) for run in ("whole", "cut")}
    drafting.train(runs["whole"])
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(packing, "batches", packing.batches)  # put back afterwards
        toy_training.terminate_after(2)
        drafting.train(runs["cut"])
    assert len(read_log(tmp_path / "cut")) < 5
    drafting.train(runs["cut"])
    assert read_log(tmp_path / "cut") == read_log(tmp_path / "whole")
    made = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in runs]
    assert made[0] == made[1]
    if name != "head":  # quick
        toy_training.exported(tmp_path / "whole", folder)


@pytest.mark.slow
def test_answers_are_the_same_wherever_they_are_interrupted(hybrid, tmp_path, monkeypatch):
    generate_each = TreeFlash.generate_each

    def interrupted(self, *arguments, **named):
        yield from islice(generate_each(self, *arguments, **named), 3)
        raise SystemExit

    source = Source(path=f"{hybrid}/responses.jsonl", format="responses", limit=9, hold_out=0)
    asked = dict(verifier=f"{hybrid}/verifier", sources=(source,), batch=4, mesh=MeshConfig(data=1), max_new_tokens=12)
    whole, cut = (respond.RespondConfig(out=f"{tmp_path}/{name}.jsonl", **asked) for name in ("whole", "cut"))
    respond.main(whole)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(TreeFlash, "generate_each", interrupted)
        respond.main(cut)
    assert not Path(cut.out).exists()
    respond.main(cut)
    assert Path(cut.out).read_bytes() == Path(whole.out).read_bytes() and len(toy_training.read_lines(whole.out)) == 9


def test_no_drafter_is_cut_from_recurrent_layers(hybrid):
    toml = toy_training.write_stage(hybrid, 'stage = "language_model"', "chunk = 16", without=("drafter", "objective"))
    refused(
        lambda: drafting.read_drafter_config(registry.read_stage(toml), HYBRID),
        "got a verifier of type 'qwen3_5_text'", "give language_model=",
    )  # fmt: skip
