"""Refusals: every mistake of a user gives the documented result, or one line of at most 300 characters."""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import fields, replace

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import RANDOM_DRAFTER, RANDOM_MODEL
from hypothesis import strategies
from ml_dtypes import bfloat16
from refusals import refused, understood

import treeflash_jax as tf
from treeflash_jax.bench import bench_records
from treeflash_jax.cli.commands import main
from treeflash_jax.core import checks, devices
from treeflash_jax.decoding import calibration
from treeflash_jax.engine import prompts
from treeflash_jax.engine.planning import make_requests, resolve
from treeflash_jax.engine.settings import GenerateConfig
from treeflash_jax.formats.tokenizer import Tokenizer

HUGE = 10**400
DEEP = "[" * 200_000
WRONG = (None, "x", "", [], {}, object(), b"3", 1.5, math.nan, math.inf, -math.inf, -1, 2**31, 2**63, HUGE, True, [1.5])


def asked(**settings) -> GenerateConfig:
    return resolve(None, settings, RANDOM_MODEL, RANDOM_DRAFTER)


# Settings of generate


def test_settings_of_generate():
    """Every field with every wrong value; what is taken has the field's type."""
    taken = {
        name: [value for value in WRONG if understood(asked, **{name: value})]
        for name in GenerateConfig.__dataclass_fields__
    }
    assert not [name for name, values in taken.items() if HUGE in values]
    whole = "max_new_tokens nodes block_size candidates children shortlist branches trunk top_k seed samples batch_size"
    for name in whole.split():
        assert not any(isinstance(value, float | bool | str | bytes) for value in taken[name]), (name, taken[name])
        assert 2**63 not in taken[name]
    assert [name for name in taken if "" in taken[name]] == []
    assert [name for name in taken if any(x is True for x in taken[name])] == ["leaves", "log_probs", "expected_lengths"]
    for name in ("temperature", "top_p", "skeleton", "drafter_temperature"):
        assert not any(isinstance(x, float) and not math.isfinite(x) for x in taken[name])
    defaults = {field.name: field.default for field in fields(GenerateConfig)}
    for name, values in taken.items():
        assert None not in values or defaults[name] is None, f"{name} takes None"


def test_lanes_that_nothing_would_follow():
    asked(lanes=3, nodes=4)
    refused(lambda: asked(lanes=4, nodes=4), "lanes 4", "at most 3")
    refused(lambda: asked(lanes=2, builder="walk"), "lanes 2", "None with builder 'walk'")
    refused(lambda: asked(depths=2), "depths 2", "drafters of kind 'block' do not have it")


def test_exact_scalars_of_numpy_and_jax_are_fine():
    numbers = [kind(1) for kind in (int, np.int8, np.int64, np.uint32, jnp.int32, np.array, jnp.array)]
    for number in numbers:
        for name in ("max_new_tokens", "nodes", "top_k", "seed", "samples"):
            assert getattr(asked(**{name: number}), name) == 1 and type(getattr(asked(**{name: number}), name)) is int
    for number in (np.float32(0.5), np.float64(0.5), jnp.float32(0.5), jnp.bfloat16(0.5), bfloat16(0.5), np.array(0.5)):
        assert type(asked(temperature=number).temperature) is float and asked(temperature=number).temperature == 0.5
    for many in ([0.5, 1], (0.5, 1.0), np.array([0.5, 1.0]), jnp.array([0.5, 1.0])):
        assert asked(temperature=many).temperature == (0.5, 1.0)


def test_checking_settings_costs_less_than_a_millisecond():
    settings = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 64, "nodes": 16, "stop": ["\n"], "stop_ids": [1, 2]}
    asked(**settings)

    def once() -> float:
        began = time.thread_time()
        for _ in range(10):
            asked(**settings)
        return (time.thread_time() - began) / 10

    assert min(once() for _ in range(5)) < 1e-3


VALUES = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(name=strategies.sampled_from(sorted(GenerateConfig.__dataclass_fields__)), value=VALUES)
def test_any_value_of_a_setting_is_served_or_refused_in_one_line(name, value):
    understood(asked, **{name: value})
    shown = checks.quoted(value)
    assert len(shown) <= checks.QUOTED and "\n" not in shown and shown.isprintable()


# Prompts and templates


BAD_PROMPTS = [  # beside those of tests/engine/test_prompts.py
    1.5, None, True, {}, object(), [[]], ["3"], [True], [b"3"], [HUGE], "\ud800", "a\udfff", {5, 6}, frozenset("ab"),
    [{"role": "user", "content": "\ud800"}], [{"role": 3, "content": "x"}], [{"role": "user", "content": b"x"}],
    "word " * 10**6, [{"role": "user", "content": "word " * 10**6}],
]  # fmt: skip


def test_prompts(tiny):
    for prompt in BAD_PROMPTS:
        if prompt == [HUGE]:
            refused(lambda: tiny.generate([HUGE]), "expected 0 to")
        else:
            refused(lambda prompt=prompt: tiny.encode(prompt))
    refused(lambda: tiny.generate(["fine", "\ud800"]), "prompt 1", "U+D800")
    refused(lambda: tiny.encode(tf.Text("word " * 10**6)), "5,000,000 characters", "context")


BAD_TEMPLATES = {
    "refuses": "{{ raise_exception('no\\nsystem') }}",
    "refuses at length": "{{ raise_exception('long ' * 1000) }}",
    "divides by nothing": "{{ 1 // 0 }}",
    "is no template": "{% for %}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "counts too far": "{% for a in range(10**9) %}{% endfor %}",
    "reaches for Python": "{{ ''.__class__.__mro__ }}",
    "changes the chat": "{{ messages.append(messages[0]) }}",
    "writes half a character": "{{ '\\ud800' }}",
    "writes too much": "{{ 'x' * 2**27 }}",
}


@pytest.mark.parametrize("template", BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_templates(tiny, template):
    inner = copy.deepcopy(tiny.tokenizer.inner)
    inner.chat_template = template
    refused(lambda: prompts.encode([{"role": "user", "content": "x"}], Tokenizer(inner)))


def test_the_boundary_gives_what_the_library_gives(tiny):
    chat = [
        {"role": "user", "content": "What is 2 + 3?\n"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "é"},
    ]
    inner = tiny.tokenizer.inner
    expected = inner.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False, return_dict=True)
    assert tiny.tokenizer.encode_chat(chat) == list(expected["input_ids"])
    assert tiny.tokenizer.encode("a b\n é") == list(inner("a b\n é")["input_ids"])


def test_broken_tokenizer_files(tiny, tmp_path):
    inner = tiny.tokenizer.inner
    inner.save_pretrained(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    for text in (b"", b"{", whole[: len(whole) // 2], b"[]", b'{"model": 3}', b"\xff\xfe", DEEP.encode()):
        (tmp_path / "tokenizer.json").write_bytes(text)
        refused(lambda: Tokenizer.load(tmp_path), "tokenizer.json")


# What the benchmarks and the calibration left


RECORD = {
    "schema": 2, "prompt_id": "a", "prompt_hash": "0", "system": "ar",
    "settings": dict.fromkeys(bench_records.SHARED, 1) | dict.fromkeys(bench_records.SYSTEM)
    | {"temperature": 0.0, "seed": 0, "builder": "none", "top_p": 1.0},
    "accept_lengths": [[1, 1]], "cut": [0], "ids": [[1, 2, 3]], "texts": ["x"], "tokens": 3, "seconds": 1.0,
    "compile_seconds": 0.0, "versions": {"jax": "1"}, "hardware": {"backend": "cpu", "device": "cpu", "cores": 2},
}  # fmt: skip


def test_records_of_a_benchmark(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    for key in RECORD:
        for value in (None, "x", "", [], {}, [[1.5]], ["x"], -1, 1.5, HUGE, "x" * 5000):
            path.write_text(json.dumps(RECORD | {key: value}) + "\n")
            assert main(["bench", "report", str(path), "--resamples", "2"]) in (0, 2)
            error = capsys.readouterr().err
            assert error.count("\n") <= 1 and "Traceback" not in error and len(error) <= 330, error
    for text in (DEEP, "{", "[]", "\ud800", json.dumps(RECORD | {"ids": []})):
        path.write_bytes((text + "\n").encode("utf-8", "surrogatepass"))
        assert main(["bench", "report", str(path)]) == 2


CALIBRATION = {
    "identity": {"pair": "x"}, "nodes": [1, 2], "batch": [1], "positions": [64], "round_seconds": [[[0.1, 0.2]]],
    "tree_seconds": [[[0.0, 0.1]]], "step_seconds": [[0.1]], "temperatures": [0.0], "tau": [[1.0, 2.0]],
    "reliability": [0.9],
}  # fmt: skip


def test_calibrations(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"entries": [CALIBRATION]}))
    assert calibration.read(path)[0].nodes == [1, 2]
    for key in CALIBRATION:
        for value in (None, "x", [], [1], [[1]], [[[1]]], 3, ["x"], [-1], [HUGE]):
            path.write_text(json.dumps({"entries": [CALIBRATION | {key: value}]}))
            understood(calibration.find, path, {"pair": "y"})
    path.write_text(json.dumps({"entries": [CALIBRATION | {"identity": ["pair"]}]}))
    refused(lambda: calibration.find(path, {"pair": "y"}), "identity")
    path.write_text(DEEP)
    refused(lambda: calibration.read(path), "nested too deeply")


# Python and the command line


def test_arguments_of_functions(trained, monkeypatch):
    result = trained.generate([5, 6], max_new_tokens=2)[0]
    for indices in ([-1], ["0"], [0.5], 3, "0", [2**32], [None], [0, 1]):
        refused(lambda indices=indices: make_requests([[1]], GenerateConfig(), trained.verifier, indices), "indices")
    for index in ("x", None, 1.5, -1, 10**9):
        refused(lambda index=index: result.tree(index))
    for arguments in (
        {"dtype": "float99"}, {"dtype": 3}, {"dtype": int}, {"mesh": 3}, {"mesh": "1x1"}, {"quantize": []}, {"verifier": 3},
        {"drafter": 3}, {"template": [1]}, {"thinking": 1},
        {"mesh": jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))},
    ):  # fmt: skip
        refused(lambda arguments=arguments: tf.load(**({"verifier": "tiny"} | arguments)), next(iter(arguments)))
    wide = replace(RANDOM_DRAFTER, layers=replace(RANDOM_DRAFTER.layers, vocab_size=2**17))
    for sizes in ({"candidates": 2048, "children": 2048}, {"candidates": 2**17, "children": 1}):
        model = replace(RANDOM_MODEL, vocab_size=2**17)
        refused(lambda sizes=sizes, model=model: resolve(None, sizes, model, wide), "candidates", "67,108,864")
    monkeypatch.setattr(devices, "host_memory", lambda: 2**34)
    refused(lambda: tf.load("tiny").generate([[5]], batch_size=2**16, max_new_tokens=2000), "caches", "16.00 GiB")
    for data_axis in ("x", None, 1.5, 0, HUGE):
        refused(lambda data_axis=data_axis: tf.make_mesh(data_axis), "data")
    refused(lambda: trained.generate([5], {"temperature": 1}), "config")
    refused(lambda: trained.warmup("many"), "prompt_tokens")
    refused(lambda: next(trained.stream([5], session=1)), "session 1")


LINES = (
    ("--nodes", "1000000"), ("--nodes", "2147483648"), ("--batch-size", str(2**40)), ("--top-k", "2147483648"),
    ("--nodes", "9" * 5000), ("--samples", str(2**40)), ("--seed", "-1"), ("--temperature", "nan"),
    ("--stop-ids", "9" * 5000), ("--builder", ""), ("--prompt-ids", "x" * 5000), ("--stop", "\udcff"),
    ("--verifier", "tiny", "--builder", "delayed", "--selector", "x" * 5000),
    ("--verifier", "tiny", "--revision", "x" * 5000),
    ("--verifier", "x" * 5000), ("--verifier", "x/" * 900), ("--verifier", "x" * 300 + ".gguf"),
    ("--verifier", "x" * 99 + "/x"), ("--verifier", "tiny", "--drafter", "x" * 5000),
    ("--verifier", "tiny", "--steering", "x" * 5000), ("--verifier", "tiny", "--steering", "x/" * 900),
    ("check", "--near-tie", "nan"), ("check", "--near-tie", "-1"),
)  # fmt: skip


@pytest.mark.parametrize("words", LINES, ids=lambda words: " ".join(words)[:30])
def test_command_lines(words, capsys):
    try:
        command, *options = ("generate",) * words[0].startswith("-") + words
        code = main([command, "--verifier", "tiny", *options, "--prompt-ids", "5 6 7"])
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and len(error) <= 330, error
