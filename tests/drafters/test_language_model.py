"""Language models as drafters: state, full acceptance of the verifier's own drafts, files; see test_every_drafter.py"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import drafted_as_plain, prefilled, refused
from budgets import table
from conftest import RANDOM_MODEL
from extending import goes_through_everything

import treeflash_jax as tf
from treeflash_jax.core import parameters
from treeflash_jax.decoding import calibration, loops
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import causal_lm
from treeflash_jax.engine import pairs
from treeflash_jax.formats import conversions, models
from treeflash_jax.models import verifier

SMALL = replace(RANDOM_MODEL, num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=32)
TEXTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12] * 9, [13]]  # the second is longer than a chunk of the prefill
pytestmark = pytest.mark.filterwarnings("ignore:tau is")


@pytest.fixture(scope="module", autouse=True)
def float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def fresh(config, seed: int, scale: float = 0.3, dtype=jnp.float64):
    return parameters.initialize(verifier.specs(config), jax.random.key(seed), dtype, scale)


def a_pair(noise: float) -> tf.TreeFlash:
    """A random verifier, and as its drafter the same weights with noise on them."""
    weights = fresh(RANDOM_MODEL, 0)
    drafter = jax.tree.map(lambda x, y: x + noise * y, weights, fresh(RANDOM_MODEL, 1))
    config = causal_lm.LanguageModelConfig(layers=RANDOM_MODEL)
    return tf.TreeFlash(RANDOM_MODEL, Weights(weights, drafter), drafter=config)


@pytest.fixture(scope="module")
def pair() -> tf.TreeFlash:
    return a_pair(0.15)


@pytest.fixture(scope="module")
def oracle() -> tf.TreeFlash:
    return a_pair(0.0)


def a_state(config, batch: int = 2):
    return causal_lm.init(config, batch, 64, jnp.float64)


def assert_same_state(got, expected) -> None:
    """Up to the slots past the end of a text."""
    np.testing.assert_array_equal(got.context.length_b, expected.context.length_b)
    np.testing.assert_allclose(got.hidden_bd, expected.hidden_bd, atol=1e-12)
    for x, y in zip(jax.tree.leaves(got.context.groups), jax.tree.leaves(expected.context.groups), strict=True):
        for b, length in enumerate(np.asarray(expected.context.length_b)):
            np.testing.assert_allclose(x[b, :, :length], y[b, :, :length], atol=1e-12)


def test_reading_in_one_call_is_reading_position_by_position_and_the_whole_text_at_once():
    config = causal_lm.LanguageModelConfig(layers=SMALL)
    weights = fresh(SMALL, 2)
    extend = partial(jax.jit(partial(causal_lm.extend, attention="xla"), static_argnums=2), weights, None, config)
    tokens_bt = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)))
    counts = jnp.asarray([12, 7])
    at_once = extend(a_state(config), None, tokens_bt, counts)
    over_batch = a_state(config)
    for i in range(12):
        over_batch = extend(over_batch, None, tokens_bt[:, i : i + 1], (i < counts).astype(int))
    assert_same_state(over_batch, at_once)
    begun = extend(a_state(config), None, tokens_bt[:, :5], jnp.asarray([5, 5]))
    assert_same_state(extend(begun, None, tokens_bt[:, 5:], counts - 5), at_once)
    whole = verifier.forward(weights, SMALL, tokens_bt, jnp.arange(12)[None], verifier.causal_mask(2, 12))
    np.testing.assert_allclose(at_once.hidden_bd, whole.hidden_btd[jnp.arange(2), counts - 1], atol=1e-12)
    assert_same_state(extend(at_once, None, tokens_bt, jnp.zeros(2, int)), at_once)


@pytest.mark.slow
def test_the_context_holds_the_text_and_the_anchor(pair):
    """After prompts and rounds, its cache has one position more than the verifier's: the text read from its start."""
    plan, state = prefilled(pair, TEXTS, nodes=8)

    def check(state) -> None:
        np.testing.assert_array_equal(state.drafter.context.length_b, state.cache.length_b + 1)
        np.testing.assert_array_equal(state.drafter.context.length_b, state.end_b)
        empty = causal_lm.init(pair.drafter, 3, 256, jnp.float64)
        read = partial(causal_lm.extend, pair.weights.drafter, None, pair.drafter, attention="streamed")
        assert_same_state(state.drafter, read(empty, None, state.tokens_bs[:, :128], state.end_b))

    check(state)
    check(loops.decode(pair.weights, state, jnp.int32(4), plan=plan))


ORACLES = [{"builder": "walk"}, {"builder": "walk", "depths": 3}]
ORACLES += [{"builder": "hybrid", "nodes": 9, "skeleton": 1.0, "drafter_temperature": 0.02}]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"nodes": 17, "drafter_temperature": 0.02}, *ORACLES])
def test_the_verifiers_own_drafts_are_accepted_to_full_depth(oracle, how):
    result = oracle.generate([[1, 2, 3]], max_new_tokens=40, stop_ids=(), **how)[0]
    depths = how.get("depths", 8)
    assert set(result.accepted_before_cut[:-1]) == {depths + 1}


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.15, 0.5])
def test_rounds_that_choose_their_nodes_and_pause(float64, tmp_path, noise):
    """A pause puts off what the small model reads; a drafter that is wrong most of the time is paused."""
    model = a_pair(noise)
    model.budget = tmp_path / "budget.json"
    entry = table(model, [1.0, 1.2, 1.5], 0.7, tau=(1.8, 2.5, 3.2), nodes=[2, 4, 8], settings={"children": 8})
    calibration.write(model.budget, entry)
    settings = {"max_new_tokens": 60, "stop_ids": (), "batch_size": 3, "temperature": [0.0, 0.7, 1.3]}
    got = drafted_as_plain(model, TEXTS, {"nodes": "auto", "children": 8}, **settings)
    nodes = {count for answer in got for count in answer.nodes}
    assert 1 in nodes and max(nodes) > 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"builder": "paths", "nodes": 9}, {"nodes": 9}], ids=str)
def test_a_tree_is_drawn_from_the_anchor_that_the_round_had(pair, how):
    """Rules for sampled trees draw anchors that sampling after the prompt would not give."""
    result = pair.generate([[1, 2, 3]], max_new_tokens=24, stop_ids=(), temperature=1.0, seed=5, children=8, **how)[0]
    for index, length in enumerate(result.accept_lengths):
        assert sum(result.tree(index).accepted) >= length or index == len(result.accept_lengths) - 1


# Files


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A verifier and two small models, one of them with another vocabulary."""
    where = tmp_path_factory.mktemp("models")
    for name, config in (("big", RANDOM_MODEL), ("small", SMALL), ("other", replace(SMALL, vocab_size=60))):
        models.save_verifier(where / name, config, fresh(config, 3, dtype=jnp.float32), jnp.float32)
    return {name: str(where / name) for name in ("big", "small", "other")}


def test_a_folder_of_a_language_model_drafts(folders):
    model = tf.load(folders["big"], drafter=folders["small"], dtype="float32")
    assert model.drafter == causal_lm.LanguageModelConfig(layers=models.read_verifier_config(folders["small"]))
    jax.tree.map(np.testing.assert_array_equal, model.weights.drafter, models.load_verifier(folders["small"])[1])


def test_what_does_not_fit_is_refused_before_weights_are_read(folders, tmp_path):
    with pytest.raises(ValueError, match="got a language model with a vocabulary of 60, expected the verifier's, of 64"):
        tf.load(folders["big"], drafter=folders["other"])
    for folder, dialect in ((folders["small"], "dflash"), (pairs.locate("tiny", "drafter"), causal_lm.DIALECT)):
        with pytest.raises(ValueError, match=f"got dialect '{dialect}' for a drafter of kind"):
            conversions.convert_drafter(folder, tmp_path / "converted", dialect)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="got model_type 'gpt2', expected a drafter's .* or a language model of"):
        models.read_drafter_config(tmp_path)


def _swapped(raw):
    ids = raw["model"]["vocab"]
    first, second = (token for token, id in ids.items() if id in (700, 900))
    ids[first], ids[second] = ids[second], ids[first]


def _added(raw):
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 2048, "content": "<new>"})


OTHER_TOKENS = {_swapped: "as token 700 .*2 tokens differ", _added: "as token 2048"}


@pytest.mark.parametrize(("change", "says"), OTHER_TOKENS.items(), ids=lambda answer: getattr(answer, "__name__", ""))
def test_other_tokens_are_refused_before_weights_are_read(tmp_path, change, says):
    """Vocabularies of one size are compared token by token; the folder has no weights."""
    verifier_folder = pairs.locate("tiny", "verifier")
    raw = json.loads((verifier_folder / "tokenizer.json").read_text())
    change(raw)
    (tmp_path / "config.json").write_text((verifier_folder / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with refused(f"drafter does not fit the verifier: .* {says}"):
        tf.load("tiny", drafter=tmp_path)


@pytest.mark.slow
def test_every_command_serves_it(short, tmp_path, capsys):
    """A verifier drafts for itself."""
    jax.config.update("jax_enable_x64", False)
    try:
        model = tf.load(verifier=short, drafter=short)
        goes_through_everything(model, short, tmp_path, capsys, {"nodes": 4, "depths": 2}, short)
    finally:
        jax.config.update("jax_enable_x64", True)
