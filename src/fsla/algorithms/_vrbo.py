"""VRBO (Yang, Ji & Liang 2021): SPIDER on ω and λ, with several steps of ω for each of λ.

    every q steps      D_ω, D_λ on a large batch at (λ, ω)
    λ' = λ - α D_λ
    m + 1 times        D_ω += ∂_ω G(new) - ∂_ω G(old),  D_λ += h(new) - h(old),  ω ← ω - τ D_ω

where old is the point that D_ω and D_λ were last taken at, so that the first difference goes over the last move of ω
and that of λ at once, and h is the hypergradient by a Neumann series.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fsla._checks import whole_number
from fsla._tree import axpy, dense, sub
from fsla.algorithms._alternating import State, Stepped
from fsla.algorithms._simultaneous import Afresh
from fsla.hypergradients._estimators import Implicit
from fsla.hypergradients._linear_solvers import Neumann
from fsla.problems._batches import Needs, Sample, batch_of_step
from fsla.problems._problem import Oracles, Point
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Periodic, Rates, callable_rates
from fsla.steps._updates import GradientDescent, Projection, Update, onto


@dataclass(frozen=True)
class Vrbo(Stepped):
    """Of `Batches`, the first of each kind is the large one, the others are those of the m + 1 inner steps."""

    rates: Callable[[int], Rates]
    estimator: Implicit
    m: int = 3
    outer: Update = field(default_factory=GradientDescent)
    capturable = False

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        whole_number(self.m, "m", "Vrbo", least=0)

    @property
    def needs(self) -> Needs:
        return Needs(*[self.m + 2] * 5)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at, outer = self.started(problem, at, xi)
        first = self._directions(problem, xi, 0)
        return State(0, at, first.omega(at, None), at, dense(first.lam(at, None)), outer)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        old = state.memory
        d_omega = state.inner
        d = state.d
        if rate.eta == 1.0:
            old = state.at
            refreshed = self._directions(problem, xi, 0)
            d_omega = refreshed.omega(old, None)
            d = dense(refreshed.lam(old, None))
        lam, outer = self.outer(state.at.lam, d, rate.alpha, state.outer)
        new = Point(lam, state.at.omega)
        for t in range(self.m + 1):
            found = self._directions(problem, xi, t + 1)
            d_omega = axpy(1.0, sub(found.omega(new, None), found.omega(old, None)), d_omega)
            d = axpy(1.0, sub(found.lam(new, None), found.lam(old, None)), d)
            old = new
            new = Point(lam, axpy(-rate.tau, d_omega, new.omega))
        return State(state.k + 1, new, d_omega, old, d, outer)

    def _directions(self, problem: Oracles, xi: Sample, t: int) -> Afresh:
        own = xi._replace(**{name: batch_of_step(getattr(xi, name), t) for name in Needs._fields})
        return Afresh(Seeded(problem, xi), own, self.estimator)


def vrbo(
    rates: Callable[[int], Rates],
    *,
    m: int = 3,
    Q: int = 10,
    step: float = 0.1,
    period: int = 10,
    project: Projection | None = None,
) -> Vrbo:
    """VRBO. Per step: 2 (m + 1) of ∂_ω G and of the hypergradient, each of Q HVPs; one more at every `period`-th."""
    return Vrbo(Periodic(rates, period), Implicit(Neumann(Q + 1, step)), m, onto(project))
