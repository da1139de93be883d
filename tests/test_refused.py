"""Refusals: every mistake of a user gives the documented result, or one line of at most 300 characters."""

import copy
import math
import traceback
from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import RANDOM_DRAFTER, RANDOM_MODEL
from ml_dtypes import bfloat16
from refusals import mistake, refused, understood

import treeflash_jax as tf
from treeflash_jax.cli.commands import main
from treeflash_jax.core.checks import UnknownSetting
from treeflash_jax.core.devices import Device
from treeflash_jax.engine import device_memory
from treeflash_jax.engine.call import prompts
from treeflash_jax.engine.call.requests import find_stops
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.plan import resolve
from treeflash_jax.formats.tokenizer import Tokenizer

HUGE = 10**400
DEEP = "[" * 200_000
TRACEBACK = "Traceback (most recent call last):\n"
WRONG = (None, "x", "", [], {}, object(), b"3", 1.5, math.nan, math.inf, -math.inf, -1, 2**31, 2**63, HUGE, True, [1.5])
WRONG += ("x" * 5000, "a\nb\x1b\u2028", [[None] * 999])


def resolved(**settings) -> GenerateConfig:
    config = GenerateConfig(**settings)
    find_stops((), config.stop_ids or (), None, RANDOM_MODEL.vocab_size)
    resolve(config, RANDOM_MODEL, RANDOM_DRAFTER, dtype=jnp.float32, device=Device("cpu"))
    return config


def test_settings_of_generate():
    """Every field with every wrong value is served or refused in one line; what is taken has the field's type."""
    names = GenerateConfig.__dataclass_fields__
    reader = {"branches": "delayed", "trunk": "delayed", "skeleton": "skeleton", "leaves": "skeleton"}
    named = {name: {"builder": reader[name]} if name in reader else {} for name in names}
    taken = {name: [x for x in WRONG if understood(resolved, **named[name] | {name: x})] for name in names}
    assert not [name for name, values in taken.items() if HUGE in values]
    whole = "max_new_tokens nodes block_size candidates children shortlist branches trunk top_k seed samples batch_size"
    for name in whole.split():
        assert not any(isinstance(value, float | bool | str | bytes) for value in taken[name]), (name, taken[name])
        assert 2**63 not in taken[name]
    assert [name for name in taken if "" in taken[name]] == []
    assert [name for name in taken if any(x is True for x in taken[name])] == [
        "leaves", "log_probs", "prompt_log_probs", "expected_lengths",
    ]  # fmt: skip
    for name in ("temperature", "top_p", "skeleton", "drafter_temperature"):
        assert not any(isinstance(x, float) and not math.isfinite(x) for x in taken[name])
    assert not [field.name for field in fields(GenerateConfig) if field.default is not None and None in taken[field.name]]
    why = "builder 'best-first' does not use it; leave it out, or use builder 'paths' or 'delayed' or "
    refused(lambda: resolved(branches=4), f"got branches 4, but {why}")
    why = "builder 'paths' does not use it; leave it out, or use builder 'delayed'"
    refused(lambda: resolved(builder="paths", trunk=1), f"got trunk 1, but {why}")
    for temperature in (1.1e6, [0.5, 1e38]):
        refused(lambda temperature=temperature: resolved(temperature=temperature), "temperature", "at most 1000000")
    why = "drafters of kind 'block' have no such setting; leave it out"
    refused(lambda: resolved(depths=2), f"got depths 2, but {why}")


def test_exact_scalars_of_numpy_and_jax_are_fine():
    numbers = [kind(1) for kind in (int, np.int8, np.int64, np.uint32, jnp.int32, np.array, jnp.array)]
    for number in numbers:
        for name in ("max_new_tokens", "nodes", "top_k", "seed", "samples"):
            value = getattr(resolved(**{name: number}), name)
            assert value == 1 and type(value) is int
    for number in (np.float32(0.5), np.float64(0.5), jnp.float32(0.5), jnp.bfloat16(0.5), bfloat16(0.5), np.array(0.5)):
        temperature = resolved(temperature=number).temperature
        assert temperature == 0.5 and type(temperature) is float
    for many in ([0.5, 1], (0.5, 1.0), np.array([0.5, 1.0]), jnp.array([0.5, 1.0])):
        assert resolved(temperature=many).temperature == (0.5, 1.0)


def test_arguments_of_load_are_suggested():
    for name, meant in {"torch_dtype": "dtype", "assistant_model": "drafter"}.items():
        refused(partial(tf.load, "tiny", **{name: "x"}), f"unknown argument '{name}'; did you mean {meant}")


def test_an_error_is_one_short_traceback(tiny):
    for call in (
        partial(tf.load, "nope"),
        partial(tf.load, "tiny", nodes=3),
        partial(tf.load, "tiny", dtype="bf17"),
        partial(tf.load, "tiny", mesh="4"),
        partial(tiny.generate, "x", nodez=3),
        partial(tiny.generate, "x", top_p=3),
        partial(tiny.generate, "x", temperature=["x"]),
        partial(tiny.generate, "x", builder="tree"),
        partial(tiny.generate, []),
        partial(tiny.generate, "\ud800"),
        partial(tiny.generate, [{"role": "gpt", "content": "x"}]),
        partial(GenerateConfig, nodes=0),
    ):
        with pytest.raises((ValueError, UnknownSetting, FileNotFoundError)) as caught:
            call()
        shown = traceback.format_exception(caught.value)
        assert shown.count(TRACEBACK) == 1 and len(shown) <= 14, "".join(shown)


def test_prompts(tiny):
    for prompt in (  # beside those of tests/engine/test_prompts.py
        [[]], ["3"], [True], "\ud800", {5, 6}, [{"role": "user", "content": "\ud800"}], [{"role": 3, "content": "x"}],
        [{"role": "user", "content": b"x"}],
    ):  # fmt: skip
        refused(lambda prompt=prompt: tiny.encode(prompt))
    refused(lambda: tiny.generate([HUGE]), "expected 0 to")
    refused(lambda: tiny.generate(["fine", "\ud800"]), "prompt 1", "U+D800")


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
}


@pytest.mark.parametrize("template", BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_templates(tiny, template):
    inner = copy.deepcopy(tiny.tokenizer.inner)
    inner.chat_template = template
    refused(lambda: prompts.encode([{"role": "user", "content": "x"}], Tokenizer(inner)))


def test_the_boundary_gives_what_the_library_gives(tiny):
    turns = ("user", "What is 2 + 3?\n"), ("assistant", "5"), ("user", "é")
    chat = [{"role": role, "content": content} for role, content in turns]
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


def test_arguments_of_functions(trained, monkeypatch):
    result = trained.generate([5, 6], max_new_tokens=2)[0]
    for indices in ([-1], ["0"], [0.5], 3, "0", [2**32], [None], [0, 1]):
        refused(lambda indices=indices: trained.generate([[1]], indices=indices), "indices")
    for index in ("x", None, 1.5, -1, 10**9):
        refused(lambda index=index: result.tree(index))
    for arguments in (
        {"dtype": "float99"}, {"dtype": 3}, {"dtype": int}, {"mesh": 3}, {"mesh": "1x"}, {"quantize": []}, {"verifier": 3},
        {"drafter": 3}, {"template": [1]}, {"thinking": 1},
        {"mesh": jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))},
    ):  # fmt: skip
        refused(lambda arguments=arguments: tf.load(**({"verifier": "tiny"} | arguments)), next(iter(arguments)))
    wide = replace(RANDOM_DRAFTER, layers=replace(RANDOM_DRAFTER.layers, vocab_size=2**17))
    for sizes in ({"candidates": 2048, "children": 2048}, {"candidates": 2**17, "children": 1}):
        model = replace(RANDOM_MODEL, vocab_size=2**17)
        plan = partial(resolve, GenerateConfig(**sizes), model, wide, dtype=jnp.float32, device=Device("gpu"))
        refused(plan, "candidates", "67,108,864")
    monkeypatch.setattr(device_memory, "host_memory", lambda: 2**34)
    refused(lambda: tf.load("tiny").generate([[5]], batch_size=2**16, max_new_tokens=2000), "caches", "16.00 GiB")
    for data_axis in ("x", None, 1.5, 0, HUGE):
        refused(lambda data_axis=data_axis: tf.make_mesh(data_axis), "data")
    refused(lambda: trained.generate([5], {"temperature": 1}), "config")
    refused(lambda: trained.warmup("many"), "prompt_tokens")
    refused(lambda: next(trained.stream([5], session=1)), "session 1")


@pytest.mark.parametrize("words", [
    ("--nodes", "1000000"), ("--batch-size", str(2**40)), ("--nodes", "9" * 5000), ("--temperature", "nan"),
    ("--stop-ids", "9" * 5000), ("--builder", ""), ("--prompt-ids", "x" * 5000), ("--stop", "\udcff"),
    ("--revision", "x" * 5000), ("--verifier", "x/" * 900), ("--verifier", "x" * 300 + ".gguf"), ("--drafter", "x" * 5000),
], ids=lambda words: " ".join(words)[:30])  # fmt: skip
def test_command_lines(words, capsys):
    assert len(mistake(capsys, main, ["generate", "--verifier", "tiny", *words, "--prompt-ids", "5 6 7"])) <= 330
