"""The layer of multi-token prediction of hybrid files, against what was computed in float32 for small random weights.

The fixtures have its logits at the last positions of three prompts, each given the token after it, and the chain of four
tokens that it drafts after the first token of the answer (`models.test_hybrids`: the verifiers' own).
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import prefilled, slow_unless
from conftest import DATA
from model_files import assert_same
from refusals import refused
from safetensors.numpy import load_file

import treeflash_jax as tf
from treeflash_jax.cli.commands import main
from treeflash_jax.core import clock
from treeflash_jax.decoding import rounds
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import mtp_drafter
from treeflash_jax.formats import draft_vocabulary, model_files, storage
from treeflash_jax.models import decoder

NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
FOLDER = DATA / "hybrid"
ATOL = 4e-3  # of the reference's own rounding, as in `models.test_hybrids`


@pytest.mark.parametrize("name", [slow_unless(name == "qwen3_5_moe", name) for name in NAMES])
def test_logits_and_chains_are_the_published_ones(name):
    """Through the state and the lanes of decoding: the hidden state after the prompt, and a chain of one lane."""
    folder, expected = FOLDER / name, dict(np.load(FOLDER / name / "expected.npz"))
    config, params = model_files.load_verifier(folder)
    drafter, weights = model_files.load_drafter(folder)
    drafter = drafter.fitted(config)
    assert drafter.taps == (7,) and drafter.layers.num_layers == 1
    pair = tf.TreeFlash(config, Weights(params, weights), drafter=drafter, stop_ids=())
    prompts = [expected[f"prompt{i}"].tolist() for i in range(3)]
    plan, state = prefilled(pair, prompts, builder="walk", depths=4, children=8)

    @jax.jit
    def chain(weights, state):
        expander = rounds.draft_expander(weights, state, plan)
        lane, tokens, hidden = expander.start(1), [], []
        for depth in range(4):
            tokens.append(expander.children(jnp.int32(depth), lane)[0][..., 0])
            hidden.append(lane.carry)
            lane = expander.follow_token(jnp.int32(depth), lane, tokens[-1])
        return jnp.concatenate(tokens, axis=1), decoder.logits(weights.verifier, config, jnp.concatenate(hidden, axis=1))

    tokens_bi, logits_biv = jax.tree.map(np.asarray, chain(pair.weights, state))
    for i in range(3):
        assert state.tokens_bs[i, len(prompts[i])] == expected[f"mtp_first{i}"]
        assert tokens_bi[i].tolist() == expected[f"mtp_chain{i}"].tolist()
        np.testing.assert_allclose(logits_biv[i], expected[f"mtp_chain_logits{i}"], atol=ATOL)

    @jax.jit
    def read(params, weights, prompt, following):
        text, where = prompt[None], (jnp.arange(len(prompt))[None], decoder.causal_mask(1, len(prompt)))
        hidden_btd = decoder.forward(params, config, text, *where).hidden_btd
        x_btd = mtp_drafter.layer_input(weights, params, drafter, following[None], hidden_btd)
        out = decoder.through_layers(weights, drafter.layers, x_btd, *where)
        return decoder.logits(params, config, out.hidden_btd)[0]

    logits_tv = read(params, weights, expected["prompt1"], jnp.append(expected["prompt1"][1:], expected["mtp_first1"]))
    np.testing.assert_allclose(logits_tv[-8:], expected["mtp_logits1"], atol=ATOL)


def load(folder, **options) -> tf.TreeFlash:
    return tf.load(folder, dtype="float32", **options)


def test_files_with_the_layer_draft_with_it_by_default(monkeypatch, caplog):
    read, read_slice = [], storage.read_slice

    def noted(source, spec, entry, index, plane=None):
        read.append((entry, str(index), plane))
        return read_slice(source, spec, entry, index, plane)

    monkeypatch.setattr(clock, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(storage, "read_slice", noted)
    pair = load(FOLDER / "qwen3_5")
    assert pair.drafter.kind == pair.names[1] == "mtp" and "drafter=mtp (mtp, " in repr(pair)
    assert any(record.message.endswith("qwen3_5 and mtp") for record in caplog.records)
    assert len(read) == len({*read}), "every weight is read once"
    assert_same(pair.weights, load(FOLDER / "qwen3_5", drafter="mtp").weights)
    assert load(FOLDER / "qwen3_5", drafter="none").drafter is None
    assert load(FOLDER / "qwen3_5_text").drafter is None
    refused(lambda: load(FOLDER / "qwen3_5_text", drafter="mtp"), "got drafter 'mtp', expected a verifier whose files hold")
    refused(lambda: load(FOLDER / "qwen3_5_text", drafter=FOLDER / "qwen3_5_text"), "qwen3_5_text: got no tensors mtp.*")
    refused(lambda: load(FOLDER / "qwen3_5", drafter_revision="x"), "got drafter_revision 'x'")
    refused(lambda: load("tiny", drafter=FOLDER / "qwen3_5"), "hidden size is 48 in its", "recurrent layers cannot draft")


@pytest.mark.parametrize("name", [slow_unless(name == "qwen3_5_moe", name) for name in NAMES])
def test_a_folder_of_its_own_holds_the_same_drafter(tmp_path, name):
    main(["convert", str(FOLDER / name), str(tmp_path / "layer"), "--to", "mtp"])
    assert_same(model_files.load_drafter(tmp_path / "layer"), model_files.load_drafter(FOLDER / name))
    alone, inside = load_file(tmp_path / "layer" / "model.safetensors"), load_file(FOLDER / name / "model.safetensors")
    if name != "qwen3_5_moe":  # whose experts are fused in one tensor
        assert_same(alone, {name: tensor for name, tensor in inside.items() if name.startswith("mtp.")})
    assert load(FOLDER / name, drafter=tmp_path / "layer").drafter == load(FOLDER / name).drafter
    refused(lambda: model_files.convert_drafter(FOLDER / "qwen3_5_text", tmp_path / "x", "mtp"), "got no tensors mtp.*")


def test_a_folder_with_a_list_drafts_the_listed_tokens_only(tmp_path):
    model_files.convert_drafter(FOLDER / "qwen3_5", tmp_path / "layer", "mtp")
    (tmp_path / "layer" / draft_vocabulary.NAME).write_text(json.dumps({"ids": [*range(0, 320, 2)]}))
    pair = load(FOLDER / "qwen3_5", drafter=tmp_path / "layer")
    assert pair.drafter.draft_vocab_size == 160
    np.testing.assert_array_equal(pair.weights.drafter["unembed"], pair.weights.verifier["unembed"][::2])


@pytest.mark.slow
def test_check_and_bench_run_draft_with_it(tmp_path, capsys):
    words = ["--verifier", str(FOLDER / "qwen3_5"), "--prompt-ids", "7 8 9", "--max-new-tokens", "8", "--dtype", "float32"]
    assert main(["check", *words, "--nodes", "8"]) == 0
    assert capsys.readouterr().out.startswith("lossless")
    out = tmp_path / "out.jsonl"
    assert main(["bench", "run", *words, "--nodes", "8", "--systems", "ar", "treeflash", "--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["settings"].get("drafter") for record in records} == {None, "mtp"}
