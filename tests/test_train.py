"""The drafter that is trained is the drafter that drafts; batches are functions of the step; evaluation data stays out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import blocks, checkpoint, data, evaluate, head
from treeflash_jax import drafter, verifier, vocab
from treeflash_jax import params as parameters
from treeflash_jax.config import DrafterConfig, ModelConfig
from treeflash_jax.heads import DraftSettings, Unembed, mlp

SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8)
OWN = ModelConfig(num_layers=3, tie_embeddings=True, **SIZES)
CONFIG = DrafterConfig(
    layers=ModelConfig(num_layers=2, **SIZES),
    block_size=5,
    mask_token_id=3,
    target_layer_ids=(0, 2),
    num_target_layers=3,
    head="mlp",
)


@pytest.fixture(scope="module")
def case():
    """Random weights and two packed rows of several documents, with the blocks of the training pass."""
    key = jax.random.key(0)
    frozen = parameters.initialize(verifier.specs(OWN), key, scale=0.3)
    backbone = parameters.initialize(drafter.specs(CONFIG), jax.random.fold_in(key, 1), scale=0.3)
    rng = np.random.default_rng(0)
    documents = [data.Document(rng.integers(4, 40, n), np.arange(n) >= 3) for n in (17, 9, 14, 11, 12)]
    rows = data.pack(documents, 32)
    teacher = jax.jit(blocks.teach, static_argnums=(1, 2))(frozen, OWN, CONFIG, rows)
    chosen = blocks.sample_blocks(rows, 8, CONFIG.block_size, 4.0, key)
    hidden = jax.jit(blocks.hidden_states, static_argnums=1)(
        backbone, CONFIG, frozen["embed"], rows, teacher.features_bsj, chosen.anchors_bn
    )
    return frozen, backbone, rows, chosen, hidden


@jax.jit
def drafted(frozen, backbone, document_1t, start):
    """What inference makes of a block that starts at `start` of one padded document."""
    mask = verifier.causal_mask(1, 32)
    out = verifier.forward(frozen, OWN, document_1t, jnp.arange(32)[None], mask, taps=CONFIG.target_layer_ids)
    state = drafter.init(CONFIG, 1, 32, jnp.float32)
    state = drafter.extend(backbone, CONFIG, state, out.features_btj, start[None])
    return drafter.block(backbone, CONFIG, state, frozen["embed"], document_1t[:, start])


def test_training_blocks_equal_inference(case):
    frozen, backbone, rows, chosen, hidden = case
    checked = 0
    for r, n in np.argwhere(np.asarray(chosen.weights_bnq).sum(-1) > 0):
        anchor = int(chosen.anchors_bn[r, n])
        members = np.flatnonzero(rows.segments_rt[r] == rows.segments_rt[r, anchor])
        document, start = rows.tokens_rt[r, members], anchor - members[0]
        padded = np.pad(document, (0, 32 - len(document)))[None]
        np.testing.assert_allclose(drafted(frozen, backbone, padded, start)[0], hidden[r, n], atol=2e-5)
        for i in np.flatnonzero(chosen.weights_bnq[r, n]):
            assert rows.tokens_rt[r, chosen.targets_bnq[r, n, i]] == document[start + i]
        checked += 1
    assert checked >= 8


def test_training_head_equals_inference():
    key = jax.random.key(2)
    specs = mlp.specs(CONFIG)
    weights = {n: jax.random.normal(jax.random.fold_in(key, i), s.shape) for i, (n, s) in enumerate(specs.items())}
    embed_vd, hidden_bqd = jax.random.normal(key, (40, 16)), jax.random.normal(key, (2, 5, 16))
    anchor_b = jnp.array([7, 9])
    norm = jnp.ones(16)
    unembed = Unembed(embed_vd, embed_vd, norm, CONFIG.layers.rms_norm_eps)
    table = mlp.expand(weights, unembed, hidden_bqd, anchor_b, DraftSettings(candidates=4, children=6), jnp.ones(1))
    _, candidates = vocab.top_k(unembed.logits(hidden_bqd[:, 1:-1]), 4)
    for m in range(4):
        previous_bq = jnp.concatenate([anchor_b[:, None], candidates[:, :, m]], axis=1)
        after = head.corrected(
            weights, {"norm": norm}, CONFIG, hidden_bqd[:, None, 1:], vocab.embed(embed_vd, previous_bq)[:, None]
        )
        log_probs = jax.nn.log_softmax(unembed.logits(after[:, 0]))
        expected = jnp.take_along_axis(log_probs, table.tokens_bimc[:, :, m], axis=-1)
        np.testing.assert_allclose(table.log_probs_bimc[:, :, m], expected, atol=2e-5)


def test_anchors_are_answers_followed_by_answers(case):
    _, _, rows, chosen, _ = case
    for r, n in np.argwhere(np.asarray(chosen.weights_bnq).sum(-1) > 0):
        anchor = int(chosen.anchors_bn[r, n])
        assert rows.weights_rt[r, anchor] > 0 and rows.weights_rt[r, anchor + 1] > 0
    assert np.all(np.asarray(chosen.weights_bnq)[..., 0] == 0)


def test_packing_keeps_documents_apart():
    documents = [data.Document(np.full(n, n), np.ones(n)) for n in (5, 6, 3, 20)]
    rows = data.pack(documents, 12)
    assert sorted(np.unique(rows.tokens_rt)) == [0, 3, 5, 6, 20]
    for r in range(len(rows)):
        for segment in np.unique(rows.segments_rt[r][rows.segments_rt[r] > 0]):
            where = rows.segments_rt[r] == segment
            assert len(np.unique(rows.tokens_rt[r][where])) == 1
            np.testing.assert_array_equal(rows.positions_rt[r][where], np.arange(where.sum()))


def test_schedule_is_a_function_of_its_arguments_and_keeps_shares():
    arguments = ({"a": 10, "b": 100}, {"a": 0.25, "b": 0.75}, 40, 4, 0)
    order = data.schedule(*arguments)
    np.testing.assert_array_equal(order, data.schedule(*arguments))
    assert order.shape == (40, 4) and np.sum(order < 10) == 40
    assert np.bincount(order[order < 10]).min() == 4  # whole passes over the small source


def test_evaluation_sets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gsm8k_test_dev"):
        data.conversations(tmp_path, "gsm8k_test_dev")


def test_checkpoint_round_trip(tmp_path):
    tree = {"a": [jnp.arange(3.0), jnp.ones((2, 2))], "b": {"c": jnp.int32(4)}}
    checkpoint.save(tmp_path / "x.npz", tree)
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), tree, checkpoint.load(tmp_path / "x.npz", tree)))
    with pytest.raises(ValueError, match="one side only"):
        checkpoint.load(tmp_path / "x.npz", {"a": tree["a"]})


def test_rounds_are_seen_where_their_16_gram_was_trained_on():
    known = evaluate.grams([(list(range(100)), list(range(100, 110)))])
    assert tuple(range(94, 110)) in known and tuple(range(85, 101)) in known and tuple(range(84, 100)) not in known
    new = list(range(200, 230))
    answers = [list(range(94, 110)) + new, new]  # the round anchored at token 7 of the first continues a known text
    records = [{"system": "treeflash-16", "ids": answers, "accept_lengths": [[7, 3, 4], [7, 8]]}]
    assert evaluate.by_seen(records, known) == {
        "treeflash-16": {"seen": {"tau": 3.0, "rounds": 1}, "unseen": {"tau": 6.0, "rounds": 2}}
    }
