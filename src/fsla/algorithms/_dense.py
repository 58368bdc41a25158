"""Methods that track H and J as whole matrices, by STORM: for small n, and as references.

    STABLE   Chen, Sun & Yin 2021    λ' = λ - α (∂_λ F - Ĵ Ĥ⁻¹ ∂_ω F)
                                     ω' = ω - τ ∂_ω G - Ĥ⁻¹ Ĵᵀ (λ' - λ), which follows ω_λ as λ moves
    SVRB     Guo et al. 2021         the three gradients are tracked as well, and ω moves along its own alone

The eigenvalues of Ĥ are kept at or above μ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fsla._checks import positive
from fsla._tree import Tree, axpy, basis, flatten, unflatten, zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.problems._batches import Needs, Sample
from fsla.problems._problem import Oracles, Point
from fsla.problems._wrappers import Seeded
from fsla.steps._momentum import STORM
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Projection, Update, onto


@dataclass(frozen=True)
class DenseTracked(Stepped):
    """Tracks H and J; with `gradients`, ∂_ω G, ∂_ω F and ∂_λ F too; with `drift`, ω follows the move of λ."""

    rates: Callable[[int], Rates]
    mu: float
    gradients: bool
    drift: bool
    outer: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        positive(self.mu, "mu", "DenseTracked")

    @property
    def needs(self) -> Needs:
        return Needs(cross=0)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at, outer = self.started(problem, at, xi)
        tracked = self._oracles(Seeded(problem, xi), xi, tracked=True)(at, None)
        return State(0, at, at, tracked, zeros_like(at.lam), outer)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        at = state.at
        problem = Seeded(problem, xi)
        oracles = self._oracles(problem, xi, tracked=True)
        tracked = dict(STORM()(oracles, (at, None), (state.inner, None), state.memory, rate.eta))
        values, axes = torch.linalg.eigh((tracked["H"] + tracked["H"].T) / 2)
        values = values.clamp(min=self.mu)
        tracked["H"] = (axes * values) @ axes.T
        now = {**tracked, **self._oracles(problem, xi, tracked=False)(at, None)}
        inverse = (axes / values) @ axes.T
        d = unflatten(now["d_lam"] - now["J"] @ (inverse @ now["d_omega"]), at.lam)
        lam, outer = self.outer(at.lam, d, rate.alpha, state.outer)
        move = rate.tau * now["grad"]
        if self.drift:
            move = move + inverse @ (now["J"].T @ (flatten(lam) - flatten(at.lam)))
        omega = axpy(-1.0, unflatten(move, at.omega), at.omega)
        return State(state.k + 1, Point(lam, omega), at, tracked, d, outer)

    def _oracles(self, problem: Oracles, xi: Sample, *, tracked: bool) -> Callable[[Point, Any], Tree]:
        """What is tracked at a point, or what is not, each as one vector or matrix."""

        def gradients(at: Point) -> Tree:
            d_omega = flatten(problem.outer_at(at, xi.outer_omega).d_omega)
            d_lam = flatten(problem.outer_at(at, xi.outer_lam).d_lam)
            return {"grad": flatten(problem.inner_at(at, xi.inner).grad), "d_omega": d_omega, "d_lam": d_lam}

        def matrices(at: Point) -> Tree:
            view = problem.inner_at(at, xi.hvp).linearised()
            pairs = [view.hvp_cross(e) for e in basis(at.omega)]
            columns = {"H": [flatten(h) for h, _ in pairs], "J": [flatten(j) for _, j in pairs]}
            return {name: torch.stack(parts, 1) for name, parts in columns.items()}

        def found(at: Point, memory: None) -> Tree:
            first = gradients(at) if self.gradients == tracked else {}
            return {**first, **(matrices(at) if tracked else {})}

        return found


def stable(rates: Callable[[int], Rates], *, mu: float = 1e-3, project: Projection | None = None) -> DenseTracked:
    """STABLE. Per step: 1 ∂_ω G, 1 of each derivative of F, 2 n joint products, an eigendecomposition of n x n."""
    return DenseTracked(rates, mu, gradients=False, drift=True, outer=onto(project))


def svrb(rates: Callable[[int], Rates], *, mu: float = 1e-3, project: Projection | None = None) -> DenseTracked:
    """SVRB. Per step: 2 of each gradient, 2 n joint products, an eigendecomposition of n x n."""
    return DenseTracked(rates, mu, gradients=True, drift=False, outer=onto(project))
