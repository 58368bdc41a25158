"""One run of the comparison: a method on a problem, until its oracle calls are used up.

The price of a step is the number of oracle calls that it makes (∂_ω G, H v, J v, Jᵀ u, ∂_λ G, ∂_ω F, ∂_λ F; a pass that
gives both H v and J v counts as two, one that gives both gradients of G as one), each times the size of its batch, in
units of the problem's usual batch. The clock is read, in CPU seconds of one thread, but decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fsla.problems import Batch, BatchSpec, CountedProblem, OracleCounts, Point, Sampler, StepBatches
from fsla.problems._batches import Mode
from fsla_benchmarks.compare.exact import Data
from fsla_benchmarks.compare.methods import METHODS, PERIOD, Setting, make, seed_of
from fsla_benchmarks.compare.task import Measured, Task

PRICED = ("grad", "hvp", "mixed_hvp", "mixed_hvp_transpose", "forward", "outer_grad_omega", "outer_grad_lam")
CHECK_EVERY = 50
"""Steps between two looks at whether all is finite."""


class Progress(NamedTuple):
    """How far a run is, and what it took."""

    calls: float
    steps: int
    seconds: float
    at: Point | None
    """None where the run has diverged."""


class Stop(NamedTuple):
    """The last state that was reached within so many calls, and what it is worth."""

    mark: float
    progress: Progress
    measured: Measured | None


def run(task: Task, name: str, setting: Setting, seed: int, marks: Sequence[float]) -> list[Stop]:
    """Measure a run at these numbers of calls; it ends at the last one. What is measured costs neither calls nor time.

    A step that would go beyond a mark does not count for it, so that no method has more calls than another.
    """
    generator = torch.Generator().manual_seed(seed_of("run", task.name, seed))
    states = _states(task, name, setting, generator)
    stops: list[Stop] = []
    known: Point | None = None
    measured: Measured | None = None
    for mark, progress in zip(marks, _stopped(states, marks), strict=True):
        if progress.at is None:
            measured = None
        elif progress.at is not known:
            measured = task.measure(progress.at.lam, progress.at.omega)
        known = progress.at
        stops.append(Stop(mark, progress, measured))
    return stops


def _stopped(states: Iterator[Progress], marks: Sequence[float]) -> list[Progress]:
    """The last state within each mark."""
    progress: list[Progress] = []
    before = next(states)
    try:
        for now in states:
            while len(progress) < len(marks) and now.calls > marks[len(progress)]:
                progress.append(before)
            if len(progress) == len(marks):
                return progress
            before = now
            if now.steps % CHECK_EVERY == 0 and not _is_finite(now.at):
                break
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass
    return progress + [before._replace(at=None)] * (len(marks) - len(progress))


def _is_finite(at: Point | None) -> bool:
    return at is not None and all(bool(t.isfinite().all()) for t in (*at.lam.values(), *at.omega.values()))


def _size(data: Any) -> int:
    return len(data[0])


def price(samples: OracleCounts, batch: int) -> float:
    """What was asked for, in calls on batches of the usual size."""
    return sum(float(getattr(samples, name)) for name in PRICED) / batch


def _states(task: Task, name: str, setting: Setting, generator: torch.Generator) -> Iterator[Progress]:
    """The start, and the state after every step."""
    problem = CountedProblem(task.oracles(), _size)
    algorithm = make(name, task, setting)
    draw = sampler(task, name, algorithm.batches, generator)
    yield Progress(0.0, 0, 0.0, task.start)
    began = time.thread_time()
    batches = draw(0)
    state = algorithm.init(problem, task.start, batches)
    seconds = time.thread_time() - began
    while True:
        yield Progress(price(problem.samples, task.batch), state.step_count, seconds, state.point)
        began = time.thread_time()
        if state.step_count or not METHODS[name].automatic:  # On a module a run starts on those of its first step.
            batches = draw(state.step_count)
        try:
            state = algorithm.step(problem, state, batches)
        except ValueError:  # Automatic step sizes refuse a run that has diverged.
            if state.is_finite():
                raise
            return
        seconds += time.thread_time() - began


def sampler(task: Task, name: str, spec: BatchSpec, generator: torch.Generator) -> Callable[[int], StepBatches]:
    """The function that draws the batches of step k, as the method wants it."""
    method = METHODS[name]
    full = StepBatches.shared(task.inner, task.outer)
    seed = int(torch.randint(2**40, (), generator=generator)) if method.needs_seed else None

    def inner() -> Data:
        return task.inner_batch(generator)

    def outer() -> Data:
        return task.outer_batch(generator)

    def one(batches: Sequence[Data]) -> Batch:
        number = int(torch.randint(len(batches), (), generator=generator))
        return Batch(batches[number], number=number)

    mode: Mode = "shared" if method.samples in ("shared", "refreshed") else "independent"
    small = Sampler(spec, inner, outer, mode, seed=seed, steps_again=method.again)

    def led() -> StepBatches:
        def several(all_samples: Batch, draw: Callable[[], Data]) -> list[object]:
            return [all_samples, *(draw() for _ in range(spec.inner_grad - 1))]

        every_inner, every_outer = Batch(task.inner), Batch(task.outer)
        first, hvp, mixed = (several(every_inner, inner) for _ in range(3))
        by_omega, by_lam = (several(every_outer, outer) for _ in range(2))
        return StepBatches.of(first, by_omega, hvp, by_lam, mixed)

    return {
        "independent": lambda k: small(),
        "shared": lambda k: small(),
        "full": lambda k: full,
        "numbered": lambda k: StepBatches.of((one(task.inner_batches),), (one(task.outer_batches),)),
        "refreshed": lambda k: full if k % PERIOD == 0 else small(),
        "led": lambda k: led(),
    }[method.samples]
