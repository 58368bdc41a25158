"""What one step may ask: one view for each point and batch, and the sizes and updates of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from itertools import chain, repeat
from typing import Any, Self

from torch import Tensor

from fsla._tree import Scalar, Tree
from fsla.problems._autograd import Level
from fsla.problems._batches import Batch, Batches, StepBatches, batch_at
from fsla.problems._views import Oracles, Point, View
from fsla.steps._schedules import Rates, StepSizes
from fsla.steps._updates import Updates, Variable


class StepContext:
    """Context of an algorithm's `move`: views, and the sizes and updates of the step.

    A view stays while its point is asked about, and is dropped when another point is. The first inner view of a step
    moves the buffers of a module, if the step is to move them.

    Args:
        problem: the two losses.
        batches: batches of the step.
        rates: sizes of the step.
        updates: how ω, v and λ move.
        step_sizes: where the sizes come from.
        step_count: steps that were taken before.
        update_buffers: whether the step moves a module's buffers.

    Examples:
        >>> from dataclasses import dataclass, replace
        >>> @dataclass(frozen=True, kw_only=True)
        ... class PlainTraining(fsla.Algorithm):
        ...     def start(self, state, step):
        ...         return state
        ...     def move(self, state, step):
        ...         g = step.inner_at(state.point, step.batches.inner_grad[0]).grad_omega
        ...         return replace(state, omega=step.updates.inner(state.omega, g, step.rates.inner_lr))
    """

    def __init__(
        self,
        problem: Oracles,
        batches: StepBatches,
        rates: Rates,
        updates: Updates,
        step_sizes: StepSizes[Any],
        *,
        step_count: int = 0,
        update_buffers: bool = True,
    ) -> None:
        self.batches = batches
        self.rates = rates
        self.updates = updates
        self.step_sizes = step_sizes
        self.step_count = step_count
        self._problem = problem
        self._at: Point | None = None
        self._views: dict[tuple[Level, Batch], View] = {}
        self._parts: list[StepContext] = []  # Not itself: a cycle would keep the views and their tensors alive.
        self._losses: dict[Level, Tensor] = {}
        self._update_buffers: Iterator[bool] = chain([update_buffers], repeat(False))

    def reading(self, batches: StepBatches, wrap: Callable[[Oracles], Oracles] = lambda problem: problem) -> Self:
        """Return a part of this step that reads other batches.

        Args:
            batches: the batches of the part.
            wrap: makes the problem of the part from that of the step.
        """
        part = copy(self)
        part.batches = batches
        part._problem = wrap(self._problem)
        part._at, part._views, part._parts = None, {}, []
        self._parts.append(part)
        return part

    def inner_at(self, at: Point, batch: Batch) -> View:
        """Return G at a point on a batch; the same view where it is asked again."""
        views = self._at_point(at)
        if ("inner", batch) not in views:
            views["inner", batch] = self._problem.inner_at(at, batch, update_buffers=next(self._update_buffers))
        return views["inner", batch]

    def outer_at(self, at: Point, batch: Batch) -> View:
        """Return F at a point on a batch; the same view where it is asked again."""
        views = self._at_point(at)
        if ("outer", batch) not in views:
            views["outer", batch] = self._problem.outer_at(at, batch)
        return views["outer", batch]

    def losses(self) -> tuple[Tensor | None, Tensor | None]:
        """Return G and F where the step first saw them; None for one that no pass has left."""
        self._note()
        for part in self._parts:
            part.losses()
        return self._losses.get("inner"), self._losses.get("outer")

    def _at_point(self, at: Point) -> dict[tuple[Level, Batch], View]:
        """The views of a point; those of the point before are dropped."""
        if at is not self._at:
            self._note()
            self._at = at
            self._views = {}
        return self._views

    def _note(self) -> None:
        for (level, _), view in self._views.items():
            value = view.known_value
            if value is not None:
                self._losses.setdefault(level, value)


def descend(
    step: StepContext,
    at: Point,
    omega: Variable,
    count: int,
    *,
    keep: Callable[[Tree], Tree] | None = None,
    batches: Batches | None = None,
) -> tuple[Point, Variable]:
    """Move ω from a point along its own gradient, `count` times.

    Args:
        step: context of the step.
        at: the point.
        omega: ω at the point.
        count: number of moves.
        keep: copies ω before each move; the point then holds its trajectory.
        batches: batches of the moves; by default those of `inner_grad`.

    Returns:
        The point after the moves, and ω.

    Examples:
        >>> from dataclasses import dataclass, replace
        >>> @dataclass(frozen=True, kw_only=True)
        ... class PlainTraining(fsla.Algorithm):
        ...     def start(self, state, step):
        ...         return state
        ...     def move(self, state, step):
        ...         at, omega = fsla.steps.descend(step, state.point, state.omega, count=5)
        ...         return replace(state, omega=omega)
    """
    trajectory: list[tuple[Tree, Scalar]] = []
    update, lr = step.updates.inner, step.rates.inner_lr
    batches = step.batches.inner_grad if batches is None else batches
    for t in range(count):
        g = step.inner_at(at, batch_at(batches, t)).grad_omega
        if keep is not None:
            trajectory.append((keep(omega.value), update.step_size(lr)))
        omega = update(omega, g, lr)
        at = Point(at.lam, omega.value, tuple(trajectory))
    return at, omega
