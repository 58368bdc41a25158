"""SOBA (Dagréou et al. 2022) and MA-SOBA (Chen, Xiao & Balasubramanian 2023).

All of ω, v and λ move from one point, on one inner and one outer batch, so that ∂_ω G, H v and J v come from one graph:

    SOBA      λ ← λ - α D_λ                             D_λ = ∂_λ F - J v
    MA-SOBA   λ ← λ - α d,   d ← (1-η) d + η D_λ        ω ← ω - τ ∂_ω G,   v ← v + β (∂_ω F - H v)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsla.problem import Oracles, Point, Sample, checked
from fsla.projection import Projection
from fsla.rates import Rates, callable_rates
from fsla.solver import State
from fsla.tree import axpy, dense, scale, sub, zeros_like


@dataclass(frozen=True)
class Soba:
    """SOBA, or with `average` MA-SOBA. The sample's `inner` and `outer_omega` batches serve all oracles."""

    rates: Callable[[int], Rates]
    average: bool = False
    project: Projection | None = None

    def __post_init__(self) -> None:
        callable_rates(self.rates)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at = checked(problem, at, xi.inner, xi.outer_omega)
        at = at if self.project is None else Point(self.project(at.lam), at.omega)
        return State(0, at, None, zeros_like(at.omega), zeros_like(at.lam))

    def step(self, problem: Oracles, state: State, xi: Sample) -> State:
        return self.move(problem, state, xi, self.rates(state.k))

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        v = state.memory
        inner, outer = problem.inner_at(state.at, xi.inner), problem.outer_at(state.at, xi.outer_omega)
        hv, jv = inner.hvp_cross(v)
        new = sub(outer.d_lam, jv)
        d = axpy(1.0 - rate.eta, state.d, scale(rate.eta, new)) if self.average else new
        lam = axpy(-rate.alpha, state.d if self.average else new, state.at.lam)
        at = Point(lam if self.project is None else self.project(lam), axpy(-rate.tau, inner.grad, state.at.omega))
        return State(state.k + 1, at, None, axpy(rate.beta, sub(outer.d_omega, hv), v), dense(d))


def soba(rates: Callable[[int], Rates], *, project: Projection | None = None) -> Soba:
    """SOBA. Per step: 1 ∂_ω G, 1 ∂_ω F, 1 ∂_λ F, and an HVP and a cross product in one pass."""
    return Soba(rates, project=project)


def ma_soba(rates: Callable[[int], Rates], *, project: Projection | None = None) -> Soba:
    """MA-SOBA: the cost of SOBA. A good choice where STORM's independent batches cannot be had."""
    return Soba(rates, average=True, project=project)
