"""A drafter for your own model in one command: answers, backbone, head, export, and a measurement.

    python -m train.pair verifier=smollm2 prompts=prompts.jsonl out=runs/pair

What is not given is chosen by rule and printed with its reason: mask token, tapped layers, block size, number of layers,
steps. Any of it can be given (block_size=8 steps=2000), and so can any setting of a stage, by its own name
(drafter.optimizer.learning_rate=3e-3). The settings of every stage lie in OUT as a TOML file, so that each can also be run
by hand: `python -m train.head OUT/head.toml`. Killed at any moment, the same command goes on where it was. minutes=60 sizes
answers and training to take about an hour, from a short timing of each.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax

from train import (
    choices,
    compose,
    config,
    data,
    drafter,
    export,
    folders,
    head,
    hosts,
    lock,
    measure,
    progress,
    respond,
    watch,
)
from train.choices import Choice
from train.compose import Composed, PairConfig
from train.drafting import DraftingStage
from treeflash_jax import files
from treeflash_jax.checks import read_json

MAINS: dict[str, Callable[[Any], None]] = {
    "respond": respond.main,
    "drafter": drafter.main,
    "head": head.main,
    "export": export.main,
    "measure": measure.main,
}
KINDS = {
    "respond": respond.RespondConfig,
    "drafter": drafter.DrafterStage,
    "head": head.HeadStage,
    "export": export.ExportStage,
    "measure": measure.MeasureStage,
}
SHARES = {"respond": 0.45, "drafter": 0.35, "head": 0.15}  # of `minutes`
TIMED_TOKENS, TIMED_STEPS = 32, 4


def main(settings: PairConfig) -> None:
    if jax.process_count() > 1:
        raise ValueError("train.pair runs in one process; on several hosts run its stages one by one")
    verifier = compose.Verifier.open(settings.verifier)
    if not _is_known(settings):
        _check_overrides(settings, verifier)
    with lock.held(folders.absolute(compose.file(settings, "pair.lock")), f"out={settings.out}"):
        _run_stages(settings, verifier)


def _run_stages(settings: PairConfig, verifier: compose.Verifier) -> None:
    is_known = _is_known(settings)
    if not is_known:
        _begin(settings)
    stages: dict[str, Any] = {}
    for number, name in enumerate(MAINS, start=1):
        path = compose.file(settings, f"{name}.toml")
        hosts.say(f"\n{number} of {len(MAINS)}: python -m train.{name} {shlex.quote(str(path))}")
        if not (is_known and path.exists()):
            _write_stage(path, name, _compose(name, settings, verifier, stages))
        stages[name] = config.load(KINDS[name], path)
        if _finished(settings).get(name) == path.read_text(encoding="utf-8"):
            hosts.say("  finished before")
            continue
        MAINS[name](stages[name])
        finished = _finished(settings) | {name: path.read_text(encoding="utf-8")}
        files.write(_finished_path(settings), json.dumps(finished, indent=1) + "\n")
    _conclude(settings, read_json(stages["measure"].out))


def _compose(name: str, settings: PairConfig, verifier: compose.Verifier, stages: dict[str, Any]) -> Composed:
    """Settings of the next stage, from those before it and what they left."""
    if name == "respond":
        made = compose.respond_stage(settings, verifier)
        limit = answers_in_time(made.stage, settings) if settings.minutes else None
        return made if limit is None else compose.respond_stage(settings, verifier, limit)
    if name == "export":
        return compose.export_stage(settings)
    if name == "measure":
        return compose.measure_stage(settings)
    asked = stages["respond"]
    answers = compose.read_answers(asked, settings, verifier)

    def stage(steps: Choice | None) -> Composed:
        if name == "drafter":
            return compose.drafter_stage(settings, verifier, asked, answers, steps)
        return compose.head_stage(settings, verifier, asked, answers, stages["drafter"], steps)

    made, given = stage(None), settings.steps if name == "drafter" else settings.head_steps
    steps = steps_in_time(name, made.stage, settings) if settings.minutes and not given else None
    return made if steps is None else stage(steps)


def _check_overrides(settings: PairConfig, verifier: compose.Verifier) -> None:
    """Composes all stages for answers that are not there yet: a misspelt setting must not show up after an hour."""
    asked = compose.respond_stage(settings, verifier).stage
    nothing = compose.Answers(count=0, rows=0, mask=Choice(0, ""))
    made = compose.drafter_stage(settings, verifier, asked, nothing).stage
    choices.check_taps(made.drafter_config(verifier.model), verifier.model)
    compose.head_stage(settings, verifier, asked, nothing, made)
    compose.export_stage(settings)
    compose.measure_stage(settings)


def answers_in_time(stage: respond.RespondConfig, settings: PairConfig) -> Choice | None:
    """How many prompts can be answered in their share of the time, by the speed of one short batch; None: all of them."""
    model = respond.load_model(stage)
    prompts = respond.collect_prompts(stage, model)
    chosen = [prompts[i].ids for i in data.spread(min(stage.batch, len(prompts)), len(prompts))]
    results = model.generate(chosen, builder="none", max_new_tokens=TIMED_TOKENS, batch_size=stage.batch)
    speed = sum(len(result.ids) for result in results) / results[0].seconds
    seconds = 60 * settings.minutes * SHARES["respond"]
    count = max(stage.batch, compose.LEAST_PROMPTS, int(seconds * speed / stage.max_new_tokens))
    if count >= len(prompts):
        return None
    return Choice(count, f"as many as {progress.duration(seconds)} are enough for, at {speed:,.0f} tokens/s as timed")


def steps_in_time(name: str, stage: DraftingStage, settings: PairConfig) -> Choice | None:
    """How many steps fit into their share of the time, by the speed of a few; None: those of the rule."""
    folder = compose.file(settings, f"timing-{name}")
    shutil.rmtree(folder, ignore_errors=True)
    loop = dataclasses.replace(stage.loop, steps=TIMED_STEPS, log_every=1, save_every=0, evaluate_every=0)
    evaluate = dataclasses.replace(stage.evaluate, prompts=0)
    hosts.say(f"  timing {TIMED_STEPS} steps")
    with redirect_stdout(io.StringIO()):
        MAINS[name](dataclasses.replace(stage, run=str(folder), loop=loop, evaluate=evaluate))
    speed = max(line.get("tokens_per_second", 0.0) for line in watch.read_log(folder))
    shutil.rmtree(folder)
    step = stage.loop.batch * stage.data.row_tokens / speed
    seconds = 60 * settings.minutes * SHARES[name]
    count = max(1, int(seconds / step))
    if count >= stage.loop.steps:
        return None
    return Choice(count, f"as many as {progress.duration(seconds)} are enough for, at {step:.2g} s a step as timed")


def _is_known(settings: PairConfig) -> bool:
    """Whether OUT was begun with these settings."""
    path = compose.file(settings, "pair.toml")
    return path.exists() and not config.changes(settings, path, ())


def _begin(settings: PairConfig) -> None:
    """Notes the settings in OUT/pair.toml and forgets stage files of others.

    What the stages themselves left stays: each of them goes on only with the settings it was begun with.
    """
    path = compose.file(settings, "pair.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in MAINS:
        compose.file(settings, f"{name}.toml").unlink(missing_ok=True)
    files.write(path, config.dump(config.to_dict(settings)))


def _write_stage(path: Path, name: str, made: Composed) -> None:
    """Prints what was chosen, and writes it above the settings."""
    for line in made.lines:
        hosts.say(f"  {line}")
    comments = "".join(f"# {line}\n" for line in [f"python -m train.{name} {path}", *made.lines])
    files.write(path, comments + config.dump(config.to_dict(made.stage)))


def _finished_path(settings: PairConfig) -> Path:
    return compose.file(settings, "finished.json")


def _finished(settings: PairConfig) -> dict[str, str]:
    """Stages that ended, and the settings they ended with."""
    path = _finished_path(settings)
    return read_json(path) if path.exists() else {}


def _conclude(settings: PairConfig, measured: dict[str, Any]) -> None:
    """Says whether drafting pays here, and how to use the drafter."""
    best = max(found["speedup"] for found in measured["temperatures"])
    if best <= 1:
        hosts.say(
            f"\nDrafting does not pay on this machine yet: {best:.2f} x the speed of one-token decoding. "
            "More prompts and more steps raise tau."
        )
    words = ["treeflash", "generate", "--verifier", settings.verifier, "--drafter", str(compose.file(settings, "model"))]
    words += [word for name, value in measured["options"].items() for word in (f"--{name}", str(value))]
    hosts.say(f"\nTo use it:\n  {shlex.join([*words, '--chat', 'How many legs do 3 cows have?'])}")


if __name__ == "__main__":
    config.run(main, PairConfig, __doc__)
