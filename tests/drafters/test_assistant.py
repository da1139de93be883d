"""Gemma 4's assistants against what transformers computed in float32 for small random weights; their files and refusals.

The fixtures have the first token after three prompts, and the chain of four tokens that is drafted after it.
"""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import drafted_as_plain, make_assistant, planned_batch, slow, with_shared_layers
from conftest import DATA, FEW_TOKENS
from model_files import assert_same, change_tensors
from published_configs import parse
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.bench import shapes
from treeflash_jax.decoding import loops, rounds
from treeflash_jax.decoding.state import Weights
from treeflash_jax.formats import model_files

NAMES = ("gemma4", "gemma4_edge")
FOLDER = DATA / "hybrid"
ATOL = 5e-4


@pytest.mark.parametrize("name", [slow(NAMES[0]), NAMES[1]])
def test_chains_are_the_published_ones(name):
    """Through the state and the lanes of decoding: the hidden state after the prompt, and a chain of one lane."""
    folder, expected = FOLDER / name, dict(np.load(FOLDER / name / "expected.npz"))
    config, params = model_files.load_verifier(folder)
    drafter, weights = model_files.load_drafter(folder / "assistant")
    assert drafter.layers.window == 13, "12 committed positions"
    drafter = replace(drafter, layers=replace(drafter.layers, window=14)).fitted(config)  # as transformers
    pair = tf.TreeFlash(config, Weights(params, weights), drafter=drafter, stop_ids=())
    prompts = [expected[f"prompt{i}"].tolist() for i in range(3)]
    plan, inputs = planned_batch(pair, prompts, builder="walk", depths=4, children=16)
    begun = loops.init_state(*inputs, plan=plan.shared, dtype=pair.dtype, can_cut=True)  # rings would hold 12 positions
    state = loops.prefill_chunks(pair.weights, begun, inputs.length_b, jnp.int32(9), plan=plan.shared)

    @jax.jit
    def chain(weights, state):
        expander = rounds.draft_expander(weights, state, plan)
        lane, tokens, log_probs = expander.start(1), [], []
        for depth in range(4):
            offered = expander.children(jnp.int32(depth), lane)
            tokens.append(offered[0][:, 0])
            log_probs.append(offered[1][:, 0])
            lane = expander.follow_token(jnp.int32(depth), lane, offered[0][..., 0])
        return jnp.stack(tokens, axis=1), jnp.stack(log_probs, axis=1)

    tokens_bic, log_probs_bic = jax.tree.map(np.asarray, chain(pair.weights, state))
    for i in range(3):
        assert state.tokens_bs[i, len(prompts[i])] == expected[f"mtp_first{i}"]
        assert tokens_bic[i, :, 0].tolist() == expected[f"mtp_chain{i}"].tolist()
        log_probs_iv = jax.nn.log_softmax(expected[f"mtp_chain_logits{i}"], axis=-1)
        wanted_ic = np.take_along_axis(np.asarray(log_probs_iv), tokens_bic[i], axis=-1)
        np.testing.assert_allclose(log_probs_bic[i], wanted_ic, atol=ATOL)
        np.testing.assert_allclose(wanted_ic, -np.sort(-np.asarray(log_probs_iv), axis=-1)[:, :16], atol=ATOL)


def load(folder, **options) -> tf.TreeFlash:
    return tf.load(folder, dtype="float32", **options)


def test_a_folder_with_an_assistant_drafts_with_it_by_default(tmp_path):
    pair = load(FOLDER / "gemma4_edge")
    assert pair.names[1] == "mtp" and "drafter=mtp (assistant, " in repr(pair)
    assert (pair.drafter.taps, pair.drafter.sources, pair.drafter.draft_vocab_size) == ((7,), (3, 2), 100)
    assert_same(pair.weights, load(FOLDER / "gemma4_edge", drafter=FOLDER / "gemma4_edge" / "assistant").weights)
    assert load(FOLDER / "gemma4_edge", drafter="none").drafter is None
    refused(lambda: load(FOLDER / "gemma4_moe", drafter="mtp"), "got drafter 'mtp', expected a verifier whose files hold")
    refused(lambda: load(FOLDER / "gemma4", drafter=FOLDER / "gemma4_edge" / "assistant"), "key/value heads", "sliding")
    refused(lambda: load(FOLDER / "qwen3_5", drafter=FOLDER / "gemma4" / "assistant"), "sliding_attention layer")
    refused(lambda: load(FOLDER / "gemma4" / "assistant"), "got a drafter's config (it has backbone_hidden_size)")
    refused(lambda: pair.generate([[1]], children=101), "children 101", "1 to 100")
    refused(lambda: model_files.convert_drafter(FOLDER / "gemma4" / "assistant", tmp_path / "x", "assistant"), "dialect")


RAW = json.loads((FOLDER / "gemma4_edge" / "assistant" / "config.json").read_text())


def test_configs_of_assistants():
    drafter = parse("drafter", RAW)
    assert drafter.layers.kinds == ("shared_sliding_attention", "shared_full_attention")
    unified = RAW | {"model_type": "gemma4_unified_assistant"}
    unified["text_config"] = RAW["text_config"] | {"model_type": "gemma4_unified_text", "num_kv_shared_layers": 0}
    assert parse("drafter", unified).layers == replace(drafter.layers, model_type="gemma4_unified_text")
    assert parse("drafter", RAW | {"use_ordered_embeddings": False}).draft_vocab_size == 0
    assert parse("drafter", RAW | {"num_centroids": 64, "centroid_intermediate_top_k": 1}).children == 5
    for change, words in (
        ({"model_type": "gemma5_assistant"}, ("model_type 'gemma5_assistant'", "gemma4_assistant")),
        ({"num_centroids": 33}, ("num_centroids 33", "a divisor of the vocabulary of 320")),
        ({"centroid_intermediate_top_k": 17}, ("centroid_intermediate_top_k", "at most 16")),
        ({"text_config": RAW["text_config"] | {"num_kv_shared_layers": 1}}, ("num_kv_shared_layers 1", "2, all layers")),
        ({"text_config": RAW["text_config"] | {"use_double_wide_mlp": True}}, ("use_double_wide_mlp",)),
    ):
        refused(lambda change=change: parse("drafter", RAW | change), *words)


def test_clusters_hold_every_token_once(tmp_path):
    shutil.copytree(FOLDER / "gemma4_edge" / "assistant", tmp_path / "assistant")
    name = "masked_embedding.token_ordering"
    change_tensors(tmp_path / "assistant", lambda tensors: tensors | {name: tensors[name] // 2})
    refused(lambda: model_files.load_drafter(tmp_path / "assistant"), f"repeated ids in tensor {name}")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_answers_of_a_rounded_verifier_are_its_own(scheme):
    """Trees of an assistant and of n-grams, and streams, over the verifier's rounded embedding."""
    pair, prompts = load(FOLDER / "gemma4_edge", quantize=scheme), [[5, 9, 5, 9, 5, 9, 5], [*range(40)]]
    settings = {"max_new_tokens": 24, "stop_ids": (), "temperature": 0.8, "seed": 1}
    for ngrams in (0, 8):
        results = drafted_as_plain(pair, prompts, {"nodes": 12, "ngrams": ngrams}, **settings)
    *_, streamed = pair.stream(prompts[0], nodes=12, ngrams=0, **settings)
    assert streamed.ids == results[0].ids
    assert max(max(result.accept_lengths) for result in results) > 1


@pytest.mark.slow
def test_random_weights_of_benchmarks_hold_every_token_once():
    model = with_shared_layers(FEW_TOKENS)
    pair = shapes.random_pair(model, make_assistant(model, num_clusters=4, top_clusters=2), jnp.bfloat16)
    assert np.array_equal(pair.weights.drafter["clusters"], np.arange(12).reshape(4, 3))
