"""A run: what it needs, how far it is, and how it is saved and taken up again.

A run is saved whole: the state, the generator's state, the records, the counts and the clock. What it is a run of, its
identity, is saved with it, so that nobody goes on with the checkpoint of another run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch
from torch import Tensor

from fsla._json_values import differences, plain
from fsla.algorithms._alternating import Algorithm, State
from fsla.distributed import ALONE, Ranks
from fsla.problems._batches import Sample
from fsla.problems._counted import Counted, Counts
from fsla.problems._reduced import stated
from fsla.train._checkpoint import CheckpointError, check_place, load_checkpoint, pack, save_checkpoint
from fsla.train._run_records import Record

T = TypeVar("T")


@dataclass
class Run:
    """What a loop needs: the algorithm, the counted problem, how to begin and how to draw a sample."""

    algorithm: Algorithm
    problem: Counted
    generator: torch.Generator
    start: Callable[[], State]
    draw: Callable[[], Sample]

    @property
    def device(self) -> torch.device:
        return self.generator.device

    @property
    def ranks(self) -> Ranks:
        """Those that take its steps together: the first decides what depends on a clock, and saves."""
        found: Ranks = stated(self.problem, "ranks", ALONE)
        return found


@dataclass
class Progress:
    """How far a run is."""

    state: State
    seconds: float = 0.0
    """What the steps took."""
    preparation_seconds: float = 0.0
    """What tracing, checking and compiling took."""
    records: list[Record] = field(default_factory=list)
    reference: dict[str, float] = field(default_factory=dict)
    """The size of each part of the state when it was first not zero."""


class Saves:
    """Where a run is saved, when, and as the run of what.

    Args:
        run: what is saved.
        path: the file; None saves nothing.
        every: the run is saved at every step that is a multiple of it; None leaves that to the clock.
        every_s: it is saved besides whenever so many seconds have passed.
        identity: what it is a run of.
    """

    def __init__(
        self,
        run: Run,
        path: str | Path | None,
        every: int | None,
        every_s: float,
        identity: Mapping[str, object] | None,
    ) -> None:
        self._run = run
        self._path = None if path is None else Path(path)
        self._every = every
        self._every_s = every_s
        self._identity = plain({} if identity is None else identity, "identity")
        self._last = monotonic()
        if self._path is not None:
            check_place(self._path)

    def begin(self, steps: int) -> Progress:
        """The run as it was saved, or at its start."""
        ranks = self._run.ranks
        if self._path is None or not ranks.from_first(self._path.exists()):
            return Progress(self._run.start())
        return self._resumed(self._path, steps)

    def check(self, state: State) -> None:
        """Raises if the state holds what a checkpoint does not: said at the first step, not when it is first saved."""
        if self._path is not None:
            pack(state)

    def reached(self, progress: Progress) -> None:
        """Saves the run if that is due."""
        if self._path is None or not self._run.ranks.is_first:
            return
        by_step = self._every is not None and progress.state.k % self._every == 0
        if not by_step and monotonic() - self._last < self._every_s:
            return
        run = self._run
        value = {
            **vars(progress),
            "random": run.generator.get_state(),
            "calls": asdict(run.problem.calls),
            "samples": asdict(run.problem.samples),
            "identity": self._identity,
        }
        save_checkpoint(self._path, value)
        self._last = monotonic()

    def _resumed(self, path: Path, steps: int) -> Progress:
        saved = load_checkpoint(path, self._run.device)
        parts: dict[str, object] = saved if isinstance(saved, dict) else {}

        def part(name: str, kind: type[T]) -> T:
            value = parts.get(name)
            if not isinstance(value, kind):
                raise CheckpointError(
                    f"{path} must be the checkpoint of a run. It is of something else: it has no {name!r}. "
                    "Name another file, or remove it to begin anew."
                )
            return value

        differ = differences(part("identity", dict), self._identity)
        if differ:
            more = f"; and {len(differ) - 8} more" if len(differ) > 8 else ""
            raise CheckpointError(
                f"{path} must be the checkpoint of this run. It is of another ({'; '.join(differ[:8])}{more}). "
                "Name another file, or remove it to begin anew."
            )
        progress = Progress(
            part("state", State),
            part("seconds", float),
            part("preparation_seconds", float),
            part("records", list),
            part("reference", dict),
        )
        if progress.state.k > steps:
            raise CheckpointError(
                f"{path} must be of a run that has not gone beyond the {steps} steps that are asked for. "
                f"It is at step {progress.state.k}. Ask for more steps, or remove it to begin anew."
            )
        try:
            calls = _counts(part("calls", dict))
            samples = _counts(part("samples", dict))
            _check_records(progress)
            self._run.generator.set_state(part("random", Tensor).cpu())
        except (TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} must be of this version and device. It is not ({error}). Remove it to begin anew."
            ) from None
        self._run.problem.calls = calls
        self._run.problem.samples = samples
        return progress


def _counts(saved: dict[str, int]) -> Counts:
    if not all(isinstance(count, int) for count in saved.values()):
        raise TypeError("its counts are not whole numbers")
    return Counts(**saved)


def _check_records(progress: Progress) -> None:
    records = progress.records
    if not records or not all(isinstance(record, dict) and "status" in record for record in records):
        raise TypeError("its records are not those of a run")
    if not all(isinstance(size, float) for size in progress.reference.values()):
        raise TypeError("its sizes are not numbers")
