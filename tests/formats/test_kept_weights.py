"""Weights of quantised files, kept as they are stored: their numbers, answers, meshes, and what is expanded in loading."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_files
from answers import PROMPTS, TREE, assert_greedy, drafted_as_plain, read_texts, slow_unless
from conftest import DATA, FOLDERS, needs_8_devices
from gguf_files import write_small
from model_files import assert_same
from quantized_files import FORMATS, expand_kept, make_folders
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.core import programs, sharding
from treeflash_jax.engine import device_memory, loading
from treeflash_jax.engine import model as engine
from treeflash_jax.engine.device_memory import device_bytes
from treeflash_jax.formats import model_files
from treeflash_jax.formats.grouped_tensors import GroupedTensor
from treeflash_jax.models.quantized_weight import is_quantized

SOURCE = FOLDERS["verifier"]


def find_kept(weights) -> list:
    return [weight for weight in jax.tree.leaves(weights, is_leaf=is_quantized) if is_quantized(weight)]


def place(form: str, tmp_path):
    if form == "gguf":
        return write_small(tmp_path / "small.gguf", kind="Q8_0")
    return DATA / "hybrid" / "gpt_oss" if form == "gpt_oss" else make_folders(tmp_path, SOURCE, form)[0]


@pytest.mark.parametrize("form, dtype", [
    *((form, jnp.float32) for form in (*FORMATS, "gpt_oss")),
    *(slow_unless(form == "gptq", form, jnp.bfloat16) for form in (*FORMATS, "gpt_oss")),
])  # fmt: skip
def test_kept_weights_are_the_expanded_ones_to_the_last_bit(form, dtype, tmp_path, monkeypatch):
    folder = place(form, tmp_path)
    expanded = model_files.load_verifier(folder, dtype=dtype)[1]
    monkeypatch.setattr(GroupedTensor, "__getitem__", None)  # nothing is expanded
    config, kept = model_files.load_verifier(folder, dtype=dtype, quantize="int4")
    held = find_kept(kept)
    assert len(held) == (3 if form == "gpt_oss" else 7) * config.num_layers
    assert {weight.dtype for weight in held} == {jnp.dtype(dtype)}
    assert {weight.values.dtype.name for weight in held} <= {"int4", "float4_e2m1fn"}
    assert_same(expand_kept(kept, dtype), expanded)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("form", ["gptq", "nvfp4-pack-quantized"])
def test_drafted_answers_are_those_of_one_token_steps(form, tmp_path):
    """With zero points and inputs in another order; and with factors of scales."""
    model = tf.load(verifier=place(form, tmp_path), drafter=FOLDERS["drafter"], dtype="float64", quantize="int4")
    assert model.quantize == "int4" and model.dtype == jnp.float64
    results = drafted_as_plain(model, PROMPTS, TREE, max_new_tokens=12)
    assert any(max(result.accept_lengths) > 1 for result in results)
    logits_btv = assert_greedy(model, PROMPTS, results)
    model.weights = model.weights.replace(verifier=expand_kept(model.weights.verifier, jnp.float64))
    np.testing.assert_allclose(logits_btv, assert_greedy(model, PROMPTS, results), atol=1e-11)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_a_language_model_drafts_with_kept_weights(tmp_path):
    """A verifier drafts for itself: all is accepted."""
    folder = place("gptq", tmp_path)
    model = tf.load(verifier=folder, drafter=folder, dtype="float64", quantize="int4")
    assert_same(model.weights.drafter, model.weights.verifier)
    results = drafted_as_plain(model, PROMPTS, {"nodes": 8, "children": 4, "ngrams": 0}, max_new_tokens=12)
    assert all(max(result.accept_lengths) > 2 for result in results)


@pytest.mark.parametrize("source, form", [("tiny", "awq"), ("qwen3_5", "modelopt")])
def test_drafters_keep_weights_by_the_rule_of_verifiers(source, form, tmp_path, monkeypatch):
    """A language model, and the layer of multi-token prediction in a verifier's files."""
    is_layer = source != "tiny"
    folder, dense = make_folders(tmp_path, DATA / "hybrid" / source if is_layer else SOURCE, form, kept=("conv1d",))
    load = partial(tf.load, verifier=dense, drafter=folder, thinking=is_layer)
    expanded = load().weights
    monkeypatch.setattr(loading, "keeps_groups", lambda *_: True)
    kept, none = load().weights, load(quantize="none").weights
    assert_same(expand_kept(kept.drafter, jnp.float32), expanded.drafter)
    assert [len(find_kept(weights.drafter)) for weights in (expanded, none)] == [0, 0]
    assert len(find_kept(kept.drafter)) >= 7 and not find_kept(kept.verifier)
    assert not is_quantized(kept.drafter.get("fc")), "its groups would be along its first axis"
    rounded = load(quantize="int8").weights
    assert find_kept(rounded.verifier) and not find_kept(rounded.drafter), "drafters are not rounded"


@needs_8_devices
@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("form, group", [
    ("pack-quantized", 32), ("gpt_oss", 32), ("gptq", 16), ("awq", 16), ("modelopt", 16),
])  # fmt: skip
def test_a_mesh_has_whole_groups(form, group, tmp_path, monkeypatch):
    """Shards have 16 inputs: of groups of 32, half a group, whose scale and zero point are repeated."""
    monkeypatch.setattr(quantized_files, "GROUP", group)
    folder, mesh = place(form, tmp_path), tf.make_mesh(2, 4)
    config, whole = model_files.load_verifier(folder, dtype=jnp.float64, quantize="int4")
    _, parts = model_files.load_verifier(folder, dtype=jnp.float64, quantize="int4", mesh=mesh)
    assert_same(expand_kept(jax.device_get(parts), jnp.float64), expand_kept(whole, jnp.float64))
    smallest = [min(math.prod(weight.block) for weight in find_kept(weights)) for weights in (whole, parts)]
    assert smallest == [group, 16]
    for weight in find_kept(parts):
        values, scale = (part.addressable_shards[0].data.shape for part in (weight.values, weight.scale))
        assert tuple(size // count for size, count in zip(values, scale, strict=True)) == weight.block
    tokens_bt = jnp.arange(10).reshape(2, 5)
    run = jax.jit(lambda weights, tokens_bt: read_texts(weights, config, tokens_bt)[1])
    logits_btv = programs.call(run, parts, sharding.place(tokens_bt, mesh), mesh=mesh)
    np.testing.assert_allclose(logits_btv, run(whole, tokens_bt), atol=1e-11)


def test_automatic_loading_keeps_groups_if_the_device_gains(tmp_path, monkeypatch):
    folder = place("awq", tmp_path)
    load = partial(tf.load, verifier=folder, drafter="none")
    assert [load(quantize=scheme).quantize for scheme in (None, "none", "int4")] == [None, None, "int4"]
    monkeypatch.setattr(loading, "keeps_groups", lambda *_: True)
    assert [load(quantize=scheme).quantize for scheme in (None, "none")] == ["int4", None]
    kept = load(quantize="int4")
    refused(lambda: model_files.save_verifier(tmp_path / "x", kept.verifier, kept.weights.verifier), "int4", "'none'")


def test_footprints_count_four_bits(tmp_path):
    config, kept = model_files.load_verifier(place("modelopt", tmp_path), dtype=jnp.bfloat16, quantize="int4")
    for weight in find_kept(kept):
        assert device_bytes(weight) == weight.values.size // 2 + weight.scale.size + 4 * weight.outer.size


def test_tables_can_stay_wide(tmp_path):
    folder = place("gguf", tmp_path)
    config, weights = model_files.load_verifier(folder, quantize="int4", wide_tables=True)
    assert len(find_kept(weights)) == 7 * config.num_layers
    np.testing.assert_array_equal(weights["embed"], model_files.load_verifier(folder)[1]["embed"])


@pytest.mark.parametrize("form", ["awq", "gguf"])
def test_footprints_are_those_of_the_files(form, tmp_path, monkeypatch):
    """Before weights are read and for every request; a GGUF file of Q8_0 keeps 8 bits."""
    needs, check = [], device_memory.refuse_if_too_large
    for module in (loading, engine):
        monkeypatch.setattr(module, "refuse_if_too_large", lambda found, *more: needs.append(found) or check(found, *more))
    folder = place(form, tmp_path)
    model = tf.load(verifier=folder, drafter=folder, quantize="int4")
    model.prepare([[1, 2]], max_new_tokens=4)
    held = device_bytes(model.weights.verifier)
    assert [(found.verifier, found.drafter) for found in needs] == [(held, held)] * 2
    assert needs[0].verifier != device_memory.footprint(model.verifier, dtype=model.dtype, quantize="int4").verifier
