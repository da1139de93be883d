"""Monitoring of commands and runs: a progress bar, a closing table, and the log of a run, RUN/log.jsonl.

The log has one JSON object per line.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from train.runtime import folders, hosts
from train.runtime.sinks import Sink

Metrics = dict[str, Any]
TRAINED = {"loss": "loss", "tau_estimate": "estimated tau"}  # metric -> its name in lines and tables
HELD_OUT = {"held_out/loss": "held-out loss"}


class Bar(Progress):
    """A live line at the bottom of a terminal, below anything printed meanwhile; it vanishes when it is stopped.

    Silent without a terminal, and on all hosts but the first.

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
        """Moves the bar to `done` and replaces the note behind it; None leaves either as it is."""
        self.update(self.task, completed=done, **({} if note is None else {"note": note}))


def table(title: str, values: Mapping[str, str]) -> None:
    """Prints names and values on the first host: a table in a terminal, a line each elsewhere."""
    if not hosts.is_first():
        return
    if not (values and sys.stdout.isatty()):
        print(title, *(f"  {name}: {value}" for name, value in values.items()), sep="\n", flush=True)
        return
    print(title)  # rich would wrap its own title to the width of the table
    grid = Table(show_header=False)
    for name, value in values.items():
        grid.add_row(Text(name), Text(value))
    Console(file=sys.stdout).print(grid)


def duration(seconds: float) -> str:
    """Seconds in words: "41 s", "12 min 3 s", "3 h 20 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def read_log(folder: Any) -> list[Metrics]:
    """The lines of RUN/log.jsonl; a last line cut by a kill is left out, any other wrong line raises ValueError."""
    path = folders.absolute(folder) / "log.jsonl"
    try:
        return [json.loads(line) for line in folders.whole_lines(path)]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; move it away to begin a new log") from None


class Watch:
    """Progress bar, printed lines and RUN/log.jsonl of a run; silent on all hosts but the first.

    A run that continues drops log lines after the step of its checkpoint. "seconds" are those of all starts, up
    to the last line of each; "goodput" is the share of them spent in steps that were kept, compilation left out.

    Args:
      sinks: programs that show metrics too.
      began: `time.perf_counter()` at the beginning of the command.
    """

    def __init__(
        self, folder: epath.Path, *, steps: int, resumed_at: int, sinks: Sequence[Sink] = (), began: float | None = None
    ):
        self.path, self.steps, self.sinks = folder / "log.jsonl", steps, sinks
        self.began = time.perf_counter() if began is None else began
        self.lines: list[Metrics] = []
        self.before = self.step_seconds = 0.0
        if hosts.is_first():
            lines = read_log(folder)
            self.before = max((line.get("seconds", 0.0) for line in lines), default=0.0)
            self.lines = [line for line in lines if line["step"] <= resumed_at]
            folders.write(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))
        if self.lines:
            self.step_seconds = self.lines[-1].get("seconds", 0.0) * self.lines[-1].get("goodput", 0.0)
        self.evaluated = {line["step"] for line in self.lines if any(name.startswith("held_out/") for name in line)}
        if resumed_at:
            hosts.say(f"continuing at step {resumed_at} of {steps}")
        self.bar = Bar("training", steps, resumed_at)
        self.bar.start()
        self.bar.show(note="compiling")

    def evaluating(self, done: int, total: int, what: str) -> None:
        """Shows how much of an evaluation is done."""
        self.bar.show(note=f"evaluating {done} of {total} {what}")

    def write(self, step: int, metrics: Metrics) -> None:
        """Adds a line to the log and prints its most important metrics."""
        if not hosts.is_first():
            return
        seconds = self.before + time.perf_counter() - self.began
        metrics = metrics | {"goodput": round(self.step_seconds / seconds, 4), "seconds": round(seconds, 1)}
        self.lines.append({"step": step, **metrics})
        folders.append(self.path, json.dumps(self.lines[-1]) + "\n")
        flat = {}
        for name, value in metrics.items():
            flat |= {f"{name}/{i}": x for i, x in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        for sink in self.sinks:
            sink.write(step, {name: value for name, value in flat.items() if value is not None})
        for words in describe(metrics):
            hosts.say(f"step {step} of {self.steps}: {words}")

    def close(self) -> None:
        self.bar.stop()
        for sink in self.sinks:
            sink.close()


def describe(metrics: Metrics) -> list[str]:
    """Short lines of the most important metrics, of the steps and of an evaluation; the others are in the log."""
    known = {name: value for name, value in metrics.items() if value is not None}
    words = [f"{word} {known[name]:.3f}" for name, word in TRAINED.items() if name in known]
    words += [f"{known['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in known else []
    words += [f"MFU {known['mfu']:.0%}"] if "mfu" in known else []
    measured = [f"{word} {known[name]:.3f}" for name, word in HELD_OUT.items() if name in known]
    measured += [f"tau {_taus(known)}"] if _taus(known) else []
    return [", ".join(line) for line in (words, measured) if line]


def summary(folder: Any) -> dict[str, str]:
    """The closing table of a run, from its log: steps, losses, tau per budget, speed, time; empty without a log."""
    lines = read_log(folder)
    last = {name: value for line in lines for name, value in line.items() if value is not None}
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    values = {"steps": str(last["step"])} if last else {}
    values |= {word: f"{last[name]:.3f}" for name, word in (TRAINED | HELD_OUT).items() if name in last}
    values |= {"tau": _taus(last)} if _taus(last) else {}
    values |= {"tokens/s": f"{statistics.median(speeds):,.0f} (median)"} if speeds else {}
    values |= {"goodput": f"{last['goodput']:.0%} of the time in steps"} if "goodput" in last else {}
    return values | ({"time": duration(last["seconds"])} if "seconds" in last else {})


def _taus(metrics: Metrics) -> str:
    """Committed tokens per round by budget, beside those of the marginals: "2.91 at 16 nodes (marginal 2.60)"."""
    words = []
    for name, value in metrics.items():
        kind, _, nodes = name.rpartition("_")
        if kind == "held_out/tau" and nodes.isdigit():
            marginal = metrics.get(f"held_out/tau_marginal_{nodes}")
            beside = "" if marginal is None else f" (marginal {marginal:.2f})"
            words.append(f"{value:.2f} at {nodes} nodes{beside}")
    return ", ".join(words)
