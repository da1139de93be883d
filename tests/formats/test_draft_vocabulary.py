"""draft_vocabulary.json: the tokens that a drafter is limited to."""

import json
import shutil

import numpy as np
import pytest
from answers import drafted_as_plain
from conftest import needs_8_devices
from model_files import assert_same
from refusals import refused
from safetensors.numpy import load_file, save_file

import treeflash_jax as tf
from treeflash_jax.bench.shapes import describe_tree
from treeflash_jax.drafters.block.block_drafter import VOCABULARIES
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats import draft_vocabulary, model_files

PROMPTS = ["Tom has 3 apples and buys 4 more. How many does he have?", "Write a function that adds two numbers."]


def limited(source, folder):
    """Copies a drafter and limits it to the even ids."""
    shutil.copytree(source, folder)
    (folder / draft_vocabulary.NAME).write_text(json.dumps({"ids": [*range(0, 2048, 2)][::-1]}))
    return folder


@pytest.fixture
def folder(tmp_path):
    return limited(locate("tiny", "drafter"), tmp_path / "drafter")


def drafted(model, **settings):
    return model.generate(PROMPTS, max_new_tokens=24, nodes=8, candidates=4, **settings)


@pytest.mark.slow
def test_only_listed_tokens_are_drafted_and_answers_stay(folder, tiny):
    model = tf.load("tiny", drafter=folder)
    table_vd = model.weights.verifier.get("unembed", model.weights.verifier["embed"])
    np.testing.assert_array_equal(model.weights.drafter["unembed"], table_vd[::2])
    whole, few, every = drafted(tiny), drafted(model), drafted(model, draft_vocabulary="all")
    assert [result.ids for result in few] == [result.ids for result in whole]
    assert [result.accept_lengths for result in every] == [result.accept_lengths for result in whole]
    assert np.mean([result.tau for result in few]) < np.mean([result.tau for result in whole])
    plans = [model.plan(tf.GenerateConfig(nodes=8, draft_vocabulary=name)) for name in VOCABULARIES]
    assert [describe_tree(plan)["draft_vocabulary"] for plan in plans] == ["frequent", "all"], "two systems of a benchmark"
    refused(lambda: drafted(tiny, draft_vocabulary="frequent"), "draft_vocabulary 'frequent'", "no list")
    refused(lambda: drafted(model, children=1100), "children 1100", "at most 1024")


@pytest.mark.slow
def test_a_language_model_scores_listed_rows_of_its_own_table(tmp_path, tiny):
    """The drafter is the verifier with a table that is a little larger."""
    folder = limited(locate("tiny"), tmp_path / "drafter")
    weights = tiny.weights.verifier
    model_files.save_verifier(folder, tiny.verifier, weights | {"embed": weights["embed"] * 1.05}, dtype="float32")
    model = tf.load("tiny", drafter=folder)
    np.testing.assert_array_equal(model.weights.drafter["unembed"], (weights["embed"] * 1.05)[::2])
    few = drafted_as_plain(model, PROMPTS, {"nodes": 8, "depths": 4, "children": 4}, max_new_tokens=24)
    assert 1.2 < np.mean([result.tau for result in few]) < 4
    refused(lambda: model.generate(PROMPTS, children=1025), "children 1025", "1 to 1024")


@needs_8_devices
def test_rows_of_the_table_are_sharded_like_it(folder):
    one, many = (tf.load("tiny", drafter=folder, mesh=mesh) for mesh in (None, tf.make_mesh(4, 2)))
    assert_same(many.weights.drafter, one.weights.drafter)
    assert many.weights.drafter["unembed"].sharding.spec[0] == "model"


def test_quantized_verifiers_lend_rounded_rows(folder, tiny):
    table_vd, model = tiny.weights.verifier["embed"], tf.load("tiny", drafter=folder, quantize="int8")
    assert 0 < np.abs(model.weights.drafter["unembed"] - table_vd[::2]).max() < 0.02 * np.abs(table_vd).max()


@pytest.mark.parametrize("text, words", [
    ('{"ids": [1, 2, 1]}', ["an id twice"]), ('{"ids": [2048]}', ["2048", "from 0 to 2047"]), ('{"ids": []}', ["ids"]),
    ("[1]", []),
])  # fmt: skip
def test_damaged_lists(folder, text, words):
    (folder / draft_vocabulary.NAME).write_text(text)
    refused(lambda: tf.load("tiny", drafter=folder), draft_vocabulary.NAME, *words)


def test_other_drafters_have_no_list(folder, tmp_path):
    ngram = shutil.copytree(locate("ngram", "drafter"), tmp_path / "ngram")
    shutil.copy(folder / draft_vocabulary.NAME, ngram)
    refused(lambda: tf.load("tiny", drafter=ngram), "kind 'ngram'", "a kind that supports one")


def test_conversions_keep_it(folder, tmp_path):
    model_files.convert_drafter(folder, tmp_path / "out", "dflash", drop_head=True)
    assert draft_vocabulary.read(tmp_path / "out", 2048).tolist() == [*range(0, 2048, 2)]


def test_conversions_keep_the_tokenizer_of_a_language_model(tmp_path):
    model_files.convert_drafter(locate("tiny"), tmp_path / "out", "language_model")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in locate("tiny").iterdir()}
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (locate("tiny") / name).read_bytes()


def test_conversions_refuse_what_they_would_round(folder, tmp_path):
    path = folder / "model.safetensors"
    save_file({name: x.astype(np.float64) for name, x in load_file(path).items()}, path)
    refused(lambda: model_files.convert_drafter(folder, tmp_path / "out", "dflash", drop_head=True), "'F64'", "BF16")
    assert not (tmp_path / "out").exists()


def test_frequent_tokens_are_listed_and_lower_ids_first_among_equals(tmp_path):
    counts_v = np.zeros(2**14, np.int64)
    counts_v[[7, 9000]] = 3, 5
    draft_vocabulary.write(tmp_path, counts_v)
    assert draft_vocabulary.read(tmp_path, 2**14).tolist() == [*range(2**14 // 6 - 1), 9000]
    draft_vocabulary.write(tmp_path / "small", counts_v[: 2**13])
    assert not (tmp_path / "small").exists()
