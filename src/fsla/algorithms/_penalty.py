"""The penalty method (Mehra & Hamm 2019): ∂_ω G = 0 as a constraint, with a multiplier ν and a penalty ρ.

    min over λ and ω of   F + νᵀ ∂_ω G + ½ ρ ‖∂_ω G‖²

No linear system is solved: where ω is stationary, ν + ρ ∂_ω G is -v. When both derivatives are small together, ν grows
by ρ ∂_ω G, and the penalty by a factor by which ω's steps then fall, since the curvature of its function grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fsla._checks import positive, whole_number
from fsla._tree import Tree, axpy, dense, norm, zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.problems._batches import Needs, Sample, batch_of_step
from fsla.problems._problem import Oracles, Point
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Projection, Update, onto


@dataclass(frozen=True)
class Penalty(Stepped):
    """T steps on ω, then one on λ; `rho` and `bound` are where penalty and tolerance start."""

    rates: Callable[[int], Rates]
    T: int = 10
    rho: float = 1.0
    grow: float = 1.1
    bound: float = 1.0
    shrink: float = 0.9
    outer: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        whole_number(self.T, "T", "Penalty")
        for name in ("rho", "grow", "bound", "shrink"):
            positive(getattr(self, name), name, "Penalty")

    @property
    def needs(self) -> Needs:
        return Needs(inner=self.T, hvp=self.T)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at, outer = self.started(problem, at, xi)
        like = next(iter(at.lam.values()))
        weights = {"rho": like.new_tensor(self.rho), "bound": like.new_tensor(self.bound)}
        return State(0, at, weights, zeros_like(at.omega), zeros_like(at.lam), outer)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        problem = Seeded(problem, xi)
        nu = state.memory
        rho = state.inner["rho"]
        at = state.at

        def pulled(at: Point, t: int) -> tuple[Tree, Tree, Tree]:
            """∂_ω G, u = ν + ρ ∂_ω G, and the derivative in ω of the penalised function."""
            grad = problem.inner_at(at, batch_of_step(xi.inner, t)).grad
            u = axpy(rho, grad, nu)
            product = problem.inner_at(at, batch_of_step(xi.hvp, t)).hvp(u)
            return grad, u, axpy(1.0, product, problem.outer_at(at, xi.outer_omega).d_omega)

        for t in range(self.T):
            at = Point(at.lam, axpy(-rate.tau * self.rho / rho, pulled(at, t)[2], at.omega))
        grad, u, by_omega = pulled(at, self.T - 1)
        d_lam = problem.outer_at(at, xi.outer_lam).d_lam
        d = dense(axpy(1.0, problem.inner_at(at, xi.cross).cross(u), d_lam))
        small = torch.hypot(norm(d), norm(by_omega)) < state.inner["bound"]
        nu = axpy(torch.where(small, rho, 0.0), grad, nu)
        weights = {
            "rho": torch.where(small, self.grow * rho, rho),
            "bound": torch.where(small, self.shrink * state.inner["bound"], state.inner["bound"]),
        }
        lam, outer = self.outer(at.lam, d, rate.alpha, state.outer)
        return State(state.k + 1, Point(lam, at.omega), weights, nu, d, outer)


def penalty(
    rates: Callable[[int], Rates],
    *,
    T: int = 10,
    rho: float = 1.0,
    grow: float = 1.1,
    bound: float = 1.0,
    shrink: float = 0.9,
    project: Projection | None = None,
) -> Penalty:
    """The penalty method. Per step: T + 1 each of ∂_ω G, ∂_ω F and HVPs, one cross product."""
    return Penalty(rates, T, rho, grow, bound, shrink, onto(project))
