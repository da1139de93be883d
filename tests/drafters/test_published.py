"""Block drafters with heads against numbers of the published code: JetSpec, Domino, DSpark, DFlash2, LiLiCorr.

Random weights, on the verifier of a_treeflash: numerics and alignments, not how much is accepted. Folders are in
tests/data/published; the files of DSpark's gated and recurrent heads have no backbone, dflash2's has part of one layer.
"""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import read_texts
from conftest import DATA
from draft_trees import grow
from published_configs import deepspec_folder
from refusals import refused
from safetensors.numpy import load_file
from scipy.special import log_softmax

import treeflash_jax as tf
from treeflash_jax.drafters import Inputs, NewPositions
from treeflash_jax.drafters.block import backbone
from treeflash_jax.drafters.block.heads import HEADS, Unembed
from treeflash_jax.formats import model_files
from treeflash_jax.models.layers import rms_norm, swiglu

FOLDER, VERIFIER = DATA / "published", DATA / "conformance" / "a_treeflash" / "verifier"
TOLERANCE = 2e-4
BLOCK = object()
FORMS = ("jetspec", "domino", "dspark_speculators", "dflash2_speculators", "lilicorr")


@partial(jax.jit, static_argnums=0)
def read_state(drafter, params, tables, state, features_btj, count_b):
    return drafter.extend(params, tables, state, NewPositions(features_btj, None, count_b))


@pytest.fixture(scope="module", params=FORMS)
def published(request) -> SimpleNamespace:
    return read(request.param)


@cache
def read(form: str) -> SimpleNamespace:
    """A drafter and what is expected of it; its state after the prompt, and the inputs of the first draft."""
    model = tf.load(verifier=VERIFIER, drafter=FOLDER / form, dtype=jnp.float32)
    expected, drafter, weights = dict(np.load(FOLDER / form / "expected.npz")), model.drafter, model.weights
    prompt_bt = expected["prompt"].astype(np.int32)
    length_b = np.int32([prompt_bt.shape[1]])
    out, logits_btv = read_texts(weights.verifier, model.verifier, prompt_bt, taps=drafter.taps)
    anchor_b = np.argmax(np.asarray(logits_btv)[:, -1], axis=-1).astype(np.int32)
    assert anchor_b == expected["anchor"].ravel()
    empty, tables = drafter.init(1, 32, jnp.float32), weights.verifier
    state = read_state(drafter, weights.drafter, tables, empty, out.features_btj, length_b)
    inputs = Inputs(
        weights.drafter, tables, state, anchor_b, np.ones(1, np.float32), drafter.num_depths, prompt_bt, length_b
    )
    return SimpleNamespace(form=form, drafter=drafter, expected=expected, inputs=inputs, features=out.features_btj)


def compiled(case: SimpleNamespace, function: Any = lambda expander: expander, **changes):
    """Returns a function of the first draft's expander, or of the block, for a drafter with some fields changed."""
    drafter, inputs = replace(case.drafter, **changes), case.inputs

    @jax.jit
    def run(params, tables, state):
        here = replace(inputs, params=params, verifier_params=tables, state=state)
        return drafter.draft_block(here) if function is BLOCK else function(drafter.draft(here))

    return run(inputs.params, inputs.verifier_params, inputs.state)


def walk(case: SimpleNamespace, **changes) -> np.ndarray:
    """Tokens of the greedy path."""
    num_nodes = case.drafter.num_depths + 1
    tree = compiled(case, lambda expander: grow("walk", expander, case.inputs.anchor_b, num_nodes), **changes)
    return np.asarray(tree.tokens_bn)[:, 1:]


def hidden(case: SimpleNamespace, **changes) -> np.ndarray:
    return np.asarray(compiled(case, BLOCK, **changes))


def normed(case: SimpleNamespace, **changes) -> np.ndarray:
    return np.asarray(jax.jit(Unembed.normed)(unembedding(case), hidden(case, **changes)))


def unembedding(case: SimpleNamespace) -> Unembed:
    params, tables = case.inputs.params, case.inputs.verifier_params
    table = params.get("unembed", tables.get("unembed", tables["embed"]))
    return Unembed(tables["embed"], table, params["backbone"]["norm"], case.drafter.layers.rms_norm_eps)


def close(got, expected) -> None:
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)


def test_hidden_states_of_the_block(published):
    close(hidden(published), published.expected["block_hidden"])


def path_logits(head: str, params, unembed: Unembed, hidden_bqd, previous_bni, drafter) -> np.ndarray:
    """Logits along paths, [b, n, i, v]."""
    hidden_bid = hidden_bqd[:, drafter.first_slot :]
    contexts_bmd = np.tile(hidden_bid, (1, previous_bni.shape[1], 1))
    previous_bm = previous_bni.reshape(len(previous_bni), -1).astype(np.int32)
    logits_bmv = jax.jit(HEADS[head].logits, static_argnums=4)(params, unembed, previous_bm, contexts_bmd, drafter)
    return np.reshape(logits_bmv, (*previous_bni.shape, -1))


def test_domino_states_logits_and_trees():
    case = read("domino")
    drafter, expected, head = case.drafter, case.expected, case.inputs.params["head"]
    assert (drafter.num_depths, drafter.shifted, drafter.lanes) == (8, True, 16)
    anchor_bn1 = np.broadcast_to(expected["anchor"][:, None], (1, 2, 1))
    previous_bni = np.concatenate([anchor_bn1, expected["paths"][..., :-1]], axis=-1)
    unembed, hidden_bqd = unembedding(case), hidden(case)
    logits_bniv = path_logits("gru", head, unembed, hidden_bqd, previous_bni, drafter)
    close(logits_bniv, expected["corrected_logits"])
    state, step = np.zeros((1, 2, 40), np.float32), jax.jit(HEADS["gru"].step)
    for depth in range(drafter.num_depths):
        _, state = step(head, unembed, state, previous_bni[..., depth].astype(np.int32), np.zeros(64, np.float32))
        close(state, expected["gru_states"][:, :, depth])
    for tree, candidates in (("tree", 64), ("tree_full", 257)):
        build = partial(grow, "best-first", anchor_b=case.inputs.anchor_b, num_nodes=24)
        grown = compiled(case, build, candidates=candidates, children=8)
        np.testing.assert_array_equal(grown.tokens_bn[:, 1:], expected[f"{tree}_tokens"][:, 1:])
        np.testing.assert_array_equal(grown.parent_bn[:, 1:], expected[f"{tree}_parents"][:, 1:])
        np.testing.assert_array_equal(grown.depth_bn, expected[f"{tree}_depths"])
        close(grown.log_prob_bn, expected[f"{tree}_scores"])
    np.testing.assert_array_equal(walk(case, candidates=257), expected["chain_tokens"])


def test_an_alignment_read_wrongly_changes_the_first_logits():
    case = read("domino")
    take = lambda expander: expander.children(jnp.int32(0), expander.start(1))  # noqa: E731
    (tokens, log_probs), (others, other_log_probs) = (compiled(case, take, shifted=shifted) for shifted in (True, False))
    assert not np.array_equal(tokens, others)
    assert np.max(np.abs(log_probs - other_log_probs)) > 0.1


def test_dspark_logits_from_a_part_of_the_vocabulary():
    case = read("dspark_speculators")
    drafter, expected = case.drafter, case.expected
    assert drafter.shifted and drafter.num_depths == 8 and drafter.draft_vocab_size == 96
    ids_z = np.arange(96) + np.asarray(case.inputs.params["offsets"])
    np.testing.assert_array_equal(ids_z, expected["kept_tokens"][0])
    head, unembed = case.inputs.params["head"], unembedding(case)
    logits_bniv = path_logits("lowrank", head, unembed, hidden(case), expected["previous_tokens"], drafter)
    close(logits_bniv, expected["path_logits"])
    table = jax.tree.map(np.asarray, compiled(case, candidates=96, children=96))
    order_z = np.argsort(table.tokens_bimc[0, 0, 0])
    np.testing.assert_array_equal(table.tokens_bimc[0, 0, 0][order_z], ids_z)
    close(table.log_probs_bimc[0, 0, 0][order_z], log_softmax(logits_bniv[0, 0, 0]))
    refused(lambda: drafter.configured(draft_vocabulary="all"), "expected frequent: its files have vectors of no other")
    refused(lambda: drafter.limited(5), "beside that of the drafter's own files")


@pytest.mark.parametrize(("form", "head"), [("dspark_gated", "lowrank-gated"), ("dspark_rnn", "lowrank-rnn")])
def test_dspark_logits_of_other_heads(form, head, tmp_path):
    """The tensors of the head and of the final norm, in a folder with the backbone of another drafter."""
    tensors = load_file(FOLDER / "jetspec" / "model.safetensors") | load_file(FOLDER / form / "model.safetensors")
    drafter, params = model_files.load_drafter(deepspec_folder(tmp_path / form, form, tensors))
    assert (drafter.head, drafter.head_rank, drafter.shifted, drafter.num_depths) == (head, 24, True, 7)
    expected = dict(np.load(FOLDER / form / "expected.npz"))
    tables = model_files.load_verifier(VERIFIER)[1]
    table = tables.get("unembed", tables["embed"])
    unembed = Unembed(tables["embed"], table, params["backbone"]["norm"], drafter.layers.rms_norm_eps)
    previous_bni = expected["previous_tokens"]
    logits = path_logits(head, params["head"], unembed, expected["block_hidden"], previous_bni, drafter)
    close(logits, expected["path_logits"])


def scores(case: SimpleNamespace, candidates_bik: np.ndarray) -> np.ndarray:
    """Log-probabilities among all candidates of a depth, in the order of the expected ones, [i, m, k]."""
    count = candidates_bik.shape[-1]
    table = jax.tree.map(np.asarray, compiled(case, candidates=count, children=count))
    by_token = np.full((*table.tokens_bimc.shape[1:3], 257), -np.inf)
    np.put_along_axis(by_token, table.tokens_bimc[0], table.log_probs_bimc[0], axis=2)
    listed = np.broadcast_to(candidates_bik[0][:, None], table.tokens_bimc.shape[1:])
    return log_softmax(np.take_along_axis(by_token, listed, axis=2), axis=-1)


def test_dflash2_scores_of_adjacent_candidates():
    case = read("dflash2_speculators")
    expected = case.expected
    close(scores(case, expected["candidates"]), log_softmax(expected["selector_scores"][0], axis=-1))
    np.testing.assert_array_equal(walk(case), expected["walk_tokens"])
    wide = compiled(case, candidates=64, children=64, shortlist=64)
    assert wide.tokens_bimc.shape == (1, 7, 16, 16), "no more candidates than the file's"


def test_dflash2_convolutions_around_a_feed_forward_part():
    """NeMo's numbers on both sides of it, in the first layer; the folder has no other tensors."""
    tensors = load_file(FOLDER / "dflash2" / "model.safetensors")
    tensors = {name.removeprefix("layers.0."): jnp.asarray(tensor) for name, tensor in tensors.items()}
    expected = dict(np.load(FOLDER / "dflash2" / "expected.npz"))
    weights = {name: tensors[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")}
    weights["mlp_conv"] = tensors["mlp_conv.base_kernel"]
    weights["mlp_conv_delta"] = tensors["mlp_conv.kernel_projection.weight"].reshape(2, 2, 4, 64)

    @jax.jit
    def run(weights, after_attention, scale):
        passed = []

        def feed_forward(x_btd):
            passed.append(x_btd)
            return swiglu(weights, x_btd)

        normed_btd = rms_norm(after_attention, scale, 1e-6)
        return backbone.convolved(weights, "mlp", normed_btd, feed_forward), passed[0]

    finished, prepared = run(weights, expected["after_attention"], tensors["post_attention_layernorm.weight"])
    close(finished, expected["mlp_conv_finished"])
    close(prepared, expected["mlp_conv_prepared"])


def test_lilicorr_scores_of_adjacent_candidates():
    case = read("lilicorr")
    expected = case.expected
    start_1kk = np.broadcast_to(expected["log_start"], (1, 8, 8))
    logits_ikk = np.concatenate([start_1kk, expected["log_pair"][0]])
    close(scores(case, expected["candidates"]), log_softmax(logits_ikk, axis=-1))
    np.testing.assert_array_equal(walk(case), expected["walk_tokens"])
    whole, few = (compiled(case, candidates=count) for count in (8, 3))
    np.testing.assert_array_equal(few.tokens_bimc, whole.tokens_bimc[:, :, :3])
    next_bimc = np.asarray(whole.next_context_bimc[:, :, :3])
    np.testing.assert_array_equal(few.next_context_bimc, np.where(next_bimc < 3, next_bimc, -1))


def test_lilicorr_keeps_the_last_feature_of_a_context_in_parts():
    case = read("lilicorr")
    state = case.drafter.init(1, 32, jnp.float32)
    for start, count in ((0, 7), (7, 13), (20, 0)):
        features_btj = np.pad(case.features, ((0, 0), (0, 20), (0, 0)))[:, start : start + 16]
        args = case.inputs.params, case.inputs.verifier_params, state, features_btj, np.int32([count])
        state = read_state(case.drafter, *args)
    np.testing.assert_allclose(state.hidden_bd, case.inputs.state.hidden_bd, atol=1e-5)


def test_causal_blocks():
    """The published code's numbers with and without the flag; in a causal block no slot depends on later ones."""
    case = read("jetspec")
    close(normed(case), case.expected["block_normed"])
    close(normed(case, causal_layers=()), case.expected["bidirectional_block_normed"])
    assert np.max(np.abs(case.expected["block_normed"] - case.expected["bidirectional_block_normed"])) > 0.1
    np.testing.assert_allclose(hidden(case, block_size=5), hidden(case)[:, :5], atol=1e-5)


@pytest.mark.parametrize("shared_window", [True, False])
def test_windows_of_the_anchor_and_of_each_slot(shared_window):
    """In one sliding layer without convolutions, a slot depends on the context positions of its window only."""
    case = read("dflash2_speculators")
    drafter = replace(case.drafter, layers=replace(case.drafter.layers, num_layers=1), shared_window=shared_window)
    weights = case.inputs.params["backbone"]["groups"][0][0]
    one_layer = {name: weight for name, weight in weights.items() if "conv" not in name}
    params = case.inputs.params | {"backbone": case.inputs.params["backbone"] | {"groups": [[one_layer]]}}
    context = case.inputs.state.context
    length, window = 20, 12

    @jax.jit
    def run(params, tables, context, position):
        first = context.states[0]
        first = first.replace(keys_bnkse=first.keys_bnkse.at[:, :, :, position].add(1))
        state = case.inputs.state.replace(context=context.replace(states=(first,), groups=((0,),)))
        return drafter.draft_block(replace(case.inputs, params=params, verifier_params=tables, state=state))[0]

    run = partial(run, params, case.inputs.verifier_params, context)
    plain = run(30)  # past the end of the context
    last_q = np.full(8, length - 1) if shared_window else length + np.arange(8)
    for position in range(length):
        is_changed_q = np.any(np.abs(run(position) - plain) > 1e-6, axis=-1)
        np.testing.assert_array_equal(is_changed_q, position > last_q - window)
