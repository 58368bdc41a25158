"""A recorder that plays a CUDA device's part on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsla import Algorithm, CountedProblem, StepBatches
from fsla._state_tree import tensors_of
from fsla.train._captured import CudaGraph

Freeze = Callable[[], Callable[[], Callable[[], object] | None]]


class Recorder:
    """Work is recorded without being done: its Python runs once, on tensors and a generator that are then set back.

    `freeze` returns what to call before a replay, to have things as they were when recorded; that returns its undoing.
    """

    def __init__(self, generator: torch.Generator, problem: CountedProblem, freeze: Freeze) -> None:
        self._generator, self._problem, self._freeze = generator, problem, freeze
        self.engine: Any = None
        self.records = 0
        self.replays = 0
        self.fails_at: int | None = None

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.records += 1
        tensors = tensors_of(self.engine._static)
        random, parts = self._generator.get_state(), [t.clone() for t in tensors]
        work()
        self._generator.set_state(random)
        for t, before in zip(tensors, parts, strict=True):
            t.copy_(before)
        as_recorded = self._freeze()

        def replay() -> None:
            self.replays += 1
            if self.replays == self.fails_at:
                raise RuntimeError("the device has gone")
            undo = as_recorded()
            self._problem.counting(work)
            if undo is not None:
                undo()

        return replay


def captured(
    algorithm: Algorithm[Any],
    problem: CountedProblem,
    draw: Callable[[], StepBatches],
    generator: torch.Generator,
    *,
    lenient: bool = False,
    freeze: Freeze = lambda: lambda: None,
) -> tuple[CudaGraph, Recorder]:
    """Return the engine of a GPU, with a recorder in the place of the device."""
    recorder = Recorder(generator, problem, freeze)
    recorder.engine = CudaGraph(algorithm, problem, draw, generator, lenient=lenient, recorder=recorder)
    return recorder.engine, recorder
