"""EAGLE-3 files: what the published forms mean, what is written, and what is refused in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA
from safetensors.numpy import load_file, save_file

from treeflash_jax.cli.commands import main
from treeflash_jax.core import parameters
from treeflash_jax.formats import dialects, models
from treeflash_jax.models import verifier
from treeflash_jax.models.config import ModelConfig

FOLDER = DATA / "eagle3"
TAPS = {  # in a verifier of six layers
    "eagle": (1, 2, 2), "angelslim": (1, 2, 2), "specforge": (1, 3, 4), "speculators": (1, 2, 4),
    "speculators_qwen3": (1, 2, 5), "deepspec": (0, 1, 2, 3, 5),
}  # fmt: skip
DIALECT = {"eagle": "eagle3", "angelslim": "eagle3", "specforge": "eagle3", "deepspec": "deepspec"}


def sizes(num_layers: int = 6, hidden_size: int = 12, **others) -> ModelConfig:
    sizes = {"vocab_size": 48, "intermediate_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4, **others}
    return ModelConfig(num_layers=num_layers, hidden_size=hidden_size, **sizes)


def raw_of(form: str) -> dict:
    return json.loads((FOLDER / form / "config.json").read_text())


def of_form(form: str, **changes):
    return dialects.parse("drafter", raw_of(form) | changes)


@pytest.mark.parametrize("form", TAPS)
def test_a_form_is_recognised_and_names_its_layers(form):
    keys = models.Keys(raw_of(form), "config.json")
    assert dialects.of(FOLDER / form, keys, "drafter").name == DIALECT.get(form, "speculators")
    config = models.read_drafter_config(FOLDER / form).fitted(sizes(hidden_size=8 if form == "specforge" else 12))
    assert config.taps == TAPS[form] and config.num_taps == len(config.taps)


@pytest.mark.parametrize("num_layers, inputs", [(32, (2, 16, 29)), (36, (2, 18, 33)), (48, (2, 24, 45))])
def test_features_are_those_of_the_tapped_layers(num_layers, inputs):
    """Layer i adds i + 1 to every feature, so the input of layer i is i (i + 1) / 2, whatever a form calls it."""
    model = sizes(num_layers, tie_embeddings=True)
    weights = parameters.initialize(verifier.specs(model), jax.random.key(0))
    weights = jax.tree.map(jnp.zeros_like, weights)
    # Attention to a value of 1 in every channel, scaled by the output map: the residual grows by i + 1.
    weights["embed"] = jnp.ones_like(weights["embed"])
    for index, layer in enumerate(weights["groups"][0]):
        layer["attention_norm"] = jnp.ones_like(layer["attention_norm"])
        layer["v"] = jnp.full_like(layer["v"], 1 / model.hidden_size)
        layer["o"] = jnp.full_like(layer["o"], (index + 1) / 4)
    tokens = jnp.zeros((1, 2), jnp.int32)
    expected = [1 + i * (i + 1) / 2 for i in inputs]
    outputs = [i - 1 for i in inputs]
    named = {
        "eagle": {},
        "angelslim": {},
        "specforge": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs}, "target_hidden_size": 12},
        "speculators": {"eagle_aux_hidden_state_layer_ids": list(inputs)},
        "deepspec": {"target_layer_ids": outputs},
    }
    for form, changes in named.items():
        taps = of_form(form, **changes).fitted(model).taps
        assert list(taps) == outputs, form
    positions, mask = jnp.arange(2)[None], verifier.causal_mask(1, 2)
    out = verifier.forward(weights, model, tokens, positions, mask, taps=tuple(outputs))
    got = np.asarray(out.features_btj)[0, -1].reshape(3, -1)
    np.testing.assert_allclose(got, np.array(expected)[:, None] * np.ones((1, 12)), rtol=1e-4)


def test_where_no_layers_are_named_the_rule_of_the_repository_holds():
    config = of_form("speculators", eagle_aux_hidden_state_layer_ids=None)
    assert config.taps is None and config.fitted(sizes(36)).taps == (1, 17, 32)


@pytest.mark.parametrize("form", TAPS)
def test_a_form_is_written_and_read_again(form, tmp_path, capsys):
    """Through the command line, into the one dialect that is written; a second time, bit for bit."""
    first, again = tmp_path / "first", tmp_path / "again"
    assert main(["convert", str(FOLDER / form), str(first), "--to", "speculators"]) == 0
    assert main(["convert", str(first), str(again), "--to", "speculators"]) == 0
    capsys.readouterr()
    config, params = models.load_drafter(FOLDER / form)
    got_config, got = models.load_drafter(first)
    assert replace(got_config, taps_are_inputs=config.taps_are_inputs) == config
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert (first / "config.json").read_text() == (again / "config.json").read_text()
    assert json.loads((first / "config.json").read_text())["speculators_model_type"] == "eagle3"
    names = load_file(first / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in names and "midlayer.self_attn.q_proj.weight" not in names


def test_defaults_of_drafting_are_kept(tmp_path):
    config, params = models.load_drafter(FOLDER / "speculators")
    changed = replace(config, num_depths=5, num_nodes=32, drafter_temperature=0.7, sampled_above=0.9, thinking=False)
    models.save_drafter(tmp_path / "out", changed, params, dialect="speculators", dtype=jnp.float32)
    assert models.read_drafter_config(tmp_path / "out") == changed


REFUSED_KEYS = {
    "two layers": ("eagle", {"num_hidden_layers": 2}, "got num_hidden_layers 2, expected 1"),
    "both norms": ("speculators", {"norm_before_fc": True}, "got fc_norm and norm_before_fc"),
    "a raw state": ("specforge", {"norm_output": False}, "norm_output"),
    "one is not true": ("specforge", {"norm_output": 1}, "norm_output = 1"),
    "what norm_output means": ("deepspec", {"norm_output": True}, "norm_output"),
    "the input of all": ("speculators", {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}, "read as inputs of layers"),
    "another layer": ("deepspec", {"model_type": "gemma"}, "model_type 'gemma'"),
    "an unknown key": ("eagle", {"depth_gate": 1}, "depth_gate"),
    "an unknown key outside": ("speculators", {"depth_gate": 1}, "depth_gate"),
    "an unknown key inside": ("specforge", {"eagle_config": {"depth_gate": 1}}, "depth_gate"),
    "more than all tokens": ("eagle", {"draft_vocab_size": 49}, "draft_vocab_size"),
    "another kind": ("speculators", {"speculators_model_type": "peagle", "transformer_layer_config": {}}, "speculators"),
}


@pytest.mark.parametrize("form, changes, words", REFUSED_KEYS.values(), ids=REFUSED_KEYS)
def test_configs_that_are_refused(form, changes, words):
    raw = raw_of(form) | changes
    if changes.get("speculators_model_type"):
        del raw["draft_vocab_size"]
    with pytest.raises(ValueError, match=words) as error:
        dialects.parse("drafter", raw)
    assert "\n" not in str(error.value)


MISFITS = {
    "hidden size": ("eagle", sizes(hidden_size=16), "hidden size is 12 in the drafter and 16"),
    "vocabulary": ("eagle", sizes(vocab_size=50), "vocabulary size is 48 in the drafter and 50"),
    "a tap outside": ("deepspec", sizes(num_layers=5), "read as outputs of layers"),
    "a tap outside, counted by inputs": ("speculators", sizes(num_layers=4), r"\[5\], read as inputs of layers"),
}


@pytest.mark.parametrize("form, model, words", MISFITS.values(), ids=MISFITS)
def test_drafters_of_another_verifier_are_refused(form, model, words):
    with pytest.raises(ValueError, match=words) as error:
        of_form(form).fitted(model)
    assert "\n" not in str(error.value)


def _no_prefix(tensors):
    return {name.replace("midlayer.", "decoder."): x for name, x in tensors.items()}


def _ids(change):
    def changed(tensors):
        ids = np.arange(20) + tensors["d2t"]
        change(ids)
        return tensors | {"d2t": ids - np.arange(20)}

    return changed


def _set(index, value):
    return _ids(lambda ids: ids.__setitem__(index, value))


REFUSED_TENSORS = {
    "no layer": ("eagle", _no_prefix, "'midlayer.' or 'layers.0.'"),
    "another width": ("eagle", lambda t: t | {"fc.weight": t["fc.weight"][:, :24].copy()}, r"for \[24\] inputs"),
    "a scalar in place of a matrix": ("eagle", lambda t: t | {"fc.weight": np.array(1.0)}, r"for \[\] inputs"),
    "a scalar in place of a list": ("eagle", lambda t: t | {"t2d": np.array(True)}, "t2d and d2t"),
    "no list of tokens": ("eagle", lambda t: {n: x for n, x in t.items() if n != "d2t"}, "no tensor d2t"),
    "a list too short": ("eagle", lambda t: t | {"d2t": t["d2t"][:9].copy()}, r"shape \[9\]"),
    "a token below all": ("eagle", _set(0, -1), "leaves the verifier's vocabulary"),
    "a token beyond all": ("eagle", _set(19, 48), "leaves the verifier's vocabulary"),
    "a token twice": ("eagle", _ids(lambda ids: ids.__setitem__(3, ids[2])), "or its order"),
    "two lists": ("eagle", lambda t: t | {"t2d": ~t["t2d"]}, "t2d and d2t"),
    "a list of floats": ("eagle", lambda t: t | {"d2t": t["d2t"].astype(np.float32)}, "d2t has type F32"),
    "no embedding": (
        "specforge", lambda t: {n: x for n, x in t.items() if n != "embed_tokens.weight"}, "no tensor embed_tokens.weight"
    ),
    "an unknown tensor": ("eagle", lambda t: t | {"gate.weight": np.ones(3, np.float32)}, "unknown tensors"),
    "a missing tensor": ("deepspec", lambda t: {n: x for n, x in t.items() if n != "norm.weight"}, "norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("form, change, words", REFUSED_TENSORS.values(), ids=REFUSED_TENSORS)
def test_tensors_that_are_refused(form, change, words, tmp_path):
    folder = tmp_path / "drafter"
    shutil.copytree(FOLDER / form, folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(ValueError, match=words) as error:
        models.load_drafter(folder)
    assert "\n" not in str(error.value)


def test_files_that_can_run_code_are_not_read(tmp_path):
    folder = tmp_path / "drafter"
    shutil.copytree(FOLDER / "eagle", folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"got pytorch_model\.bin, expected model\.safetensors: convert it"):
        models.load_drafter(folder)


def test_a_list_of_all_tokens_says_nothing(tmp_path):
    folder = tmp_path / "drafter"
    shutil.copytree(FOLDER / "deepspec", folder)
    tensors = load_file(folder / "model.safetensors") | {"d2t": np.zeros(48, np.int64), "verifier_norm.weight": np.ones(12)}
    save_file(tensors, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, models.load_drafter(folder), models.load_drafter(FOLDER / "deepspec"))
