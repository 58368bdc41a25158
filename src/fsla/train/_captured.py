"""What captured engines share: rates from the host, the step itself to compare with, and the way back to it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fsla.algorithms._alternating import Algorithm, State
from fsla.problems._batches import Sample
from fsla.problems._counted import Counted, Counts
from fsla.problems._nest import rebuild, tensors
from fsla.steps._schedules import Rates
from fsla.train._agreement import OTHER_KERNELS, Tolerance, difference
from fsla.train._program import CaptureError, Program

LONG = 16
"""An `advance` of so many steps compares its first one: data may have changed since the last call."""


class EngineWarning(UserWarning):
    """A faster engine is unavailable, or was given up, and why."""


class Captured:
    """An engine that replays steps, and takes them one by one once its name is "eager"."""

    def __init__(
        self, name: str, algorithm: Algorithm, problem: Counted, draw: Callable[[], Sample], *, lenient: bool
    ) -> None:
        self.name = name
        self.preparation_s = 0.0
        self._algorithm = algorithm
        self._problem = problem
        self._draw = draw
        self._lenient = lenient
        """Whether to go on with the next best engine where this one is unavailable."""

    def _step(self, state: State, xi: Sample) -> State:
        return self._algorithm.step(self._problem, state, xi)

    def _move(self, state: State, xi: Sample, rates: Rates) -> State:
        return self._algorithm.move(self._problem, state, xi, rates)

    def _numbers(self, k: int) -> list[float]:
        """The rates of step k, asked for on the host with a whole number."""
        return [float(x) for x in self._algorithm.rates(k)]

    def _difference(
        self, start: State, xi: Sample, rates: Rates, expected: State, found: State, tolerance: Tolerance
    ) -> str | None:
        """The part in which a captured step from `start` differs from the step itself."""

        def step(state: State) -> State:
            return self._move(state, xi, rates)

        return self._problem.counting(lambda: difference(start, expected, found, tolerance, step))[0]

    def _program(self, state: State, xi: Sample, rates: Sequence[Tensor]) -> tuple[Program, Counts, Counts]:
        """The program for states and samples of this form, and what one step asks the problem for."""
        return self._problem.counting(lambda: Program(self._move, state, xi, rates))

    def _compile(self, program: Program, state: State, xi: Sample, rates: Sequence[Tensor]) -> None:
        """Compiles a program; raises unless that gives what it gave before."""
        arguments = tensors(state[1:]), rates, tensors(xi)
        program.compile(*arguments)
        runs = (program.run_uncompiled, program.run)
        plain, found = (State(state.k, *rebuild(state[1:], run(*arguments))) for run in runs)
        if part := self._difference(state, xi, Rates(*rates), plain, found, OTHER_KERNELS):
            raise CaptureError(f"The compiled step does not give the numbers of the program (in {part}).")

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.preparation_s += time.perf_counter() - begun

    def _unavailable(self, error: Exception, *, must_raise: bool) -> None:
        """Goes on with the next best engine, or raises."""
        message = f"Engine {self.name!r} is unavailable: {reason(error)}"
        if must_raise:
            raise CaptureError(message) from error
        worse = "graph" if self.name == "compile" else "eager"
        warn(f"{message} Using {worse!r}.")
        self.name = worse

    def _give_up(self, why: str, k: int, doubtful: int | None) -> None:
        """Takes steps eagerly from step k on; `doubtful`: the first step whose numbers were not compared."""
        self.name = "eager"
        if doubtful is None or doubtful >= k:
            before = "The numbers of all steps before are those of the step itself."
        else:
            before = f"The numbers since step {doubtful} are in doubt."
        warn(f"{why} Steps are taken eagerly from step {k} on. {before}")


def differs(part: str) -> str:
    return (
        f"The captured step no longer gives the numbers of the step itself (in {part}): the losses must be functions "
        "of their arguments and of tensors that stay the same objects."
    )


def rate_dtype(parts: Sequence[Tensor]) -> torch.dtype:
    """Double where anything in the state is, else single."""
    return torch.float64 if any(t.dtype == torch.float64 for t in parts) else torch.float32


def reason(error: Exception) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if first.endswith((".", "!", "?", ")")) else f"{first}."


def warn(message: str) -> None:
    warnings.warn(message, EngineWarning, stacklevel=4)
