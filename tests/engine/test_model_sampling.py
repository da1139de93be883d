"""The setting `sampling="model"`: values of generation_config.json."""

import json
import shutil
from copy import copy

import pytest
from conftest import FOLDERS
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.cli.commands import main
from treeflash_jax.engine.settings import pairs
from treeflash_jax.engine.settings.recommended import take_recommended

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "eos_token_id": 2}


VALUES = {name: value for name, value in QWEN.items() if name not in ("do_sample", "eos_token_id")}
OTHERS = {"no_repeat_ngram_size": 3, "typical_p": 1.0, "num_beams": 1, "suppress_tokens": [4], "_from_model_config": 2}


@pytest.mark.parametrize("content, expected, words", [
    (QWEN, VALUES, "takes temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05 from generation_config.json"),
    ({"do_sample": True, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}, "takes min_p 0.1, temperature 1.0 from"),
    ({"temperature": 0.7}, {}, "takes nothing from"),
    ({"do_sample": False, "temperature": 0.7, "top_k": 9}, {"top_k": 9}, "takes top_k 9 from"),
    ({}, {}, "takes nothing"),
    (QWEN | OTHERS, VALUES, "not implemented and ignored: no_repeat_ngram_size, suppress_tokens"),
])  # fmt: skip
def test_values_are_taken_and_others_named(content, expected, words):
    config, note = take_recommended(tf.GenerateConfig(sampling="model"), content)
    assert config == tf.GenerateConfig(sampling="model", **expected) and words in note
    given, note = take_recommended(tf.GenerateConfig(temperature=0.3), content)
    assert given.temperature == 0.3 and "temperature 0" not in note, "what a call sets stays"
    given, note = take_recommended(tf.GenerateConfig(), content, keywords={"temperature"})
    assert given.temperature == 0.0 and "temperature" not in note, "also if that is the default"


def test_a_call_samples_as_its_model_recommends(tmp_path, caplog, capsys):
    folder = shutil.copytree(FOLDERS["verifier"], tmp_path / "verifier")
    (folder / "generation_config.json").write_text(json.dumps(QWEN | {"top_p": 0.8}))
    model, prompt = tf.load(folder), [3, 4, 5, 6]
    own = {name: QWEN[name] for name in ("temperature", "top_k", "repetition_penalty")} | {"top_p": 0.8}
    other = copy(model)
    other.names = ("other", "")
    [asked] = model.generate([prompt], sampling="model", seed=3, max_new_tokens=30)
    [plain] = other.generate([prompt], sampling="model", seed=4, max_new_tokens=30)
    other.generate([prompt], sampling="model", seed=4, max_new_tokens=30)
    assert asked.ids == model.generate([prompt], **own, seed=3, max_new_tokens=30)[0].ids != plain.ids
    notes = [record.getMessage() for record in caplog.records if "generation_config" in record.getMessage()]
    assert [note.partition(": sampling")[0] for note in notes] == [str(folder), "other"] and "top_p 0.8" in notes[0]
    assert model.generate([prompt], max_new_tokens=30)[0].ids == model.generate([prompt], seed=9, max_new_tokens=30)[0].ids
    words = "--sampling model --seed 3 --max-new-tokens 30 --prompt-ids".split()
    assert main(["generate", "--verifier", str(folder), "--dtype", "float32", *words, "3 4 5 6"]) == 0
    assert capsys.readouterr().out.split() == [*map(str, asked.ids)]
    [greedy] = model.generate([prompt], sampling="model", temperature=0, repetition_penalty=1.0, max_new_tokens=30)
    assert greedy.ids == model.generate([prompt], max_new_tokens=30)[0].ids != asked.ids
    assert main(["generate", "--verifier", str(folder), "--dtype", "float32", *words[:-1], "--temperature", "0",
                 "--repetition-penalty", "1", words[-1], "3 4 5 6"]) == 0  # fmt: skip
    assert capsys.readouterr().out.split() == [*map(str, greedy.ids)]
    (folder / "generation_config.json").write_text(json.dumps({"top_p": 7}))
    refused(lambda: tf.load(folder).generate([prompt], sampling="model"), "generation_config.json: got top_p 7")
    refused(lambda: model.generate([prompt], sampling="greedy"), "got sampling 'greedy', expected 'model'")


def test_a_conversation_samples_as_its_model_recommends(tmp_path, monkeypatch, capsys):
    """Also if the file of a verifier known by name states nothing, as SmolLM2's does."""
    heard = []
    answer = tf.Result.unanswered([1])
    monkeypatch.setattr(tf.TreeFlash, "stream", lambda *_, **settings: heard.append(settings) or [answer])
    monkeypatch.setitem(pairs.RECOMMENDED, "tiny", pairs.RECOMMENDED["smollm2"])
    assert tf.load("tiny").recommended.items() >= {"do_sample": True, "temperature": 0.2, "top_p": 0.9}.items()
    turns = iter(["Hi", "/set temperature 0", "Hi", "/set sampling", "Hi", "/quit"])
    monkeypatch.setattr("treeflash_jax.cli.line_editor.LineEditor.read", lambda _: next(turns))
    assert main(["chat", "--verifier", "tiny", "--dtype", "float32"]) == 0
    first, greedy, plain = ({name: x.get(name) for name in ("sampling", "temperature")} for x in heard)
    assert first == {"sampling": "model", "temperature": None} and greedy == {"sampling": "model", "temperature": 0}
    assert plain == {"sampling": None, "temperature": 0}
