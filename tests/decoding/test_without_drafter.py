"""A verifier without a drafter decodes one token at a time, with a note, and refuses settings of drafting."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_8_devices
from refusals import refused
from rich.console import Console

from treeflash_jax import TreeFlash, make_mesh
from treeflash_jax.cli.chat import converse
from treeflash_jax.core import sharding
from treeflash_jax.core.devices import Device
from treeflash_jax.decoding.state import Weights
from treeflash_jax.engine.comparison import compare_decodings
from treeflash_jax.engine.settings.generate_config import GenerateConfig

PROMPT = [3, 4, 5, 17, 29]


@pytest.fixture(scope="module")
def alone(trained) -> TreeFlash:
    return TreeFlash(trained.verifier, Weights(trained.weights.verifier), stop_ids=trained.stop_ids)


def test_the_default_decodes_plainly_with_one_note(alone, trained, caplog):
    expected = trained.generate(PROMPT, max_new_tokens=8, builder="none")[0]
    assert alone.generate(PROMPT, max_new_tokens=8, builder="none", nodes=8)[0].ids == expected.ids
    with caplog.at_level(logging.INFO, logger="treeflash_jax"):
        first = alone.generate(PROMPT, max_new_tokens=8)[0]
        *_, again = alone.stream(PROMPT, max_new_tokens=8)
    assert first.ids == again.ids == expected.ids
    assert first.builder == again.builder == expected.builder == "none"
    [note] = [record.message for record in caplog.records if "no drafter" in record.message]
    assert note.startswith("decoding one token at a time (builder 'none' does so without this note): no drafter is loaded")
    assert all(advice in note for advice in ("--drafter ngram", "README.md", "python -m train.pair")) and "\n" not in note


H100, CPU = Device("gpu", "NVIDIA H100 80GB HBM3"), Device("cpu", features=frozenset({"avx512_bf16", "amx_bf16"}))


@needs_8_devices
@pytest.mark.parametrize(("device", "data", "batch", "nodes"), [
    (H100, 1, 1, 16), (H100, 1, 8, 16), (H100, 1, 64, 4), (H100, 1, 512, 1), (H100, 8, 64, 16), (H100, 8, 505, 4),
    (Device("gpu", "unknown"), 1, 512, 16), (CPU, 1, 512, 16),
])  # fmt: skip
def test_large_batches_get_smaller_trees_on_known_accelerators(trained, monkeypatch, device, data, batch, nodes):
    """Nodes x sequences of a data shard stay within the ridge (295 tokens on an H100), unless the caller sets them."""
    monkeypatch.setattr(sharding, "device", lambda mesh: device)
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trained.weights)
    model = TreeFlash(trained.verifier, weights, drafter=trained.drafter, mesh=make_mesh(data) if data > 1 else None)

    def plan(**settings):
        return model.plan(GenerateConfig(**settings), batch)

    assert plan().num_nodes == nodes and plan().drafts == (nodes > 1)
    note = "drafting does not pay on NVIDIA H100 80GB HBM3 for 512 sequences at a time; nodes=8 (--nodes 8) drafts anyway"
    assert plan().why_plain == (note if nodes == 1 else None)
    assert plan(nodes=8).num_nodes == 8
    assert plan(builder="skeleton").num_nodes == max(nodes, 2)
    assert plan(lanes=5).num_nodes == max(nodes, 6)
    assert plan(builder="chain").num_nodes == {4: 4, 1: 2}.get(nodes, 1 + trained.drafter.num_depths)


def test_requested_drafting_is_refused(alone):
    requests = {"builder": "chain", "nodes": 8, "head": "marginal", "candidates": 4, "drafter_temperature": 0.5}
    for name, value in requests.items():
        refused(
            partial(alone.generate, PROMPT, **{name: value}), f"got {name} {value!r}, but no drafter is loaded; try drafter"
        )
    refused(lambda: compare_decodings(alone, [PROMPT]), "nothing to compare: no drafter is loaded; try drafter 'ngram'")


def test_a_chat_goes_on_and_no_tree_ends_it(tiny, monkeypatch, capsys, caplog):
    verifier = TreeFlash(tiny.verifier, Weights(tiny.weights.verifier), tokenizer=tiny.tokenizer, stop_ids=tiny.stop_ids)
    lines = iter(("/tree", "Name a colour.", "/tree", "And a river.", "/exit"))
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    converse(verifier, Console(width=200), max_new_tokens=1)
    printed = capsys.readouterr().out
    assert printed.count("tokens/s") == 2
    assert "no draft tree yet" in printed and "no draft tree: this answer was decoded one token at a time" in printed
    assert "error" not in printed and caplog.text.count("no drafter is loaded") == 1


def test_a_chat_says_at_once_why_nothing_is_drafted_and_what_would_fail_at_every_message(tiny, monkeypatch, capsys, caplog):
    monkeypatch.setattr("builtins.input", lambda prompt="": "/exit")
    converse(tiny, Console(width=200), max_new_tokens=1)
    assert "drafting does not pay on this CPU" in caplog.text and "error" not in capsys.readouterr().out
    for settings, words in (({"max_new_tokens": 10**6}, "context"), ({"temperature": -1}, "temperature -1")):
        refused(partial(converse, tiny, Console(), **settings), words)
        assert capsys.readouterr().out == ""
