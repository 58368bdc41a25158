"""SAMA (Choe et al. 2023): the derivative of Adam's step in the place of the inverse Hessian, and J v by a difference.

With moments m, s before and g the gradient of ω's last step, the derivative of that step by its gradient is, but for
the correction of the moments' start,

    D = τ [(1 - b₁) b₂ s - b₁ (1 - b₂) g m] / (√s' + floor)³        and v = D ∂_ω F

With plain steps in the place of Adam's, D is the step size and the method is T1-T2 by differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fsla._checks import whole_number
from fsla._tree import Tree, dense, zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.hypergradients._estimators import readout
from fsla.problems._batches import Needs, Sample, batch_of_step
from fsla.problems._differences import Differences
from fsla.problems._problem import Oracles, Point
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import Adam, GradientDescent, Projection, Update, onto


@dataclass(frozen=True)
class Sama(Stepped):
    """T steps of Adam on ω, then one on λ."""

    rates: Callable[[int], Rates]
    T: int = 1
    inner: Adam = field(default_factory=Adam)
    outer: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        whole_number(self.T, "T", "Sama")

    @property
    def needs(self) -> Needs:
        return Needs(inner=self.T, hvp=0)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at, outer = self.started(problem, at, xi)
        return State(0, at, self.inner.init(at.omega)[1], None, zeros_like(at.lam), outer)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        problem = Differences(Seeded(problem, xi))
        at = state.at
        moments = state.inner
        before: tuple[Tree, Tree, Tree] = moments
        grad: Tree = {}
        for t in range(self.T):
            before = moments
            grad = problem.inner_at(at, batch_of_step(xi.inner, t)).grad
            omega, moments = self.inner(at.omega, grad, rate.tau, moments)
            at = Point(at.lam, omega)
        m, s, _ = before
        p = problem.outer_at(at, xi.outer_omega).d_omega
        first = self.inner.first
        second = self.inner.second
        v = {}
        for name, g in grad.items():
            slope = (1 - first) * second * s[name] - first * (1 - second) * g * m[name]
            v[name] = rate.tau * slope / (moments[1][name].sqrt() + self.inner.floor) ** 3 * p[name]
        d = dense(readout(problem, at, v, xi))
        lam, outer = self.outer(at.lam, d, rate.alpha, state.outer)
        return State(state.k + 1, Point(lam, at.omega), moments, None, d, outer)


def sama(
    rates: Callable[[int], Rates],
    *,
    T: int = 1,
    first: float = 0.9,
    second: float = 0.999,
    floor: float = 1e-8,
    project: Projection | None = None,
) -> Sama:
    """SAMA. Per step: T ∂_ω G, 1 of each derivative of F, 2 ∂_λ G. Biased unless H is near a multiple of D⁻¹."""
    return Sama(rates, T, Adam(first, second, floor), onto(project))
