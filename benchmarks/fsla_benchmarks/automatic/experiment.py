"""Steps that need no tuning against the best of a grid of constants, on every task of `automatic_tasks`.

Both take the same number of steps of FSLA without momentum, from the same start on the same batches. A run is judged by
f = F(λ, ω_λ) at its last λ, ω_λ by L-BFGS on the whole inner loss from the run's last ω; the table has the
ratio of the automatic run's f to the smallest one of the grid.

The grid: τ = t/L and β = r τ with L the curvature at the start, α = m / |d| with |d| the root mean square of the
hypergradient once ω and v have converged there, each constant or falling as 1/√(k+1).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsla._checks import whole_number
from fsla.problems import Batch
from fsla.steps import Automatic
from fsla.train import FSLA, DivergenceError, RollbackWarning
from fsla_benchmarks.automatic.tasks import Task, tasks
from fsla_reproduction.folder import Folder, Record
from fsla_reproduction.job import Job, ReportShare
from fsla_reproduction.report import Claim, Summary, table
from fsla_reproduction.runs import LOCAL, Report, Workers, unseen

T = (0.3, 1.0)
R = (1.0, 0.1)
M = (0.01, 0.03, 0.1, 0.3)
FALLS = (False, True)


@dataclass(frozen=True)
class AutomaticSpec:
    steps: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps", "AutomaticSpec")


def run(spec: AutomaticSpec, folder: Folder, report: Report = unseen, workers: Workers = LOCAL) -> list[Record]:
    """Do the tasks that the folder lacks; return the records of all."""
    jobs = [
        Job("".join(c if c.isalnum() else "-" for c in task.name), task.name, partial(_compare, spec, task.name))
        for task in tasks()
    ]
    workers.do(folder, jobs, report)
    return folder.gather([job.name for job in jobs])


def _compare(spec: AutomaticSpec, name: str, report: ReportShare) -> list[Record]:
    (task,) = [task for task in tasks() if task.name == name]
    settings = list(product(T, R, M, FALLS))
    model, outer = task.build()
    start = solved_outer_loss(task, model, outer)
    rates, rollbacks = _automatic(spec, task)
    records: list[Record] = [
        {"task": task.name, "rule": "automatic", "f": rates, "rollbacks": rollbacks, "start": start}
    ]
    curvature, size = _scales(spec, task)
    for i, (t, r, m, falls) in enumerate(settings):
        report((i + 1) / (len(settings) + 1))
        tau = t / curvature
        f = _constants(spec, task, m / size, tau, r * tau, falls)
        records.append({"task": task.name, "rule": "constants", "f": f, "t": t, "r": r, "m": m, "falls": falls})
    return records


def _automatic(spec: AutomaticSpec, task: Task) -> tuple[float | None, int]:
    inner, outer = task.losses()
    model, modules = task.build()
    opt = FSLA(model, modules, inner_loss=inner, outer_loss=outer, hvp_method="autograd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RollbackWarning)
        f = _taken(spec, task, opt, model, modules, lambda k: None)
    return f, sum(issubclass(w.category, RollbackWarning) for w in caught)


def _constants(spec: AutomaticSpec, task: Task, alpha: float, tau: float, beta: float, falls: bool) -> float | None:
    inner, outer = task.losses()
    model, modules = task.build()
    rates = {"outer_optimizer": alpha, "inner_optimizer": tau, "adjoint_optimizer": beta}
    factories: dict[str, Any] = {name: partial(torch.optim.SGD, lr=rate) for name, rate in rates.items()}
    opt = FSLA(model, modules, inner_loss=inner, outer_loss=outer, hvp_method="autograd", max_rollbacks=0, **factories)

    def fall(k: int) -> None:
        for name, rate in rates.items():
            factor = 10 / math.sqrt(k + 100) if falls else 1.0
            getattr(opt, name).param_groups[0]["lr"] = rate * factor

    return _taken(spec, task, opt, model, modules, fall)


def _taken(
    spec: AutomaticSpec, task: Task, opt: FSLA, model: nn.Module, modules: nn.Module, before: Callable[[int], None]
) -> float | None:
    """f after the steps; None where the run diverged."""
    generator = torch.Generator().manual_seed(spec.seed)
    try:
        for k in range(spec.steps):
            before(k)
            opt.step(*task.draw(generator), seed=0)
    except DivergenceError:
        return None
    return solved_outer_loss(task, model, modules)


def solved_outer_loss(task: Task, model: nn.Module, modules: nn.Module) -> float | None:
    """Return F(λ, ω_λ), with ω_λ by L-BFGS from the present parameters; None where it is not finite."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    search = torch.optim.LBFGS(parameters, max_iter=300, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = task.inner_loss(model, modules, task.inner)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        value = float(task.outer_loss(model, modules, task.outer))
    return value if math.isfinite(value) else None


def _scales(spec: AutomaticSpec, task: Task) -> tuple[float, float]:
    """The curvature at the start, and the root mean square of the hypergradient once ω and v have converged there."""
    inner, outer = task.losses()
    model, modules = task.build()
    opt = FSLA(
        model,
        modules,
        inner_loss=inner,
        outer_loss=outer,
        hvp_method="autograd",
        outer_optimizer=partial(torch.optim.SGD, lr=0.0),
    )
    generator = torch.Generator().manual_seed(spec.seed)
    problem, start = opt.problem_at_point()
    sizes = Automatic()
    view = problem.inner_at(start, Batch(task.inner)).linearized()
    curvature = float(sizes.measure(view, 30, sizes.init(start.omega)).curvature)
    for _ in range(300):
        opt.step(*task.draw(generator), seed=0)
    d = torch.cat([t.flatten() for t in opt.hypergradient.values()])
    return curvature, max(float(d.square().mean().sqrt()), 1e-12)


def summarise(records: list[Record]) -> list[Record]:
    """For each task f of the automatic run, the best of the grid, their ratio, and how many of the grid diverged."""
    rows = []
    for name in dict.fromkeys(r["task"] for r in records):
        automatic = next(r for r in records if r["task"] == name and r["rule"] == "automatic")
        grid = [r for r in records if r["task"] == name and r["rule"] == "constants"]
        ended = sorted(r["f"] for r in grid if r["f"] is not None)
        rows.append(
            {
                "task": name,
                "start": automatic["start"],
                "automatic": automatic["f"],
                "best": ended[0],
                "median": ended[len(ended) // 2],
                "ratio": None if automatic["f"] is None else automatic["f"] / ended[0],
                "diverged": len(grid) - len(ended),
                "tried": len(grid),
                "rollbacks": automatic["rollbacks"],
            }
        )
    return rows


def claims(rows: list[Record]) -> tuple[Claim, ...]:
    """What the comparison is to show, held or not."""
    within = [r["task"] for r in rows if r["ratio"] is not None and r["ratio"] <= 1.1]
    beyond = [f"{r['task']} ({_ratio(r)})" for r in rows if r["task"] not in within]
    lost = [r["task"] for r in rows if r["ratio"] is None]
    return (
        Claim(
            "Steps that need no tuning come within 10 % of the best of a grid on most tasks",
            2 * len(within) > len(rows),
            f"{len(within)} of {len(rows)}" + (f"; not on {', '.join(beyond)}" if beyond else ""),
        ),
        Claim("They never diverge", not lost, "none did" if not lost else ", ".join(lost)),
    )


def markdown(spec: AutomaticSpec, rows: list[Record]) -> str:
    """summary.md."""
    head = ["task", "f at the start", "automatic", "best", "median of the grid", "automatic / best", "grid diverged"]
    lines = [
        (r["task"], r["start"], r["automatic"], r["best"], r["median"], _ratio(r), f"{r['diverged']} of {r['tried']}")
        for r in rows
    ]
    return "\n".join(
        [
            "# Steps that need no tuning, against the best of a grid\n",
            f"FSLA without momentum, {spec.steps} steps, exact products; f = F(λ, ω_λ) at the end, smaller is better. "
            f"The automatic steps have one setting for all, the grid {len(T) * len(R) * len(M) * len(FALLS)} sets of "
            "constants for each task.\n",
            table(head, lines),
            *(f"- {c.text}: {'yes' if c.holds else '**no**'} ({c.figures})" for c in claims(rows)),
            "",
        ]
    )


def _ratio(row: Record) -> str:
    return "diverged" if row["ratio"] is None else f"{row['ratio']:.2f}"


def reproduce(out: Path, spec: AutomaticSpec, report: Report = unseen, workers: Workers = LOCAL) -> Summary:
    """Do the tasks that the folder lacks, and write the summary."""
    folder = workers.open(out, "automatic", spec)
    rows = summarise(run(spec, folder, report, workers))
    summary = Summary(claims(rows), {"tasks": rows}, markdown(spec, rows))
    folder.conclude(summary)
    return summary
