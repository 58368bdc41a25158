"""Methods that track H and J as whole matrices, by STORM: for small n, and as references.

    STABLE   Chen, Sun & Yin 2021    λ' = λ - α (∂_λ F - Ĵ Ĥ⁻¹ ∂_ω F)
                                     ω' = ω - τ ∂_ω G - Ĥ⁻¹ Ĵᵀ (λ' - λ), which follows ω_λ as λ moves
    SVRB     Guo et al. 2021         the three gradients are tracked as well, and ω moves along its own alone

The eigenvalues of Ĥ are clamped at or above μ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsla._checks import positive
from fsla._state_tree import evolve, saved
from fsla._tree import Tree, axpy, basis, flatten, unflatten
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes
from fsla.problems._batches import BatchSpec
from fsla.problems._views import Point
from fsla.steps._context import StepContext
from fsla.steps._momentum import STORM, Position
from fsla.steps._updates import Projection


@saved
@dataclass(frozen=True)
class DenseState(State):
    """State of `DenseTracked`.

    Args:
        before: where the step before began.
        tracked: the matrices H and J, and the gradients where they are tracked, each as one tensor.
    """

    before: Position
    tracked: Tree


@dataclass(frozen=True, kw_only=True)
class DenseTracked(Algorithm[DenseState]):
    """Tracks H and J; with `gradients`, ∂_ω G, ∂_ω F and ∂_λ F too; with `drift`, ω follows the move of λ."""

    mu: float
    gradients: bool
    drift: bool

    batches = BatchSpec(mixed_hvp=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self.mu, "mu", "DenseTracked")

    def start(self, state: State, step: StepContext) -> DenseState:
        tracked = self._ask(step, state.point, tracked=True)
        before = self.keep(Position(state.point, {}))
        return DenseState(0, state.lam, state.omega, state.direction, state.measured, before, tracked)

    def move(self, state: DenseState, step: StepContext) -> DenseState:
        rates, updates = step.rates, step.updates
        at = state.point
        before = self.keep(Position(at, {}))
        new, now = self._ask(step, at, tracked=True), self._ask(step, at, tracked=False)
        old = self._ask(step, state.before.at, tracked=True)
        tracked = dict(STORM()(new, old, state.tracked, rates.new_grad_weight))
        values, axes = torch.linalg.eigh((tracked["H"] + tracked["H"].T) / 2)
        values = values.clamp(min=self.mu)
        tracked["H"] = (axes * values) @ axes.T
        now = tracked | now
        inverse = (axes / values) @ axes.T
        d = unflatten(now["by_lam"] - now["J"] @ (inverse @ now["by_omega"]), before.at.lam)
        lam = updates.outer(state.lam, d, rates.outer_lr)
        move = updates.inner.step_size(rates.inner_lr) * now["grad"]
        if self.drift:
            move = move + inverse @ (now["J"].T @ (flatten(lam.value) - flatten(before.at.lam)))
        omega = axpy(-1.0, unflatten(move, before.at.omega), before.at.omega)
        return evolve(
            state,
            lam=lam,
            omega=updates.inner.set(state.omega, omega),
            direction=d,
            before=before,
            tracked=tracked,
        )

    def _ask(self, step: StepContext, at: Point, *, tracked: bool) -> dict[str, torch.Tensor]:
        """What is tracked at a point, or what is not, each as one vector or matrix."""
        batches = step.batches
        parts: dict[str, torch.Tensor] = {}
        if self.gradients == tracked:
            parts["grad"] = flatten(step.inner_at(at, batches.inner_grad[0]).grad_omega)
            parts["by_omega"] = flatten(step.outer_at(at, batches.outer_grad_omega[0]).grad_omega)
            parts["by_lam"] = flatten(step.outer_at(at, batches.outer_grad_lam[0]).grad_lam)
        if tracked:
            view = step.inner_at(at, batches.hvp[0]).linearized()
            pairs = [view.products(e) for e in basis(at.omega)]
            parts["H"] = torch.stack([flatten(h) for h, _ in pairs], 1)
            parts["J"] = torch.stack([flatten(j) for _, j in pairs], 1)
        return parts


@register("stable")
def stable(step_sizes: Sizes, *, mu: float = 1e-3, projection: Projection | None = None) -> DenseTracked:
    """Return STABLE: H and J are tracked as matrices, and ω follows the move of λ.

    Cost of a step: 1 ∂_ω G, 1 of each derivative of F, 2 n joint products, an eigendecomposition of n x n.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        mu: smallest eigenvalue that the tracked Hessian may have.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `DenseTracked`.

    Examples:
        >>> minimize(fsla.algorithms.stable(constant(0.2, 0.5, 0.0)))
        1.0
    """
    return DenseTracked(step_sizes=step_sizes, mu=mu, gradients=False, drift=True, projection=projection)


@register("svrb")
def svrb(step_sizes: Sizes, *, mu: float = 1e-3, projection: Projection | None = None) -> DenseTracked:
    """Return SVRB: H, J and the three gradients are tracked by STORM.

    Cost of a step: 2 of each gradient, 2 n joint products, an eigendecomposition of n x n.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        mu: smallest eigenvalue that the tracked Hessian may have.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `DenseTracked`.

    Examples:
        >>> minimize(fsla.algorithms.svrb(constant(0.2, 0.5, 0.0)))
        1.0
    """
    return DenseTracked(step_sizes=step_sizes, mu=mu, gradients=True, drift=False, projection=projection)
