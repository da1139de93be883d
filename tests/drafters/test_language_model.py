"""Language models as drafters: state, full acceptance of the verifier's own drafts, files; see test_every_drafter.py"""

import json
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import make_pair, random_weights
from conftest import RANDOM_MODEL
from extending import goes_through_everything
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.drafters import LanguageModelDrafter
from treeflash_jax.engine.settings import pairs
from treeflash_jax.formats import model_files
from treeflash_jax.models import decoder

SMALL = replace(RANDOM_MODEL, num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=32)
pytestmark = pytest.mark.usefixtures("float64")


@cache
def noisy_pair(noise: float) -> tf.TreeFlash:
    """A random verifier, and as its drafter the same weights with noise on them."""
    pair = make_pair(RANDOM_MODEL, LanguageModelDrafter(layers=RANDOM_MODEL), dtype=jnp.float64)
    drafter = jax.tree.map(lambda x, y: x + noise * y, pair.weights.verifier, pair.weights.drafter)
    return tf.TreeFlash(RANDOM_MODEL, pair.weights.replace(drafter=drafter), drafter=pair.drafter)


@pytest.mark.slow
@pytest.mark.parametrize("how", [
    {"nodes": 17, "drafter_temperature": 0.02},
    {"builder": "walk", "depths": 3},
])  # fmt: skip
def test_the_verifiers_own_drafts_are_accepted_to_full_depth(how):
    [result] = noisy_pair(0.0).generate([[1, 2, 3]], max_new_tokens=40, stop_ids=(), ngrams=0, **how)
    assert set(result.accepted_before_cut[:-1]) == {how.get("depths", 8) + 1}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"builder": "paths", "nodes": 9}, {"nodes": 9}], ids=str)
def test_a_tree_is_drawn_from_the_anchor_that_the_round_had(how):
    """Rules for sampled trees draw anchors that sampling after the prompt would not give."""
    settings = {"max_new_tokens": 24, "stop_ids": (), "temperature": 1.0, "seed": 5, "children": 8}
    [result] = noisy_pair(0.15).generate([[1, 2, 3]], **settings, **how)
    for index, length in enumerate(result.accept_lengths):
        assert sum(result.tree(index).accepted) >= length or index == len(result.accept_lengths) - 1


def test_a_folder_of_a_language_model_drafts_and_what_does_not_fit_is_refused(tmp_path):
    big, small, other = (tmp_path / name for name in ("big", "small", "other"))
    for folder, config in ((big, RANDOM_MODEL), (small, SMALL), (other, replace(SMALL, vocab_size=60))):
        weights = random_weights(decoder.specs(config))
        model_files.save_verifier(folder, config, weights, jnp.float32)
    model = tf.load(big, drafter=small, dtype="float32")
    assert model.drafter == LanguageModelDrafter(layers=model_files.read_verifier_config(small))
    jax.tree.map(np.testing.assert_array_equal, model.weights.drafter, model_files.load_verifier(small)[1])
    refused(lambda: tf.load(big, drafter=other), "a language model with a vocabulary of 60, expected the verifier's, of 64")
    for folder, dialect in ((small, "dflash"), (pairs.locate("tiny", "drafter"), "language_model")):
        convert = partial(model_files.convert_drafter, folder, tmp_path / "converted", dialect)
        refused(convert, f"got dialect '{dialect}' for a drafter of kind")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    words = "got model_type 'gpt2', expected a drafter's", "or that of a language model"
    refused(lambda: model_files.read_drafter_config(tmp_path), *words)


def test_other_tokens_are_refused_before_weights_are_read(tmp_path):
    """Vocabularies of one size are compared token by token; the folder has no weights."""
    folder = pairs.locate("tiny", "verifier")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    raw = json.loads((folder / "tokenizer.json").read_text())
    ids, added = raw["model"]["vocab"], raw["added_tokens"]
    first, second = (token for token, id in ids.items() if id in (700, 900))
    swapped = ids | {first: ids[second], second: ids[first]}
    for words, change in (
        (["as token 700", "2 tokens differ"], {"model": raw["model"] | {"vocab": swapped}}),
        (["as token 2048"], {"added_tokens": [*added, added[0] | {"id": 2048, "content": "<new>"}]}),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw | change))
        refused(lambda: tf.load("tiny", drafter=tmp_path), "drafter does not fit the verifier: ", *words)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "settings"), [(None, {"nodes": 4, "depths": 2}), ("ngram", {"nodes": 4})])
def test_every_command_serves_it(short, tmp_path, capsys, drafter, settings):
    """A verifier drafts for itself, and n-grams, which have no weights, do."""
    folder = pairs.locate(drafter, "drafter") if drafter else short
    with jax.enable_x64(False):
        goes_through_everything(tf.load(verifier=short, drafter=folder), folder, tmp_path, capsys, settings, short)
