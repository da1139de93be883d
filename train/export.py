"""Writes what a drafter's run trained as a Hugging Face folder with a model card, from any of its checkpoints.

    python -m train.export run=runs/head out=my-drafter step=best

The folder loads in `treeflash_jax.load(drafter=...)` and in the published PyTorch code. The last step of every run is in
RUN/model already; this command is for its best checkpoint, for other types on disk, and for the card.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath
from orbax.checkpoint import v1 as ocp

from train import config, loop, watch
from train.drafter import DrafterStage, drafter_config, make_stage
from train.head import HeadStage, read_backbone
from treeflash_jax import hf
from treeflash_jax import mesh as meshes
from treeflash_jax.config import DrafterConfig
from treeflash_jax.generate import shipped


@dataclass(frozen=True, kw_only=True)
class ExportStage:
    """Settings of this stage.

    Attributes:
      run: folder of a `train.drafter` or `train.head` run.
      out: folder to write.
      step: "last", "best" (by the run's `loop.best`), or a number.
      dialect: "treeflash", or "dflash" for a backbone alone.
      dtype: on disk.
      licence: of the weights, for the card.
    """

    run: str
    out: str
    step: str = "last"
    dialect: Literal["treeflash", "dflash"] = "treeflash"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    licence: str = "apache-2.0"


def main(settings: ExportStage) -> None:
    trained = read_settings(settings.run)
    model = hf.read_verifier_config(hf.locate(shipped("verifier") if trained.verifier == "tiny" else trained.verifier))
    backbone = None
    if isinstance(trained, HeadStage):
        drafter, backbone = read_backbone(trained)
        trains = ("backbone", "head") if trained.train_backbone else ("head",)
    else:
        drafter, trains = drafter_config(trained, model), ("backbone",)
    stage = make_stage(trained, model, drafter, trains=trains)
    step, params = read_params(settings, trained, stage)
    out = Path(settings.out)
    hf.save_drafter(
        out,
        drafter,
        params.get("backbone", backbone),
        params.get("head"),
        dialect=settings.dialect,
        dtype=jnp.dtype(settings.dtype),
    )
    (out / "README.md").write_text(card(settings, trained, drafter, step), encoding="utf-8")
    print(f"wrote {out} from step {step}")


def read_settings(run: str) -> DrafterStage | HeadStage:
    """What a run was started with. Raises ValueError where `run` is no run of a drafter."""
    path = epath.Path(run) / "settings.json"
    if not path.exists():
        raise ValueError(f"{run}: got no settings.json, expected the run= of train.drafter or train.head")
    kind = HeadStage if "drafter" in json.loads(path.read_text()) else DrafterStage
    return config.load(kind, epath.Path(run) / "settings.toml")


def read_params(settings: ExportStage, trained: DrafterStage | HeadStage, stage: loop.Stage) -> tuple[int, Any]:
    """The chosen step and its weights, whole, on one device."""
    mesh = meshes.make_mesh(devices=jax.devices()[:1])
    transform = loop.make_optimizer(trained.optimizer, 1)
    rows = loop.abstract_rows(trained.loop.batch, trained.data.row_tokens)
    run = settings.run if "://" in settings.run else os.path.abspath(settings.run)
    with ocp.training.Checkpointer(epath.Path(run) / "checkpoints") as saved:
        step = choose_step(list(saved.checkpoints), settings.step, trained.loop)
        return step, saved.load(step, loop.abstract_state(stage, transform, rows, mesh)).params


def choose_step(found: list[Any], wanted: str, kept: config.LoopConfig) -> int:
    """The step meant by "last", "best" or a number. Raises ValueError where there is none."""
    steps = sorted(one.step for one in found)
    if wanted == "last" and steps:
        return steps[-1]
    if wanted == "best":
        scored = [(one.metrics[kept.best], one.step) for one in found if kept.best in (one.metrics or {})]
        if scored:
            return (min if kept.best_mode == "min" else max)(scored)[1]
    if wanted.isdigit() and int(wanted) in steps:
        return int(wanted)
    raise ValueError(f"got step {wanted!r}, expected last, best (needs evaluations of {kept.best}) or one of {steps}")


def card(settings: ExportStage, trained: DrafterStage | HeadStage, drafter: DrafterConfig, step: int) -> str:
    """A model card: what it is, how it was trained, what its run measured."""
    kind = {"marginal": "DFlash drafter", "mlp": "TreeFlash drafter", "linear": "drafter with a linear head"}[drafter.head]
    measured = [line for line in watch.read_log(settings.run) if line["step"] <= step]
    last: dict[str, Any] = {}
    for line in measured:
        last |= {name: value for name, value in line.items() if name.startswith("held_out/") and value is not None}
    rows = [f"| {name.removeprefix('held_out/')} | {_shown(value)} |" for name, value in last.items()]
    return f"""---
license: {settings.licence}
base_model: {trained.verifier}
library_name: treeflash-jax
tags: [speculative-decoding, dflash, treeflash]
---

# A {kind} for {trained.verifier}

Drafts blocks of {drafter.block_size} tokens (the anchor included) for lossless speculative decoding: it changes the speed
of its verifier, never its output. Trained with treeflash_jax (DFlash, arXiv 2602.06036; TreeFlash, arXiv 2606.03819).

    import treeflash_jax as tf
    model = tf.load(verifier="{trained.verifier}", drafter="this folder")

| backbone | |
|---|---|
| layers, width | {drafter.layers.num_layers}, {drafter.layers.hidden_size} |
| reads verifier layers | {", ".join(map(str, drafter.target_layer_ids))} |
| head | {drafter.head} |
| drafter temperature | {drafter.drafter_temperature} |

## Held out, at step {step}

| metric | value |
|---|---|
{chr(10).join(rows) if rows else "| none was measured | |"}

`top1`, `overlap`: per slot, the token before it being right. `tau_n`: tokens committed per round, trees of n rows (root
included).

## Settings of the run

```toml
{config.dump(config.to_dict(trained)).strip()}
```
"""


def _shown(value: Any) -> str:
    return " ".join("-" if x is None else f"{x:.3f}" for x in value) if isinstance(value, list) else f"{value:.3f}"


if __name__ == "__main__":
    config.run(main, ExportStage, __doc__)
