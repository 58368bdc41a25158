"""What is asked of the benchmark, checked before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsla._checks import pick
from fsla_benchmarks.steps.cases import PROBLEMS
from fsla_benchmarks.steps.race import Report, Row
from fsla_benchmarks.steps.table import SCALINGS, measure, scaling
from fsla_benchmarks.steps.transformer import measure_transformer

ENGINES = ("eager", "graph", "compile")
_CHOICES = {"problems": (*PROBLEMS, "transformer"), "engines": ENGINES, "scalings": tuple(SCALINGS)}


@dataclass(frozen=True)
class BenchRequest:
    """Which problems, under which engines, what is varied, and how often each step is timed."""

    problems: tuple[str, ...]
    engines: tuple[str, ...]
    scalings: tuple[str, ...] = ()
    repeats: int = 9
    baselines: bool = False
    autocast: bool = False

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            for name in getattr(self, field):
                pick(name, dict.fromkeys(choices), field[:-1])
        plain = [name for name in self.problems if name != "transformer"]
        if "compile" in self.engines and plain:
            raise ValueError(
                "Engine 'compile' must come with the problem 'transformer' alone, whose module it compiles. "
                f"Got the problems {', '.join(plain)} too. Use engines 'eager' and 'graph' for these."
            )

    def measured(self, device: torch.device, report: Report) -> tuple[list[Row], list[str]]:
        """The rows, and a line for whatever could not be measured, with the reason."""
        small = tuple(name for name in self.problems if name != "transformer")
        rows, notes = measure(small, self.repeats, device, report, engines=self.engines, with_peers=self.baselines)
        if "transformer" in self.problems:
            transformer_rows, transformer_notes = measure_transformer(
                self.repeats, device, report, engines=self.engines, autocast=self.autocast
            )
            rows += transformer_rows
            notes += transformer_notes
        for name in self.scalings:
            rows += scaling(name, self.repeats, device, report)
        return rows, notes
