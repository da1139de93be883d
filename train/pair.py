"""Makes a drafter for your own model in one command: answers, training, export, and a measurement.

    python -m train.pair verifier=smollm2 prompts=configs/prompts.jsonl out=runs/pair

Mask token, tapped layers, block size, number of layers and steps are chosen by rule and printed, unless they are given
(block_size=8 passes=4). Any setting of a stage can be given by its dotted name (drafter.optimizer.learning_rate=3e-3).
The second training step is timed, and the time of the whole command is estimated and printed. The settings of every stage
are kept in OUT as a TOML file, so that a stage can be run alone: `python -m train.drafter OUT/drafter.toml`.

A command that was stopped continues when it is run again. The same command with more prompts, passes or steps extends a
finished OUT. With other settings, the stages that depend on them begin again, and their earlier results are kept in
OUT/before (then OUT/before/2 and so on).
"""

import json
import shlex
import shutil
import time
from functools import partial
from typing import Any

import jax

from train import measure, respond
from train.data import answers
from train.pairing.compose import MEASURE_SECONDS, Composer, PairConfig
from train.pairing.stages import PAIR_STAGES, StageInputs
from train.runtime import hosts, run_config, watch
from treeflash_jax.bench.report import format_interval
from treeflash_jax.core import files
from treeflash_jax.core.json_files import read_json
from treeflash_jax.core.setting_tables import dotted


def main(settings: PairConfig) -> None:
    hosts.connect()
    if jax.process_count() > 1:
        raise ValueError("train.pair runs in one process; on several hosts run its stages one by one")
    composer = Composer(settings)
    composer.check_settings()
    with hosts.held(files.absolute(settings.path("pair.lock")), f"out={settings.out}"):
        begun = StageInputs(settings)  # under the lock: another command may have just ended
        run_stages(composer, begun)
        shutil.rmtree(settings.path("recorded"), ignore_errors=True)  # gigabytes; training that continues records again
        conclude(settings, composer.stages["respond"], read_json(composer.stages["measure"].out))


def run_stages(composer: Composer, begun: StageInputs) -> None:
    """Runs the stages that have not finished with these inputs."""
    began = time.perf_counter()
    settings = composer.settings
    needed = [stage for stage in PAIR_STAGES if stage.name != "ask" or composer.num_questions]
    for number, stage in enumerate(needed, start=1):
        toml = settings.path(f"{stage.name}.toml")
        hosts.say(f"\n{number} of {len(needed)}: python -m train.{stage.name} {shlex.quote(str(toml))}")
        if stage.name == "drafter":
            composer.read_answers()
        stage_settings = stage.compose(composer)
        inputs = stage.inputs(composer, stage_settings)
        action = begun.action(stage, inputs)
        if action != "begin":
            stage_settings = stage.continued(stage_settings, settings)
        composer.stages[stage.name] = stage_settings
        if action == "skip":
            if stage.name == "respond":  # all stages have the same verifier, and stages that run compare it themselves
                answers.check_inputs(stage_settings, files.absolute(stage_settings.out))
            hosts.say("  finished before")
            continue
        if action == "begin" and stage.name in begun.by_name:
            read = "prompts or questions" if stage.reads_prompts else stage.reads
            changed = begun.changed(stage, inputs) or f"{read} changed"
            folder = stage.set_aside(settings)
            hosts.say(f"  begins again, as {changed}; earlier results are kept in {folder}")
        run_config.save(stage_settings, toml)
        begun.save(stage, inputs, finished=False)
        run_config.save(settings, settings.path("pair.toml"))
        values = dotted(run_config.to_dict(stage_settings), into_lists=True)
        for key in stage.shown:
            hosts.say(f"  {key} = {values[key]}")
        if stage.name == "drafter":
            stage.main(stage_settings, on_timed=partial(announce, began, stage_settings.loop.steps))
        else:
            stage.main(stage_settings)
        begun.save(stage, inputs, finished=True)


def announce(began: float, steps: int, step: int, seconds: float) -> None:
    """Prints an estimate of the command's total time, when it is known that step `step` of `steps` took `seconds`."""
    spent = time.perf_counter() - began
    training = (steps - step) * seconds
    total, *parts = map(watch.duration, (spent + training + MEASURE_SECONDS, spent, training, MEASURE_SECONDS))
    hosts.say(
        f"the whole command will take about {total}: {parts[0]} so far, {parts[1]} for {steps:,} steps of {seconds:.2g} s, "
        f"about {parts[2]} to measure; evaluations and compiling are not counted"
    )


def conclude(settings: PairConfig, responded: respond.RespondConfig, measured: dict[str, Any]) -> None:
    """Prints whether the drafter is faster than one-token decoding and than n-grams, and the command that uses it."""
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
    words += ["--nodes", str(measured["settings"]["nodes"])]  # drafts even if drafting is off by default
    if responded.thinking:
        words += ["--thinking"]
    if responded.template:
        words += ["--template", json.dumps(responded.template)]
    hosts.say(f"\nTo use it:\n  {shlex.join([*words, 'Hello'])}")


if __name__ == "__main__":
    run_config.run_command(main, PairConfig, __doc__)
