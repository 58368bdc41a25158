"""The inner steps of a hyper-iteration: ω ← ω - τ ∂_ω G(λ, ω), T times, warm or from a fixed start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from fsla.checks import whole
from fsla.problem import Oracles, Point, Sample, batch_of_step
from fsla.tree import Scalar, Tree, axpy


class InnerUpdate(Protocol):
    @property
    def revisited(self) -> int:
        """How many of the last graphs an estimator may ask for again: all that unrolling reads, else one."""
        ...

    def init(self, at: Point) -> Any: ...
    def run(self, problem: Oracles, at: Point, memory: Any, xi: Sample, tau: Scalar) -> tuple[Point, Any]: ...


@dataclass(frozen=True)
class Descent:
    """`steps` gradient steps (Algorithm 1, line 6, has one).

    Warm: from the ω of the last hyper-iteration. With `restart`: from the run's first ω each time, which is its memory.
    With `trail`, the steps are kept in the point for unrolled differentiation, at the price of `steps` copies of ω.
    """

    steps: int = 1
    restart: bool = False
    trail: bool = False

    def __post_init__(self) -> None:
        whole(self.steps, "steps", "Descent")

    @property
    def revisited(self) -> int:
        return self.steps if self.trail else 1

    def init(self, at: Point) -> Tree | None:
        return at.omega if self.restart else None

    def run(
        self, problem: Oracles, at: Point, memory: Tree | None, xi: Sample, tau: Scalar
    ) -> tuple[Point, Tree | None]:
        omega = at.omega if memory is None else memory
        trail: list[tuple[Tree, Scalar]] = []
        for t in range(self.steps):
            if self.trail:
                trail.append((omega, tau))
            grad = problem.inner_at(Point(at.lam, omega), batch_of_step(xi.inner, t)).grad
            omega = axpy(-tau, grad, omega)
        return Point(at.lam, omega, tuple(trail)), memory
