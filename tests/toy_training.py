"""A toy verifier, drafter and responses on disk, and the settings of a few training steps on them.

Run as a script it is one process of a training run: `python tests/toy_training.py FOLDER [key=value ...]`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

from train import config, head, loop
from treeflash_jax import params
from treeflash_jax.drafters import block
from treeflash_jax.drafters.block import backbone as dflash
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.formats import models
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig

SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8)
MODEL = ModelConfig(num_layers=3, tie_embeddings=True, max_positions=256, eos_token_ids=(2,), **SIZES)
DRAFTER = DrafterConfig(
    layers=ModelConfig(num_layers=2, max_positions=256, **SIZES),
    block_size=5,
    mask_token_id=3,
    target_layer_ids=(0, 2),
    num_target_layers=3,
)
TOML = """
run = "{folder}/run"
verifier = "{folder}/verifier"
drafter = "{folder}/drafter"
init_scale = 0.3
compute_dtype = "float32"
sources = [{{ path = "{folder}/responses.jsonl", format = "responses", hold_out = 10 }}]
data = {{ row_tokens = 32 }}
objective = {{ loss = "forward-kl", decay = 4.0, anchors = 4, chunk = 2 }}
evaluate = {{ prompts = 0 }}
optimizer = {{ learning_rate = 1e-2 }}
loop = {{ steps = 12, batch = 8, log_every = 2, save_every = 4, evaluate_every = 6 }}
mesh = {{ data = 1 }}
"""


def write(folder: Path, documents: int = 120) -> Path:
    """Writes the pair, its responses and head.toml; returns the TOML file."""
    key = jax.random.key(0)
    models.save_verifier(folder / "verifier", MODEL, params.initialize(verifier.specs(MODEL), key, scale=0.3))
    backbone = params.initialize(dflash.specs(DRAFTER), jax.random.fold_in(key, 1), scale=0.3)
    models.save_drafter(folder / "drafter", DRAFTER, {"backbone": backbone, "head": {}})
    rng = np.random.default_rng(0)
    with (folder / "responses.jsonl").open("w") as file:
        for _ in range(documents):
            prompt, response = (rng.integers(4, 64, rng.integers(*ends)).tolist() for ends in ((2, 5), (6, 14)))
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    (folder / "head.toml").write_text(TOML.format(folder=folder))
    return folder / "head.toml"


def with_head(kind: str = "mlp") -> DrafterConfig:
    return dataclasses.replace(DRAFTER, head=kind)


def fresh_head() -> dict:
    """Head weights whose output layer is zero."""
    return params.initialize(block.specs(with_head())["head"], jax.random.key(0), scale=0.3)


def settings(toml: Path, *overrides: str) -> head.HeadStage:
    return config.load(head.HeadStage, toml, overrides)


def terminate_after(steps: int) -> None:
    """Has this process send itself SIGTERM once it has done so many steps of training, and be told of it in that step."""

    class Terminated(loop.Termination):
        def requested(self, step: int) -> bool:
            if step == steps:
                os.kill(os.getpid(), signal.SIGTERM)
                deadline = time.monotonic() + 60
                while self.received is None and time.monotonic() < deadline:
                    time.sleep(0.01)  # a thread of its own hears of signals; without a wait one more step may be done
            return super().requested(step)

    loop.Termination = Terminated


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    if "TOY_DEVICES" in os.environ:
        jax.config.update("jax_num_cpu_devices", int(os.environ["TOY_DEVICES"]))
    if "TOY_TERMINATE_AFTER" in os.environ:
        terminate_after(int(os.environ["TOY_TERMINATE_AFTER"]))
    head.main(settings(Path(sys.argv[1]) / "head.toml", *sys.argv[2:]))
