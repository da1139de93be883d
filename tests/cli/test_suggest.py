"""What users of other libraries type is answered with our name for it, in one line."""

from __future__ import annotations

import inspect

import pytest

import treeflash_jax as tf
from treeflash_jax.core import checks
from treeflash_jax.engine.settings import LOAD_ARGUMENTS


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokens", "max_new_tokens"),
        ("n", "samples"),
        ("num_return_sequences", "samples"),
        ("do_sample", "temperature"),
        ("eos_token_id", "stop_ids"),
        ("temprature", "temperature"),
        ("num_speculative_tokens", "nodes"),
    ],
)
def test_settings_of_other_libraries_are_understood(trained, name, meant):
    for call in (lambda: trained.generate([3], **{name: 1}), lambda: tf.GenerateConfig(**{name: 1})):
        with pytest.raises(ValueError, match=f"unknown .*'{name}'; did you mean {meant}") as error:
            call()
        assert "\n" not in str(error.value)


def test_arguments_of_load_are_no_settings(trained):
    names = {"model": "verifier", "torch_dtype": "dtype", "dtype": "dtype", "assistant_model": "drafter"}
    for name, meant in names.items():
        with pytest.raises(ValueError, match=f"'{name}'; {meant} is an argument of tf.load"):
            trained.generate([3], **{name: 1})
    assert set(LOAD_ARGUMENTS) <= set(inspect.signature(tf.load).parameters)
    for name, meant in (("model", "verifier"), ("speculative_model", "drafter"), ("torch_dtype", "dtype")):
        with pytest.raises(ValueError, match=f"unknown argument '{name}'; did you mean {meant}"):
            tf.load(**{name: "x"})


def test_choices_name_what_was_meant(trained):
    for name, slip, meant in (("builder", "best-frist", "best-first"), ("acceptance", "travesal", "traversal")):
        with pytest.raises(ValueError, match=f"got {name} '{slip}', expected one of .*; did you mean {meant}\\?$"):
            trained.generate([3], **{name: slip})


def test_what_resembles_nothing_lists_what_there_is(trained):
    with pytest.raises(ValueError, match="unknown setting 'zzz', expected one of max_new_tokens, temperature"):
        trained.generate([3], zzz=1)
    with pytest.raises(ValueError, match="unknown argument 'zzz'$"):
        tf.load(zzz=1)


def test_signatures_stay_as_they_are():
    assert list(inspect.signature(tf.load).parameters)[:2] == ["verifier", "drafter"]
    assert "self" not in inspect.signature(tf.GenerateConfig).parameters


def test_no_alias_stands_for_a_name_of_ours_that_is_known_beside_it():
    settings = list(inspect.signature(tf.GenerateConfig).parameters)
    assert all(checks.suggestion(name, settings) == name for name in settings)
    assert not {alias for words in checks.ALIASES.values() for alias in words.split()} & set(settings)
