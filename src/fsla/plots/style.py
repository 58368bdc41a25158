"""One look for every figure: legible fonts, colours that colour-blind readers tell apart, PNG and SVG."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""

_STYLE: Any = {
    "font.size": 11,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.dpi": 160,
    "svg.hashsalt": "fsla",
}


@contextmanager
def figure(path: Path, columns: int = 1, rows: int = 1, *, size: tuple[float, float] = (5.6, 4.2)) -> Iterator[Figure]:
    """Gives an empty figure and saves it as path.png and path.svg, each whole or not at all."""
    with plt.rc_context(_STYLE):
        fig = plt.figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        try:
            yield fig
            for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
                temporary = path.with_name(f".{path.name}.{os.getpid()}{suffix}")
                fig.savefig(temporary, metadata=metadata, bbox_inches="tight")
                temporary.replace(path.with_suffix(suffix))
        finally:
            plt.close(fig)
