"""The figures of section 6.2 and Appendix E from the records of the cleaning runs, and three that the paper lacks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke

from fsla_reproduction.cleaning import BINS, RunSpec
from fsla_reproduction.datasets import TaskSpec
from fsla_reproduction.figures import Panel, Panels
from fsla_reproduction.methods import Fsla, NoCleaning, Oracle
from fsla_reproduction.plots.style import CurveStyle, curve_style, figure, log_axis, plain_number, setting
from fsla_reproduction.results import Results, Runs, oracle_calls

_STEPS = "hyper-iteration"
_SECONDS = "seconds of running time"
_CALLS = "oracle calls (∂G, ∂F, HVP, mixed product)"
_NAMES = {"valid_loss": "validation loss", "weight_auroc": "AUROC of the weights, wrong labels"}
_TITLES = {
    "overview": "Data hyper-cleaning, the same oracle calls for every method",
    "fig2": "Figure 2: FSLA and backpropagation",
    "fig3": "Figure 3: FSLA, Neumann series and conjugate gradients",
    "fig4": "Figure 4: FSLA and CG on other data",
    "fig5": "Figure 5: FSLA with other batch sizes and δ (blue: the usual)",
    "fig6": "Figure 6: FSLA with other c_τ, c_η and c_β (blue: the usual)",
    "momentum": "FSLA with other momentum and curvature",
}
_DATA = {"digits": "scikit-learn's digits", "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "qmnist": "QMNIST"}
_NOISE = {
    "uniform": "{:.0%} of the labels redrawn",
    "wrong": "{:.0%} of the labels wrong",
    "pair": "{:.0%} of the labels one class too high",
}


@dataclass(frozen=True)
class View:
    """A panel as it is drawn: its runs, what is on the axes, and the title."""

    panel: Panel
    x: str
    y: str = "valid_loss"
    title: str = ""


def draw(folder: Path, figures: Sequence[str], results: Results) -> list[Path]:
    """Draw the figures that were asked for; return the PNG files."""
    panels = results.panels
    drawn = []
    for name in figures:
        _grid(folder / name, _TITLES[name], _views(name, results), results)
        drawn.append(name)
    measured = [name for name in ("fig2", "fig3") if name in figures]
    if measured:
        fair = [_learning(panel) for name in measured for panel in panels.figures[name]]
        views = [[View(panel, _CALLS, title=panel.title) for panel in fair]]
        _grid(folder / "oracle-calls", "The price in oracle calls", views, results)
        drawn.append("oracle-calls")
    if "fig2" in figures:
        _weights(folder / "weights", panels.panel("fig2", "FSLA and BP").runs["FSLA"], results)
        drawn.append("weights")
    return [folder / f"{name}.png" for name in drawn]


def _views(name: str, results: Results) -> list[list[View]]:
    """The rows of a figure."""
    panels = results.panels.figures[name]
    if name == "overview":
        return [_overview(panels[0], results)]
    if name == "fig2":
        return [[View(panels[0], _STEPS, title="by hyper-iterations"), View(panels[0], _SECONDS, title="by time")]]
    if name == "fig3":
        return [[View(panel, x, title=panel.title) for panel in panels] for x in (_STEPS, _SECONDS)]
    x = _SECONDS if name == "fig4" else _STEPS
    return [[View(panel, x, title=panel.title) for panel in panels]]


def _overview(panel: Panel, results: Results) -> list[View]:
    """Three views; each title names the method that is ahead at the end, whichever it is."""
    runs = results.by_label(panel)
    spent = f"{plain_number(runs['FSLA'].calls)} oracle calls each"
    storm = ("FSLA", "CG_1_1", "CG_1_10")
    plain = ("FSLA, no momentum", "CG_1_10, no momentum")
    lowest = f"lowest: {_lowest(runs, storm)} with STORM, {_lowest(runs, plain)} without momentum"
    ranking = {label: group.final("weight_auroc") for label, group in runs.items()}
    best = max(ranking, key=lambda label: ranking[label])
    ended = {label: runs[label].loss_when_ended(runs["FSLA"]) for label in storm}
    first = min(ended, key=lambda label: ended[label])
    return [
        View(panel, _CALLS, "weight_auroc", f"Finding the wrong labels, {spent}\nbest: {best} ({ranking[best]:.3f})"),
        View(panel, _CALLS, "valid_loss", f"Validation loss, {spent}\n{lowest}"),
        View(panel, _SECONDS, "valid_loss", f"Validation loss against time\nlowest with STORM when FSLA ends: {first}"),
    ]


def _lowest(runs: dict[str, Runs], labels: Iterable[str]) -> str:
    return min(labels, key=lambda label: runs[label].loss).split(",")[0]


def _learning(panel: Panel) -> Panel:
    """The panel without the two runs that learn no weights."""
    selected = {label: spec for label, spec in panel.runs.items() if not isinstance(spec.method, NoCleaning | Oracle)}
    return Panel(panel.title, selected)


def _grid(path: Path, title: str, rows: list[list[View]], results: Results) -> None:
    """Draw views in rows; under them a legend for all, or where the runs differ a row of legends."""
    columns = len(rows[0])
    same_panel = all(view.panel is rows[0][0].panel for row in rows for view in row)
    tasks = {spec.task for row in rows for view in row for spec in view.panel.runs.values()}
    heights = [4.4] * len(rows)
    if not same_panel:
        heights.append(0.1 + 0.24 * max(len(view.panel.runs) for view in rows[-1]))
    width = 5.2 if columns == 3 else 4.8
    with figure(path, size=(width * max(columns, 1.25), sum(heights) + 0.7)) as fig:
        axes = fig.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
        for row, views in enumerate(rows):
            for column, view in enumerate(views):
                ax = axes[row][column]
                if _one_y(rows) and ax is not axes[0][0]:
                    ax.sharey(axes[0][0])  # before anything is drawn, so that the scale fits all
                _draw_view(ax, view, results, _heading(view, tasks))
                if _one_y(rows) and column:
                    ax.set_ylabel("")
                    ax.tick_params(labelleft=False)
        task = next(iter(tasks)) if len(tasks) == 1 else None
        fig.suptitle(f"{title}\n{_about(task, results)}", fontsize=13)
        if same_panel:
            _legend_for_all(fig, axes[0][0], per_row=2 * columns)
        else:
            for ax, above in zip(axes[-1], axes[-2], strict=True):
                ax.set_axis_off()
                ax.legend(*above.get_legend_handles_labels(), loc="upper center")


def _heading(view: View, tasks: set[TaskSpec]) -> str:
    """The title of a view, and its data where the figure has more than one task."""
    task = next(iter(view.panel.runs.values())).task
    return view.title if len(tasks) == 1 else f"{view.title}\n{_amount(task)}"


def _legend_for_all(fig: Figure, ax: Axes, per_row: int) -> None:
    handles, labels = ax.get_legend_handles_labels()
    lines = math.ceil(len(handles) / per_row)
    fig.legend(handles, labels, loc="outside lower center", ncols=math.ceil(len(handles) / lines))


def _one_y(rows: list[list[View]]) -> bool:
    return len({view.y for row in rows for view in row}) == 1


def _about(task: TaskSpec | None, results: Results) -> str:
    """The data, the model and the seeds of a figure."""
    seeds = "seed 0" if results.seeds == 1 else f"mean and range of seeds 0 to {results.seeds - 1}"
    data = [] if task is None else [_data(task)]
    return "; ".join([*data, f"model {results.panels.base.model}", seeds])


def _data(task: TaskSpec) -> str:
    return f"{_DATA.get(task.dataset, task.dataset)}, {_amount(task)}"


def _amount(task: TaskSpec) -> str:
    noise = _NOISE[task.noise].format(task.rate)
    return f"{task.n_train} + {task.n_valid} images, {noise}"


def _draw_view(ax: Axes, view: View, results: Results, title: str) -> None:
    """Mean and range over seeds; a run that was stopped ends in a marker."""
    styles = _styles(view.panel, results.panels)
    for label, runs in results.by_label(view.panel).items():
        points = _points(runs, view)
        style = styles[label]
        name = label if runs.status == "finished" else f"{label} ({runs.status.replace('budget at', 'to')})"
        xs = [point.x for point in points]
        ax.plot(xs, [point.mean for point in points], color=style.colour, ls=style.dash, lw=style.width, label=name)
        if results.seeds > 1:
            low = [point.low for point in points]
            high = [point.high for point in points]
            ax.fill_between(xs, low, high, color=style.colour, alpha=0.13, linewidth=0)
        if runs.status != "finished" and points:
            ax.plot(xs[-1], points[-1].mean, "x", color=style.colour, markersize=9, markeredgewidth=2)
    ax.set_xlabel(view.x)
    ax.set_ylabel(_NAMES[view.y])
    ax.set_title(title)
    if view.x != _STEPS:
        log_axis(ax)


def _styles(panel: Panel, panels: Panels) -> dict[str, CurveStyle]:
    """The look of each run. FSLA with a setting other than usual has another colour, from light to dark."""
    base = panels.base
    unusual = [
        label
        for label, spec in panel.runs.items()
        if spec.method == Fsla() and replace(spec, task=base.task, steps=base.steps, every=base.every) != base
    ]
    styles = {}
    for label, spec in panel.runs.items():
        styles[label] = setting(unusual.index(label), len(unusual)) if label in unusual else curve_style(spec.method)
    return styles


@dataclass(frozen=True)
class Point:
    """A point of a curve: mean over seeds, least and largest."""

    x: float
    mean: float
    low: float
    high: float


def _points(runs: Runs, view: View) -> list[Point]:
    """At each step that all seeds have. On a logarithmic axis the start has no place."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for run in runs.seeds:
        for record in run:
            if record[view.y] is not None:
                x = {_STEPS: record["step"], _SECONDS: record["seconds"]}.get(view.x, oracle_calls(record["oracles"]))
                by_step.setdefault(record["step"], []).append((x, record[view.y]))
    points = []
    for step, seen in sorted(by_step.items()):
        if len(seen) == len(runs.seeds) and (step > 0 or view.x == _STEPS):
            ys = [y for _, y in seen]
            points.append(Point(statistics.fmean(x for x, _ in seen), statistics.fmean(ys), min(ys), max(ys)))
    return points


def _weights(path: Path, spec: RunSpec, results: Results) -> None:
    """How the learnt weights of right and wrong labels spread over the run (first seed)."""
    run = results.of(spec).seeds[0]
    steps = [record["step"] for record in run]
    middles = [(a + b) / 2 for a, b in pairwise(steps)]
    edges = [steps[0], *middles, steps[-1]] if len(steps) > 1 else [0, 1]
    with figure(path, columns=2) as fig:
        axes = fig.subplots(1, 2, sharey=True)
        for ax, kind, title in zip(axes, ("clean", "corrupted"), ("right labels", "wrong labels"), strict=True):
            counts = [record[f"histogram_{kind}"] for record in run]
            fractions = [[row[b] / max(1, sum(row)) for row in counts] for b in range(BINS)]
            rungs = [b / BINS for b in range(BINS + 1)]
            mesh = ax.pcolormesh(edges, rungs, fractions, norm=LogNorm(1e-3, 1), cmap="viridis", rasterized=True)
            outlined = [Stroke(linewidth=4.5, foreground="black"), Normal()]
            means = [record[f"weight_{kind}"] for record in run]
            ax.plot(steps, means, color="white", lw=2.5, path_effects=outlined, label="mean")
            ax.set_facecolor("#440154")  # the colour of none
            ax.set_xlabel(_STEPS)
            ax.set_title(title)
            ax.grid(visible=False)
        axes[0].set_ylabel("weight, sigmoid(λ)")
        axes[0].legend(labelcolor="white", loc="lower left")
        fig.colorbar(mesh, ax=axes, label="share of the samples (logarithmic)")
        data = _data(spec.task)
        fig.suptitle(f"The weights that FSLA learns\n{data}; model {spec.model}; seed 0", fontsize=13)
