"""The inner steps of a hyper-iteration.

Descent    ω ← ω - τ ∂_ω G(λ, ω), T times, warm or from a fixed start
Nesterov   z = y + γ (y - y_old),  y ← z - τ ∂_ω G(λ, z),  and ω a moving average of y
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from fsla._checks import positive, whole_number
from fsla._tree import Scalar, Tree, axpy, scale, sub
from fsla.problems._batches import Sample, batch_of_step
from fsla.problems._problem import Oracles, Point
from fsla.steps._updates import GradientDescent, Update


class InnerUpdate(Protocol):
    @property
    def steps(self) -> int: ...
    @property
    def revisited(self) -> int:
        """How many of the last views an estimator may ask for again: all that unrolling reads, else one."""
        ...

    def init(self, at: Point) -> Any: ...
    def run(self, problem: Oracles, at: Point, memory: Any, xi: Sample, tau: Scalar) -> tuple[Point, Any]: ...


@dataclass(frozen=True)
class Descent:
    """`steps` steps along the gradient (Algorithm 1, line 6, has one), by any `update`.

    Warm: from the ω of the last hyper-iteration; the update's memory goes on. With `restart`: from the run's first ω
    each time, which is then the memory. With `trail`, the steps are kept in the point for unrolled differentiation, at
    the price of `steps` copies of ω; they must be plain ones, whose derivative it is.
    """

    steps: int = 1
    restart: bool = False
    trail: bool = False
    update: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps", "Descent")
        if self.trail and self.update != GradientDescent():
            raise ValueError(f"With trail, the update of Descent must be GradientDescent(). Got {self.update} instead.")

    @property
    def revisited(self) -> int:
        return self.steps if self.trail else 1

    def init(self, at: Point) -> Any:
        return at.omega if self.restart else self.update.init(at.omega)[1]

    def run(self, problem: Oracles, at: Point, memory: Any, xi: Sample, tau: Scalar) -> tuple[Point, Any]:
        omega, moved = self.update.init(memory) if self.restart else (at.omega, memory)
        trail: list[tuple[Tree, Scalar]] = []
        for t in range(self.steps):
            if self.trail:
                trail.append((omega, tau))
            grad = problem.inner_at(Point(at.lam, omega), batch_of_step(xi.inner, t)).grad
            omega, moved = self.update(omega, grad, tau, moved)
        return Point(at.lam, omega, tuple(trail)), memory if self.restart else moved


@dataclass(frozen=True)
class Nesterov:
    """One accelerated step, and ω ← (1 - average) ω + average y."""

    gamma: float
    average: float = 1.0
    steps = 1
    revisited = 1

    def __post_init__(self) -> None:
        positive(self.gamma, "gamma", "Nesterov")
        positive(self.average, "average", "Nesterov")

    def init(self, at: Point) -> tuple[Tree, Tree]:
        return at.omega, at.omega

    def run(
        self, problem: Oracles, at: Point, memory: tuple[Tree, Tree], xi: Sample, tau: Scalar
    ) -> tuple[Point, tuple[Tree, Tree]]:
        y, before = memory
        z = axpy(self.gamma, sub(y, before), y)
        grad = problem.inner_at(Point(at.lam, z), batch_of_step(xi.inner, 0)).grad
        new = axpy(-tau, grad, z)
        omega = axpy(self.average, new, scale(1 - self.average, at.omega))
        return Point(at.lam, omega), (new, y)
