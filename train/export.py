"""Writes what a drafter's run trained as a Hugging Face folder with a model card, from any of its checkpoints.

    python -m train.export run=runs/head out=my-drafter step=best

The folder loads in `treeflash_jax.load(drafter=...)` and in the published PyTorch code. The last step of every run is in
RUN/model already; this command is for its best checkpoint, for other types on disk, and for the card.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from train import config, folders, watch
from train.drafting import DraftingStage, assembled, make_stage
from train.stages import read_stage
from train.state import Stage, abstract_rows, abstract_state, make_optimizer
from treeflash_jax import drafters, files
from treeflash_jax import mesh as meshes
from treeflash_jax.checks import bounded
from treeflash_jax.formats import models, storage
from treeflash_jax.pairs import locate


@dataclass(frozen=True, kw_only=True)
class ExportStage:
    """Settings of this stage.

    Attributes:
      run: folder of a run of any stage that trains a drafter, local or gs://.
      out: new folder, local or gs://.
      step: "last", "best" (by the run's `loop.best`), or a number.
      dialect: form of the files, one of `formats.dialects`; empty takes that of this kind of drafter ("treeflash" for
        block drafters, of which "dflash" holds the backbone alone).
      dtype: dtype of the weights on disk.
      licence: licence of the weights, for the model card.
      drafter_temperature: default stored with the drafter, as `train.evaluate temperatures` found it; 0 keeps the run's.
      sampled_above: temperature from which `treeflash bench run --preset rules` found sampled trees better; 0 stores none.
      overwrite: `out` may hold an earlier export, whose files are replaced; nothing else ever is.
    """

    run: str
    out: str
    step: str = "last"
    dialect: str = ""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    licence: str = "apache-2.0"
    drafter_temperature: float = bounded(0.0, least=0)
    sampled_above: float = bounded(0.0, least=0)
    overwrite: bool = False


def main(settings: ExportStage) -> None:
    replacing = {"overwrite": settings.overwrite, "own": lambda folder: storage.is_own(folder / "model.safetensors")}
    folders.check(settings.out, **replacing)
    trained = read_settings(settings.run)
    model = models.read_verifier_config(locate(trained.verifier, "verifier"))
    drafter = trained.drafter_config(model)
    drafter = dataclasses.replace(
        drafter,
        drafter_temperature=settings.drafter_temperature or drafter.drafter_temperature,
        sampled_above=settings.sampled_above or None,
    )
    dialect = settings.dialect or drafters.of(drafter).DIALECT
    models.writable(dialect).to_hf(drafter)  # refused before weights are read
    step, params = read_params(settings, trained, make_stage(trained, model, drafter))
    with folders.filled(settings.out, **replacing) as out:
        models.save_drafter(
            out,
            drafter,
            assembled(drafter, trained.kept(drafter) | params),
            dialect=dialect,
            dtype=jnp.dtype(settings.dtype),
        )
        files.write(out / "README.md", card(settings, trained, drafter, dialect, step))
    print(f"wrote {settings.out} from step {step}")


def read_settings(run: str) -> DraftingStage:
    """What a run was started with. Raises ValueError where `run` is no run of a drafter."""
    path = folders.absolute(run) / "settings.toml"
    if not path.exists():
        raise ValueError(f"{run}: got no settings.toml, expected the run= of a stage that trains a drafter")
    return read_stage(path)


def read_params(settings: ExportStage, trained: DraftingStage, stage: Stage) -> tuple[int, Any]:
    """The chosen step and its weights, whole, on one device."""
    mesh = meshes.make_mesh(devices=jax.devices()[:1])
    transform = make_optimizer(trained.optimizer, 1, stage.specs)
    rows = abstract_rows(trained.loop.batch, trained.data.row_tokens)
    with ocp.training.Checkpointer(folders.absolute(settings.run) / "checkpoints") as saved:
        step = choose_step(list(saved.checkpoints), settings.step, trained.loop)
        return step, saved.load(step, abstract_state(stage, transform, rows, mesh)).params


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


def card(settings: ExportStage, trained: DraftingStage, drafter: Any, dialect: str, step: int) -> str:
    """A model card: what it is, how it was trained, what its run measured."""
    kind, sizes = trained.described(drafter)
    measured = [line for line in watch.read_log(settings.run) if line["step"] <= step]
    last: dict[str, Any] = {}
    for line in measured:
        last |= {name: value for name, value in line.items() if name.startswith("held_out/") and value is not None}
    rows = [f"| {name.removeprefix('held_out/')} | {_shown(value)} |" for name, value in last.items()]
    return f"""---
license: {settings.licence}
base_model: {trained.verifier}
library_name: treeflash-jax
tags: [speculative-decoding, {dialect}]
---

# A {kind} for {trained.verifier}

Drafts continuations for lossless speculative decoding: it changes the speed of its verifier, never its output. Trained with
treeflash_jax.

    import treeflash_jax as tf
    model = tf.load(verifier={json.dumps(trained.verifier)}, drafter={json.dumps(settings.out)})

or, on the command line (the second path is this folder, wherever it lies):

    treeflash generate --verifier {shlex.quote(trained.verifier)} --drafter {shlex.quote(settings.out)} --chat "Hello"

| drafter | |
|---|---|
{chr(10).join(f"| {name} | {value} |" for name, value in sizes.items())}
| drafter temperature | {drafter.drafter_temperature} |
| sampled trees from temperature | {drafter.sampled_above or "never"} |

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
