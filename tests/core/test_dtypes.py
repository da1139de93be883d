"""Names of dtypes, which every command and function understands or refuses alike."""

from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import treeflash_jax as tf
from train import export, head
from train.runtime import run_config
from treeflash_jax.cli.commands import parser
from treeflash_jax.engine.settings.model_options import ModelOptions

CONFIGS = Path(__file__).parents[2] / "configs" / "tiny"
COMMANDS = ("generate x", "check x", "demo", "convert x y", "bench latency", "bench memory", "bench run --out x")
STAGES = {  # name of the setting, and a file or words that give what is required
    head.HeadStage: ("compute_dtype", CONFIGS / "head.toml", []),
    export.ExportConfig: ("dtype", None, ["run=x", "out=y"]),
}


@pytest.mark.parametrize("given, name", {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32",
    "fp16": "float16", "half": "float16", "fp64": "float64", "double": "float64",
}.items())  # fmt: skip
def test_abbreviations_are_understood_everywhere(capsys, given, name):
    assert ModelOptions(dtype=given).dtype == name
    for command in COMMANDS:
        words = [*command.split(), "--dtype", given]
        has_all = command.split()[0] in ("generate", "check", "demo") or command in ("bench latency", "bench run --out x")
        if has_all or name in ("bfloat16", "float32"):
            assert parser().parse_args(words).dtype == name
            continue
        with pytest.raises(SystemExit):
            parser().parse_args(words)
        assert f"got '{name}', expected one of float32, bfloat16" in capsys.readouterr().err
    for stage, (setting, path, words) in STAGES.items():
        load = partial(run_config.load, stage, path, [*words, f"{setting}={given}"])
        if name in ("bfloat16", "float32"):
            assert getattr(load(), setting) == name
        else:
            refused(load, f"{setting} = '{name}', expected one of")


def test_load_takes_dtypes_as_objects_too_and_refuses_others():
    for dtype in (jnp.bfloat16, jnp.dtype("bfloat16"), "bf16"):
        assert tf.load("tiny", dtype=dtype).dtype == jnp.bfloat16
    for dtype in ("bf17", "f4", "int8", int, np.int32, 3, [], "float", object()):
        refused(lambda dtype=dtype: tf.load("tiny", dtype=dtype), "got dtype", "expected one of 'bfloat16'")
    refused(lambda: tf.load("tiny", dtype="fp64"), "dtype 'float64'", "jax_enable_x64")
