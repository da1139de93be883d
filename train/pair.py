"""A drafter for your own model in one command: answers, backbone, head, export, and a measurement.

    python -m train.pair verifier=smollm2 prompts=prompts.jsonl out=runs/pair

Mask token, tapped layers, block size, number of layers and steps are chosen by rule and printed with their reasons, unless
they are given (block_size=8 steps=2000). Any setting of a stage can be given by its dotted name
(drafter.optimizer.learning_rate=3e-3). The settings of every stage are kept in OUT as a TOML file, so that a stage can be
run alone: `python -m train.head OUT/head.toml`. A command that was stopped continues when it is run again. minutes=60 times
every stage briefly and plans all of them, measurement included, to take an hour. The same command with more minutes,
prompts or steps extends a finished OUT.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from train import (
    choices,
    compose,
    config,
    drafter,
    export,
    extend,
    folders,
    head,
    hosts,
    lock,
    measure,
    progress,
    respond,
    watch,
)
from train.budget import Budget, measure_costs
from train.choices import Choice
from train.compose import Composed, PairConfig
from train.records import read
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
MOST_DOUBLINGS = 3  # that a suggestion extrapolates


def main(settings: PairConfig) -> None:
    if jax.process_count() > 1:
        raise ValueError("train.pair runs in one process; on several hosts run its stages one by one")
    verifier = compose.Verifier.open(settings.verifier)
    if not _is_known(settings):
        extend.check(settings)
        _check_overrides(settings, verifier)
    with (
        lock.held(folders.absolute(compose.file(settings, "pair.lock")), f"out={settings.out}"),
        (budget := Budget(settings)).counting(),
    ):
        _run_stages(settings, verifier, budget)


def _run_stages(settings: PairConfig, verifier: compose.Verifier, budget: Budget) -> None:
    if not _is_known(settings):
        _begin(settings)
    stages: dict[str, Any] = {}
    for number, name in enumerate(MAINS, start=1):
        path = compose.file(settings, f"{name}.toml")
        hosts.say(f"\n{number} of {len(MAINS)}: python -m train.{name} {shlex.quote(str(path))}")
        if not path.exists():
            made = _compose(name, settings, verifier, stages, budget)
            _write_stage(path, name, extend.continued(made, settings, name))
        stages[name] = config.load(KINDS[name], path)
        before = _finished(settings)
        if name in before and _without_time(before[name]) == _without_time(config.to_dict(stages[name])):
            hosts.say("  finished before")
            continue
        later = {name} if name == "respond" else set(MAINS) - set(stages) | {name}
        _finish(settings, {done: stage for done, stage in before.items() if done not in later})
        if name == "drafter":  # the head was trained on another backbone
            shutil.rmtree(compose.file(settings, "head"), ignore_errors=True)
        since, answered = time.perf_counter(), extend.count_answers(settings)
        MAINS[name](stages[name])
        if name == "respond" and settings.minutes:
            stages[name] = _answer_more(settings, verifier, stages[name], budget, since, answered)
        _finish(settings, _finished(settings) | {name: config.to_dict(stages[name])})
    conclude(settings, stages["respond"], read_json(stages["measure"].out), budget.spent)


def _compose(
    name: str, settings: PairConfig, verifier: compose.Verifier, stages: dict[str, Any], budget: Budget
) -> Composed:
    """Settings of the next stage, from those before it and what they left, and the seconds it may take."""
    if name == "respond":
        made = compose.respond_stage(settings, verifier)
        if not settings.minutes:
            return made
        if budget.costs is None:
            budget.costs = measure_costs(settings, verifier, made.stage, MAINS)
            budget.save()
        plan = budget.costs.plan(budget.left, tuple(MAINS))
        budget.say(plan)
        count = compose.LEAST_PROMPTS + int((plan[name] - budget.costs.answers_start) / budget.costs.answer)
        return compose.respond_stage(settings, verifier, _limit(settings, count, plan[name]))
    if name == "export":
        return compose.export_stage(settings)
    if name == "measure":
        return compose.measure_stage(settings, max(1.0, round(budget.left)) if settings.minutes else 0.0)
    asked = stages["respond"]
    answers = compose.read_answers(asked, settings, verifier)

    def stage(steps: Choice | None = None, evaluations: int = 4) -> Composed:
        if name == "drafter":
            return compose.drafter_stage(settings, verifier, asked, answers, steps, evaluations)
        return compose.head_stage(settings, verifier, asked, answers, stages["drafter"], steps, evaluations)

    if not settings.minutes:
        return stage()
    seconds = budget.costs.plan(budget.left, tuple(MAINS)[tuple(MAINS).index(name) :])[name]
    count, evaluations = budget.costs.training(seconds)
    given = settings.steps if name == "drafter" else settings.head_steps
    steps, by_rule = max(1, count + extend.trained_steps(settings, name)), stage().stage.loop.steps
    if given or steps >= by_rule:
        return stage(None, evaluations)
    reason = f"as many as {progress.duration(seconds)} are enough for, at {budget.costs.step:.2g} s a step"
    return stage(Choice(steps, reason), evaluations)


def _limit(settings: PairConfig, count: int, seconds: float) -> Choice | None:
    """Returns the number of prompts that time allows; None if those of the settings are fewer."""
    available = settings.num_prompts or compose.count_prompts(settings)
    if count >= available:
        return None
    return Choice(count, f"as many as {progress.duration(seconds)} are enough for")


def _answer_more(
    settings: PairConfig, verifier: compose.Verifier, stage: Any, budget: Budget, since: float, before: int
) -> Any:
    """Answers further prompts if those of the plan were answered much sooner: it took every answer to be of full length."""
    took, count = time.perf_counter() - since, extend.count_answers(settings) - before
    planned = budget.costs.plan(budget.left + took, tuple(MAINS))["respond"]
    limit = stage.sources[0].limit
    if not (limit and count >= compose.LEAST_PROMPTS and took < 0.75 * planned):
        return stage
    choice = _limit(settings, limit + int((planned - took) * count / took), planned)
    made = extend.continued(compose.respond_stage(settings, verifier, choice), settings, "respond")
    _write_stage(compose.file(settings, "respond.toml"), "respond", made)
    MAINS["respond"](made.stage)
    return made.stage


def _check_overrides(settings: PairConfig, verifier: compose.Verifier) -> None:
    """Composes all stages for answers that are not there yet: a misspelt setting must not show up after an hour."""
    asked = compose.respond_stage(settings, verifier).stage
    nothing = compose.Answers(count=0, rows=0, mask=Choice(0, ""))
    made = compose.drafter_stage(settings, verifier, asked, nothing).stage
    choices.check_taps(made.drafter_config(verifier.model), verifier.model)
    compose.head_stage(settings, verifier, asked, nothing, made)
    compose.export_stage(settings)
    compose.measure_stage(settings)


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


def _finished(settings: PairConfig) -> dict[str, Any]:
    """Settings of the stages that ended."""
    path = compose.file(settings, "finished.json")
    return read_json(path) if path.exists() else {}


def _without_time(stage: dict[str, Any]) -> dict[str, Any]:
    """Settings of a stage without the time that was left for it: less time later is no reason to measure again."""
    return {name: value for name, value in stage.items() if name != "seconds"}


def _finish(settings: PairConfig, stages: dict[str, Any]) -> None:
    files.write(compose.file(settings, "finished.json"), json.dumps(stages, indent=1) + "\n")


def conclude(settings: PairConfig, asked: respond.RespondConfig, measured: dict[str, Any], seconds: float) -> None:
    """Says whether drafting pays here, what would make it pay, and how to use the drafter."""
    best = max(measured["temperatures"], key=lambda result: result["speedup"])
    words = ["treeflash", "generate", "--verifier", settings.verifier, "--drafter", str(compose.file(settings, "model"))]
    if best["speedup"] > 1:
        words += [word for name, value in measured["options"].items() for word in (f"--{name}", str(value))]
    else:
        round_cost = best["tau"] / best["speedup"]
        hosts.say(
            f"\nDrafting does not pay on this machine yet: {best['speedup']:.2f} x the speed of one-token decoding. "
            f"A round takes as long as {round_cost:.2f} one-token steps here, so tau must exceed {round_cost:.2f}; it is "
            f"{best['tau']:.2f}."
        )
        hosts.say(_outlook(settings, round_cost / best["tau"], seconds))
        hosts.say("Without further options, the library drafts only where it expects drafting to pay.")
    hosts.say(f"\nTo use it:\n  {shlex.join([*words, *_sample(asked)])}")


def _outlook(settings: PairConfig, factor: float, seconds: float) -> str:
    """Says how much more training raises tau by `factor` if every doubling adds as much as the last one did."""
    log = watch.read_log(compose.file(settings, "drafter"))
    taus = {line["step"]: [line[name] for name in line if re.fullmatch(r"held_out/tau_\d+", name)] for line in log}
    curve = {step: values[0] for step, values in taus.items() if values}
    last = max(curve, default=0)
    half = min(curve, key=lambda step: abs(step - last / 2), default=0)
    if not curve or not 0.4 * last <= half <= 0.6 * last:
        return "The run is too short to say how much training that takes: it has no evaluation at half of its steps."
    gain, doublings = curve[last] - curve[half], math.inf
    seen = f"tau of held-out prompts rose from {curve[half]:.2f} at step {half} to {curve[last]:.2f} at step {last}"
    if gain > 0:
        doublings = (factor - 1) * curve[last] / gain
    if doublings > MOST_DOUBLINGS:
        return f"The run is too short to say how much training that takes: {seen}."
    more = 2**doublings
    count, minutes = math.ceil(more * extend.count_answers(settings)), math.ceil(more * seconds / 60)
    return (
        f"In the last doubling of steps, {seen}. If every further doubling adds as much, drafting pays with {more:.1f} "
        f"times the training: about {count:,} answers and {minutes:,} minutes in all. The same command with more minutes, "
        "prompts or steps goes on from here."
    )


def _sample(asked: respond.RespondConfig) -> list[str]:
    """Returns a short held-out prompt of the user as options of the command line."""
    [source], prompts = asked.sources, []
    for record in read(source, asked.seed, skip=lambda _: None):
        content = respond.question(record.content) if record.number % source.hold_out == source.hold_out - 1 else None
        if isinstance(content, str):
            prompts.append(["--prompt", content])
        elif content:
            prompts.append(["--chat", content[-1]["content"]])
    return min(prompts, key=lambda words: len(words[1]), default=["--chat", "Hello"])


if __name__ == "__main__":
    config.run(main, PairConfig, __doc__)
