"""Extension of an earlier `train.pair` in the same OUT by more time, prompts or steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from train.pairing.compose import Composed, PairConfig, setting
from train.runtime import run_config

# Settings that may change although stages were begun; and the first stage that others affect, if not "drafter".
MAY_CHANGE = ("minutes", "num_prompts", "steps", "head_steps", "out", "mesh", "export", "measure")
FIRST_AFFECTED = {"verifier": "respond", "prompts": "respond", "seed": "respond", "respond": "respond", "head": "head"}


def count_answers(settings: PairConfig) -> int:
    path = settings.path("responses.jsonl")
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check(settings: PairConfig) -> None:
    """Refuses settings with which the stages that were begun in OUT cannot continue, before anything is written.

    Raises:
      ValueError: naming the setting and the value to give.
    """
    path = settings.path("pair.toml")
    if not path.exists():
        return
    for key, (then, now) in run_config.changes(settings, path, MAY_CHANGE).items():
        if settings_path(settings, FIRST_AFFECTED.get(key.partition(".")[0], "drafter")).exists():
            give = f"leave {key} out" if then in (None, [], "") else f"give {key}={then}"
            raise ValueError(f"{settings.out} was begun with {key} = {then!r}, got {now!r}; {give}, or another out=")


def settings_path(settings: PairConfig, name: str) -> Path:
    """Returns the file in which a stage stores the settings that it was begun with."""
    return settings.path("responses.jsonl.settings.toml" if name == "respond" else f"{name}/settings.toml")


def trained_steps(settings: PairConfig, name: str) -> int:
    """Returns the step of a training stage's newest checkpoint; 0 without one."""
    folder = settings.path(name) / "checkpoints"
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=0)


def continued(made: Composed, settings: PairConfig, name: str) -> Composed:
    """Returns the settings that a stage was begun with, with its number of prompts or steps raised to that of `made`."""
    if name not in ("respond", "drafter", "head") or not settings_path(settings, name).exists():
        return made
    before, new = run_config.load(type(made.stage), settings_path(settings, name)), made.stage
    if name == "respond":
        limits = (before.sources[0].limit, new.sources[0].limit)
        source = dataclasses.replace(before.sources[0], limit=max(limits) if all(limits) else 0)
        stage = dataclasses.replace(before, sources=(source,), mesh=new.mesh)
        key, why = "sources.0.limit", "existing answers are kept"
    else:
        done = trained_steps(settings, name)
        loop = dataclasses.replace(before.loop, steps=max(done, new.loop.steps))
        if loop != before.loop:
            loop = dataclasses.replace(loop, evaluate_every=new.loop.evaluate_every)
        stage = dataclasses.replace(before, loop=loop, mesh=new.mesh)
        key, why = "loop.steps", f"continues from step {done}, with the learning rate of a run of {loop.steps}"
    value = setting(stage, key)
    if stage == before:
        return Composed(stage, [f"{key} = {value}, and all other settings: as before"])
    [line] = [line for line in made.lines if line.startswith(f"{key} = {value}:")] or [f"{key} = {value}: as before"]
    return Composed(stage, [f"{line}; {why}", "all other settings are those that it was begun with"])
