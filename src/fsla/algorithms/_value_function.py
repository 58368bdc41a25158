"""First-order methods: no product at all, but gradients of G at two values of ω.

F2SA   Kwon et al. 2023    y minimises F + ϱ G, z minimises G;  λ moves along ∂_λ F(y) + ϱ (∂_λ G(y) - ∂_λ G(z))
BOME   Ye et al. 2022      λ and ω move along ∇F + m ∇q, where q = G(λ, ω) - G(λ, ω after T steps), and m is the
                           least multiplier with which q falls
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fsla._checks import whole_number
from fsla._tree import axpy, dense, dot, sub, zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.hypergradients._inner import Descent
from fsla.problems._batches import Needs, Sample, batch_of_step
from fsla.problems._problem import Oracles, Point
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Projection, Update, onto


@dataclass(frozen=True)
class F2sa(Stepped):
    """τ moves z, β moves y, α moves λ, and ϱ = τ / 2β: with a β that falls faster than τ it grows. ω is z."""

    rates: Callable[[int], Rates]
    T: int = 1
    outer: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        whole_number(self.T, "T", "F2sa")

    @property
    def needs(self) -> Needs:
        return Needs(inner=self.T, hvp=self.T)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at, outer = self.started(problem, at, xi)
        return State(0, at, None, at.omega, zeros_like(at.lam), outer)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        problem = Seeded(problem, xi)
        weight = rate.tau / (2 * rate.beta)
        z = state.at
        y = Point(z.lam, state.memory)
        for t in range(self.T):
            z = Point(z.lam, axpy(-rate.tau, problem.inner_at(z, batch_of_step(xi.inner, t)).grad, z.omega))
            grad = problem.inner_at(y, batch_of_step(xi.hvp, t)).grad
            pull = axpy(weight, grad, problem.outer_at(y, xi.outer_omega).d_omega)
            y = Point(y.lam, axpy(-rate.beta, pull, y.omega))
        gap = sub(problem.inner_at(y, xi.cross).d_lam, problem.inner_at(z, xi.cross).d_lam)
        d = dense(axpy(weight, gap, problem.outer_at(y, xi.outer_lam).d_lam))
        lam, outer = self.outer(z.lam, d, rate.alpha, state.outer)
        return State(state.k + 1, Point(lam, z.omega), None, y.omega, d, outer)


def f2sa(rates: Callable[[int], Rates], *, T: int = 1, project: Projection | None = None) -> F2sa:
    """F2SA. Per step: 2 T ∂_ω G, T ∂_ω F, 1 ∂_λ F and 2 ∂_λ G. Its direction has a bias of the order 1 / ϱ.

    Where y lags behind z, ϱ multiplies the lag: with a large ϱ take α of the order 1 / ϱ, or a large T. Rates
    of the paper, with noise at both levels: Schedule(..., power=(5/7, 4/7, 5/7, 0)).
    """
    return F2sa(rates, T, onto(project))


@dataclass(frozen=True)
class Bome(Stepped):
    """On full batches: `inner` and `outer_omega` serve all. τ is the step of ω and of the T inner steps; q falls at
    least at the rate η ‖∇q‖²."""

    rates: Callable[[int], Rates]
    T: int = 10
    outer: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        whole_number(self.T, "T", "Bome")

    @property
    def needs(self) -> Needs:
        return Needs(hvp=0, outer_lam=0, cross=0)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        problem = Seeded(problem, xi)
        at = state.at
        best, _ = Descent(self.T).run(problem, at, None, xi, rate.tau)
        grad, by_lam = problem.inner_at(at, xi.inner).gradients()
        q_lam = dense(sub(by_lam, problem.inner_at(best, xi.inner).d_lam))
        outer_view = problem.outer_at(at, xi.outer_omega)
        d_omega = outer_view.d_omega
        d_lam = dense(outer_view.d_lam)
        square = dot(q_lam, q_lam) + dot(grad, grad)
        along = dot(d_lam, q_lam) + dot(d_omega, grad)
        short = (rate.eta * square - along).clamp(min=0)
        multiplier = torch.where(square > 0, short / torch.where(square > 0, square, 1), 0.0)
        d = axpy(multiplier, q_lam, d_lam)
        lam, outer = self.outer(at.lam, d, rate.alpha, state.outer)
        omega = axpy(-rate.tau, axpy(multiplier, grad, d_omega), at.omega)
        return State(state.k + 1, Point(lam, omega), None, None, d, outer)


def bome(rates: Callable[[int], Rates], *, T: int = 10, project: Projection | None = None) -> Bome:
    """BOME. Per step: T + 1 ∂_ω G, 1 of each derivative of F, 2 ∂_λ G."""
    return Bome(rates, T, onto(project))
