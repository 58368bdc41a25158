"""Figure 1 from the records of the synthetic experiment."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fsla.plots.style import COLOURS, figure

Record = dict[str, Any]
_LINES = {
    "NS": (COLOURS[0], "-"),
    "BP": (COLOURS[4], (0, (2, 3))),
    "CG": (COLOURS[2], "-"),
    "FSLA": (COLOURS[1], "-"),
}
_ERROR = r"$\|\nabla f_K-\nabla f\|^2\;/\;\|\nabla f\|^2$"
_FLOOR = 1e-24


def draw(folder: Path, records: list[Record]) -> list[Path]:
    """Draws every figure into the folder; returns the PNG files."""
    curves = [r for r in records if r["run"] == "estimators"]
    timing = [r for r in records if r["run"] == "timing"]
    seeds = len({r["seed"] for r in curves})
    paths = [folder / f"fig1-{name}" for name in ("estimators", "sequences", "products", "time")]

    with figure(paths[0]) as fig:
        ax = fig.add_subplot()
        for method in _LINES:
            _curve(ax, [r for r in curves if r["method"] == method], "K", method)
        _finish(
            ax, "K (inner steps and hypergradient steps)", f"Estimators, λ fixed (median and range of {_seeds(seeds)})"
        )
        ax.set_xlim(0, None)

    with figure(paths[1]) as fig:
        ax = fig.add_subplot()
        rows = [r for r in records if r["run"] == "sequences"]
        for colour, a in zip(COLOURS, sorted({r["exponent"] for r in rows}, reverse=True), strict=False):
            own = [r for r in rows if r["exponent"] == a]
            K, low, mid, high = _band(own, "K")
            ax.plot(K, mid, color=colour, label=f"a = {a:g}   (slope {-2 * a:g} dotted)")
            ax.fill_between(K, low, high, color=colour, alpha=0.15, linewidth=0)
            ax.plot(K, [mid[-1] * (k / K[-1]) ** (-2 * a) for k in K], ":", color=colour, linewidth=1.0)
        ax.set_xscale("log")
        ax.set_ylim(min(r["relative_error"] for r in rows) / 30, 30 * max(r["relative_error"] for r in rows))
        _finish(
            ax, "K (Neumann terms)", r"NS at $\omega_K=\omega_\lambda+\tilde\omega\,K^{-a}$" + f" ({_seeds(seeds)})"
        )

    for path, rows, key, unit in (
        (paths[2], curves, "hvp", "Hessian-vector products"),
        (paths[3], timing, "s", "seconds"),
    ):
        with figure(path, columns=2) as fig:
            axes = fig.subplots(1, 2, sharey=True)
            for ax, price, title in zip(
                axes, ("one", "every"), ("one estimate at K", "an estimate at every k ≤ K"), strict=True
            ):
                for method in _LINES:
                    _curve(ax, [r for r in rows if r["method"] == method], f"{key}_{price}", method)
                ax.set_xscale("log")
                _finish(ax, unit, f"Price of {title}")
            axes[1].set_ylabel("")
    return [p.with_suffix(".png") for p in paths]


def _curve(ax: Axes, rows: list[Record], x: str, method: str) -> None:
    colour, dash = _LINES[method]
    xs, low, mid, high = _band(rows, x)
    ax.plot(xs, mid, color=colour, linestyle=dash, label=method, zorder=3 if method == "BP" else 2)
    if method != "BP":
        ax.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)


def _band(rows: Iterable[Record], x: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """At each K: the median of x, and the least, median and largest error, over seeds. An x of 0 is left out."""
    by_K: dict[int, list[Record]] = defaultdict(list)
    for r in rows:
        by_K[r["K"]].append(r)
    out: tuple[list[float], list[float], list[float], list[float]] = [], [], [], []
    for K in sorted(by_K):
        errors = [max(r["relative_error"], _FLOOR) for r in by_K[K]]
        values = statistics.median(r[x] for r in by_K[K]), min(errors), statistics.median(errors), max(errors)
        for column, value in zip(out, values, strict=True):
            if values[0] > 0:
                column.append(value)
    return out if x != "s_one" else (_running_median(out[0]), *out[1:])


def _running_median(x: list[float], reach: int = 7) -> list[float]:
    """Each value as the median of its neighbourhood: a single time measurement is noisy."""
    near = [min(reach, i, len(x) - 1 - i) for i in range(len(x))]  # the same reach to both sides
    return [statistics.median(x[i - r : i + r + 1]) for i, r in enumerate(near)]


def _finish(ax: Axes, x: str, title: str) -> None:
    ax.set_yscale("log")
    ax.set_xlabel(x)
    ax.set_ylabel(f"relative squared error  {_ERROR}")
    ax.set_title(title, fontsize=11)
    ax.legend()


def _seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"
