"""A picture of a run: its loss, and the tau of its evaluations, by step."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

NAME = "training.png"  # file beside a run's log, and beside the model card of an exported drafter
LOSSES = {"loss": "training", "held_out/loss": "held out"}
TAU = "held_out/tau"


def draw(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns a PNG of the lines of a log (`watch.read_log`). If tau was not evaluated, it shows the loss alone."""
    from matplotlib.figure import Figure  # slow to import

    taus = {name: name.removeprefix("held_out/") for line in lines for name in line if name.startswith(TAU)}
    panels = {"loss": LOSSES}
    if taus:
        panels["tau (tokens per round)"] = taus
    figure = Figure(figsize=(5 * len(panels), 3.5), layout="constrained")
    for number, (title, metrics) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), number, title=title, xlabel="step")
        for name, label in metrics.items():
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 30 else None)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    content = io.BytesIO()
    figure.savefig(content, dpi=120, metadata={"Software": None})
    return content.getvalue()
