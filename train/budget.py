"""Time budget of `train.pair minutes=...`: measured costs of the stages, time spent, and its distribution."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train import compose, data, hosts, progress, respond, watch
from train.choices import Choice
from train.compose import PairConfig
from treeflash_jax import files
from treeflash_jax.checks import read_json

SHARES = {"respond": 0.45, "drafter": 0.35, "head": 0.15, "measure": 0.15}  # of the time that no fixed cost takes
TITLES = {
    "respond": "answers",
    "drafter": "backbone and head",
    "head": "head alone",
    "export": "export",
    "measure": "measurement",
}
EVALUATED_SHARE, MOST_EVALUATIONS = 0.2, 4  # of a training stage
TIMED_TOKENS, TIMED_STEPS = 32, 4
TIMED_EVERY = 2  # steps between the two evaluations that are timed


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of stages, as measured on this machine.

    Attributes:
      answer: one answer of full length, in a batch.
      answers_start: loading and compiling before the first answer.
      start: loading and compiling before the first training step, and writing the result.
      first_evaluation: the first evaluation of a run, compiling included.
      evaluation: any other evaluation.
    """

    answer: float
    answers_start: float
    start: float
    step: float
    first_evaluation: float
    evaluation: float
    export: float

    def plan(self, seconds: float, stages: Sequence[str]) -> dict[str, float]:
        """Shares `seconds` out among `stages`: each gets its fixed costs, and its share of what these leave."""
        training = self.start + self.first_evaluation
        fixed = {"respond": self.answers_start, "drafter": training, "head": training, "export": self.export}
        fixed |= {"measure": 2 * self.first_evaluation}  # which compiled two ways to decode, the least that is compared
        shares = {name: SHARES.get(name, 0.0) for name in stages}
        free = max(0.0, seconds - sum(fixed[name] for name in stages)) / (sum(shares.values()) or 1.0)
        return {name: fixed[name] + free * share for name, share in shares.items()}

    def training(self, seconds: float) -> tuple[int, int]:
        """Steps and evaluations of a training stage of `seconds`."""
        free = max(0.0, seconds - self.start - self.first_evaluation)
        more = min(MOST_EVALUATIONS - 1, int(EVALUATED_SHARE * free / self.evaluation))
        return int((free - more * self.evaluation) / self.step), 1 + more


class Budget:
    """Seconds of a command and of those that it continues, kept in OUT/minutes.json together with the costs."""

    def __init__(self, settings: PairConfig):
        self.path, self.minutes = compose.file(settings, "minutes.json"), settings.minutes
        saved = read_json(self.path) if self.path.exists() else {}
        self.before, self.began = saved.get("seconds", 0.0), time.perf_counter()
        self.costs = Costs(**saved["costs"]) if saved.get("costs") else None

    @property
    def spent(self) -> float:
        return self.before + time.perf_counter() - self.began

    @property
    def left(self) -> float:
        return 60 * self.minutes - self.spent

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Notes what was spent, however the command ends."""
        try:
            yield
        finally:
            self.save()

    def save(self) -> None:
        costs = self.costs and dataclasses.asdict(self.costs)
        files.write(self.path, json.dumps({"seconds": round(self.spent, 1), "costs": costs}, indent=1) + "\n")

    def say(self, plan: Mapping[str, float]) -> None:
        """Prints the seconds of every stage before the first one starts."""
        hosts.say(f"\nPlan for minutes={self.minutes:g}, of which {progress.duration(self.spent)} are spent:")
        for name, seconds in plan.items():
            hosts.say(f"  {TITLES[name]}: {seconds:,.0f} s")
        total = self.spent + sum(plan.values())
        least = (
            ""
            if total <= 75 * self.minutes
            else f": the least that these stages take here, more than minutes={self.minutes:g}"
        )
        hosts.say(f"  all: {progress.duration(total)}{least}")


def measure_costs(
    settings: PairConfig,
    verifier: compose.Verifier,
    asked: respond.RespondConfig,
    mains: Mapping[str, Callable[[Any], None]],
) -> Costs:
    """Times a short batch of answers, a few training steps with two evaluations, and an export, in OUT/timing."""
    folder = compose.file(settings, "timing")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hosts.say(f"timing {TIMED_TOKENS} tokens of answers, {TIMED_STEPS} training steps, 2 evaluations and an export")
    with redirect_stdout(io.StringIO()):
        answer, answers_start = _time_answers(asked, folder / "responses.jsonl")
        stage = _short_training(dataclasses.replace(settings, out=str(folder)), verifier, asked)
        whole = _timed(mains["drafter"], stage)
        short = dataclasses.replace(compose.export_stage(settings).stage, run=stage.run, out=str(folder / "model"))
        export = _timed(mains["export"], short)
    lines = watch.read_log(stage.run)
    shutil.rmtree(folder)
    ended = {line["step"]: line["seconds"] for line in lines}
    step = stage.loop.batch * stage.data.row_tokens / max(line.get("tokens_per_second", 0.0) for line in lines)
    first, later = (max(0.1, ended[at] - ended[at - 1] - step) for at in (TIMED_EVERY, 2 * TIMED_EVERY))
    return Costs(answer, answers_start, max(0.0, whole - TIMED_STEPS * step - first - later), step, first, later, export)


def _timed(main: Callable[[Any], None], stage: Any) -> float:
    since = time.perf_counter()
    main(stage)
    return time.perf_counter() - since


def _time_answers(asked: respond.RespondConfig, out: Path) -> tuple[float, float]:
    """Seconds of an answer and of everything before it; leaves some short answers to train on in `out`."""
    since = time.perf_counter()
    model = respond.load_model(asked)
    prompts = respond.collect_prompts(asked, model)
    chosen = [prompts[i] for i in data.spread(min(asked.batch, len(prompts)), len(prompts))]
    results = model.generate(
        [prompt.ids for prompt in chosen], builder="none", max_new_tokens=TIMED_TOKENS, batch_size=asked.batch
    )
    seconds = results[0].seconds
    start = time.perf_counter() - since - seconds
    out.write_text("".join(respond.line_of(i, chosen[i], asked, results[i]) for i in range(len(chosen))), encoding="utf-8")
    return seconds * asked.max_new_tokens / sum(len(result.ids) for result in results), start


def _short_training(settings: PairConfig, verifier: compose.Verifier, asked: respond.RespondConfig) -> Any:
    """Settings of a few steps on the answers that were timed."""
    asked = dataclasses.replace(asked, out=str(compose.file(settings, "responses.jsonl")))
    answers = compose.read_answers(asked, settings, verifier)
    stage = compose.drafter_stage(settings, verifier, asked, answers, Choice(TIMED_STEPS, "")).stage
    loop = dataclasses.replace(stage.loop, steps=TIMED_STEPS, log_every=1, save_every=0, evaluate_every=TIMED_EVERY)
    return dataclasses.replace(stage, loop=loop)
