"""Figures of benchmarks, as files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treeflash_jax import files


def check(path: str | Path) -> None:
    """Refuses, before anything is measured, a figure that could not be drawn or that would replace another file.

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
    """Writes a matplotlib figure in the format that the path's ending names."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix[1:])
    files.write(path, drawn.getvalue())


def draw_trees(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Tokens per round over nodes, expected ones where they were recorded: a panel per temperature and head, a line per
    builder with the best of its rules.

    Args:
      rows: of `report.summarise`; those without a number of nodes are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def tau(row: dict[str, Any]) -> float:
        return row["whole_rounds"]["expected_tau"]["value"] if row["whole_rounds"] else row["tau"]

    rows = [row for row in rows if isinstance(row["nodes"], int) and row["tau"]]
    heads, temperatures = (list(dict.fromkeys(row[key] for row in rows)) or [None] for key in ("head", "temperature"))
    shape = len(heads), len(temperatures)
    figure, axes = pyplot.subplots(*shape, squeeze=False, sharey=True, figsize=(4 * shape[1], 3.4 * shape[0]))
    for row_of_axes, head in zip(axes, heads, strict=True):
        for axis, temperature in zip(row_of_axes, temperatures, strict=True):
            best: dict[str, dict[int, dict[str, Any]]] = {}
            for row in sorted(rows, key=tau):
                if (row["head"], row["temperature"]) == (head, temperature):
                    best.setdefault(row["builder"], {})[row["nodes"]] = row
            for builder, found in best.items():
                nodes = sorted(found)
                label = f"{builder}, {found[nodes[-1]]['acceptance']}"
                axis.plot(nodes, [tau(found[count]) for count in nodes], "o-", label=label)
            axis.set(title=f"{head}, T = {temperature}", xlabel="nodes verified in a round")
            axis.legend(fontsize="x-small")
        row_of_axes[0].set_ylabel("tokens per round")
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)
