"""The runs of `fsla bench data`: a set, a number of checked rows and a seed; alternatives and fsla in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fsla._checks import pick
from fsla.data._learners import Learner, default_learners
from fsla_benchmarks.data.alternatives import (
    ALTERNATIVES,
    Alternative,
    add_source,
    checked_mass,
    choose_checked_weight,
    source_of_rows,
)
from fsla_benchmarks.data.measures import judge_votes, row_losses, score, score_predictions
from fsla_benchmarks.data.problem import Array, Problem
from fsla_benchmarks.data.sets import SETS, draw_problem
from fsla_reproduction.folder import Folder, Record
from fsla_reproduction.job import Job, ReportShare
from fsla_reproduction.runs import LOCAL, Report, Workers, unseen

FOLDS = 5
TUNING_SEEDS = (0, 1, 2)
"""Seeds on which settings were chosen; no other table has them."""
REPORTED_SEEDS = (3, 4, 5, 6, 7)
PARTS = ("alternatives", "fsla")
PRODUCT = "fsla"
BY_CV = "careful user (CV)"
"""Picks the alternative of the lowest held-out loss."""
BY_CV_SCORE = "careful user (CV by accuracy)"
"""Picks the alternative of the best held-out accuracy, or R2; the loss breaks ties."""


@dataclass(frozen=True)
class DataSpec:
    """What is measured."""

    sets: tuple[str, ...] = tuple(SETS)
    checked: tuple[int, ...] = (100,)
    seeds: tuple[int, ...] = TUNING_SEEDS
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        for name in self.sets:
            pick(name, SETS, "set")
        for part in self.parts:
            pick(part, dict.fromkeys(PARTS, 0), "part")

    def cells(self) -> list[tuple[str, int, int]]:
        """Return set, number of checked rows and seed of each cell, without those a set is too small for."""
        return [
            (name, checked, seed)
            for checked in self.checked
            for seed in self.seeds
            for name in self.sets
            if checked in SETS[name].sizes
        ]


@dataclass(frozen=True)
class FolderSettings:
    """What a folder is bound to: nothing, as each cell stands by itself."""

    folds: int = FOLDS


def run(
    spec: DataSpec,
    folder: Folder,
    data_dir: Path | None,
    report: Report = unseen,
    workers: Workers = LOCAL,
    commit: str = "unknown",
) -> list[Record]:
    """Do the cells that the folder lacks; return the records of all cells in it."""
    measure: dict[str, Callable[..., list[Record]]] = {"alternatives": run_alternatives, "fsla": run_product}
    jobs = [
        Job(
            f"{name}-{checked}-{seed}-{part}",
            f"{name}, {checked} checked rows, seed {seed}: {part}",
            partial(_run_cell, measure[part], name, checked, seed, data_dir, commit),
        )
        for name, checked, seed in spec.cells()
        for part in spec.parts
    ]
    workers.do(folder, jobs, report)
    return read_records(folder)


def read_records(folder: Folder) -> list[Record]:
    """Return the records of all finished runs of a folder, of earlier calls too."""
    return folder.gather([path.stem for path in sorted(folder.runs.glob("*.jsonl")) if folder.finished(path.stem)])


def _run_cell(
    measure: Callable[[Problem, int, ReportShare], list[Record]],
    name: str,
    checked: int,
    seed: int,
    data_dir: Path | None,
    commit: str,
    report: ReportShare,
) -> list[Record]:
    problem = draw_problem(name, checked, seed, data_dir)
    head = {
        "set": name,
        "task": problem.data.task,
        "checked": checked,
        "seed": seed,
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
    }
    return [head | record for record in measure(problem, seed, report)]


def run_alternatives(problem: Problem, seed: int, report: ReportShare) -> list[Record]:
    """Measure each alternative with each learner, and what a user has who picks one of them by cross-validation."""
    data = problem.data
    alternatives = [alternative for alternative in ALTERNATIVES if alternative.suits(data)]
    learners = default_learners(data)
    records: list[Record] = []
    for number, alternative in enumerate(alternatives):
        report(number / len(alternatives))
        records += run_alternative(problem, alternative, learners, seed)
    total = {"learner": "", "seconds": sum(record["seconds"] for record in records)}
    by_loss = min(records, key=lambda record: record["held_out_loss"])
    by_score = max(records, key=lambda record: (record["held_out_score"], -record["held_out_loss"]))
    return [
        *records,
        by_loss | total | {"method": BY_CV, "picked": _label(by_loss)},
        by_score | total | {"method": BY_CV_SCORE, "picked": _label(by_score)},
    ]


def _label(record: Record) -> str:
    return f"{record['method']} / {record['learner']}"


def run_alternative(problem: Problem, alternative: Alternative, learners: Sequence[Learner], seed: int) -> list[Record]:
    """Measure an alternative with each learner. Folds of the checked rows choose a learner's penalty."""
    data = problem.data
    num_checked = len(data.checked_rows)
    fold = np.random.default_rng(seed).permutation(num_checked) % FOLDS
    everything = np.arange(num_checked)
    start = time.process_time()
    parts = [everything, *(everything[fold != number] for number in range(FOLDS))]
    beliefs = []
    for checked in parts:
        choice = alternative.choose(data, checked, learners[0])
        weight = alternative.checked_weight
        if weight is None:
            weight = choose_checked_weight(data, choice.mass, checked)
        beliefs.append((choice, checked_mass(data, checked, weight)))
    preparing = time.process_time() - start
    features, test = data.features, problem.test
    if alternative.source_feature:
        features = add_source(features, source_of_rows(data), data.num_groups)
        test = add_source(test, np.full(len(test), data.num_groups), data.num_groups)
    records = []
    for learner in learners:
        if learner.fine_tunes and (alternative.checked_weight is not None):
            continue  # It needs rows of both kinds.
        start = time.process_time()
        choice, sure = beliefs[0]
        final = learner.path(features, choice.mass, sure, data.task, seed)
        seconds = time.process_time() - start
        shape = (num_checked, data.num_classes) if data.num_classes else (num_checked,)
        held_out = [np.zeros(shape) for _ in final]
        for number, (part, part_sure) in enumerate(beliefs[1:]):
            rows = everything[fold == number]
            start = time.process_time()
            path = learner.path(features, part.mass, part_sure, data.task, seed)
            for out, predictor in zip(held_out, path, strict=True):
                out[rows] = predictor.predict(features.take(data.checked_rows[rows]))
            seconds += time.process_time() - start
        losses = [float(row_losses(data.task, out, data.checked_labels).mean()) for out in held_out]
        best = int(np.argmin(losses))
        unseen_rows = cross_fit(problem, features, choice.mass, sure, learner, best, seed)
        scores = score_predictions(data.task, final[best].predict(test), problem.test_labels, losses[best])
        records.append(
            {
                "method": alternative.name,
                "learner": learner.name,
                **scores,
                **judge_votes(problem, unseen_rows, choice.group_score),
                "held_out_loss": losses[best],
                "held_out_score": score(data.task, held_out[best], data.checked_labels),
                "seconds": preparing + seconds,
            }
        )
    return records


def cross_fit(
    problem: Problem, features: Any, mass: Array, sure: Array, learner: Learner, penalty: int, seed: int
) -> Array:
    """Return predictions for all rows of the data, each by a model that was not trained on the row's votes."""
    data = problem.data
    rows = np.arange(len(features))
    half = np.random.default_rng(seed).permutation(len(rows)) % 2
    if not mass.any():
        return learner.path(features, mass, sure, data.task, seed)[penalty].predict(features)
    predicted = np.zeros((len(rows), data.num_classes) if data.num_classes else len(rows))
    for number in range(2):
        inside = half != number
        model = learner.path(features, mass * inside[:, None], sure, data.task, seed)[penalty]
        predicted[~inside] = model.predict(features.take(rows[~inside]))
    return predicted


def run_product(problem: Problem, seed: int, report: ReportShare) -> list[Record]:
    """Measure the library's own choice."""
    from fsla.data._selection import fit_data

    data = problem.data
    start = time.process_time()
    fit = fit_data(data, seed=seed)
    seconds = time.process_time() - start
    held_out = float(row_losses(data.task, fit.out_of_fold[data.checked_rows], data.checked_labels).mean())
    scores = score_predictions(data.task, fit.predictor.predict(problem.test), problem.test_labels, held_out)
    group_score = None if fit.groups is None else fit.groups.quality
    posterior = fit.posterior if data.task == "classification" else fit.out_of_fold
    candidates = {f"{each.strategy} / {each.learner}": round(each.share, 3) for each in fit.candidates}
    return [
        {
            "method": PRODUCT,
            "learner": "",
            **scores,
            **judge_votes(problem, posterior, group_score),
            "held_out_loss": held_out,
            "seconds": seconds,
            "weights": {name: weight for name, weight in candidates.items() if weight > 0.005},
        }
    ]
