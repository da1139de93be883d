"""Figures of benchmarks, as files."""

from __future__ import annotations

import io
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
