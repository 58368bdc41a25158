"""The records of finished runs, by figure, panel and label, and what is read off them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from fsla.problems import OracleCounts
from fsla.train import Record
from fsla_reproduction.cleaning import RunSpec
from fsla_reproduction.figures import Panel, Panels
from fsla_reproduction.run_records import Status, work


@dataclass(frozen=True)
class Runs:
    """The runs of one spec: a list of records for each seed."""

    seeds: tuple[list[Record], ...]

    @property
    def lasts(self) -> list[Record]:
        """The last record of each seed."""
        return [run[-1] for run in self.seeds]

    @property
    def loss(self) -> float:
        return self.final("valid_loss")

    @property
    def lowest(self) -> float:
        """The lowest mean loss at any step."""
        return min(self.curve().values())

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the median over all stretches between two records, so that a slow first one is no matter.

        NaN if no step was taken.
        """
        paces = [
            (b["seconds"] - a["seconds"]) / (b["step"] - a["step"])
            for run in self.seeds
            for a, b in pairwise(run)
            if b["step"] > a["step"]
        ]
        return statistics.median(paces) if paces else math.nan

    @property
    def status(self) -> str:
        kinds = sorted({last["status"] for last in self.lasts})
        step = min(last["step"] for last in self.lasts)
        return ", ".join(kinds) + ("" if kinds == ["finished"] else f" at step {step}")

    @property
    def calls(self) -> float:
        """The mean over seeds of the oracle calls at the end."""
        return statistics.fmean(oracle_calls(last["oracles"]) for last in self.lasts)

    def final(self, key: str) -> float:
        """The mean over seeds of the last value; a diverged run has an infinite loss, and nothing else."""
        if any(last["status"] == Status.DIVERGED or last[key] is None for last in self.lasts):
            return math.inf if key == "valid_loss" else math.nan
        return statistics.fmean(last[key] for last in self.lasts)

    def spread(self, key: str) -> float:
        """The standard deviation over seeds of the last value; 0 for one seed, or where a seed has none."""
        values = [last[key] for last in self.lasts]
        return 0.0 if len(values) < 2 or any(v is None for v in values) else statistics.stdev(values)

    def curve(self, key: str = "valid_loss") -> dict[int, float]:
        """The mean over seeds at each step that every seed has."""
        runs = [{r["step"]: r[key] for r in run if r[key] is not None} for run in self.seeds]
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        return {step: statistics.fmean(run[step] for run in runs) for step in steps}

    def loss_when_ended(self, other: Runs) -> float:
        """The mean over seeds of the loss at the second when another run ended, or the last before."""
        losses = []
        for run, last in zip(self.seeds, other.lasts, strict=True):
            seen = [r["valid_loss"] for r in run if r["seconds"] <= last["seconds"]]
            losses.append(math.inf if seen[-1] is None else seen[-1])
        return statistics.fmean(losses)

    def seconds_to(self, level: float) -> float | None:
        """The mean over seeds of the seconds until the loss is first at or under a level; None if one never is."""
        times = []
        for run in self.seeds:
            hits = [r["seconds"] for r in run if r["valid_loss"] is not None and r["valid_loss"] <= level]
            if not hits:
                return None
            times.append(hits[0])
        return statistics.fmean(times)


class Results:
    """The records of the finished runs, by the run's name."""

    def __init__(self, panels: Panels, records: Mapping[str, list[Record]], seeds: int) -> None:
        self.panels = panels
        self.seeds = seeds
        self._records = records

    def of(self, spec: RunSpec) -> Runs:
        return Runs(tuple(self._records[spec.with_seed(seed).name] for seed in range(self.seeds)))

    def by_label(self, panel: Panel) -> dict[str, Runs]:
        return {label: self.of(spec) for label, spec in panel.runs.items()}

    def panel(self, figure: str, title: str) -> dict[str, Runs]:
        """The runs of a panel, by their labels."""
        return self.by_label(self.panels.panel(figure, title))


def number_of_seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"


def oracle_calls(counts: Mapping[str, int]) -> int:
    """The oracle calls of a record, as budgets count them."""
    return work(OracleCounts(**counts))


def last_common_step(runs: Iterable[Runs]) -> int:
    """The last step that all of these were measured at: a budget may have cut some."""
    return max(set.intersection(*(set(r.curve()) for r in runs)))
