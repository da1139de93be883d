"""Extending the library: a toy of each kind, defined here and registered, works without an edit to the package."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from answers import drafted_as_plain, slow
from conftest import FOLDERS
from extending import OPTIONS, SMALL, generated, goes_through_everything
from refusals import refused
from safetensors.numpy import load_file

import treeflash_jax as tf
from train import head as head_stage
from treeflash_jax import trees
from treeflash_jax.acceptance import RULES
from treeflash_jax.acceptance.sample_and_match import SampleAndMatch
from treeflash_jax.cli.commands import main
from treeflash_jax.core.parameters import Entry, Spec
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.formats import model_files
from treeflash_jax.formats.architectures import ARCHITECTURES, dense
from treeflash_jax.formats.architectures.architecture import Architecture, Key
from treeflash_jax.models.backend.indexing import pick

PROMPT = [3, 4, 5]
DRAFT = SMALL | {"ngrams": 0}
IDS = " ".join(map(str, PROMPT))
COMMAND = ["--verifier", str(FOLDERS["verifier"]), "--drafter", str(FOLDERS["drafter"]), "--prompt-ids", IDS]

# Heads: taken from the page that explains how to write one.

PAGE = (Path(tf.__file__).parent / "drafters" / "README.md").read_text(encoding="utf-8").partition("## Adding a head")[2]


@pytest.fixture
def page(monkeypatch):
    """The names that the page's examples define; its heads are registered until the test ends."""
    for name in ("scaled", "unrepeated"):
        monkeypatch.setitem(HEADS, name, None)
    names = {"__name__": "page"}
    for example in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(example, "README.md", "exec"), names)
    return names


@pytest.mark.slow
def test_a_head(page, tmp_path, capsys, tiny):
    config = replace(tiny.drafter, head="scaled")
    own = {"scale": 0.01 * jnp.arange(config.layers.hidden_size, dtype=jnp.float32)}
    folder = tmp_path / "drafter"
    model_files.save_drafter(folder, config, tiny.weights.drafter | {"head": own}, dtype=jnp.float32)
    model = tf.load("tiny", drafter=folder)
    assert model.drafter.head == "scaled"
    np.testing.assert_array_equal(model.weights.drafter["head"]["scale"], own["scale"])
    goes_through_everything(model, folder, tmp_path, capsys)


@pytest.mark.slow
def test_a_head_is_trained_and_exported(page, tmp_path):
    run = tmp_path / "run"
    head_stage.main(toy_training.settings(toy_training.write(tmp_path), f"run={run}", "head=scaled", "loop.steps=3"))
    model = toy_training.exported(run, tmp_path / "verifier")
    assert np.any(np.asarray(model.weights.drafter["head"]["scale"]))


@pytest.mark.parametrize(("entries", "words"), [
    ({"matrix": Entry("toy.matrix")}, "head.matrix: got an Entry with order (0,)"),
    ({"other": Entry("toy.other")}, "head.matrix: got no Entry"),
])  # fmt: skip
def test_a_weight_that_files_cannot_hold_is_refused_before_training(page, monkeypatch, tmp_path, toy, entries, words):
    class Square(page["ScaledHead"]):
        def specs(self, drafter):
            return {"matrix": Spec((drafter.layers.hidden_size, 4), (None, None), "zeros")}

    head, run = Square(), tmp_path / "run"
    head.entries = entries
    monkeypatch.setitem(HEADS, "scaled", head)
    settings = toy_training.settings(toy, f"run={run}", "head=scaled", "loop.steps=3")
    refused(lambda: head_stage.main(settings), words)
    assert not (run / "log.jsonl").exists()


@pytest.mark.parametrize("settings", [
    {"nodes": 8},
    slow({"nodes": 8, "builder": "skeleton", "acceptance": "sample-and-match", "temperature": 1.0}),
])  # fmt: skip
def test_an_expander_works_with_all_defaults_of_a_cpu(page, trained, settings):
    """Its tree is joined with n-grams, which follow tokens that it did not offer."""
    config = replace(trained.drafter, head="unrepeated")
    weights = Weights(trained.weights.verifier, trained.weights.drafter | {"head": {}})
    model = tf.TreeFlash(trained.verifier, weights, drafter=config)
    assert model.plan(tf.GenerateConfig(**settings)).configured_drafter.ngrams
    draft = {name: value for name, value in settings.items() if name != "temperature"}
    sampling = {"temperature": settings.get("temperature", 0.0), "seed": 2, "max_new_tokens": 24, "stop_ids": ()}
    [drafted] = drafted_as_plain(model, [PROMPT * 5], draft, **sampling)
    assert drafted.tau > 1


def test_an_expander_without_a_method_says_which(page, tiny):
    class Incomplete(page["Expander"]):
        start = children = page["Unrepeated"].children

    with pytest.raises(TypeError, match="follow_token"):
        Incomplete()


# A builder: the two likeliest tokens after the anchor.


def _fork(inputs):
    tree, _ = trees.best_first(replace(inputs, num_nodes=3, shape=trees.TreeShape(lanes=1)))
    return trees.first(tree, min(inputs.num_nodes, 3)), None


def test_a_builder(monkeypatch, trained, capsys):
    monkeypatch.setitem(trees.BUILDERS, "fork", trees.Builder(_fork))
    [drafted] = drafted_as_plain(trained, [PROMPT], {"builder": "fork"} | DRAFT, max_new_tokens=12)
    assert 1 < max(drafted.accept_lengths) <= 3
    assert generated(capsys, *COMMAND, "--builder", "fork", *OPTIONS, "--ngrams=0") == drafted.ids


# An acceptance rule: never more than one drafted token, which is lossless as well.


class OneAtMost(SampleAndMatch):
    distributions = ("deterministic",)
    needs = "a tree of no random nodes"

    def accept(self, tree, proposal, target, noise):
        taken = super().accept(tree, proposal, target, noise)
        drafted_bp = pick(tree.tokens_bn, taken.path_bp)
        is_cut_b = taken.length_b > 2
        third_b = drafted_bp[:, 2] if drafted_bp.shape[1] > 2 else taken.bonus_b
        length_b, bonus_b = jnp.minimum(taken.length_b, 2), jnp.where(is_cut_b, third_b, taken.bonus_b)
        return taken.replace(length_b=length_b, bonus_b=bonus_b)


def test_an_acceptance_rule(monkeypatch, trained, capsys):
    monkeypatch.setitem(RULES, "one at most", OneAtMost())
    [drafted] = drafted_as_plain(trained, [PROMPT], {"acceptance": "one at most"} | DRAFT, max_new_tokens=12)
    assert max(drafted.accept_lengths) == 2
    assert generated(capsys, *COMMAND, "--acceptance", "one at most", *OPTIONS, "--ngrams=0") == drafted.ids
    refused(lambda: trained.generate(PROMPT, acceptance="one at most", builder="paths"), "a tree of no random nodes")


# An architecture: Qwen3 under other names, with a key of its own that must not change the numbers.


TOY_ARCHITECTURE = Architecture(
    model_type="toy",
    class_name="ToyForCausalLM",
    keys=(*dense.size_keys(head_dim=lambda keys, fields: 32)[1:], Key(name="words", field="vocab_size")),
    constants={"qk_norm": True},
    only=dense.ONLY | {"logit_scale": (1.0,)},
    inert=dense.INERT | {"recipe"},
    layer={name: replace(entry, name=f"toy.{name}") for name, entry in ARCHITECTURES["qwen3"].layer.items()},
    outside=dense.OUTSIDE | {"norm": Entry("the.norm")},
)


def test_an_architecture(monkeypatch, short, tmp_path, capsys):
    """Answers equal those that the same weights give as Qwen3."""
    monkeypatch.setitem(ARCHITECTURES, "toy", TOY_ARCHITECTURE)
    qwen3 = tf.load(short)
    config, folder = replace(qwen3.verifier, model_type="toy"), tmp_path / "verifier"
    model_files.save_verifier(folder, config, qwen3.weights.verifier, jnp.float32)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["words"] == config.vocab_size and "vocab_size" not in raw
    assert {"the.norm", "model.layers.0.toy.q"} < load_file(folder / "model.safetensors").keys()
    (folder / "config.json").write_text(json.dumps(raw | {"logit_scale": 1.0, "recipe": "ours"}))
    model, plain = tf.load(verifier=folder, drafter="ngram"), {"max_new_tokens": 12, "stop_ids": ()}
    assert model.verifier == config
    expected = qwen3.generate(PROMPT, builder="none", **plain)
    drafted_as_plain(model, [PROMPT], {"nodes": 4}, plain=expected, **plain)
    words = ["--verifier", str(folder), "--drafter", "ngram", "--prompt-ids", IDS, "--stop-ids", ""]
    assert generated(capsys, *words, "--nodes", "4") == expected[0].ids
    assert main(["bench", "memory", "--shape", str(folder), "--no-compile", "--dtype", "float32"]) == 0
    for change, word in (({"logit_scale": 2.0}, "logit_scale"), ({"clip_qkv": 3}, "clip_qkv")):
        (folder / "config.json").write_text(json.dumps(raw | change))
        refused(lambda: model_files.read_verifier_config(folder), word)
