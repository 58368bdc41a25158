"""The figures of the comparison: a curve for each method, performance profiles, and the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fsla_benchmarks.compare.methods import label
from fsla_benchmarks.compare.report import LEVELS, Curve, Results, ratios
from fsla_reproduction.plots.style import BP, CG, FSLA, GREY, NS, CurveStyle, figure, log_axis

BEST = 8
"""As many methods have a colour; the others are grey."""
FLOOR = 1e-4
TOP = 3.0
"""The suboptimalities that are shown; what is outside lies on the edge."""
FSLA_STYLES = {"fsla": CurveStyle(FSLA, width=3.0), "fsla_automatic": CurveStyle("#4FA8DC", "--", 3.0)}
OTHERS = (
    CurveStyle(NS), CurveStyle(CG), CurveStyle(BP), CurveStyle("#E69F00"), CurveStyle("#000000"), CurveStyle("#8C564B"),
    CurveStyle("#C0392B", "--"), CurveStyle("#00332B", "-."),
)  # fmt: skip


def draw(folder: Path, results: Results) -> list[Path]:
    """Draw all figures; return the PNG files."""
    curves = [_curves(folder, results, problem) for problem in results.titles if results.ranked(problem)]
    return [*curves, _profiles(folder, results), _plot_ranks(folder, results)]


def _styles(best_first: Sequence[str]) -> dict[str, CurveStyle]:
    """The methods that have a colour, best first: the best ones, and FSLA at any place."""
    coloured = [name for place, name in enumerate(best_first) if place < BEST or name in FSLA_STYLES]
    others = iter(OTHERS)
    return {name: FSLA_STYLES[name] if name in FSLA_STYLES else next(others) for name in coloured}


def _curves(folder: Path, results: Results, problem: str) -> Path:
    path = folder / f"compare-{problem}"
    names = [row["algorithm"] for row in results.ranked(problem)]
    styles = _styles(names)
    with figure(path, columns=2.6, size=(5.6, 4.8)) as fig:
        left, right = fig.subplots(1, 2, sharey=True)
        for name in sorted(names, key=lambda name: name in styles):  # grey ones beneath
            curve_style = styles.get(name, CurveStyle(GREY, width=0.8))
            style = {"color": curve_style.colour, "linestyle": curve_style.dash, "linewidth": curve_style.width}
            style |= {"alpha": 1.0 if name in styles else 0.45, "zorder": 3 if name in styles else 1}
            calls, seconds, gaps = _medians(results.curves[problem, name])
            left.plot(calls, gaps, **style)
            right.plot(seconds, gaps, **style)
        right.axvline(results.common_time[problem], color=GREY, linestyle=":", linewidth=1.5)
        left.set_yscale("log")
        low = min(min(line.get_ydata(), default=1.0) for line in left.get_lines())
        left.set_ylim(10 ** math.floor(math.log10(low)), 1.3 * TOP)
        left.set_ylabel("relative suboptimality of f")
        left.set_xlabel("oracle calls (on batches of the usual size)")
        right.set_xlabel("CPU seconds (dotted: where all are compared)")
        log_axis(left)
        log_axis(right)
        fig.suptitle(results.titles[problem])
        handles = [_handle(curve_style) for curve_style in styles.values()]
        texts = [label(name) for name in styles]
        if len(names) > len(styles):
            handles.append(_handle(CurveStyle(GREY, width=0.8)))
            texts.append(f"{len(names) - len(styles)} others")
        fig.legend(handles, texts, loc="outside right upper", title="best first")
    return path.with_suffix(".png")


def _handle(style: CurveStyle) -> Line2D:
    line = Line2D([], [], color=style.colour, linewidth=style.width)
    line.set_linestyle(style.dash)  # type: ignore[arg-type, unused-ignore]
    return line


def _medians(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float]]:
    """Calls, seconds and the suboptimality at each mark, medians over seeds, within what is shown."""
    gaps = [min(max(median(values), FLOOR), TOP) for values in zip(*(c.gap for c in curves), strict=True)]
    seconds = [median(values) for values in zip(*(c.seconds for c in curves), strict=True)]
    points = [(m, s, g) for m, s, g in zip(curves[0].marks, seconds, gaps, strict=True) if s > 0]
    return [p[0] for p in points], [p[1] for p in points], [p[2] for p in points]


def _profiles(folder: Path, results: Results) -> Path:
    path = folder / "compare-profiles"
    styles = _styles([row["algorithm"] for row in results.overall])
    with figure(path, columns=3.5, size=(4.6, 4.6)) as fig:
        axes: Sequence[Axes] = fig.subplots(1, len(LEVELS), sharey=True)
        for ax, level in zip(axes, LEVELS, strict=True):
            by_name, tasks = ratios(results.curves, level)
            end = 1.1 * max((max(r) for r in by_name.values() if r), default=2.0)
            for name in sorted(by_name, key=lambda name: name in styles):
                style = styles.get(name, CurveStyle(GREY, width=0.8))
                values = by_name[name]
                x = [1.0, *values, max(end, 1.5)]
                y = [0.0, *((i + 1) / tasks for i in range(len(values))), len(values) / tasks]
                ax.step(
                    x, y, where="post", color=style.colour, linestyle=style.dash, linewidth=style.width,
                    alpha=1.0 if name in styles else 0.45, zorder=3 if name in styles else 1,
                )  # fmt: skip
            ax.set_title(f"to a suboptimality of {level:g}")
            ax.set_xlabel("calls / fewest calls of any method")
            log_axis(ax)
        axes[0].set_ylabel("share of problems and seeds solved")
        axes[0].set_ylim(-0.02, 1.02)
        handles = [_handle(style) for style in styles.values()]
        fig.legend(handles, [label(name) for name in styles], loc="outside right upper", title="by mean rank")
    return path.with_suffix(".png")


def _plot_ranks(folder: Path, results: Results) -> Path:
    """A table of ranks, one row for each method, from dark (first) to light."""
    path = folder / "compare-ranks"
    names = [row["algorithm"] for row in results.overall]
    problems = [problem for problem in results.titles if results.ranked(problem)]
    rows_by_name = {(row["problem"], row["algorithm"]): row for row in results.rows}
    grid = np.full((len(names), len(problems)), np.nan)
    for i, name in enumerate(names):
        for j, problem in enumerate(problems):
            if (problem, name) in rows_by_name:
                grid[i, j] = rows_by_name[problem, name]["rank"]
    with figure(path, size=(3.0 + 1.15 * len(problems), 1.8 + 0.3 * len(names))) as fig:
        ax = fig.subplots()
        ax.grid(visible=False)
        ax.imshow(grid, cmap="Blues_r", aspect="auto", vmin=-0.5 * len(names), vmax=len(names))
        for i, name in enumerate(names):
            for j, problem in enumerate(problems):
                row = rows_by_name.get((problem, name))
                text = "-" if row is None else "diverged" if math.isinf(row["gap"]) else f"{row['gap']:.2g}"
                ax.text(j, i, text, ha="center", va="center", fontsize=9)
        ax.set_yticks(range(len(names)), [label(name) for name in names])
        ax.set_xticks(range(len(problems)), [results.titles[p].replace(", ", ",\n") for p in problems], fontsize=9)
        ax.xaxis.tick_top()
        ax.set_xlabel("number: relative suboptimality of f at the end; shade: rank (darker is better)")
    return path.with_suffix(".png")
