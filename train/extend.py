"""Continues an earlier `train.pair` in the same OUT, with more time, prompts or steps."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from train import compose, config
from train.compose import Composed, PairConfig
from train.respond import RespondConfig

# Settings that may change although stages were begun, and the first stage that the others bind; "drafter" if not listed.
MAY_CHANGE = ("minutes", "num_prompts", "steps", "head_steps", "out", "mesh", "export", "measure")
BOUND = {"verifier": "respond", "prompts": "respond", "seed": "respond", "respond": "respond", "head": "head"}


def count_answers(settings: PairConfig) -> int:
    path = compose.file(settings, "responses.jsonl")
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check(settings: PairConfig) -> None:
    """Refuses, before anything is written, settings with which the stages that were begun in OUT cannot go on.

    Raises:
      ValueError: naming the setting and the value to give.
    """
    path = compose.file(settings, "pair.toml")
    if not path.exists():
        return
    for key, (then, now) in config.changes(settings, path, MAY_CHANGE).items():
        if record(settings, BOUND.get(key.partition(".")[0], "drafter")).exists():
            give = f"leave {key} out" if then in (None, [], "") else f"give {key}={then}"
            raise ValueError(f"{settings.out} was begun with {key} = {then!r}, got {now!r}; {give}, or another out=")
    sizes = {"steps": trained_steps(settings, "drafter"), "head_steps": trained_steps(settings, "head")}
    if record(settings, "respond").exists():
        sizes["num_prompts"] = config.load(RespondConfig, record(settings, "respond")).sources[0].limit
    for key, least in sizes.items():
        if 0 < getattr(settings, key) < (least or math.inf if key == "num_prompts" else least):
            raise ValueError(
                f"{settings.out} has {key} = {least or 'all'}, got {getattr(settings, key)}; give {key}={least} or more, "
                "or another out="
            )


def record(settings: PairConfig, name: str) -> Path:
    """Returns the file in which a stage keeps the settings that it was begun with."""
    return compose.file(settings, "responses.jsonl.settings.toml" if name == "respond" else f"{name}/settings.toml")


def trained_steps(settings: PairConfig, name: str) -> int:
    """Step of the newest checkpoint of a training stage; 0 without one."""
    folder = compose.file(settings, name) / "checkpoints"
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=0)


def continued(made: Composed, settings: PairConfig, name: str) -> Composed:
    """Returns the settings that a stage was begun with, except for its size: prompts and steps only grow."""
    if name not in ("respond", "drafter", "head") or not record(settings, name).exists():
        return made
    before, new = config.load(type(made.stage), record(settings, name)), made.stage
    if name == "respond":
        setting, limits = "sources.0.limit", (before.sources[0].limit, new.sources[0].limit)
        source = dataclasses.replace(before.sources[0], limit=max(limits) if all(limits) else 0)
        stage = dataclasses.replace(before, sources=(source,), mesh=new.mesh)
        why = "those that are answered stay"
    else:
        setting, done = "loop.steps", trained_steps(settings, name)
        loop = dataclasses.replace(before.loop, steps=max(done, new.loop.steps))
        if loop != before.loop:
            loop = dataclasses.replace(loop, evaluate_every=new.loop.evaluate_every)
        stage = dataclasses.replace(before, loop=loop, mesh=new.mesh)
        why = f"goes on from step {done}, with the learning rate of a run of {loop.steps}"
    value = compose.setting(stage, setting)
    if stage == before:
        return Composed(stage, [f"{setting} = {value}, and all other settings: as before"])
    same = [line for line in made.lines if line.startswith(f"{setting} = {value}:")]
    return Composed(
        stage,
        [
            f"{(same or [f'{setting} = {value}: as before'])[0]}; {why}",
            "all other settings are those that it was begun with",
        ],
    )
