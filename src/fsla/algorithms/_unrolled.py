"""Differentiation of the inner steps themselves, and then λ.

ITD-BiO          Ji, Yang & Liang 2021     backwards through T warm steps
truncated BP     Shaban et al. 2018        backwards through the last R of them
forward          Franceschi et al. 2017    forwards, with p products a step: for few coordinates of λ
RTHO             Franceschi et al. 2017    the same in real time: λ moves after every inner step
BiO-BreD         Huang et al. 2021         ITD-BiO with a Bregman or proximal step of λ
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsla.algorithms._alternating import Solver
from fsla.hypergradients._estimators import Carried, Estimator, Tangent, Unrolled
from fsla.hypergradients._inner import Descent
from fsla.steps._momentum import NoMomentum
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import Projection, Update, onto

Schedule = Callable[[int], Rates]


def _solver(
    estimator: Estimator, rates: Schedule, T: int, project: Projection | None, outer: Update | None = None
) -> Solver:
    return Solver(estimator, rates, Descent(T, trail=True), NoMomentum(), outer=onto(project, outer), lam_last=True)


def itd_bio(rates: Schedule, *, T: int = 10, project: Projection | None = None) -> Solver:
    """ITD-BiO: T warm steps, differentiated in reverse."""
    return _solver(Unrolled(), rates, T, project)


def truncated_bp(rates: Schedule, *, T: int = 10, R: int = 5, project: Projection | None = None) -> Solver:
    """Truncated back-propagation: T warm steps, of which the last R are differentiated."""
    return _solver(Unrolled(R), rates, T, project)


def forward(rates: Schedule, *, T: int = 10, project: Projection | None = None) -> Solver:
    """The direction of ITD-BiO from the first step to the last: p HVPs and p transposed cross products a step."""
    return _solver(Tangent(), rates, T, project)


def bio_bred(rates: Schedule, *, T: int = 10, outer: Update | None = None, project: Projection | None = None) -> Solver:
    """BiO-BreD: ITD-BiO with a step such as `update.Proximal(update.SoftThreshold(weight))` or `update.Mirror()`."""
    return _solver(Unrolled(), rates, T, project, outer)


def rtho(rates: Schedule, *, project: Projection | None = None) -> Solver:
    """Real-time hyperparameter optimisation: dω/dλ is carried along, p trees of the form of ω."""
    return Solver(Carried(), InnerStep(rates), direction=NoMomentum(), outer=onto(project), lam_last=True)


@dataclass(frozen=True)
class InnerStep:
    """Other rates, with β = τ: the derivative of the inner step itself."""

    rates: Schedule

    def __post_init__(self) -> None:
        callable_rates(self.rates)

    def __call__(self, k: int) -> Rates:
        rate = self.rates(k)
        return rate._replace(beta=rate.tau)
