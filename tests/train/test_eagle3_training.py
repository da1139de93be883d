"""Training of EAGLE-3 drafters: the objective is what drafting would give, and a run goes through every door."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from answers import random_weights, slow_unless
from conftest import FEW_TOKENS
from refusals import refused

from train import eagle3 as stage
from train import mtp
from train.data import packing
from train.data.packing import Document, PackedBatch
from train.runtime import run_config
from train.stages import drafting, rollout
from train.stages.registry import read_stage
from treeflash_jax.drafters import Eagle3Drafter, Inputs, MtpDrafter, NewPositions, mtp_drafter
from treeflash_jax.formats import model_files
from treeflash_jax.models import decoder
from treeflash_jax.models.config import Rope
from treeflash_jax.models.packed_attention import MAX_BLOCKS

MODEL = replace(FEW_TOKENS, tie_embeddings=True)
GATED = replace(MODEL, gates_attention=True, offset_norms=True, rope=Rope(fraction=0.5))
DRAFTER = Eagle3Drafter(
    layers=replace(MODEL, num_layers=1), target_hidden_size=16, draft_vocab_size=12, norm_output=True, taps=(0, 1, 1)
)
MTP = MtpDrafter(layers=mtp_drafter.layer_sizes(GATED), num_depths=3).fitted(GATED)
LENGTHS, SIZE, STEPS = (7, 4), 12, 3


def make_batch() -> PackedBatch:
    """One sequence with two documents and padding; the first two tokens of each are a prompt."""
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(0, 12, n), np.arange(n) >= 2) for n in LENGTHS]
    return packing.pack(documents, SIZE)[0]


@partial(jax.jit, static_argnames=("model", "drafter"))
def drafted_along(weights, drafting, tokens_1s, *, model, drafter):
    """Log-probabilities of the tokens that can be drafted, [position, step, token], by extending and drafting at every
    position; and the verifier's logits. The labels have to be tokens that can be drafted."""
    size, steps = tokens_1s.shape[1], jnp.arange(STEPS)
    out = decoder.forward(
        weights, model, tokens_1s, jnp.arange(size)[None], decoder.causal_mask(1, size), taps=drafter.taps
    )
    padded_s = jnp.pad(tokens_1s[0], (0, STEPS + 2))

    def step(state, t):
        features_11j, token_11 = (jax.lax.dynamic_slice_in_dim(x, at, 1, axis=1) for x, at in (
            (out.features_btj, t), (tokens_1s, t + 1)
        ))  # fmt: skip
        one_1 = jnp.ones(1, jnp.int32)
        state = drafter.extend(drafting, weights, state, NewPositions(features_11j, token_11, one_1))
        inputs = Inputs(drafting, weights, state, token_11[:, 0], jnp.ones(1), STEPS, None, None)
        expander = drafter.configured(children=drafter.draft_vocab_size or 12).draft(inputs)

        def level(lane, i):
            ids_11c, log_probs_11c = expander.children(i, lane)
            log_probs_c = log_probs_11c[0, 0][jnp.argsort(ids_11c[0, 0])]
            return expander.follow_token(i, lane, padded_s[t + 2 + i].reshape(1, 1)), log_probs_c

        return state, jax.lax.scan(level, expander.start(1), steps)[1]

    log_probs = jax.lax.scan(step, drafter.init(1, size, jnp.float64), jnp.arange(size - 2))[1]
    return log_probs, decoder.logits(weights, model, out.hidden_btd)[0]


NETWORKS = {
    "all tokens": (MODEL, stage.Eagle3Network(DRAFTER)),
    "frequent tokens": (MODEL, stage.Eagle3Network(replace(DRAFTER, draft_vocab_size=9))),
    "mtp": (GATED, mtp.MtpNetwork(MTP)),
}


@pytest.mark.parametrize("kind", [slow_unless(kind == "frequent tokens", kind) for kind in NETWORKS])
def test_a_step_is_what_drafting_gives(kind):
    """Sums over positions and steps of a packed sequence, against every document extended and drafted by itself."""
    with jax.enable_x64(True):
        model, network = NETWORKS[kind]
        drafter = network.drafter
        vocabulary, specs = drafter.draft_vocab_size or 12, (decoder.specs(model), drafter.specs())
        weights, drafting = (random_weights(spec, seed, 0.5, jnp.float64) for seed, spec in enumerate(specs))
        packed = make_batch()
        packed = replace(packed, weights_bt=packed.weights_bt * np.where(packed.positions_bt == 3, 0.25, 1))
        if vocabulary < 12:  # what follows in the documents can be drafted: the rollout takes it
            drafting["offsets"] = jnp.asarray([0] * 3 + [1] * 3 + [2] * 3, jnp.int32)
            allowed = np.arange(9) + np.asarray(drafting["offsets"])
            packed = replace(packed, tokens_bt=jnp.asarray(allowed[np.asarray(packed.tokens_bt) % 9], jnp.int32))
        settings = rollout.RolloutConfig(steps=STEPS, decay=0.7, chunk=4)
        trained = {name: tree for name, tree in drafting.items() if name != "offsets"}
        frozen = {"verifier": weights} | {name: tree for name, tree in drafting.items() if name == "offsets"}
        objective = partial(rollout.rollout_sums, settings=settings, verifier=model, network=network)
        sums = jax.jit(objective)(trained, frozen, packed, jax.random.split(jax.random.key(2), 1))
        ids = np.arange(12) if vocabulary == 12 else allowed
        loss = weight = 0.0
        overlap, top1, count = np.zeros(STEPS), np.zeros(STEPS), np.zeros(STEPS)
        begin = 0
        for length in LENGTHS:
            tokens = packed.tokens_bt[:, begin : begin + length]
            log_probs, logits = map(np.asarray, drafted_along(weights, drafting, tokens, model=model, drafter=drafter))
            for t, log_qs in enumerate(log_probs):
                for i, log_q in enumerate(log_qs[: length - 2 - t]):
                    label, wanted = int(tokens[0, t + 2 + i]), logits[t + 1 + i]
                    log_p = wanted[ids] - np.log(np.exp(wanted[ids]).sum())
                    p, q = np.exp(log_p), np.exp(log_q)
                    share = 0.7**i * (int(wanted.argmax()) in ids) * packed.weights_bt[0, begin + t + 2 + i]
                    loss, weight = loss - share * (p * log_q).sum(), weight + share
                    overlap[i] += np.minimum(np.exp(wanted[ids]) / np.exp(wanted).sum(), q).sum()
                    top1[i] += ids[log_q.argmax()] == label
                    count[i] += 1
            begin += length
        np.testing.assert_array_equal(sums["overlap"][1], count)
        np.testing.assert_allclose(sums["loss"][1], weight, rtol=1e-6)
        np.testing.assert_allclose(sums["loss"][0], loss, rtol=1e-6)
        np.testing.assert_allclose(sums["overlap"][0], overlap, rtol=1e-6)
        np.testing.assert_allclose(sums["top1"][0], top1)


@pytest.fixture
def toml(tmp_path):
    toy_training.write(tmp_path)
    line = "objective = { steps = 2, anchors = 16, chunk = 8 }"
    return toy_training.write_stage(tmp_path, 'stage = "eagle3"', line, without=("drafter", "objective"))


@pytest.mark.slow
def test_a_run_learns_and_is_exported(toml, tmp_path):
    """And drafts the tokens that are most frequent in the answers."""
    stage.main(run_config.load(stage.Eagle3Stage, toml, ["loop.steps=8", "draft_vocab_size=20"]))
    log = toy_training.read_log(tmp_path / "run")
    assert log[-1]["loss"] < log[0]["loss"]
    model = toy_training.exported(tmp_path / "run", tmp_path / "verifier")
    assert model.drafter.taps == (0, 1, 2), "by default, of three layers"
    assert model.drafter.kind == "eagle3"
    assert replace(model_files.load_drafter(tmp_path / "run" / "model")[0], tau=model.drafter.tau) == model.drafter
    assert model.drafter.tau > 1, "measured by the export"
    answers = [line["response"] for line in toy_training.read_lines(tmp_path / "responses.jsonl")]
    kept = [answer for number, answer in enumerate(answers) if number % 10 != 9]  # the others are held out
    counts = np.bincount(np.concatenate(kept), minlength=64)
    ids = np.arange(20) + np.asarray(model.weights.drafter["offsets"])
    assert counts[ids].min() >= np.delete(counts, ids).max() and model.weights.drafter["unembed"].shape == (20, 16)


def test_settings_of_a_run_are_known_by_its_kind(toml):
    settings = read_stage(toml)
    assert isinstance(settings, stage.Eagle3Stage)
    assert drafting.read_drafter_config(settings, toy_training.MODEL).verifier == (settings.verifier, "Qwen3ForCausalLM")
    for words, message in (
        (["objective.anchors=0", "objective.chunk=9"], "chunk 9, expected a divisor of data.sequence_length 32"),
        (["objective.anchors=64"], "anchors 64, expected at most data.sequence_length 32"),
        (["data.sequence_length=8192", "objective.chunk=8192"], f"objective.chunk = 8192, expected at most {MAX_BLOCKS}"),
        (["draft_vocab_size=65"], "draft_vocab_size 65, expected at most 64"),
    ):
        make = lambda words=words: run_config.load(stage.Eagle3Stage, toml, words).drafter_config(toy_training.MODEL, None)  # noqa: E731
        refused(make, message)


def test_positions_are_drawn_among_those_that_predict_an_answer():
    """Up to `anchors` distinct positions, and other ones with another key."""
    packed, settings = make_batch(), rollout.RolloutConfig(steps=STEPS, anchors=8, chunk=4)
    keys = jax.random.split(jax.random.key(0), 5)[:, None]
    draw = jax.jit(rollout.draw_positions, static_argnums=1)
    drawn = [tuple(map(np.asarray, draw(packed, settings, key))) for key in keys]
    for index, is_there in drawn:
        assert sorted(index[is_there].tolist()) == [0, 1, 2, 3, 4, 7, 8]  # 5 answer tokens, then 2
    few = [draw(packed, rollout.RolloutConfig(steps=STEPS, anchors=4), key)[0].tolist() for key in keys]
    assert len({tuple(sorted(step[0])) for step in few}) > 1 and all(len({*step[0]}) == 4 for step in few)
