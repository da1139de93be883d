"""Monitoring of a run: progress, a log that can be read again, a closing table, curves.

    python -m train.watch RUN

draws the curves of a run in RUN/curves.png (needs matplotlib). RUN/log.jsonl is always written, one JSON object a line;
other sinks implement `Sink`.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time
from typing import Any, Protocol

from etils import epath

from train import folders, hosts
from train.progress import Bar, duration
from treeflash_jax import files

Metrics = dict[str, Any]
TRAINED = {"loss": "loss", "tau_estimate": "estimated tau"}  # what lines and tables say of a metric
HELD_OUT = {"held_out/loss": "held-out loss"}


class Sink(Protocol):
    """Takes what a run reports."""

    def write(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars for TensorBoard; vectors become one scalar per entry."""

    def __init__(self, folder: str):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ValueError("loop.tensorboard needs tensorboardX; install treeflash-jax[tensorboard]") from None
        self.inner = SummaryWriter(folder)

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            for i, entry in enumerate(value) if isinstance(value, list) else [(None, value)]:
                self.inner.add_scalar(name if i is None else f"{name}/{i + 1}", entry, step)

    def close(self) -> None:
        self.inner.close()


class Log:
    """RUN/log.jsonl. A continued run forgets lines after the step it continues from, so that the log is that of one run."""

    def __init__(self, folder: epath.Path, resumed_at: int):
        self.path = folder / "log.jsonl"
        self.is_remote = folders.is_remote(folder)
        self.lines = [line for line in read_log(folder) if line["step"] <= resumed_at]
        folders.write(self.path, self._text())

    def _text(self) -> str:
        return "".join(json.dumps(line) + "\n" for line in self.lines)

    def write(self, step: int, metrics: Metrics) -> None:
        self.lines.append({"step": step, **metrics})
        if self.is_remote:  # object stores cannot append
            self.path.write_text(self._text())
        else:
            with self.path.open("a") as file:
                file.write(json.dumps(self.lines[-1]) + "\n")

    def close(self) -> None:
        pass


def read_log(folder: Any) -> list[Metrics]:
    """The lines of RUN/log.jsonl; a last line cut by a kill is left out.

    Raises:
      ValueError: a file that cannot be read, or any other line that no run wrote.
    """
    path = epath.Path(folder) / "log.jsonl"
    if not path.exists():
        return []
    try:
        texts = (path if folders.is_remote(path) else files.regular(path)).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); move it away to begin a new log") from None
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not text.endswith(b"\n") and number == len(texts) and line is None:
            break
        if not isinstance(line, dict) or type(line.get("step")) is not int or not all(map(_is_metric, line.values())):
            raise ValueError(f"{path}, line {number}: got no line of a log; remove it, or move the file away to begin anew")
        lines.append(line)
    return lines


def _is_metric(value: Any) -> bool:
    """Whether a log may hold it: a number, none, or a list of these."""
    many = value if isinstance(value, list) else [value]
    return all(one is None or type(one) in (int, float) for one in many)


class Watch:
    """Progress bar, lines and sinks of the first process; silent elsewhere."""

    def __init__(self, folder: epath.Path, *, steps: int, resumed_at: int, tensorboard: bool, shown: bool):
        self.sinks: list[Sink] = []
        self.steps, self.shown = steps, shown
        self.before, self.began = 0.0, time.perf_counter()
        self.evaluated: set[int] = set()
        if shown:
            log = Log(folder, resumed_at)
            self.before = log.lines[-1].get("seconds", 0.0) if log.lines else 0.0
            self.evaluated = {line["step"] for line in log.lines if any(name.startswith("held_out/") for name in line)}
            self.sinks.append(log)
            if tensorboard:
                self.sinks.append(TensorBoard(str(folder / "tensorboard")))
        if resumed_at:
            hosts.say(f"continuing at step {resumed_at} of {steps}")
        self.bar = Bar("training", steps, resumed_at)
        self.bar.update(note="compiling")

    def advance(self, step: int) -> None:
        self.bar.update(step, "")

    def evaluating(self, done: int, total: int, what: str) -> None:
        """Says on the bar how much of an evaluation is done."""
        self.bar.update(note=f"evaluating {done} of {total} {what}")

    def write(self, step: int, metrics: Metrics) -> None:
        if not self.shown:
            return
        metrics = metrics | {"seconds": round(self.before + time.perf_counter() - self.began, 1)}
        for sink in self.sinks:
            sink.write(step, metrics)
        for words in describe(metrics):
            hosts.say(f"step {step} of {self.steps}: {words}")

    def close(self) -> None:
        self.bar.close()
        for sink in self.sinks:
            sink.close()


def describe(metrics: Metrics) -> list[str]:
    """Short lines of what matters most, of the steps and of an evaluation; all the rest is in the log."""
    known = {name: value for name, value in metrics.items() if value is not None}
    words = [f"{word} {known[name]:.3f}" for name, word in TRAINED.items() if name in known]
    words += [f"{known['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in known else []
    words += [f"MFU {known['mfu']:.0%}"] if "mfu" in known else []
    measured = [f"{word} {known[name]:.3f}" for name, word in HELD_OUT.items() if name in known]
    measured += [f"tau {_taus(known)}"] if _taus(known) else []
    return [", ".join(line) for line in (words, measured) if line]


def summary(folder: Any) -> dict[str, str]:
    """The rows of a run's closing table, from its log: steps, losses, tau per budget, speed, time.

    Args:
      folder: the run's; one without a log has no rows.
    """
    lines = read_log(folder)
    last: Metrics = {}
    for line in lines:
        last |= {name: value for name, value in line.items() if value is not None}
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    rows = {"steps": str(last["step"])} if last else {}
    rows |= {word: f"{last[name]:.3f}" for name, word in (TRAINED | HELD_OUT).items() if name in last}
    rows |= {"tau": _taus(last)} if _taus(last) else {}
    rows |= {"tokens/s": f"{statistics.median(speeds):,.0f} (median)"} if speeds else {}
    return rows | ({"time": duration(last["seconds"])} if "seconds" in last else {})


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


def plot(folder: Any) -> epath.Path:
    """Draws RUN/curves.png: every scalar of the log over steps.

    Raises:
      ValueError: no matplotlib, or nothing was logged.
    """
    lines = read_log(folder)
    if not lines:
        raise ValueError(f"{folder}: got no log.jsonl with a line in it, expected the run= of a training command")
    try:
        import matplotlib
    except ImportError:
        raise ValueError("curves need matplotlib; install it with pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    hidden = ("step", "seconds", "learning_rate", "mfu")
    names = [name for line in lines for name, value in line.items() if isinstance(value, float) and name not in hidden]
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(name.rpartition("/")[2] if name.startswith("held_out/") else name.partition("/")[0], []).append(
            name
        )
    columns = min(3, max(1, len(groups)))
    rows = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.5 * columns, 3 * rows), squeeze=False, layout="constrained")
    for axis, (title, members) in zip(axes.flat, groups.items(), strict=False):
        for name in members:
            points = [(line["step"], line[name]) for line in lines if name in line]
            axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 20 else "")
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(groups) :]:
        axis.axis("off")
    path = epath.Path(folder) / "curves.png"
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    pyplot.close(figure)
    folders.write(path, drawn.getvalue())
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="folder of a training run, local or gs://")
    run = parser.parse_args(argv).run
    try:
        print(plot(folders.absolute(run)))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
