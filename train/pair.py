"""A drafter for your own model in one command: answers, backbone, head, export, and a measurement.

    python -m train.pair verifier=smollm2 prompts=prompts.jsonl out=runs/pair

Mask token, tapped layers, block size, number of layers and steps are chosen by rule and printed, unless they are given
(block_size=8 passes=4). Any setting of a stage can be given by its dotted name (drafter.optimizer.learning_rate=3e-3).
The first training steps are timed, and a line says what all of it will take. The settings of every stage are kept in OUT
as a TOML file, so that a stage can be run alone: `python -m train.head OUT/head.toml`. A command that was stopped continues
when it is run again. The same command with more prompts, passes or steps extends a finished OUT.
"""

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
from train.pairing.compose import MEASURE_SECONDS, Composer, PairConfig
from train.runtime import folders, hosts, run_config, watch
from treeflash_jax.bench.report import format_interval
from treeflash_jax.core.checks import read_json
from treeflash_jax.core.settings import dotted

STAGES = {"respond": respond, "drafter": drafter, "head": head, "export": export, "measure": measure}
PRINTED = {  # settings that are chosen by rule, by stage
    "respond": "sources.0.hold_out max_prompt_tokens max_new_tokens",
    "drafter": "mask_token_id target_layer_ids block_size num_layers initial_layers compute_dtype loop.steps",
    "head": "loop.steps",
}
# Settings that may change after stages were begun; and the first stage that others affect, if not "drafter".
MAY_CHANGE = ("num_prompts", "steps", "passes", "anyway", "out", "mesh", "export", "measure")
FIRST_AFFECTED = {"verifier": "respond", "prompts": "respond", "seed": "respond", "respond": "respond", "head": "head"}


def main(settings: PairConfig) -> None:
    hosts.connect()
    if jax.process_count() > 1:
        raise ValueError("train.pair runs in one process; on several hosts run its stages one by one")
    composer = Composer(settings)
    check_extension(settings)
    composer.check()
    with hosts.held(folders.absolute(settings.path("pair.lock")), f"out={settings.out}"):
        run_config.save(settings, settings.path("pair.toml"))
        run_stages(composer)
        conclude(settings, composer.stages["respond"], read_json(composer.stages["measure"].out))


def check_extension(settings: PairConfig) -> None:
    """Raises ValueError if the stages begun in OUT cannot continue with these settings, before anything is written."""
    path = settings.path("pair.toml")
    changes = run_config.changes(settings, path, MAY_CHANGE) if path.exists() else {}
    affected = {key: FIRST_AFFECTED.get(key.partition(".")[0], "drafter") for key in changes}
    refused = {key: changes[key] for key, stage in affected.items() if _begun_with(settings, stage).exists()}
    run_config.refuse(refused, settings.out, "out")


def _begun_with(settings: PairConfig, name: str) -> Path:
    """Returns the file in which a stage keeps the settings that it was begun with; export and measure have none."""
    return settings.path("responses.jsonl.settings.toml" if name == "respond" else f"{name}/settings.toml")


def run_stages(composer: Composer) -> None:
    """Runs the stages that have not finished with these settings."""
    began, settings = time.perf_counter(), composer.settings
    for number, (name, module) in enumerate(STAGES.items(), start=1):
        toml, finished = settings.path(f"{name}.toml"), settings.path(f"{name}.finished.toml")
        hosts.say(f"\n{number} of {len(STAGES)}: python -m train.{name} {shlex.quote(str(toml))}")
        if name == "drafter":
            composer.read_answers()
        composer.stages[name] = stage = continued(getattr(composer, name)(), settings, name)
        run_config.save(stage, toml)
        if finished.exists() and finished.read_text() == run_config.dump(stage):
            hosts.say("  finished before")
            continue
        values = dotted(run_config.to_dict(stage), into_lists=True)
        for key in PRINTED.get(name, "").split():
            hosts.say(f"  {key} = {values[key]}")
        for other in [name] if name == "respond" else [*STAGES][number - 1 :]:  # later results are of another drafter
            settings.path(f"{other}.finished.toml").unlink(missing_ok=True)
        if name == "drafter":  # the head was trained on another backbone
            shutil.rmtree(settings.path("head"), ignore_errors=True)
            module.main(stage, on_timed=partial(announce, began, stage.loop.steps))
        else:
            module.main(stage)
        run_config.save(stage, finished)


def announce(began: float, steps: int, step: int, seconds: float) -> None:
    """Prints what the whole command will take, once `seconds` of a training step are known; at `step` of `steps`."""
    spent = time.perf_counter() - began
    training = (steps - step + math.ceil(steps / 2)) * seconds
    total, *parts = map(watch.duration, (spent + training + MEASURE_SECONDS, spent, training, MEASURE_SECONDS))
    hosts.say(
        f"the whole command will take about {total}: {parts[0]} so far, {parts[1]} for {steps:,} steps of {seconds:.2g} s "
        f"and half as many of the head, about {parts[2]} to measure; evaluations and compiling are not counted"
    )


def continued(made: Any, settings: PairConfig, name: str) -> Any:
    """Returns the settings that a stage was begun with, but with the number of prompts or steps that `made` has."""
    path = _begun_with(settings, name)
    if not path.exists():
        return made
    if name == "respond":
        new = {"sources.0.limit": made.sources[0].limit}
    else:
        new = {"loop.steps": made.loop.steps, "loop.evaluate_every": made.loop.evaluate_every}
    return run_config.replaced(run_config.load(type(made), path), new | {"mesh": run_config.to_dict(made.mesh)})


def conclude(settings: PairConfig, responded: respond.RespondConfig, measured: dict[str, Any]) -> None:
    """Prints whether the drafter is faster than one token at a time and than n-grams, and the command that uses it."""
    hosts.say("")
    for system in measured["systems"]:
        if system["builder"] == "none" or system["system"] == measure.NGRAMS:
            continue
        ratio, over = system["speedup"], system["over_ngrams"]
        speeds = f"{format_interval(ratio)} x one-token speed, {format_interval(over)} x the speed of n-grams alone"
        hosts.say(f"T = {system['temperature']:g}: {speeds}")
        if min(ratio["low"] or 0, over["low"] or 0) > 1:
            hosts.say("  the drafter pays")
        else:
            tau, cost = system["tau"], system["tau"] / ratio["value"]
            hosts.say(f"  the drafter adds nothing yet: tau is {tau:.2f}, and a round takes {cost:.2f} one-token steps")
            hosts.say("  the same command with more prompts, passes or steps continues from here")
    words = ["treeflash", "generate", "--verifier", settings.verifier, "--drafter", str(settings.path("model"))]
    words += ["--nodes", str(measured["settings"]["nodes"])]  # drafts where it is off by default, too
    if responded.thinking:
        words += ["--thinking"]
    if responded.template:
        words += ["--template", json.dumps(responded.template)]
    hosts.say(f"\nTo use it:\n  {shlex.join([*words, 'Hello'])}")


if __name__ == "__main__":
    run_config.run(main, PairConfig, __doc__)
