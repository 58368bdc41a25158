"""The figures of section 6.2 and Appendix E from the records of the cleaning runs, and two that the paper lacks."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from fsla.experiments.cleaning import BINS, RunSpec
from fsla.experiments.cleaning_summary import Results
from fsla.experiments.figures import CleaningSpec, Panel, panels
from fsla.plots.style import COLOURS, figure

_LOSS = "validation loss"
_STEP, _TIME, _CALLS = (
    "hyper-iteration",
    "log10 of running time in seconds",
    "oracle calls (∂G, ∂F, HVP, cross product)",
)


def draw(folder: Path, asked: CleaningSpec, figures: tuple[str, ...], results: Results) -> list[Path]:
    """Draws the figures that were asked for; returns the PNG files."""
    out = []
    for name in figures:
        wanted, path = panels(name, asked), folder / name
        if name in ("overview", "fig2"):
            grid = [[(wanted[0], _STEP), (wanted[0], _TIME)]]
        elif name == "fig3":
            grid = [[(panel, x) for panel in wanted] for x in (_STEP, _TIME)]
        else:
            grid = [[(panel, _TIME if name == "fig4" else _STEP) for panel in wanted]]
        _grid(path, grid, results)
        out.append(path)
    if {"fig2", "fig3"} & set(figures):
        out.append(_against_calls(folder / "oracle-calls", asked, figures, results))
    if "fig2" in figures:
        out.append(_weights(folder / "weights", panels("fig2", asked)[0].runs["FSLA"], results))
    return [p.with_name(f"{p.name}.png") for p in out]


def _grid(path: Path, grid: list[list[tuple[Panel, str]]], results: Results) -> None:
    """Draws panels in rows; each column has its legend under its last row, or all share one, outside the axes."""
    columns, last = len(grid[0]), len(grid) - 1
    shared = all(panel is grid[last][0][0] for panel, _ in grid[last])
    with figure(path, columns=columns, rows=len(grid), size=(4.6, 4.2)) as fig:
        axes = fig.subplots(len(grid), columns, sharey=True, squeeze=False)
        for r, row in enumerate(grid):
            for c, (panel, x) in enumerate(row):
                _panel(axes[r][c], panel, results, x)
                if c:
                    axes[r][c].set_ylabel("")
                if r == last and not shared:
                    axes[r][c].legend(fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.17))
        if shared:
            fig.legend(*axes[0][0].get_legend_handles_labels(), fontsize=10, loc="outside lower center", ncols=3)


def _panel(ax: Axes, panel: Panel, results: Results, x: str) -> None:
    """Mean and range over seeds of the validation loss; a run that was stopped ends in a marker."""
    for i, (name, spec) in enumerate(panel.runs.items()):
        colour = "#888888" if name in ("NONE", "ORACLE") else COLOURS[i % len(COLOURS)]
        dash = ":" if name == "NONE" else "--" if name == "ORACLE" else "-"
        rows = _rows(results.runs(spec))
        if x != _STEP:  # these axes are logarithmic: the start has no place on them
            rows = [r for r in rows if r["step"] > 0]
        xs = [r["step"] if x == _STEP else math.log10(r["seconds"]) if x == _TIME else r["calls"] for r in rows]
        status = results.status(spec)
        label = name if status == "finished" else f"{name} ({status.replace('budget at', 'to')})"
        ax.plot(xs, [r["mean"] for r in rows], color=colour, linestyle=dash, label=label)
        if results.seeds > 1:
            ax.fill_between(
                xs, [r["low"] for r in rows], [r["high"] for r in rows], color=colour, alpha=0.15, linewidth=0
            )
        if status != "finished" and rows:
            ax.plot(xs[-1], rows[-1]["mean"], "x", color=colour, markersize=8, markeredgewidth=2)
    ax.set_xlabel(x)
    ax.set_ylabel(_LOSS)
    ax.set_title(panel.title, fontsize=11)
    if x == _CALLS:
        ax.set_xscale("log")


def _rows(runs: list[list[dict[str, Any]]]) -> list[dict[str, float]]:
    """At each step that all seeds have: mean, least and largest loss, mean seconds and oracle calls."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        for r in run:
            if r["valid_loss"] is not None:
                by_step.setdefault(r["step"], []).append(r)
    out = []
    for step, rs in sorted(by_step.items()):
        if len(rs) == len(runs):
            losses = [r["valid_loss"] for r in rs]
            row = {"step": step, "mean": statistics.fmean(losses), "low": min(losses), "high": max(losses)}
            row["seconds"] = statistics.fmean(r["seconds"] for r in rs)
            row["calls"] = statistics.fmean(_calls(r["oracles"]) for r in rs)
            out.append(row)
    return out


def _calls(counts: dict[str, int]) -> int:
    """Oracle calls, a joint HVP and cross product as one; ∂_λ F is not called, since F does not read λ."""
    products = counts["hvp"] + counts.get("gnvp", 0) + counts["cross"] - counts["joint"]
    return counts["grad"] + counts["d_omega"] + products


def _against_calls(path: Path, asked: CleaningSpec, figures: tuple[str, ...], results: Results) -> Path:
    wanted = [p for f in ("fig2", "fig3") if f in figures for p in panels(f, asked)]
    fair = [Panel(p.title, {n: s for n, s in p.runs.items() if n not in ("NONE", "ORACLE")}) for p in wanted]
    _grid(path, [[(panel, _CALLS) for panel in fair]], results)
    return path


def _weights(path: Path, spec: RunSpec, results: Results) -> Path:
    """How the learnt weights of right and wrong labels spread over the run (first seed)."""
    run = results.runs(spec)[0]
    steps = [r["step"] for r in run]
    with figure(path, columns=2) as fig:
        axes = fig.subplots(1, 2, sharey=True)
        for ax, kind, title in zip(axes, ("clean", "corrupted"), ("right labels", "wrong labels"), strict=True):
            share = [
                [r[f"histogram_{kind}"][b] / max(1, sum(r[f"histogram_{kind}"])) for r in run] for b in range(BINS)
            ]
            edges = [*steps, 2 * steps[-1] - steps[-2]] if len(steps) > 1 else [0, 1]
            mesh = ax.pcolormesh(
                edges,
                [b / BINS for b in range(BINS + 1)],
                share,
                norm=LogNorm(1e-3, 1),
                cmap="viridis",
                rasterized=True,
            )
            ax.plot(steps, [r[f"weight_{kind}"] for r in run], color="white", linewidth=2.5)
            ax.plot(steps, [r[f"weight_{kind}"] for r in run], color=COLOURS[1], label="mean")
            ax.set_facecolor("#440154")  # the colour of none
            ax.set_xlabel(_STEP)
            ax.set_title(f"Weights of {title} (FSLA)", fontsize=11)
            ax.grid(visible=False)
        axes[0].set_ylabel("weight, sigmoid(λ)")
        axes[0].legend(labelcolor="white", loc="lower left")
        fig.colorbar(mesh, ax=axes, label="share of the samples")
    return path
