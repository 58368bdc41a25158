"""How good λ is after the same number of training steps, where it moves at one of m.

Each run takes SOBA's automatic steps. It is judged as in `experiment`: by f = F(λ, ω_λ) at its last λ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsla.train import SOBA, DivergenceError
from fsla_benchmarks.automatic.experiment import solved_outer_loss
from fsla_benchmarks.automatic.tasks import Task, tasks

NAMES = {
    "weights of sources, dense": "source weights",
    "weights of classes, dense": "class weights",
    "weights of samples, dense": "sample weights",
    "ridge a feature, cancer, batch 64": "penalties",
    "a feature map, with a linear head inside": "hyper-representation",
}
"""The tasks, and what λ is in them."""
SPACINGS = (1, 4, 8, 16)


@dataclass(frozen=True)
class SpacingRow:
    """The runs of a task at one `outer_every`.

    Args:
        task: what λ is.
        outer_every: m.
        steps: training steps of each run.
        start: f at the start.
        f: f at the end of the run of each seed; None where it diverged.
    """

    task: str
    outer_every: int
    steps: int
    start: float | None
    f: list[float | None]


def measure(steps: int, seeds: int, report: Callable[[str], None]) -> list[SpacingRow]:
    """Return the rows of all tasks.

    Args:
        steps: training steps of each run.
        seeds: runs of each row; a seed draws the batches.
        report: called with what is measured next.
    """
    rows = []
    for task in [task for task in tasks() if task.name in NAMES]:
        start = solved_outer_loss(task, *task.build())
        for m in SPACINGS:
            report(f"{NAMES[task.name]}, outer_every={m}")
            ends = [_run(task, m, steps, seed) for seed in range(seeds)]
            rows.append(SpacingRow(NAMES[task.name], m, steps, start, ends))
    return rows


def _run(task: Task, m: int, steps: int, seed: int) -> float | None:
    inner, outer = task.losses()
    model, modules = task.build()
    bilevel = SOBA(model, modules, inner_loss=inner, outer_loss=outer, hvp_method="autograd", outer_every=m)
    generator = torch.Generator().manual_seed(seed)
    try:
        for _ in range(steps):
            bilevel.step(*task.draw(generator), seed=0)
    except DivergenceError:
        return None
    return solved_outer_loss(task, model, modules)


def write_result(result: Mapping[str, Any]) -> list[str]:
    """Return the table of a file of results as lines of Markdown: the mean of f, and its smallest and largest."""
    rows = {(row["task"], row["outer_every"]): row for row in result["rows"]}
    lines = [
        "| λ | at the start | " + " | ".join(f"m = {m}" for m in SPACINGS) + " |",
        "|---" * (len(SPACINGS) + 2) + "|",
    ]
    for task in dict.fromkeys(task for task, _ in rows):
        cells = [_cell(rows[task, m]["f"]) for m in SPACINGS]
        lines.append(f"| {task} | {rows[task, SPACINGS[0]]['start']:.3g} | " + " | ".join(cells) + " |")
    return lines


def _cell(ends: list[float | None]) -> str:
    finite = [f for f in ends if f is not None]
    if len(finite) < len(ends):
        return f"{len(ends) - len(finite)} of {len(ends)} diverged"
    return f"{sum(finite) / len(finite):.3g} ({min(finite):.3g} to {max(finite):.3g})"
