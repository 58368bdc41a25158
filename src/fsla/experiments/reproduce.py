"""Runs, records and summary of the cleaning experiments, in one folder; what is finished there is not repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fsla.checks import pick
from fsla.data import Images, fingerprint, load, make_task
from fsla.experiments.cleaning import RunSpec, execute
from fsla.experiments.cleaning_claims import all_claims
from fsla.experiments.cleaning_summary import markdown
from fsla.experiments.figures import FIGURES, CleaningSpec, Panels, panels
from fsla.experiments.folder import Folder, settings_for
from fsla.experiments.report import Summary
from fsla.experiments.results import Results
from fsla.training.engine import ENGINES

EXPERIMENT = "cleaning"
Report = Callable[[RunSpec, int, int, int], None]
"""Called with the run, its step, and how many runs are done of how many."""


@dataclass(frozen=True)
class Plan:
    """What was asked for and found to be possible: its data is read, and nothing is written yet."""

    out: Path
    panels: Panels
    figures: tuple[str, ...]
    seeds: int
    images: Mapping[str, Images]
    fingerprints: Mapping[str, str]
    device: torch.device | str
    engine: str


def prepare(
    out: Path,
    asked: CleaningSpec,
    figures: tuple[str, ...],
    seeds: int,
    *,
    data_dir: Path | None = None,
    device: torch.device | str = "cpu",
    engine: str = "auto",
) -> Plan:
    """Checks everything that was asked for, the data and the output folder too, and writes nothing."""
    pick(engine, dict.fromkeys(ENGINES), "engine")
    every = panels(asked)
    wanted = every.runs(figures, seeds)
    images = {name: load(name, data_dir) for name in dict.fromkeys(spec.task.dataset for spec in wanted)}
    for task in dict.fromkeys(replace(spec.task, seed=0) for spec in wanted):
        make_task(task, images=images[task.dataset])  # tells whether the data set has enough images
    fingerprints = {name: fingerprint(data) for name, data in images.items()}
    settings_for(out, EXPERIMENT, asked, fingerprints)
    return Plan(out, every, figures, seeds, images, fingerprints, device, engine)


def carry_out(plan: Plan, report: Report = lambda spec, step, done, total: None) -> tuple[Results, Summary]:
    """Does the runs that the folder lacks; returns the results and the summary, which are written there too.

    The records and the summary are of every figure whose runs the folder has by then, asked for now or before.
    """
    folder = Folder(plan.out, EXPERIMENT, plan.panels.asked, plan.fingerprints)
    wanted = plan.panels.runs(plan.figures, plan.seeds)
    for done, spec in enumerate(wanted):
        report(spec, 0, done, len(wanted))
        if folder.finished(spec.name):
            continue
        part = folder.runs / f"{spec.name}.part.safetensors"

        def tell(record: dict[str, Any], spec: RunSpec = spec, done: int = done) -> None:
            report(spec, record["step"], done, len(wanted))

        data = plan.images[spec.task.dataset]
        records = execute(spec, checkpoint=part, images=data, device=plan.device, engine=plan.engine, on_measure=tell)
        folder.save(spec.name, records)
        part.unlink(missing_ok=True)
    return _summarise(folder, plan)


def _summarise(folder: Folder, plan: Plan) -> tuple[Results, Summary]:
    """Gathers the records of all figures whose runs are finished, and writes what they say."""

    def names(figure: str) -> list[str]:
        return [spec.name for spec in plan.panels.runs((figure,), plan.seeds)]

    figures = tuple(figure for figure in FIGURES if all(folder.finished(name) for name in names(figure)))
    by_run: dict[str, list[dict[str, Any]]] = {}
    for record in folder.gather([spec.name for spec in plan.panels.runs(figures, plan.seeds)]):
        by_run.setdefault(record["run"], []).append(record)
    results = Results(plan.panels, by_run, plan.seeds)
    claims = tuple(all_claims(figures, results))
    numbers = {
        "claims": [{"claim": claim.text, "held": claim.held, "figures": claim.figures} for claim in claims],
        "runs": {name: records[-1] for name, records in by_run.items()},
    }
    summary = Summary(claims, numbers, markdown(figures, results))
    summary.save(folder.path)
    return results, summary


def reproduce(
    out: Path,
    asked: CleaningSpec,
    figures: tuple[str, ...],
    seeds: int,
    *,
    data_dir: Path | None = None,
    device: torch.device | str = "cpu",
    engine: str = "auto",
    report: Report = lambda spec, step, done, total: None,
) -> tuple[Results, Summary]:
    """Checks what was asked for, then does it: `prepare` and `carry_out` in one call."""
    plan = prepare(out, asked, figures, seeds, data_dir=data_dir, device=device, engine=engine)
    return carry_out(plan, report)
