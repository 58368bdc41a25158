"""One run of the comparison: a method on a problem, until its oracle calls are used up.

The price of a step is the number of oracle calls that it makes (∂_ω G, H v, J v, Jᵀ u, ∂_λ G, ∂_ω F, ∂_λ F; a pass that
gives both H v and J v counts as two, one that gives both gradients of G as one), each times the size of its batch, in
units of the problem's usual batch. The clock is read, in CPU seconds of one thread, but decides nothing.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsla._tree import Tree
from fsla.problems import Batches, Counted, Counts, Inner, Needs, Numbered, Outer, Point, Sample, Sampler
from fsla.problems._batches import Batch
from fsla.problems._counted import CountedOuter
from fsla.train import BilevelOptimizer, DivergenceError, ModelProblem, RollbackWarning
from fsla_benchmarks.compare.methods import METHODS, PERIOD, Setting, make, seed_of
from fsla_benchmarks.compare.task import Measured, Task

PRICED = ("grad", "hvp", "cross", "cross_t", "forward", "d_omega", "d_lam")
CHECK_EVERY = 50
"""Steps between two looks at whether all is finite."""


class Progress(NamedTuple):
    """Where a run stands, and what it took."""

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
    """Measures a run at these numbers of calls; it ends at the last one. What is measured costs neither calls nor time.

    A step that would go beyond a mark does not count for it, so that no method has more calls than another.
    """
    generator = torch.Generator().manual_seed(seed_of("run", task.name, seed))
    states = (_automatic if METHODS[name].automatic else _core)(task, name, setting, generator)
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
    found: list[Progress] = []
    before = next(states)
    try:
        for now in states:
            while len(found) < len(marks) and now.calls > marks[len(found)]:
                found.append(before)
            if len(found) == len(marks):
                return found
            before = now
            if now.steps % CHECK_EVERY == 0 and not _is_finite(now.at):
                break
    except (DivergenceError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        pass
    return found + [before._replace(at=None)] * (len(marks) - len(found))


def _is_finite(at: Point | None) -> bool:
    return at is not None and all(bool(t.isfinite().all()) for t in (*at.lam.values(), *at.omega.values()))


def _size(batch: Batch) -> int:
    return len(batch[0])


def price(samples: Counts, batch: int) -> float:
    """What was asked for, in calls on batches of the usual size."""
    return sum(float(getattr(samples, name)) for name in PRICED) / batch


def _core(task: Task, name: str, setting: Setting, generator: torch.Generator) -> Iterator[Progress]:
    """The states of an algorithm of the core: the start, and the state after every step."""
    problem = Counted(task.oracles(), _size)
    solver = make(name, task, setting)
    draw = sampler(task, name, solver.needs, generator)
    yield Progress(0.0, 0, 0.0, task.start)
    began = time.thread_time()
    state = solver.init(problem, task.start, draw(0))
    seconds = time.thread_time() - began
    while True:
        yield Progress(price(problem.samples, task.batch), state.k, seconds, state.at)
        began = time.thread_time()
        state = solver.step(problem, state, draw(state.k))
        seconds += time.thread_time() - began


def sampler(task: Task, name: str, needs: Needs, generator: torch.Generator) -> Callable[[int], Sample]:
    """The function that draws the sample of step k, as the method wants it."""
    method = METHODS[name]
    full = Sample.full(task.inner, task.outer)
    seed = int(torch.randint(2**40, (), generator=generator)) if method.seeded else None

    def inner() -> Batch:
        return task.inner_batch(generator)

    def outer() -> Batch:
        return task.outer_batch(generator)

    def one(batches: Sequence[Batch]) -> Numbered:
        number = int(torch.randint(len(batches), (), generator=generator))
        return Numbered(number, batches[number])

    mode = "shared" if method.samples in ("shared", "refreshed") else "independent"
    small = Sampler(needs, inner, outer, mode, seed=seed, steps_again=method.again)  # type: ignore[arg-type]

    def led() -> Sample:
        def several(all_samples: Batch, draw: Callable[[], Batch]) -> Batches:
            return Batches([all_samples, *(draw() for _ in range(needs.inner - 1))])

        levels = [several(task.inner, inner) for _ in range(3)], [several(task.outer, outer) for _ in range(2)]
        return Sample(levels[0][0], levels[1][0], levels[0][1], levels[1][1], levels[0][2])

    return {
        "independent": lambda k: small(),
        "shared": lambda k: small(),
        "full": lambda k: full,
        "numbered": lambda k: Sample.full(one(task.inner_batches), one(task.outer_batches)),
        "refreshed": lambda k: full if k % PERIOD == 0 else small(),
        "led": lambda k: led(),
    }[method.samples]


class _Held(nn.Module):
    """A tree as a module's parameters."""

    def __init__(self, values: Tree) -> None:
        super().__init__()
        for name, t in values.items():
            self.register_parameter(name, nn.Parameter(t.clone()))

    def tree(self) -> Tree:
        return dict(self.named_parameters())

    def copy(self) -> Tree:
        return {name: p.detach().clone() for name, p in self.named_parameters()}


class _CountedModel(Counted):
    """A model's problem whose oracles are counted; all else is the model's own."""

    def __init__(self, problem: ModelProblem) -> None:
        super().__init__(problem, _size)
        self._model = problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return super().inner_at(at, batch, seed)

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        return _CountedModelOuter(self._model.outer_at(at, batch, seed), batch, self)


class _CountedModelOuter(CountedOuter):
    @property
    def reads_lam(self) -> bool | None:
        found: bool | None = self._view.reads_lam  # type: ignore[attr-defined]
        return found


def _automatic(task: Task, name: str, setting: Setting, generator: torch.Generator) -> Iterator[Progress]:
    """The states of a class of the front end, whose steps need no rates."""
    front = METHODS[name].automatic
    assert front is not None
    model = _Held(task.start.omega)
    outer = _Held(task.start.lam)

    def inner_loss(model: _Held, outer: _Held, batch: Batch) -> Tensor:
        return task.inner_loss(outer.tree(), model.tree(), batch)

    def outer_loss(model: _Held, outer: _Held, batch: Batch) -> Tensor:
        return task.outer_loss(outer.tree(), model.tree(), batch)

    opt: BilevelOptimizer = front(model, outer, inner_loss=inner_loss, outer_loss=outer_loss, products="exact")
    problem = _CountedModel(opt.problem)
    opt.problem = problem  # type: ignore[assignment]
    seconds = 0.0
    while True:
        yield Progress(price(problem.samples, task.batch), opt.step_count, seconds, Point(outer.copy(), model.copy()))
        began = time.thread_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RollbackWarning)
            opt.step(task.inner_batch(generator), task.outer_batch(generator), seed=0)
        seconds += time.thread_time() - began
