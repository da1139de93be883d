"""Figures of benchmarks, as files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from treeflash_jax.core import files


def check(path: str | Path) -> None:
    """Refuses, before anything is measured, a figure that cannot be drawn or that would replace another file.

    Raises:
      ValueError: no matplotlib, an unknown kind of file, or a path that cannot or must not be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError('--plot needs matplotlib; pip install "treeflash-jax[plots]"') from None
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if Path(path).suffix[1:] not in known:
        raise ValueError(f"got --plot {path}, expected a file ending in one of {', '.join(known)}")
    files.check_output(path, lambda content: b"atplotlib" in content)  # named in what it draws


def save(figure: Any, path: str | Path) -> None:
    """Writes a matplotlib figure in the format of the path's ending."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix[1:])
    files.write(path, drawn.getvalue())


def draw_trees(systems: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draws tokens per round over nodes, the expected ones if they were recorded.

    There is a panel per temperature and head, with a line per builder for the best of its rules.

    Args:
      systems: entries of `report.summarise`; those without a number of nodes are left out.
    """
    from matplotlib.figure import Figure

    def tau(system: dict[str, Any]) -> float:
        return system["whole_rounds"]["expected_tau"]["value"] if system["whole_rounds"] else system["tau"]

    systems = sorted((s for s in systems if isinstance(s["nodes"], int) and s["tau"]), key=tau)
    heads, temperatures = (list(dict.fromkeys(s[key] for s in systems)) or [None] for key in ("head", "temperature"))
    figure = Figure(figsize=(4 * len(temperatures), 3.4 * len(heads)), layout="constrained")
    axes = figure.subplots(len(heads), len(temperatures), squeeze=False, sharey=True)
    for (i, head), (j, temperature) in product(enumerate(heads), enumerate(temperatures)):
        best: dict[str, dict[int, dict[str, Any]]] = {}
        for system in systems:
            if (system["head"], system["temperature"]) == (head, temperature):
                best.setdefault(system["builder"], {})[system["nodes"]] = system
        for builder, by_nodes in best.items():
            nodes = sorted(by_nodes)
            label = f"{builder}, {by_nodes[nodes[-1]]['acceptance']}"
            axes[i, j].plot(nodes, [tau(by_nodes[count]) for count in nodes], "o-", label=label)
        axes[i, j].set(title=f"{head}, T = {temperature}", xlabel="nodes verified in a round", ylabel="tokens per round")
        axes[i, j].legend(fontsize="x-small")
    save(figure, path)
