"""Results of the comparison: suboptimalities, ranks, performance profiles, and the tables of summary.md.

The measure is the relative suboptimality (f(λ) - f_best) / (f(λ_0) - f_best): 1 at the start, 0 at the best λ known,
which is the best of all runs of the problem and of a long search by L-BFGS on the exact hypergradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from fsla_benchmarks.compare.methods import METHODS, label
from fsla_reproduction.folder import Record
from fsla_reproduction.report import Summary, table

LEVELS = (1e-1, 1e-2, 1e-3)
"""Suboptimalities at which a problem counts as solved."""
WITHIN = 2.0
"""A method is near the best one from where its suboptimality is at most so many times the best one's last, or so many
times the smallest level."""
FEW = 10
"""Methods that took fewer steps do not say when the others' time is up."""


@dataclass(frozen=True)
class Curve:
    """A run: at each mark the suboptimality (infinite where it diverged), and the calls, seconds and steps so far."""

    seed: int
    marks: tuple[float, ...]
    gap: tuple[float, ...]
    calls: tuple[float, ...]
    seconds: tuple[float, ...]
    steps: tuple[int, ...]
    accuracy: float | None

    def calls_to(self, level: float) -> float:
        """The first mark at which the suboptimality is at most the level; infinite where it never is."""
        return next((mark for mark, gap in zip(self.marks, self.gap, strict=True) if gap <= level), math.inf)

    def gap_at(self, seconds: float) -> float:
        """The suboptimality of the last state that was reached within so many seconds."""
        gaps = [gap for gap, time in zip(self.gap, self.seconds, strict=True) if time <= seconds]
        return gaps[-1] if gaps else 1.0


@dataclass(frozen=True)
class Results:
    """All runs, by problem and algorithm, and a row for each such pair, best first within a problem."""

    titles: Mapping[str, str]
    curves: Mapping[tuple[str, str], tuple[Curve, ...]]
    rows: tuple[Record, ...]
    overall: tuple[Record, ...]
    common_time: Mapping[str, float]
    """Of each problem the seconds after which the first method had used up its calls."""

    @classmethod
    def of(cls, records: Sequence[Record], titles: Mapping[str, str]) -> Results:
        curves: dict[tuple[str, str], tuple[Curve, ...]] = {}
        rows: list[Record] = []
        common_time: dict[str, float] = {}
        for problem in titles:
            of_problem = [r for r in records if r["problem"] == problem]
            by_name = _curves(of_problem)
            common_time[problem] = _common_time(list(by_name.values()))
            rows += _rows(problem, by_name, of_problem, common_time[problem])
            curves |= {(problem, name): cs for name, cs in by_name.items()}
        return cls(titles, curves, tuple(rows), _overall(rows, curves), common_time)

    def ranked(self, problem: str) -> list[Record]:
        return [row for row in self.rows if row["problem"] == problem]


def _curves(records: Sequence[Record]) -> dict[str, tuple[Curve, ...]]:
    """The runs of one problem, by algorithm."""
    least = next(r for r in records if r["kind"] == "least")
    best = min(r["value"] for r in records if r["value"] is not None)
    scale = max(least["start"] - best, 1e-300)
    by_name: dict[str, list[Curve]] = {}
    for name, seed in dict.fromkeys((r["algorithm"], r["seed"]) for r in records if r["kind"] == "run"):
        run_records = [r for r in records if r["kind"] == "run" and (r["algorithm"], r["seed"]) == (name, seed)]
        gap = [math.inf if r["value"] is None else (r["value"] - best) / scale for r in run_records]
        curve = Curve(
            seed,
            tuple(r["mark"] for r in run_records),
            tuple(gap),
            tuple(r["calls"] or 0.0 for r in run_records),
            tuple(r["seconds"] or 0.0 for r in run_records),
            tuple(r["steps"] or 0 for r in run_records),
            run_records[-1].get("accuracy"),
        )
        by_name.setdefault(name, []).append(curve)
    return {name: tuple(curves) for name, curves in by_name.items()}


def _common_time(methods: Sequence[Sequence[Curve]]) -> float:
    """The least time in which a method used up its calls, of those that took more than a handful of steps."""
    took = [
        (median(c.seconds[-1] for c in curves), median(c.steps[-1] for c in curves))
        for curves in methods
        if math.isfinite(_last(curves))
    ]
    return min(
        [seconds for seconds, steps in took if steps >= FEW] or [seconds for seconds, _ in took], default=math.inf
    )


def _last(curves: Sequence[Curve]) -> float:
    return median(c.gap[-1] for c in curves)


def _rows(
    problem: str, curves: Mapping[str, Sequence[Curve]], records: Sequence[Record], common_time: float
) -> list[Record]:
    """A row for each algorithm of a problem, ranked by the median over seeds of the last suboptimality."""
    last = {name: _last(cs) for name, cs in curves.items()}
    level = WITHIN * max(min(last.values(), default=math.inf), LEVELS[-1])
    rows = []
    for name in sorted(curves, key=lambda name: last[name]):
        method_curves = curves[name]
        trials = [r for r in records if r["kind"] == "trial" and r["algorithm"] == name]
        accuracies = [c.accuracy for c in method_curves if c.accuracy is not None]
        rows.append(
            {
                "problem": problem,
                "algorithm": name,
                "rank": _rank(last[name], list(last.values())),
                "gap": last[name],
                "gap_least": min(c.gap[-1] for c in method_curves),
                "gap_most": max(c.gap[-1] for c in method_curves),
                "calls_to_best": median(c.calls_to(level) for c in method_curves),
                "gap_at_common_time": median(c.gap_at(common_time) for c in method_curves),
                "calls": median(c.calls[-1] for c in method_curves),
                "steps": median(c.steps[-1] for c in method_curves),
                "seconds": median(c.seconds[-1] for c in method_curves),
                "accuracy": fmean(accuracies) if accuracies else None,
                "trials": len(trials),
                "trials_diverged": sum(r["value"] is None for r in trials),
                "setting": next(r["setting"] for r in records if r["kind"] == "run" and r["algorithm"] == name),
            }
        )
    return rows


def _rank(value: float, every: Sequence[float]) -> float:
    """The place of a number among all; those that are equal share theirs."""
    return 1 + sum(other < value for other in every) + (sum(other == value for other in every) - 1) / 2


def ratios(curves: Mapping[tuple[str, str], Sequence[Curve]], level: float) -> tuple[dict[str, list[float]], int]:
    """Dolan and Moré's: for each algorithm the calls it took to the level, over the fewest that any took, on every
    problem and seed on which it got there; and the number of problems and seeds."""
    tasks = list(dict.fromkeys((problem, c.seed) for (problem, _), cs in curves.items() for c in cs))
    calls = {(problem, name, c.seed): c.calls_to(level) for (problem, name), cs in curves.items() for c in cs}
    by_name: dict[str, list[float]] = {name: [] for _, name in curves}
    for problem, seed in tasks:
        calls_by_name = {
            name: n for (where, name, s), n in calls.items() if (where, s) == (problem, seed) and n < math.inf
        }
        for name, number in calls_by_name.items():
            by_name[name].append(number / min(calls_by_name.values()))
    return {name: sorted(values) for name, values in by_name.items()}, len(tasks)


def _overall(rows: Sequence[Record], curves: Mapping[tuple[str, str], Sequence[Curve]]) -> tuple[Record, ...]:
    """The algorithms by their mean rank over the problems that they ran on."""
    solved = {level: ratios(curves, level) for level in LEVELS}
    result = []
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        method_rows = [row for row in rows if row["algorithm"] == name]
        solved_shares = {f"solved_{level:g}": len(by_name[name]) / tasks for level, (by_name, tasks) in solved.items()}
        rank = fmean(row["rank"] for row in method_rows)
        result.append({"algorithm": name, "mean_rank": rank, "problems": len(method_rows), **solved_shares})
    return tuple(sorted(result, key=lambda row: row["mean_rank"]))


def summary_of(preset: str, budget: int, trials: int, results: Results, skipped: Sequence[str]) -> Summary:
    """summary.json and summary.md."""
    numbers = {
        "preset": preset,
        "budget": budget,
        "trials": trials,
        "overall": list(results.overall),
        "rows": [_finite(row) for row in results.rows],
        "common_time": {name: _finite(time) for name, time in results.common_time.items()},
        "skipped": list(skipped),
    }
    parts = [
        "# Algorithms compared at equal oracle calls\n",
        _rules(budget, trials, results),
        *(f"{s}\n" for s in skipped),
    ]
    parts += ["## Over all problems\n", _overall_table(results)]
    for problem, title in results.titles.items():
        time = results.common_time[problem]
        parts += [f"## {title[0].upper()}{title[1:]}\n", _problem_table(results.ranked(problem), time)]
    return Summary((), numbers, "\n".join(parts))


def _finite(value: Any) -> Any:
    """The value with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rules(budget: int, trials: int, results: Results) -> str:
    seeds = max((len(curves) for curves in results.curves.values()), default=0)
    return (
        f"Every run had {budget} oracle calls: ∂_ω G, H v, J v, ∂_λ G, ∂_ω F and ∂_λ F count one each on a batch of "
        "the usual size, more on a larger one; a pass that gives both H v and J v counts two, one that gives both "
        "gradients of G, as products by differences want them, counts one. A step that goes beyond the budget does "
        f"not count. Every method was tuned on every problem by the same random search of {trials} runs, "
        "log-uniform over the rates that it has and over how they fall, and the setting with the least f at the end "
        f"was run with {seeds} other {'seed' if seeds == 1 else 'seeds'}; those called automatic, and s_tfbo, were "
        "not tuned.\n\n"
        "The measure is (f(λ) - f_best) / (f(λ_0) - f_best) with f(λ) = F(λ, ω_λ) on all samples, ω_λ solved for "
        "exactly and for free: 1 at the start, 0 at the best λ that any run or a long search with the exact "
        "hypergradient found. Tables have the median over seeds, and the least and the most. *Near the best* is a "
        f"measure of at most {WITHIN:g} times that of the best method at its end, or {WITHIN * LEVELS[-1]:g}.\n\n"
        "*At equal time* is the measure when the first method of the problem had used up its calls, of those that "
        f"took at least {FEW} steps: the longest time that all of them ran. Times are CPU seconds of one thread and "
        "decide nothing. Methods on full batches are fast in time and slow in calls, since small tensors cost about "
        "the same whatever the batch.\n"
    )


def _overall_table(results: Results) -> str:
    head = ["place", "algorithm", "mean rank", "problems", *(f"solved to {level:g}" for level in LEVELS)]
    lines = [
        (
            place,
            label(row["algorithm"]),
            f"{row['mean_rank']:.1f}",
            row["problems"],
            *(f"{100 * row[f'solved_{level:g}']:.0f} %" for level in LEVELS),
        )
        for place, row in enumerate(results.overall, 1)
    ]
    note = (
        "Ranks are over the problems that a method ran on; those that carry matrices run on small ones alone. *Solved* "
        "is the share of all problems and seeds on which the measure fell to the level within the budget.\n"
    )
    return f"{note}\n{table(head, lines)}"


def _problem_table(rows: Sequence[Record], time: float) -> str:
    equal = f"at equal time ({time:.2g} s)"
    head = [
        "rank",
        "algorithm",
        "batches",
        "measure",
        "least - most",
        "calls to near the best",
        equal,
        "steps",
        "seconds",
    ]
    head += ["test accuracy", "trials diverged"]
    lines = [
        (
            f"{row['rank']:g}",
            label(row["algorithm"]),
            METHODS[row["algorithm"]].samples,
            _gap(row["gap"]),
            f"{_gap(row['gap_least'])} - {_gap(row['gap_most'])}",
            None if math.isinf(row["calls_to_best"]) else f"{row['calls_to_best']:.0f}",
            _gap(row["gap_at_common_time"]),
            f"{row['steps']:.0f}",
            f"{row['seconds']:.2f}",
            None if row["accuracy"] is None else f"{row['accuracy']:.3f}",
            f"{row['trials_diverged']} of {row['trials']}" if row["trials"] else None,
        )
        for row in rows
    ]
    return table(head, lines)


def _gap(gap: float) -> str:
    return "diverged" if math.isinf(gap) else f"{gap:.2g}"
