"""A drafter for your own model in one command: answers, backbone, head, export, and a measurement.

    python -m train.pair verifier=smollm2 prompts=prompts.jsonl out=runs/pair

Mask token, tapped layers, block size, number of layers and steps are chosen by rule and printed with their reasons, unless
they are given (block_size=8 passes=4). Any setting of a stage can be given by its dotted name
(drafter.optimizer.learning_rate=3e-3). The first training steps are timed, and a line says what all of it will take.
The settings of every stage are kept in OUT as a TOML file, so that a stage can be run alone:
`python -m train.head OUT/head.toml`. A command that was stopped continues when it is run again. The same command with more
prompts, passes or steps extends a finished OUT.
"""

import dataclasses
import json
import math
import shlex
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax

from train import drafter, export, head, measure, respond
from train.pairing.compose import MEASURE_SECONDS, Composed, Composer, PairConfig, check_steps
from train.runtime import folders, hosts, lock, run_config, watch
from treeflash_jax.bench.report import format_interval
from treeflash_jax.core import files
from treeflash_jax.core.checks import read_json

STAGES = {
    "respond": (respond, respond.RespondConfig),
    "drafter": (drafter, drafter.DrafterStage),
    "head": (head, head.HeadStage),
    "export": (export, export.ExportStage),
    "measure": (measure, measure.MeasureStage),
}
# Settings that may change after stages were begun; and the first stage that others affect, if not "drafter".
MAY_CHANGE = ("num_prompts", "steps", "passes", "anyway", "out", "mesh", "export", "measure")
FIRST_AFFECTED = {"verifier": "respond", "prompts": "respond", "seed": "respond", "respond": "respond", "head": "head"}


def main(settings: PairConfig) -> None:
    hosts.connect()
    if jax.process_count() > 1:
        raise ValueError("train.pair runs in one process; on several hosts run its stages one by one")
    composer, path = Composer(settings), settings.path("pair.toml")
    is_known = path.exists() and not run_config.changes(settings, path, ())
    if not is_known:
        check_extension(settings)
        composer.check()
    with lock.held(folders.absolute(settings.path("pair.lock")), f"out={settings.out}"):
        if not is_known:  # stages are composed again; each continues only with the settings it was begun with
            for name in STAGES:
                settings.path(f"{name}.toml").unlink(missing_ok=True)
            run_config.save(settings, path)
        stages = _run_stages(composer)
        conclude(composer, stages["respond"], read_json(stages["measure"].out))


def check_extension(settings: PairConfig) -> None:
    """Raises ValueError if the stages begun in OUT cannot continue with these settings, before anything is written."""
    path = settings.path("pair.toml")
    changes = run_config.changes(settings, path, MAY_CHANGE) if path.exists() else {}
    for key, (then, now) in changes.items():
        if _begun_with(settings, FIRST_AFFECTED.get(key.partition(".")[0], "drafter")).exists():
            give = f"leave {key} out" if then in (None, [], "") else f"give {key}={then}"
            raise ValueError(f"{settings.out} was begun with {key} = {then!r}, got {now!r}; {give}, or another out=")


def _begun_with(settings: PairConfig, name: str) -> Path:
    return settings.path("responses.jsonl.settings.toml" if name == "respond" else f"{name}/settings.toml")


def _run_stages(composer: Composer) -> dict[str, Any]:
    """Runs the stages that have not finished with these settings, and returns the settings of all."""
    began, settings, stages = time.perf_counter(), composer.settings, {}
    path = settings.path("finished.json")
    finished = read_json(path) if path.exists() else {}
    for number, (name, (module, kind)) in enumerate(STAGES.items(), start=1):
        toml = settings.path(f"{name}.toml")
        hosts.say(f"\n{number} of {len(STAGES)}: python -m train.{name} {shlex.quote(str(toml))}")
        if not toml.exists():
            _write_stage(name, settings, _compose(name, composer, stages))
        stages[name] = run_config.load(kind, toml)
        if finished.get(name) == run_config.to_dict(stages[name]):
            hosts.say("  finished before")
            continue
        stale = {name} if name == "respond" else {*STAGES} - {*stages} | {name}
        finished = {other: stage for other, stage in finished.items() if other not in stale}
        files.write(path, json.dumps(finished, indent=1) + "\n")
        if name == "drafter":  # the head was trained on another backbone
            shutil.rmtree(settings.path("head"), ignore_errors=True)
            module.main(stages[name], on_timed=partial(announce, began, stages[name].loop.steps))
        else:
            module.main(stages[name])
        finished[name] = run_config.to_dict(stages[name])
        files.write(path, json.dumps(finished, indent=1) + "\n")
    return stages


def announce(began: float, steps: int, step: int, seconds: float) -> None:
    """Prints what the whole command will take, once `seconds` of a training step are known; at `step` of `steps`."""
    spent = time.perf_counter() - began
    training = (steps - step + math.ceil(steps / 2)) * seconds
    total, *parts = map(watch.duration, (spent + training + MEASURE_SECONDS, spent, training, MEASURE_SECONDS))
    hosts.say(
        f"the whole command will take about {total}: {parts[0]} so far, {parts[1]} for {steps:,} steps of {seconds:.2g} s "
        f"and half as many of the head, at most {parts[2]} to measure; evaluations and compiling are not counted"
    )


def _compose(name: str, composer: Composer, stages: dict[str, Any]) -> Composed:
    """Composes the next stage from those before it and their results."""
    if name not in ("drafter", "head"):
        return getattr(composer, name)()
    made = composer.training(stages["respond"], composer.read_answers(stages["respond"]), on=stages.get("drafter"))
    if name == "drafter":
        check_steps(made.stage.loop, composer.settings)
    return made


def _write_stage(name: str, settings: PairConfig, made: Composed) -> Any:
    """Prints the choices, writes them with the settings to OUT/NAME.toml, and returns the settings."""
    stage, lines = continued(made, settings, name)
    for line in lines:
        hosts.say(f"  {line}")
    path = settings.path(f"{name}.toml")
    comments = "".join(f"# {line}\n" for line in [f"python -m train.{name} {path}", *lines])
    files.write(path, comments + run_config.dump(stage))
    return stage


def continued(made: Composed, settings: PairConfig, name: str) -> Composed:
    """Returns the settings that a stage was begun with, with its number of prompts or steps raised to that of `made`."""
    if name not in ("respond", "drafter", "head") or not _begun_with(settings, name).exists():
        return made
    before, new = run_config.load(type(made.stage), _begun_with(settings, name)), made.stage
    if name == "respond":
        limits = (before.sources[0].limit, new.sources[0].limit)
        source = dataclasses.replace(before.sources[0], limit=max(limits) if all(limits) else 0)
        stage, line = dataclasses.replace(before, sources=(source,)), f"sources.0.limit = {source.limit}: answers are kept"
    else:
        done = _trained_steps(settings, name)
        steps = max(done, new.loop.steps)
        every = (before if steps == before.loop.steps else new).loop.evaluate_every
        stage = dataclasses.replace(before, loop=dataclasses.replace(before.loop, steps=steps, evaluate_every=every))
        line = f"loop.steps = {steps}: continues from step {done}, with the learning rate of a run of {steps}"
    return Composed(dataclasses.replace(stage, mesh=new.mesh), [line, "all other settings are as it was begun"])


def _trained_steps(settings: PairConfig, name: str) -> int:
    """Returns the step of a training stage's newest checkpoint; 0 without one."""
    folder = settings.path(name) / "checkpoints"
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=0)


def conclude(composer: Composer, responded: respond.RespondConfig, measured: dict[str, Any]) -> None:
    """Prints whether drafting pays here, and the command that uses the drafter."""
    settings = composer.settings
    drafted = [system for system in measured["systems"] if system["system"].startswith("drafted")]
    hosts.say("")
    for system in drafted:
        ratio = system["speedup"]
        low, high = ratio["low"] or 0, ratio["high"] or math.inf
        pays = "undecided, give more prompts or measure.seconds"
        if low > 1 or high < 1:
            pays = "drafting pays" if low > 1 else "drafting does not pay"
        hosts.say(f"T = {system['temperature']:g}: {format_interval(ratio)} x one-token speed; {pays}")
    best = max(drafted, key=lambda system: system["speedup"]["value"])
    speedup, tau = best["speedup"]["value"], best["tau"]
    words = ["treeflash", "generate", "--verifier", settings.verifier, "--drafter", str(settings.path("model"))]
    if responded.thinking:
        words += ["--thinking"]
    if responded.template:
        words += ["--template", json.dumps(responded.template)]
    if (best["speedup"]["low"] or 0) > 1:
        words += [word for name, value in measured["options"].items() for word in (f"--{name}", str(value))]
    elif speedup <= 1:
        cost = tau / speedup
        hosts.say(
            f"\nDrafting does not pay on this machine yet: {speedup:.2f} x the speed of one-token decoding. "
            f"A round takes as long as {cost:.2f} one-token steps here, so tau must exceed {cost:.2f}; it is {tau:.2f}. "
            "The same command with more prompts, passes or steps continues from here."
        )
        hosts.say("Without further options, the library drafts only where it expects drafting to pay.")
    is_chat = composer.tokenizer is not None and composer.tokenizer.has_chat_template
    hosts.say(f"\nTo use it:\n  {shlex.join([*words, '--chat' if is_chat else '--prompt', 'Hello'])}")


if __name__ == "__main__":
    run_config.run(main, PairConfig, __doc__)
