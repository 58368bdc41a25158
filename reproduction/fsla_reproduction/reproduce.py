"""Runs, records and summary of the cleaning experiments, in one folder; what is finished there is not repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsla._checks import pick
from fsla.train._engine import ENGINES
from fsla_reproduction.cleaning import RunSpec, execute
from fsla_reproduction.cleaning_claims import all_claims
from fsla_reproduction.cleaning_summary import markdown
from fsla_reproduction.datasets import load, make_task
from fsla_reproduction.figures import FIGURES, CleaningSpec, Panels, panels
from fsla_reproduction.folder import Folder, settings_for
from fsla_reproduction.images import hold, load_once
from fsla_reproduction.job import Job, ReportShare
from fsla_reproduction.report import Summary
from fsla_reproduction.results import Results
from fsla_reproduction.runs import LOCAL, Report, Workers, unseen

EXPERIMENT = "cleaning"


@dataclass(frozen=True)
class Plan:
    """A request that is possible: its data is read, and nothing is written yet."""

    out: Path
    panels: Panels
    figures: tuple[str, ...]
    seeds: int
    data_dir: Path | None
    fingerprints: Mapping[str, str]
    device: torch.device | str
    engine: str


def prepare(
    out: Path,
    cleaning_spec: CleaningSpec,
    figures: tuple[str, ...],
    seeds: int,
    *,
    data_dir: Path | None = None,
    device: torch.device | str = "cpu",
    engine: str = "auto",
) -> Plan:
    """Check everything that was asked for, the data and the output folder too, and write nothing."""
    pick(engine, dict.fromkeys(ENGINES), "engine")
    every = panels(cleaning_spec)
    selected = every.runs(figures, seeds)
    images = {name: load(name, data_dir) for name in dict.fromkeys(spec.task.dataset for spec in selected)}
    for task in dict.fromkeys(replace(spec.task, seed=0) for spec in selected):
        make_task(task, images=images[task.dataset])  # tells whether the data set has enough images
    fingerprints = {name: hold(data) for name, data in images.items()}
    settings_for(out, EXPERIMENT, cleaning_spec, fingerprints)
    return Plan(out, every, figures, seeds, data_dir, fingerprints, device, engine)


def carry_out(plan: Plan, report: Report = unseen, workers: Workers = LOCAL) -> tuple[Results, Summary]:
    """Do the runs that the folder lacks; return the results and the summary, which are written there too.

    The records and the summary are of every figure whose runs the folder has by then, asked for now or before.
    """
    folder = workers.open(plan.out, EXPERIMENT, plan.panels.cleaning_spec, plan.fingerprints)
    gpu = torch.device(plan.device).type != "cpu"
    jobs = []
    for spec in plan.panels.runs(plan.figures, plan.seeds):
        part = folder.runs.resolve() / f"{spec.name}.part"
        known = plan.fingerprints[spec.task.dataset]
        work = partial(_execute, spec, part, plan.data_dir, known, plan.device, plan.engine)
        jobs.append(Job(spec.name, f"{spec.task.dataset} {spec.method}", work, part=part, gpu=gpu))
    workers.do(folder, jobs, report)
    return _summarise(folder, plan)


def _execute(
    spec: RunSpec,
    part: Path,
    data_dir: Path | None,
    known: str,
    device: torch.device | str,
    engine: str,
    report: ReportShare,
) -> list[dict[str, Any]]:
    """One run, from its checkpoint if there is one. A worker that does not see the folder keeps none."""
    return execute(
        spec,
        checkpoint=part if part.parent.is_dir() else None,
        images=load_once(spec.task.dataset, known, data_dir),
        device=device,
        engine=engine,
        on_measure=lambda record: report(record["step"] / spec.steps),
    )


def _summarise(folder: Folder, plan: Plan) -> tuple[Results, Summary]:
    """Gather the records of all figures whose runs are finished, and write what they say."""

    def names(figure: str) -> list[str]:
        return [spec.name for spec in plan.panels.runs((figure,), plan.seeds)]

    figures = tuple(figure for figure in FIGURES if all(folder.finished(name) for name in names(figure)))
    by_run: dict[str, list[dict[str, Any]]] = {}
    for record in folder.gather([spec.name for spec in plan.panels.runs(figures, plan.seeds)]):
        by_run.setdefault(record["run"], []).append(record)
    results = Results(plan.panels, by_run, plan.seeds)
    claims = tuple(all_claims(figures, results))
    numbers = {
        "claims": [{"claim": claim.text, "holds": claim.holds, "figures": claim.figures} for claim in claims],
        "runs": {name: records[-1] for name, records in by_run.items()},
    }
    summary = Summary(claims, numbers, markdown(figures, results))
    folder.conclude(summary)
    return results, summary


def reproduce(
    out: Path,
    cleaning_spec: CleaningSpec,
    figures: tuple[str, ...],
    seeds: int,
    *,
    data_dir: Path | None = None,
    device: torch.device | str = "cpu",
    engine: str = "auto",
    report: Report = unseen,
    workers: Workers = LOCAL,
) -> tuple[Results, Summary]:
    """Check what was asked for, then do it: `prepare` and `carry_out` in one call."""
    plan = prepare(out, cleaning_spec, figures, seeds, data_dir=data_dir, device=device, engine=engine)
    return carry_out(plan, report, workers)
