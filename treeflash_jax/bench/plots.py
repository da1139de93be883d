"""Figures of benchmarks, as files."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treeflash_jax.core import files

PANELS = 4  # side by side
MARKED = 20  # lines of fewer points show them
Lines = Mapping[str, Mapping[float, float]]  # by label, y by x


def check(path: str | Path | None) -> None:
    """Refuses, before anything is measured, a figure that cannot be drawn or that would replace another file.

    Raises ValueError without matplotlib, or for an unknown kind of file or a path that cannot or must not be written.
    """
    if path is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError('--plot needs matplotlib; pip install "treeflash-jax[plots]"') from None
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if Path(path).suffix[1:] not in known:
        raise ValueError(f"got --plot {path}, expected a file ending in one of {', '.join(known)}")
    files.check_output(path, lambda content: b"atplotlib" in content)  # named in all figures that it draws


def draw(panels: Mapping[str, Lines], path: str | Path, *, title: str | None = None) -> None:
    """Draws lines in panels side by side, by title, in the format of the path's ending."""
    files.write(path, drawn(panels, Path(path).suffix[1:], title))


def drawn(panels: Mapping[str, Lines], format: str, title: str | None = None) -> bytes:
    """Returns the figure of `draw` as a file of this format."""
    from matplotlib.figure import Figure

    width, height = min(max(len(panels), 1), PANELS), -(-len(panels) // PANELS) or 1
    figure = Figure(figsize=(4.5 * width, 3.6 * height), layout="constrained")
    axes = list(figure.subplots(height, width, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (name, lines) in zip(axes, panels.items(), strict=False):
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points.items()), strict=True), "o-" if len(points) < MARKED else "-", label=label)
        axis.set(title=name, ylim=(0, None))
        axis.legend(fontsize="x-small")
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=format)
    return buffer.getvalue()


def draw_trees(systems: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draws tokens per round over nodes, the expected ones if they were recorded, from entries of `report.summarise`.

    There is a panel per set of prompts and temperature, and a line per drafter, head and builder, for the best of its
    rules. With one drafter, there is a panel per head too.
    """

    def tau(system: dict[str, Any]) -> float:
        return system["whole_rounds"]["expected_tau"]["value"] if system["whole_rounds"] else system["tau"]

    drawn = sorted((system for system in systems if isinstance(system["nodes"], int) and system["tau"]), key=tau)
    compares = len({system["drafter"] for system in drawn}) > 1
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for system in drawn:
        title = [system["set"], "" if compares else system["head"], f"T = {system['temperature']:g}"]
        label = [system["drafter"], system["head"]] if compares else []
        panel = panels.setdefault(", ".join(filter(None, title)), {})
        panel.setdefault(", ".join(filter(None, [*label, system["builder"]])), {})[system["nodes"]] = tau(system)
    draw(panels, path, title="tokens per round over nodes")
