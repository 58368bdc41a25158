"""HOAG (Pedregosa 2016): inner problem and linear system solved to a tolerance that falls with k, on full batches.

The step of λ finds itself: it grows by 1 / `down` after a step that did not raise F by more than the tolerance, and
falls by 1 / `up` after one that did. How many gradients and products a step takes depends on the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fsla._checks import positive, whole_number
from fsla._tree import Tree, axpy, dense, norm, sub, zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.hypergradients._estimators import readout
from fsla.hypergradients._linsolve import Matvec, cg
from fsla.problems._batches import Needs, Sample
from fsla.problems._problem import Oracles, Point
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Projection, Update, onto


@dataclass(frozen=True)
class Hoag(Stepped):
    """The tolerance of step k is tolerance · decay^k; no solve takes more than `most` steps."""

    rates: Callable[[int], Rates]
    tolerance: float = 0.1
    decay: float = 0.9
    most: int = 100
    up: float = 2.0
    down: float = 0.9
    outer: Update = field(default_factory=GradientDescent)
    capturable = False

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        for name in ("tolerance", "decay", "up", "down"):
            positive(getattr(self, name), name, "Hoag")
        whole_number(self.most, "most", "Hoag")

    @property
    def needs(self) -> Needs:
        return Needs()

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at, outer = self.started(problem, at, xi)
        like = next(iter(at.lam.values()))
        memory = {"step": like.new_tensor(float(self.rates(0).alpha)), "value": like.new_tensor(torch.inf)}
        return State(0, at, memory, zeros_like(at.omega), zeros_like(at.lam), outer)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        problem = Seeded(problem, xi)
        tolerance = self.tolerance * self.decay**state.k
        at = self._solved(problem, state.at, xi, rate, tolerance)
        outer_view = problem.outer_at(at, xi.outer_omega)
        v = self._system(problem.inner_at(at, xi.hvp).linearised().hvp, outer_view.d_omega, state.memory, tolerance)
        d = dense(readout(problem, at, v, xi))
        value = outer_view.value
        step = state.inner["step"]
        if state.k:
            step = torch.where(value <= state.inner["value"] + tolerance, step / self.down, step / self.up)
        lam, outer = self.outer(at.lam, d, step, state.outer)
        memory = {"step": step, "value": value.detach()}
        return State(state.k + 1, Point(lam, at.omega), memory, v, d, outer)

    def _solved(self, problem: Oracles, at: Point, xi: Sample, rate: Rates, tolerance: float) -> Point:
        for _ in range(self.most):
            grad = problem.inner_at(at, xi.inner).grad
            if float(norm(grad)) <= tolerance:
                break
            at = Point(at.lam, axpy(-rate.tau, grad, at.omega))
        return at

    def _system(self, matvec: Matvec, b: Tree, v: Tree, tolerance: float) -> Tree:
        residual = sub(b, matvec(v))
        size = float(norm(residual))
        if size <= tolerance:
            return v
        return axpy(1.0, cg(matvec, residual, steps=self.most, tol=tolerance / size, stop_early=True), v)


def hoag(
    rates: Callable[[int], Rates],
    *,
    tolerance: float = 0.1,
    decay: float = 0.9,
    most: int = 100,
    project: Projection | None = None,
) -> Hoag:
    """HOAG. τ of the rates is the inner step, α the first step of λ."""
    return Hoag(rates, tolerance, decay, most, outer=onto(project))
