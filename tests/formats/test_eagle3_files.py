"""EAGLE-3 files: what the published forms mean, what is written, and what is refused in one line."""

import json
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA
from model_files import assert_same, change_tensors
from published_configs import parse, without
from refusals import refused
from safetensors.numpy import load_file

from treeflash_jax.cli.commands import main
from treeflash_jax.formats import dialects, model_files
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


def read_raw(form: str) -> dict:
    return json.loads((FOLDER / form / "config.json").read_text())


def read_config(form: str, **changes):
    return parse("drafter", read_raw(form) | changes)


@pytest.mark.parametrize("form", TAPS)
def test_a_form_is_recognised_and_names_its_layers(form):
    keys = model_files.Keys(read_raw(form), "config.json")
    assert dialects.recognise(FOLDER / form, keys, "drafter").name == DIALECT.get(form, "speculators")
    config = model_files.read_drafter_config(FOLDER / form).fitted(sizes(hidden_size=8 if form == "specforge" else 12))
    assert config.taps == TAPS[form] and config.num_taps == len(config.taps)


@pytest.mark.parametrize("num_layers, inputs", [(32, (2, 16, 29)), (36, (2, 18, 33)), (48, (2, 24, 45))])
def test_every_form_names_the_published_layers(num_layers, inputs):
    """A form counts the inputs of layers or their outputs: the input of layer i is the output of layer i - 1."""
    outputs = [i - 1 for i in inputs]
    for form, changes in {
        "eagle": {},
        "angelslim": {},
        "specforge": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs}, "target_hidden_size": 12},
        "speculators": {"eagle_aux_hidden_state_layer_ids": list(inputs)},
        "deepspec": {"target_layer_ids": outputs},
    }.items():
        assert list(read_config(form, **changes).fitted(sizes(num_layers)).taps) == outputs, form


def test_where_no_layers_are_named_the_rule_of_the_repository_holds(caplog):
    config = read_config("speculators", eagle_aux_hidden_state_layer_ids=None)
    assert config.taps is None and config.fitted(sizes(36)).taps == (1, 17, 32)
    note = "the EAGLE-3 drafter's files name no layers: outputs of layers [1, 17, 32] are read, by EAGLE's rule"
    assert caplog.messages == [note]
    refused(lambda: read_config("deepspec", target_layer_ids=None), "target_layer_ids = None")


@pytest.mark.parametrize("form", TAPS)
def test_a_form_is_written_and_read_again(form, tmp_path, capsys):
    """Through the command line, into the one dialect that is written; a second time, bit for bit."""
    first, again = tmp_path / "first", tmp_path / "again"
    assert main(["convert", str(FOLDER / form), str(first), "--to", "speculators"]) == 0
    assert main(["convert", str(first), str(again), "--to", "speculators"]) == 0
    capsys.readouterr()
    config, params = model_files.load_drafter(FOLDER / form)
    converted, got = model_files.load_drafter(first)
    assert_same((converted, got), (config, params))
    assert (first / "config.json").read_text() == (again / "config.json").read_text()
    assert json.loads((first / "config.json").read_text())["speculators_model_type"] == "eagle3"
    names = load_file(first / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in names and "midlayer.self_attn.q_proj.weight" not in names


def test_defaults_of_drafting_are_kept(tmp_path):
    config, params = model_files.load_drafter(FOLDER / "speculators")
    changed = replace(config, num_depths=5, num_nodes=32, drafter_temperature=0.7, tau=2.5, thinking=False)
    model_files.save_drafter(tmp_path / "out", changed, params, dialect="speculators", dtype=jnp.float32)
    assert model_files.read_drafter_config(tmp_path / "out") == changed


REFUSED_KEYS = {
    "two layers": ("eagle", {"num_hidden_layers": 2}, "got num_hidden_layers 2, expected 1"),
    "both norms": ("speculators", {"norm_before_fc": True}, "got fc_norm and norm_before_fc"),
    "a raw state": ("specforge", {"norm_output": False}, "norm_output"),
    "the input of all": ("speculators", {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}, "read as inputs of layers"),
    "another layer": ("deepspec", {"model_type": "gemma"}, "model_type 'gemma'"),
    "another norm": ("specforge", {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
    "more than all tokens": ("eagle", {"draft_vocab_size": 49}, "draft_vocab_size"),
    "another kind": ("speculators", {"speculators_model_type": "peagle", "transformer_layer_config": {}}, "speculators"),
}


@pytest.mark.parametrize("form, changes, words", REFUSED_KEYS.values(), ids=REFUSED_KEYS)
def test_configs_that_are_refused(form, changes, words):
    raw = read_raw(form) | changes
    if changes.get("speculators_model_type"):
        del raw["draft_vocab_size"]
    refused(lambda: parse("drafter", raw), words)


@pytest.mark.parametrize("form, model, words", [
    ("eagle", sizes(hidden_size=16), "hidden size is 12 in the drafter and 16"),
    ("eagle", sizes(vocab_size=50), "vocabulary size is 48 in the drafter and 50"),
    ("deepspec", sizes(num_layers=5), "reads verifier layers [5], but the verifier has layers 0 to 4"),
    ("speculators", sizes(num_layers=4), "reads verifier layers [4]"),
])  # fmt: skip
def test_drafters_of_another_verifier_are_refused(form, model, words):
    refused(lambda: read_config(form).fitted(model), words)


# d2t[i] + i is the i-th token of the drafter.
REFUSED_TENSORS = {
    "no layer": ("eagle", lambda t: {n.replace("midlayer.", "decoder."): x for n, x in t.items()}, "the first is midlayer"),
    "another width": ("eagle", lambda t: t | {"fc.weight": t["fc.weight"][:, :24].copy()}, ("fc.weight has shape", "24]")),
    "a scalar in place of a matrix": ("eagle", lambda t: t | {"fc.weight": np.array(1.0)}, "fc.weight has shape []"),
    "a scalar in place of a list": ("eagle", lambda t: t | {"t2d": np.array(True)}, "t2d and d2t"),
    "no list of tokens": ("eagle", lambda t: without(t, "d2t"), "missing: 1, the first is d2t"),
    "a list too short": ("eagle", lambda t: t | {"d2t": t["d2t"][:9].copy()}, "shape [9]"),
    "a token below all": ("eagle", lambda t: t | {"d2t": np.r_[-1, t["d2t"][1:]]}, "leaves the verifier's vocabulary"),
    "a token beyond all": ("eagle", lambda t: t | {"d2t": np.r_[t["d2t"][:19], 29]}, "leaves the verifier's vocabulary"),
    "a token twice": ("eagle", lambda t: t | {"d2t": np.r_[t["d2t"][:3], t["d2t"][2] - 1, t["d2t"][4:]]}, "or its order"),
    "two lists": ("eagle", lambda t: t | {"t2d": ~t["t2d"]}, "t2d and d2t"),
    "another list of all": ("deepspec", lambda t: t | {"d2t": np.r_[1, np.zeros(47, np.int64)]}, "or its order"),
    "a list of floats": ("eagle", lambda t: t | {"d2t": t["d2t"].astype(np.float32)}, "d2t has type F32"),
    "no embedding": ("specforge", lambda t: without(t, "embed_tokens.weight"), "1, the first is embed_tokens.weight"),
}  # fmt: skip


@pytest.mark.parametrize("form, change, words", REFUSED_TENSORS.values(), ids=REFUSED_TENSORS)
def test_tensors_that_are_refused(form, change, words, tmp_path):
    folder = shutil.copytree(FOLDER / form, tmp_path / "drafter")
    change_tensors(folder, change)
    refused(lambda: model_files.load_drafter(folder), *([words] if isinstance(words, str) else words))


def test_files_that_can_run_code_are_not_read(tmp_path):
    folder = shutil.copytree(FOLDER / "eagle", tmp_path / "drafter")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(lambda: model_files.load_drafter(folder), "got pytorch_model.bin, expected model.safetensors: convert it")


def test_a_list_of_all_tokens_says_nothing(tmp_path):
    folder = shutil.copytree(FOLDER / "deepspec", tmp_path / "drafter")
    change_tensors(folder, lambda t: t | {"d2t": np.zeros(48, np.int64), "verifier_norm.weight": np.ones(12)})
    assert_same(model_files.load_drafter(folder), model_files.load_drafter(FOLDER / "deepspec"))
