"""The picture of `fsla bench data`: gains of the library over each bar, with standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fsla_benchmarks.data.report import BARS, MARGIN, Line
from fsla_reproduction.plots.style import BP, CG, FSLA, NS, figure

_STYLE = {"own CV": (FSLA, "o"), "own CV, accuracy": (BP, "^"), "tuned": (CG, "s"), "hindsight": (NS, "D")}
_NAMES = {
    "own CV": "against a careful user's cross-validation",
    "own CV, accuracy": "against the same by accuracy",
    "tuned": "against the alternative that is best on other seeds",
    "hindsight": "against the alternative that is best on the test set",
}


def draw(path: Path, lines: Sequence[Line]) -> list[Path]:
    """Draw a row for each line, largest loss first; return the PNG file, none without lines."""
    if not lines:
        return []
    with figure(path, size=(8.5, 1.6 + 0.3 * len(lines))) as fig:
        axes = fig.subplots()
        axes.axvspan(-MARGIN, MARGIN, color="#eeeeee", zorder=0)
        axes.axvline(0, color="black", linewidth=1)
        places = np.arange(len(lines))
        for offset, bar in zip((-0.3, -0.1, 0.1, 0.3), BARS, strict=True):
            colour, marker = _STYLE[bar]
            shown = [(place, line.gains[bar]) for place, line in zip(places, lines, strict=True) if bar in line.gains]
            axes.errorbar(
                [gain.mean for _, gain in shown],
                [place + offset for place, _ in shown],
                xerr=[2 * (gain.error or 0) for _, gain in shown],
                fmt=marker,
                color=colour,
                markersize=5,
                linewidth=1,
                label=_NAMES[bar],
            )
        axes.set_yticks(places, [f"{line.name}, {line.checked}" for line in lines])
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_xlabel("gain of fsla in accuracy or R2 (bars: 2 standard errors)")
        fig.legend(*axes.get_legend_handles_labels(), loc="outside lower center", fontsize=10)
    return [path.with_suffix(".png")]
