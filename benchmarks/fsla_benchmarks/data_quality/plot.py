"""The figure of the data weights: what each method reaches on each kind of bad data."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from fsla_benchmarks.data_quality.report import CHOSEN, METHODS, ORACLE
from fsla_reproduction.folder import Record
from fsla_reproduction.plots.style import BP, CG, FSLA, GREY, NS, figure

_COLOURS = (GREY, GREY, "#56B4E9", NS, BP, "#E69F00", "#571C00", CG, CG)
_MARKERS = ("v", "s", "P", "^", "D", "x", "+", "<", ">")
_LOOKS = dict(zip(METHODS, zip(_COLOURS, _MARKERS, strict=True), strict=True))
_LOOKS |= {CHOSEN: (FSLA, "o"), ORACLE: ("black", "|")}
_MEASURES = {"accuracy": "test accuracy", "auroc": "AUROC of ranking wrong labels"}


def draw(folder: Path, rows: list[Record]) -> list[Path]:
    """Draws a line for each cell, with a mark for each method; returns the PNG file, none without classes."""
    path = folder / "weights"
    rows = [row for row in rows if "accuracy" in row]
    if not rows:
        return []
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    with figure(path, columns=2, size=(6.2, 1.6 + 0.42 * len(cells))) as fig:
        axes = fig.subplots(1, 2, sharey=True)
        for ax, key in zip(axes, _MEASURES, strict=True):
            _panel(ax, rows, cells, key)
        axes[0].set_yticks(range(len(cells)), cells)
        axes[0].invert_yaxis()
        handles, labels = axes[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=10)
    return [path.with_suffix(".png")]


def _panel(ax: Axes, rows: list[Record], cells: list[str], key: str) -> None:
    for method, (colour, marker) in _LOOKS.items():
        own = [row for row in rows if row["method"] == method and key in row]
        if own:
            level = [cells.index(row["cell"]) for row in own]
            ring = method == CHOSEN  # which hides nothing
            ax.scatter(
                [row[key] for row in own],
                level,
                s=130 if method in (CHOSEN, ORACLE) else 45,
                c="none" if ring else colour,
                edgecolors=colour if ring else None,
                linewidths=2.4 if ring else None,
                marker=marker,
                label=method,
                zorder=3,
            )
    chosen = [row for row in rows if row["method"] == CHOSEN and key in row]
    ax.errorbar(
        [row[key] for row in chosen],
        [cells.index(row["cell"]) for row in chosen],
        xerr=[row[f"{key}_spread"] for row in chosen],
        fmt="none", ecolor=FSLA, zorder=2,
    )  # fmt: skip
    ax.set_xlabel(_MEASURES[key])
