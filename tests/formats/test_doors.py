"""Families and dialects defined outside the package: written, read, converted and refused like its own."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import treeflash_jax as tf
from treeflash_jax.cli import main
from treeflash_jax.formats import models
from treeflash_jax.formats.architectures import ARCHITECTURES, common
from treeflash_jax.formats.architectures.record import Architecture, Key
from treeflash_jax.formats.dialects import DIALECTS
from treeflash_jax.formats.dialects.dflash import DFlash
from treeflash_jax.params import Entry

CHAT = [{"role": "user", "content": "Ada has 3 pens and buys 5 more. How many pens has she?"}]
SMALL = {"nodes": 4, "candidates": 2, "children": 2}
OPTIONS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]

# An architecture: Qwen3 under other names, with a key of its own that must not change the numbers.


TOY_ARCHITECTURE = Architecture(
    model_type="toy",
    class_name="ToyForCausalLM",
    keys=(*common.keys(head_dim=lambda fields: 32)[1:], Key(name="words", field="vocab_size")),
    constants={"qk_norm": True},
    only=common.ONLY | {"logit_scale": (1.0,)},
    inert=common.INERT | {"recipe"},
    layer={name: replace(entry, name=f"toy.{name}") for name, entry in ARCHITECTURES["qwen3"].layer.items()},
    outside=common.OUTSIDE | {"norm": Entry("the.norm")},
)


def test_an_architecture(monkeypatch, tiny, tmp_path, capsys):
    monkeypatch.setitem(ARCHITECTURES, "toy", TOY_ARCHITECTURE)
    config, folder = replace(tiny.verifier, model_type="toy"), tmp_path / "verifier"
    models.save_verifier(folder, config, tiny.weights.verifier, jnp.float32)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["words"] == config.vocab_size and "vocab_size" not in raw and raw["architectures"] == ["ToyForCausalLM"]
    assert {"the.norm", "model.layers.0.toy.q"} < load_file(folder / "model.safetensors").keys()
    (folder / "config.json").write_text(json.dumps(raw | {"logit_scale": 1.0, "recipe": "ours"}))
    model = tf.load(verifier=folder, drafter="tiny")
    assert model.verifier == config
    prompt = tiny.encode(CHAT)
    plain = tiny.generate([prompt], max_new_tokens=8, builder="none")[0]
    assert model.generate([prompt], max_new_tokens=8, **SMALL)[0].ids == plain.ids
    words = ["--prompt-ids", " ".join(map(str, prompt)), "--max-new-tokens", "8", "--json", *OPTIONS]
    assert main(["generate", "--verifier", str(folder), "--drafter", "tiny", *words]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == plain.ids
    words = ["--shape", str(folder), "--no-compile", "--dtype", "float32"]
    assert main(["bench", "memory", *words]) == 0
    for change, word in (({"logit_scale": 2.0}, "logit_scale"), ({"vocab_size": 3}, "vocab_size")):
        (folder / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ValueError, match=word):
            models.read_verifier_config(folder)


# A file dialect: DFlash files marked with a version, their tensors under a prefix of their own.


class ToyDialect(DFlash):
    name = "toy"
    marks = ("toy_version",)
    keys = (*DFlash.keys, "toy_version")
    heads = ("marginal", "mlp")

    def read_config(self, path, keys):
        return replace(super().read_config(path, keys), head="mlp", num_nodes=5)

    def entries(self, config, specs, names):
        moved = super().entries(config, specs, ())
        return jax.tree.map(lambda entry: replace(entry, name="toy." + entry.name), moved)

    def to_hf(self, config):
        return super().to_hf(config) | {"toy_version": 1}


def test_a_file_dialect(monkeypatch, tiny, tmp_path, capsys):
    monkeypatch.setitem(DIALECTS, "toy", ToyDialect())
    folder, back = tmp_path / "toy", tmp_path / "back"
    models.save_drafter(folder, tiny.drafter, tiny.weights.drafter, dialect="toy", dtype=jnp.float32)
    assert all(name.startswith("toy.") for name in load_file(folder / "model.safetensors"))
    model = tf.load("tiny", drafter=folder)
    assert model.drafter == replace(tiny.drafter, num_nodes=5, drafter_temperature=1.0, sampled_above=None)
    jax.tree.map(np.testing.assert_array_equal, model.weights.drafter, tiny.weights.drafter)
    assert main(["convert", str(folder), str(back), "--to", "treeflash"]) == 0
    assert main(["convert", str(back), str(tmp_path / "again"), "--to", "toy"]) == 0
    assert load_file(tmp_path / "again/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    capsys.readouterr()
    chat = ["--chat", CHAT[0]["content"], "--max-new-tokens", "8", "--json"]
    plain = tiny.generate(CHAT, max_new_tokens=8, builder="none")[0]
    assert main(["generate", "--verifier", "tiny", "--drafter", str(folder), *chat, *OPTIONS]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == plain.ids
    with pytest.raises(ValueError, match="got a drafter's config"):
        models.read_verifier_config(folder)
