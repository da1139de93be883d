"""Refusals of training: wrong settings end with one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refused, understood

from train import drafter, evaluate, head, measure, respond
from train.runtime import run_config

CONFIGS = Path(__file__).parents[2] / "configs" / "tiny"
HUGE = 10**400


def leaves(raw, prefix=""):
    """Dotted names of all values of nested tables, and the values."""
    for key, value in raw.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def test_training_settings():
    """Every setting of the stages with wrong values of every type: served, or refused before anything runs."""
    words = [
        '""', "[]", "{}", "1.5", "nan", "inf", "-1", "0", str(2**31), str(2**63), "1" + "0" * 400, "true", "[1.5]",
        '"x"'
    ]  # fmt: skip
    stages = {"head.toml": head.HeadStage, "drafter.toml": drafter.DrafterStage, "respond.toml": respond.RespondConfig}
    for name, stage in stages.items():
        for key, default in leaves(run_config.to_dict(run_config.load(stage, CONFIGS / name))):
            for word in words:
                loaded = understood(run_config.load, stage, CONFIGS / name, [f"{key}={word}"])
                is_text = isinstance(default, str) or key == "drafter"
                assert not loaded or word not in ("nan", "inf", str(HUGE)) or is_text, (key, word)


BAD_TRAINING = (
    "drafter_temperature=-1 num_nodes=0 num_nodes=4097 num_layers=0 block_size=1 loop.batch=0 loop.batch=-2 run="
    " optimizer.learning_rate=-1 optimizer.learning_rate=0 optimizer.learning_rate=1e30 optimizer.b1=2 optimizer.b1=1"
    " optimizer.b2=-1 optimizer.warmup=5 optimizer.final=-1 optimizer.clip=-1 optimizer.clip=0 optimizer.weight_decay=-5"
    " evaluate.prompts=-1 evaluate.nodes=[0] evaluate.batch=0 loop.accumulate=0 loop.steps=-1 loop.keep=0 loop.log_every=-1"
    " data.sequence_length=1 data.prompt_weight=2 objective.decay=-1 objective.chunk=0 init_scale=0 mesh.model=0"
).split()


@pytest.mark.parametrize("word", BAD_TRAINING)
def test_training_settings_by_name(word):
    key = word.split("=")[0]
    refused(lambda: run_config.load(drafter.DrafterStage, CONFIGS / "drafter.toml", [word]), key.split(".")[-1])


def test_other_stages_refuse_too():
    assert evaluate.EvaluateConfig() == run_config.replaced(evaluate.EvaluateConfig(), {})
    stage = {"verifier": "x", "drafter": "x", "respond": "x", "out": "x"}
    for change in ({"prompts": 0}, {"nodes": [0]}, {"nodes": []}, {"temperatures": [-1.0]}, {"out": ""}):
        refused(lambda change=change: run_config.replaced(measure.MeasureStage(**stage), change), next(iter(change)))
