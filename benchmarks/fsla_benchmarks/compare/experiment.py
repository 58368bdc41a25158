"""Every algorithm on every problem: at equal oracle calls, each tuned by the same small random search.

For each problem and algorithm so many settings are drawn and run with a seed of their own; the one with the least
f = F(λ, ω_λ) at the end of the budget then runs with the seeds that are reported. Budgets are in oracle calls, so that
results depend neither on the clock nor on how many processes share the work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from fsla._checks import pick, whole_number
from fsla_benchmarks.compare.methods import METHODS, RANGES, Setting, label, settings
from fsla_benchmarks.compare.problems import DATA, PROBLEMS
from fsla_benchmarks.compare.report import Results, summary_of
from fsla_benchmarks.compare.runs import Stop
from fsla_benchmarks.compare.runs import run as run_once
from fsla_benchmarks.compare.task import Task
from fsla_reproduction.datasets import DataError, fingerprint, load
from fsla_reproduction.folder import Folder, Record, RunError
from fsla_reproduction.job import Job, ReportShare, quiet
from fsla_reproduction.report import Summary
from fsla_reproduction.runs import LOCAL, Report, Workers, unseen

__all__ = ["METHODS", "PROBLEMS", "CompareSpec", "Plan", "carry_out", "prepare"]

TUNING = 0
"""The seed of the search; those that are reported begin with 1."""
MS_A_CALL = 0.5
"""Milliseconds that a call takes, for the estimate alone."""
START: Setting = {**dict.fromkeys(RANGES, 1.0), "power": 0.0}
"""What methods are given whose steps find themselves."""


@dataclass(frozen=True)
class CompareSpec:
    """The settings of a comparison; empty tuples mean all."""

    preset: str = "smoke"
    seeds: int = 3
    algorithms: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    max_oracle_calls: int | None = None
    num_trials: int | None = None
    """Oracle calls of a run, and settings to try, where they are not the preset's."""

    def __post_init__(self) -> None:
        pick(self.preset, {"smoke": 0, "paper": 0}, "preset")
        whole_number(self.seeds, "seeds", "CompareSpec")
        for name in ("max_oracle_calls", "num_trials"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, "CompareSpec")
        for name in self.algorithms:
            pick(name, METHODS, "algorithm")
        for name in self.problems:
            pick(name, PROBLEMS, "problem")

    @property
    def budget(self) -> int:
        """Oracle calls of a run."""
        return self.max_oracle_calls or (8000 if self.preset == "paper" else 200)

    @property
    def trials(self) -> int:
        """Settings that each method may try on each problem."""
        return self.num_trials or (16 if self.preset == "paper" else 2)

    @property
    def iterations(self) -> int:
        """Of the search for the least f."""
        return 150 if self.preset == "paper" else 5

    @property
    def marks(self) -> tuple[float, ...]:
        """The numbers of calls at which a reported run is measured, each a little more than the one before."""
        number = 32 if self.preset == "paper" else 8
        return tuple(self.budget * 2 ** ((j - number) / 4) for j in range(number + 1))


@dataclass(frozen=True)
class Unit:
    """A piece of work whose records make one file: the least f of a problem, a search, or a run with one seed."""

    problem: str
    algorithm: str = ""
    seed: int | None = None

    @property
    def name(self) -> str:
        last = "tuning" if self.seed is None else f"seed{self.seed}"
        return f"{self.problem}-{self.algorithm}-{last}" if self.algorithm else f"{self.problem}-least"

    @property
    def text(self) -> str:
        return f"{self.problem} {label(self.algorithm) or 'least f'}"


@dataclass(frozen=True)
class Plan:
    """What will be done, what is left out and why, and the folder of the records."""

    spec: CompareSpec
    folder: Folder
    data_dir: Path | None
    tasks: Mapping[str, Task]
    algorithms: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [
            (problem, name)
            for problem, task in self.tasks.items()
            for name in self.algorithms
            if METHODS[name].takes(task)
        ]

    @property
    def first(self) -> list[Unit]:
        """What nothing else must come before."""
        searches = [Unit(problem, name) for problem, name in self.pairs if METHODS[name].searched]
        return [*(Unit(problem) for problem in self.tasks), *searches]

    @property
    def second(self) -> list[Unit]:
        """The runs that are reported."""
        seeds = range(TUNING + 1, TUNING + 1 + self.spec.seeds)
        return [Unit(problem, name, seed) for problem, name in self.pairs for seed in seeds]

    def estimate(self, jobs: int) -> str:
        """How much is left to do, and about how long it will take."""
        searches = [u for u in self.first if u.algorithm and not self.folder.finished(u.name)]
        runs = [u for u in self.second if not self.folder.finished(u.name)]
        number = self.spec.trials * len(searches) + len(runs)
        minutes = number * self.spec.budget * MS_A_CALL / 60e3 / jobs
        time = f"{minutes:.0f} minutes" if minutes >= 1 else f"{60 * minutes:.0f} seconds"
        return (
            f"{len(searches)} searches of {self.spec.trials} runs and {len(runs)} runs, each of {self.spec.budget} "
            f"oracle calls: about {time} with {jobs} {'process' if jobs == 1 else 'processes'}."
        )


def prepare(out: Path, spec: CompareSpec, data_dir: Path | None = None, workers: Workers = LOCAL) -> Plan:
    """Read the data and open the folder. A problem that was not named is left out where it has no data."""
    offline = [name for name in PROBLEMS if DATA.get(name) != "mnist"]
    names = spec.problems or (tuple(PROBLEMS) if spec.preset == "paper" else offline)
    tasks: dict[str, Task] = {}
    prints: dict[str, str] = {}
    skipped: list[str] = []
    for name in names:
        data = DATA.get(name, "digits")
        try:
            if data and data not in prints:
                prints[data] = fingerprint(load(data, data_dir))
            tasks[name] = _task(name, data_dir)
        except DataError as error:
            if spec.problems:
                raise
            skipped.append(f"The problem {name} is left out. {error}")
    folder = workers.open(out, "compare", replace(spec, algorithms=(), problems=()), prints)
    return Plan(spec, folder, data_dir, tasks, spec.algorithms or tuple(METHODS), tuple(skipped))


@lru_cache(maxsize=len(PROBLEMS))
def _task(name: str, data_dir: Path | None) -> Task:
    return PROBLEMS[name](data_dir)


def carry_out(plan: Plan, report: Report = unseen, workers: Workers = LOCAL) -> tuple[Results, Summary]:
    """Do what the folder lacks, and write the summary."""
    total = len(plan.first) + len(plan.second)
    workers.do(plan.folder, _jobs(plan, plan.first, {}), report, 0, total)
    searched = plan.folder.gather([unit.name for unit in plan.first])
    chosen = {(r["problem"], r["algorithm"]): r["setting"] for r in _best(searched)}
    workers.do(plan.folder, _jobs(plan, plan.second, chosen), report, len(plan.first), total)
    records = plan.folder.gather([unit.name for unit in (*plan.first, *plan.second)])
    results = Results.of(records, {name: task.title for name, task in plan.tasks.items()})
    summary = summary_of(plan.spec.preset, plan.spec.budget, plan.spec.trials, results, plan.skipped)
    plan.folder.conclude(summary)
    return results, summary


def _best(records: list[Record]) -> list[Record]:
    """Of each search the trial that ended with the least f; none where all diverged."""
    best_records: dict[tuple[str, str], Record] = {}
    for record in records:
        key = (record["problem"], record.get("algorithm", ""))
        if (
            record["kind"] == "trial"
            and record["value"] is not None
            and (key not in best_records or record["value"] < best_records[key]["value"])
        ):
            best_records[key] = record
    return list(best_records.values())


def _jobs(plan: Plan, units: Sequence[Unit], chosen: Mapping[tuple[str, str], Setting]) -> list[Job]:
    def setting(unit: Unit) -> Setting | None:
        if unit.algorithm and not METHODS[unit.algorithm].searched:
            return START
        return chosen.get((unit.problem, unit.algorithm))

    return [
        Job(unit.name, unit.text, partial(records_of, plan.spec, plan.data_dir, unit, setting(unit))) for unit in units
    ]


def records_of(
    spec: CompareSpec, data_dir: Path | None, unit: Unit, setting: Setting | None, report: ReportShare = quiet
) -> list[Record]:
    """The records of a unit. What goes wrong in it is one message."""
    task = _task(unit.problem, data_dir)
    head: Record = {"problem": unit.problem}
    try:
        if not unit.algorithm:
            start, least = task.least(spec.iterations)
            return [{**head, "kind": "least", "start": start, "value": least, "n": task.n, "p": task.p}]
        head["algorithm"] = unit.algorithm
        if unit.seed is None:
            trials = []
            for drawn in settings(unit.algorithm, task, spec.trials):
                (end,) = run_once(task, unit.algorithm, drawn, TUNING, [spec.budget])
                trials.append({**head, "kind": "trial", "setting": drawn, **_numbers(end)})
            return trials
        head |= {"kind": "run", "seed": unit.seed, "setting": setting}
        if setting is None:  # every trial diverged
            return [{**head, **_numbers(None, mark)} for mark in spec.marks]
        return [{**head, **_numbers(stop)} for stop in run_once(task, unit.algorithm, setting, unit.seed, spec.marks)]
    except Exception as error:
        raise RunError(
            f"{label(unit.algorithm) or 'The search for the least f'} must run on {unit.problem}. It raised "
            f"{type(error).__name__}: {error} The runs that ended are kept; leave it out with --algorithms or "
            "--problems."
        ) from error


def _numbers(stop: Stop | None, mark: float = math.nan) -> Record:
    """What a record holds of a stop; None for what has diverged."""
    if stop is None:
        return {"mark": mark, "calls": None, "steps": None, "seconds": None, "value": None}
    took = stop.progress
    numbers: Record = {"mark": stop.mark, "calls": took.calls, "steps": took.steps, "seconds": took.seconds}
    measured = stop.measured
    if measured is None or not math.isfinite(measured.value):
        return numbers | {"value": None}
    return numbers | measured._asdict()
