"""What a person sees of a run: a progress bar, a log that can be read again, curves.

RUN/log.jsonl is always written, one JSON object a line; other sinks implement `Sink`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol

import jax
from etils import epath

from train import folders

# Dense bf16 peak of one chip, FLOP/s, as its maker states it.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "Tesla T4": 65e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}

Metrics = dict[str, Any]


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
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def write(self, step: int, metrics: Metrics) -> None:
        self.lines.append({"step": step, **metrics})
        if self.is_remote:  # object stores cannot append
            self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        else:
            with self.path.open("a") as file:
                file.write(json.dumps(self.lines[-1]) + "\n")

    def close(self) -> None:
        pass


def read_log(folder: Any) -> list[Metrics]:
    """The lines of RUN/log.jsonl; a last line cut by a kill is left out."""
    path = epath.Path(folder) / "log.jsonl"
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


class Watch:
    """Progress bar and sinks of the first process; silent elsewhere."""

    def __init__(self, folder: epath.Path, *, steps: int, resumed_at: int, tensorboard: bool, shown: bool):
        self.sinks: list[Sink] = []
        self.shown = shown
        self.terminal = shown and sys.stdout.isatty()
        if not shown:
            return
        self.sinks.append(Log(folder, resumed_at))
        if tensorboard:
            self.sinks.append(TensorBoard(str(folder / "tensorboard")))
        if resumed_at:
            print(f"continuing at step {resumed_at} of {steps}", flush=True)
        if self.terminal:
            from rich import progress

            columns = ("{task.description}", progress.BarColumn(), progress.MofNCompleteColumn())
            self.bar = progress.Progress(*columns, progress.TimeRemainingColumn(), "{task.fields[line]}")
            self.task = self.bar.add_task("training", total=steps, completed=resumed_at, line="")
            self.bar.start()

    def advance(self, step: int) -> None:
        if self.terminal:
            self.bar.update(self.task, completed=step)

    def write(self, step: int, metrics: Metrics) -> None:
        if not self.shown:
            return
        for sink in self.sinks:
            sink.write(step, metrics)
        line = describe(metrics)
        if self.terminal:
            self.bar.update(self.task, completed=step, line=line)
        else:
            print(f"step {step}: {line}", flush=True)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        if self.terminal:
            self.bar.stop()


def describe(metrics: Metrics) -> str:
    """One line of what matters most: scalars as they are, vectors by their first, second and last entry."""
    words = []
    for name, value in metrics.items():
        if isinstance(value, list):
            value = "/".join(f"{value[i]:.2f}" for i in dict.fromkeys((0, min(1, len(value) - 1), len(value) - 1)))
            words.append(f"{name} {value}")
        elif isinstance(value, float | int):
            words.append(f"{name} {value:.4g}")
    return ", ".join(words)


def peak_flops(devices: int) -> float | None:
    """Peak FLOP/s of this many devices: a known chip's, else what a large matmul reaches here (CPUs share their cores)."""
    device = jax.devices()[0]
    for name, peak in sorted(PEAK_FLOPS.items(), key=lambda item: -len(item[0])):
        if device.device_kind.startswith(name):
            return peak * devices
    if jax.process_count() > 1 or device.platform != "cpu":
        return None
    return _matmul_flops()


def _matmul_flops(size: int = 1024, repeats: int = 5) -> float:
    x = jax.numpy.ones((size, size), jax.numpy.float32)
    multiply = jax.jit(lambda x: x @ x)
    multiply(x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        multiply(x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def plot(folder: Any) -> epath.Path:
    """Draws RUN/curves.png: every scalar of the log over steps. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_log(folder)
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
    with path.open("wb") as file:
        figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m train.watch RUN")
    print(plot(sys.argv[1]))
