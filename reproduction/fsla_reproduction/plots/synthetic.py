"""Figure 1 from the records of the synthetic experiment."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fsla_reproduction.plots.style import BP, CG, FSLA, NS, CurveStyle, figure, log_axis, setting
from fsla_reproduction.synthetic_summary import steady

Record = dict[str, Any]
_STYLES = {
    "NS": CurveStyle(NS),
    "BP": CurveStyle(BP, (0, (2, 3))),
    "CG": CurveStyle(CG),
    "FSLA": CurveStyle(FSLA, width=2.8),
}
_ERROR = "relative squared error\n" + r"$\|\nabla f_K-\nabla f\|^2\;/\;\|\nabla f\|^2$"
_FLOOR = 1e-24
_PRICES = {"one": "one estimate, at K", "every": "an estimate at every k ≤ K"}


def draw(folder: Path, records: list[Record]) -> list[Path]:
    """Draw every figure into the folder; return the PNG files."""
    curves = [r for r in records if r["run"] == "estimators"]
    sequences = [r for r in records if r["run"] == "sequences"]
    timing = steady([r for r in records if r["run"] == "timing"])
    seeds = _seeds(curves)
    _estimators(folder / "fig1-estimators", curves, seeds)
    _sequences(folder / "fig1-sequences", sequences, seeds)
    _prices(folder / "fig1-products", curves, "hvp", "Hessian-vector products", seeds)
    _prices(folder / "fig1-time", timing, "s", "seconds", "seed 0; left: the least time measured for K or more")
    return [folder / f"fig1-{name}.png" for name in ("estimators", "sequences", "products", "time")]


def _estimators(path: Path, rows: list[Record], seeds: str) -> None:
    with figure(path, size=(7.2, 5.0)) as fig:
        ax = fig.add_subplot()
        for method in _STYLES:
            _curve(ax, [r for r in rows if r["method"] == method], "K", method)
        ax.set_xlim(0, None)
        _finish(ax, "K (inner steps and hypergradient steps)", "")
        fig.suptitle(f"Hypergradient estimators at a fixed λ\n{_about(seeds)}", fontsize=12)
        ax.set_ylabel(_ERROR)
        ax.legend()


def _sequences(path: Path, rows: list[Record], seeds: str) -> None:
    """NS at artificial inner states, and beside each curve the slope that theory gives."""
    exponents = sorted({r["exponent"] for r in rows}, reverse=True)
    with figure(path, size=(7.2, 5.0)) as fig:
        ax = fig.add_subplot()
        for place, a in enumerate(exponents):
            band = _band([r for r in rows if r["exponent"] == a], "K")
            colour = setting(place, len(exponents)).colour
            ax.plot(band.x, band.middle, color=colour, label=f"a = {a:g}   (dotted: slope {-2 * a:g})")
            ax.fill_between(band.x, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
            slope = [band.middle[-1] * (K / band.x[-1]) ** (-2 * a) for K in band.x]
            ax.plot(band.x, slope, ":", color=colour, linewidth=1.2)
        errors = [r["relative_error"] for r in rows]
        ax.set_ylim(min(errors) / 30, 30 * max(errors))
        title = r"NS at the inner states $\omega_K=\omega_\lambda+\tilde\omega\,K^{-a}$"
        _finish(ax, "K (Neumann terms)", "")
        fig.suptitle(f"{title}\n{_about(seeds)}", fontsize=12)
        log_axis(ax)
        ax.set_ylabel(_ERROR)
        ax.legend()


def _prices(path: Path, rows: list[Record], key: str, unit: str, seeds: str) -> None:
    with figure(path, columns=2, size=(5.6, 4.8)) as fig:
        axes = fig.subplots(1, 2, sharey=True)
        for ax, (price, title) in zip(axes, _PRICES.items(), strict=True):
            for method in _STYLES:
                _curve(ax, [r for r in rows if r["method"] == method], f"{key}_{price}", method)
            _finish(ax, unit, f"{unit} for {title}")
            log_axis(ax)
        axes[0].set_ylabel(_ERROR)
        fig.suptitle(f"Error of the hypergradient against {unit}\n{_about(seeds)}", fontsize=13)
        fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_STYLES))


def _curve(ax: Axes, rows: list[Record], x: str, method: str) -> None:
    style = _STYLES[method]
    band = _band(rows, x)
    over = 3 if method == "BP" else 2  # BP and NS coincide: both are seen
    ax.plot(band.x, band.middle, color=style.colour, ls=style.dash, lw=style.width, label=method, zorder=over)
    if method != "BP":
        ax.fill_between(band.x, band.low, band.high, color=style.colour, alpha=0.12, linewidth=0)


@dataclass(frozen=True)
class Band:
    """A curve over seeds: the median of x, and the least, median and largest error."""

    x: list[float]
    low: list[float]
    middle: list[float]
    high: list[float]


def _band(rows: Iterable[Record], x: str) -> Band:
    """The curve in the order of K. Where x is 0, which a logarithmic axis has not, the point is left out."""
    by_K: dict[int, list[Record]] = defaultdict(list)
    for r in rows:
        by_K[r["K"]].append(r)
    band = Band([], [], [], [])
    for K in sorted(by_K):
        place = statistics.median(r[x] for r in by_K[K])
        errors = [max(r["relative_error"], _FLOOR) for r in by_K[K]]
        if place > 0:
            band.x.append(place)
            band.low.append(min(errors))
            band.middle.append(statistics.median(errors))
            band.high.append(max(errors))
    return band


def _finish(ax: Axes, x: str, title: str) -> None:
    ax.set_yscale("log")
    ax.set_xlabel(x)
    ax.set_title(title)


def _about(seeds: str) -> str:
    return f"random quadratic, 10 000 rows, 5 dimensions; {seeds}"


def _seeds(rows: list[Record]) -> str:
    last = max(r["seed"] for r in rows)
    return "seed 0" if last == 0 else f"median and range of seeds 0 to {last}"
