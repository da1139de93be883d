"""Time budget of `train.pair minutes=...`: measures the costs of all stages, and divides the time among them."""

import dataclasses
import io
import json
import shutil
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from train import drafter, respond
from train.data import packing
from train.pairing.choices import Choice
from train.pairing.compose import MOST_EVALUATIONS, Composer, PairConfig
from train.runtime import hosts, watch
from treeflash_jax.core import files
from treeflash_jax.core.checks import read_json

# Shares of the time that is left after fixed costs. The remaining share goes to answers and the first training, such that
# training makes PASSES passes (notebooks/results, "How much training").
LATER = {"head": 0.15, "export": 0.0, "measure": 0.15}
PASSES = 5
EVALUATED_SHARE = 0.2  # of a training stage
TIMED_TOKENS, TIMED_STEPS = 32, 4
TIMED_EVERY = 2  # steps between the two timed evaluations


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of stages take, measured on this machine.

    Attributes:
      answer: one answer of full length, in a batch.
      answers_start: loading and compiling before the first answer.
      start: loading, compiling, the first evaluation and writing the result of a training stage. Later stages, which
        compile no training step, are taken to need half of it.
      step: one training step.
      learn: training once on one prompt and answer of full length.
      evaluation: any evaluation but the first.
    """

    answer: float
    answers_start: float
    start: float
    step: float
    learn: float
    evaluation: float

    def plan(self, seconds: float, first: str = "respond") -> dict[str, float]:
        """Divides `seconds` among the stages from `first` on: the fixed costs of each, and shares of the others."""
        answering, both = self.answer / (self.answer + PASSES * self.learn), 1 - sum(LATER.values())
        shares = {"respond": both * answering, "drafter": both * (1 - answering)} | LATER
        start, names = self.start, list(shares)[list(shares).index(first) :]
        fixed = dict(respond=self.answers_start, drafter=start, head=start, export=start / 2, measure=start / 2)
        free = max(0.0, seconds - sum(fixed[name] for name in names)) / sum(shares[name] for name in names)
        return {name: fixed[name] + free * shares[name] for name in names}

    def training(self, seconds: float) -> tuple[int, int]:
        """Returns the numbers of steps and evaluations that fit into a training stage of `seconds`."""
        free = max(0.0, seconds - self.start)
        more = min(MOST_EVALUATIONS - 1, int(EVALUATED_SHARE * free / self.evaluation))
        return int((free - more * self.evaluation) / self.step), 1 + more


class Budget:
    """Time used by all commands with the same OUT, and measured costs; kept in OUT/minutes.json."""

    def __init__(self, settings: PairConfig):
        self.path, self.minutes = settings.path("minutes.json"), settings.minutes
        saved = read_json(self.path) if self.path.exists() else {}
        self.before, self.began = saved.get("seconds", 0.0), time.perf_counter()
        self.costs = Costs(**saved["costs"]) if saved.get("costs") else None

    @property
    def spent(self) -> float:
        return self.before + time.perf_counter() - self.began

    @property
    def left(self) -> float:
        return 60 * self.minutes - self.spent

    def save(self) -> None:
        costs = self.costs and dataclasses.asdict(self.costs)
        files.write(self.path, json.dumps({"seconds": round(self.spent, 1), "costs": costs}, indent=1) + "\n")

    def plan(self, composer: Composer, responding: respond.RespondConfig) -> dict[str, float]:
        """Returns and prints the seconds planned for every stage; measures the costs unless an earlier command did."""
        if self.costs is None:
            self.costs = measure_costs(composer, responding)
            self.save()
        plan = self.costs.plan(self.left)
        hosts.say(f"\nPlan for minutes={self.minutes:g}, of which {watch.duration(self.spent)} are spent:")
        for name, seconds in plan.items():
            hosts.say(f"  train.{name}: {seconds:,.0f} s")
        total = self.spent + sum(plan.values())
        over = f", more than minutes={self.minutes:g}: these stages take at least this long here"
        hosts.say(f"  all: {watch.duration(total)}{over if total > 75 * self.minutes else ''}")
        return plan


def measure_costs(composer: Composer, responding: respond.RespondConfig) -> Costs:
    """Times a batch of short answers, and a few training steps with two evaluations, in OUT/timing."""
    folder = composer.settings.path("timing")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hosts.say(f"timing {TIMED_TOKENS} tokens of answers, {TIMED_STEPS} training steps and 2 evaluations")
    timed = Composer(dataclasses.replace(composer.settings, out=str(folder)))
    responded = dataclasses.replace(responding, out=str(folder / "responses.jsonl"))
    with redirect_stdout(io.StringIO()):
        answer, answers_start = _time_answers(responded)
        stage = timed.training(responded, timed.read_answers(responded), Choice(TIMED_STEPS, "")).stage
        loop = dataclasses.replace(stage.loop, steps=TIMED_STEPS, log_every=1, save_every=0, evaluate_every=TIMED_EVERY)
        began = time.perf_counter()
        drafter.main(dataclasses.replace(stage, loop=loop))
        seconds = time.perf_counter() - began
    log = watch.read_log(stage.run)
    shutil.rmtree(folder)
    seconds_per_token = 1 / max(line.get("tokens_per_second", 0.0) for line in log)
    step = stage.loop.batch * stage.data.sequence_length * seconds_per_token
    learn = (responding.max_prompt_tokens + responding.max_new_tokens) * seconds_per_token
    *_, before, last = (line["seconds"] for line in log)
    evaluation = max(0.1, last - before - step)
    return Costs(answer, answers_start, max(0.0, seconds - TIMED_STEPS * step - evaluation), step, learn, evaluation)


def _time_answers(settings: respond.RespondConfig) -> tuple[float, float]:
    """Writes some short answers, to train on; returns the seconds of a full one and of everything before it."""
    began = time.perf_counter()
    model = respond.load_model(settings)
    prompts = respond.collect_prompts(settings, model)
    chosen = packing.pick_spread(prompts, settings.batch)
    ids = [prompt.ids for prompt in chosen]
    results = model.generate(ids, builder="none", max_new_tokens=TIMED_TOKENS, batch_size=settings.batch)
    seconds = results[0].seconds
    start = time.perf_counter() - began - seconds
    lines = [respond.answer_line(i, chosen[i], settings, result) for i, result in enumerate(results)]
    Path(settings.out).write_text("".join(lines), encoding="utf-8")
    return seconds * settings.max_new_tokens / sum(len(result.ids) for result in results), start
