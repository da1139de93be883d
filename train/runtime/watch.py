"""Monitoring of commands and runs: a progress bar, printed lines, the log RUN/log.jsonl, and other programs.

The log has one JSON object per line.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.runtime import hosts, run_config
from treeflash_jax.core import files

StepMetrics = dict[str, Any]
Sink = Callable[[int, Mapping[str, float]], None]  # receives a step and its metrics
SHOWN = {  # metric -> its form in printed lines; other metrics are only in the log
    "loss": "loss {:.3f}",
    "tau_estimate": "estimated tau {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.0%}",
    "held_out/loss": "held-out loss {:.3f}",
}


class Bar(Progress):
    """A live line at the bottom of a terminal, below all printed text. It vanishes when it is stopped.

    It is silent without a terminal, and on all hosts except the first.

    Example:
      >>> with Bar("answers", total=100) as bar:
      ...     bar.show(40, "evaluating 3 of 16")
    """

    def __init__(self, description: str, total: int, done: int = 0):
        is_shown = hosts.is_first() and sys.stdout.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        note = TextColumn("{task.fields[note]}", markup=False)
        console = Console(file=sys.stdout, quiet=not is_shown)
        super().__init__(*columns, note, transient=True, console=console, disable=not is_shown)
        self.task = self.add_task(description, total=total, completed=done, note="")

    def show(self, done: int | None = None, note: str | None = None) -> None:
        """Moves the bar to `done`, and replaces the note after it. None leaves either of them as it is."""
        fields = {} if note is None else {"note": note}
        self.update(self.task, completed=done, **fields)


def duration(seconds: float) -> str:
    """Formats seconds in words: "41 s", "12 min 3 s", "3 h 20 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def read_log(folder: str | os.PathLike) -> list[StepMetrics]:
    """Reads the lines of RUN/log.jsonl. Ignores a last line that a kill cut. Raises ValueError for any other wrong line."""
    path = files.absolute(folder) / "log.jsonl"
    content = path.read_bytes() if path.exists() else b""
    try:
        return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; move it away to begin a new log") from None


class Watch(Bar):
    """Progress bar, printed lines and RUN/log.jsonl of a run; silent on all hosts except the first.

    When a run continues, log lines after the step of its checkpoint are dropped. "seconds" are the total of all starts of
    the run, each up to its last line.

    Args:
      sinks: functions that also receive the metrics.
    """

    def __init__(self, folder: epath.Path, *, steps: int, resumed_at: int, sinks: Sequence[Sink] = ()):
        super().__init__("training", steps, resumed_at)
        self.path = folder / "log.jsonl"
        self.steps = steps
        self.sinks = sinks
        self.began = time.perf_counter()
        if hosts.is_first():
            lines = read_log(folder)
            self.began -= max((line["seconds"] for line in lines), default=0.0)
            kept = [line for line in lines if line["step"] <= resumed_at]
            files.write(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        if resumed_at:
            hosts.say(f"continuing at step {resumed_at} of {steps}")
        self.show(note="compiling")

    def write(self, step: int, metrics: StepMetrics) -> None:
        """Adds a line to the log and prints its most important metrics."""
        if not hosts.is_first():
            return
        metrics = metrics | {"seconds": round(time.perf_counter() - self.began, 1)}
        files.append(self.path, json.dumps({"step": step, **metrics}) + "\n")
        flat: StepMetrics = {}
        for name, value in metrics.items():
            if isinstance(value, list):
                flat |= {f"{name}/{i}": x for i, x in enumerate(value, 1)}
            else:
                flat[name] = value
        for sink in self.sinks:
            sink(step, {name: value for name, value in flat.items() if value is not None})
        words = describe(metrics)
        if words:
            hosts.say(f"step {step} of {self.steps}: {words}")


def describe(metrics: StepMetrics) -> str:
    """Returns the most important metrics in words, with tau by number of nodes next to the marginals' tau."""
    words = [form.format(metrics[name]) for name, form in SHOWN.items() if metrics.get(name) is not None]
    for name, value in metrics.items():
        kind, _, nodes = name.rpartition("_")
        if kind == "held_out/tau" and nodes.isdigit():
            marginal = metrics.get(f"held_out/tau_marginal_{nodes}")
            beside = "" if marginal is None else f" (marginal {marginal:.2f})"
            words.append(f"tau {value:.2f} at {nodes} nodes{beside}")
    return ", ".join(words)


def summary(folder: str | os.PathLike) -> str:
    """Returns the steps and the time of a run in words; "" if its log is missing."""
    log = read_log(folder)
    return f"{log[-1]['step']} steps in {duration(log[-1]['seconds'])}" if log else ""


def open_sinks(settings: Any, step: int, stack: ExitStack) -> list[Sink]:
    """Opens the programs that a run's settings name, for the metrics of steps after `step`. `stack` closes them."""
    sinks: list[Sink] = []
    try:
        if settings.loop.tensorboard and hosts.is_first():
            from tensorboardX import SummaryWriter

            folder = files.absolute(settings.run) / "tensorboard"
            writer = stack.enter_context(SummaryWriter(str(folder), purge_step=step + 1))

            def write(step: int, metrics: Mapping[str, float]) -> None:
                for name, value in metrics.items():
                    writer.add_scalar(name, value, step)

            sinks.append(write)
        if settings.loop.wandb and hosts.is_first():
            import wandb

            run = wandb.init(project=settings.loop.wandb, group=settings.run, config=run_config.to_dict(settings))
            stack.callback(run.finish)
            sinks.append(lambda step, metrics: run.log(dict(metrics), step=step))
    except ImportError as error:
        advice = "pip install '.[tensorboard]' or '.[wandb]' in a clone, for gs:// also '.[gcs]'"
        raise ValueError(f"{error}; loop.tensorboard and loop.wandb need {advice}") from None
    return sinks


@contextmanager
def profiled(settings: Any) -> Iterator[None]:
    """Records a profile for TensorBoard in RUN/tensorboard."""
    with files.filled(files.absolute(settings.run) / "tensorboard", overwrite=True) as folder, jax.profiler.trace(folder):
        yield
