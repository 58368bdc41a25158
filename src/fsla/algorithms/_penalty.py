"""The penalty method (Mehra & Hamm 2019): ∂_ω G = 0 as a constraint, with a multiplier ν and a penalty ρ.

    min over λ and ω of   F + νᵀ ∂_ω G + ½ ρ ‖∂_ω G‖²

No linear system is solved: where ω is stationary, ν + ρ ∂_ω G is -v. When both derivatives are small together, ν grows
by ρ ∂_ω G, and the penalty by a factor by which ω's steps then fall, since the curvature of its function grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsla._checks import positive, whole_number
from fsla._state_tree import evolve, saved
from fsla._tree import Tree, axpy, dense, norm, scalar, scale, zeros_like
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes
from fsla.problems._batches import BatchSpec, batch_at
from fsla.problems._views import Point
from fsla.steps._context import StepContext
from fsla.steps._updates import Projection


@saved
@dataclass(frozen=True)
class PenaltyState(State):
    """State of `Penalty`.

    Args:
        nu: ν, the multiplier of ∂_ω G = 0.
        rho: ρ.
        bound: how small both derivatives must be for ν to grow.
    """

    nu: Tree
    rho: Tensor
    bound: Tensor


@dataclass(frozen=True, kw_only=True)
class Penalty(Algorithm[PenaltyState]):
    """T steps on ω, then one on λ; `rho` and `bound` are where penalty and tolerance start."""

    inner_steps: int = 10
    rho: float = 1.0
    grow: float = 1.1
    bound: float = 1.0
    shrink: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_steps, "inner_steps", "Penalty")
        for name in ("rho", "grow", "bound", "shrink"):
            positive(getattr(self, name), name, "Penalty")

    @property
    def batches(self) -> BatchSpec:
        return BatchSpec(inner_grad=self.inner_steps, hvp=self.inner_steps)

    def start(self, state: State, step: StepContext) -> PenaltyState:
        rho, bound = scalar(self.rho, state.lam.value), scalar(self.bound, state.lam.value)
        nu = zeros_like(state.omega.value)
        return PenaltyState(0, state.lam, state.omega, state.direction, state.measured, nu, rho, bound)

    def move(self, state: PenaltyState, step: StepContext) -> PenaltyState:
        batches, updates, rates = step.batches, step.updates, step.rates
        rho, omega = state.rho, state.omega

        def gradients(at: Point, t: int) -> tuple[Tree, Tree, Tree]:
            """∂_ω G, u = ν + ρ ∂_ω G, and the derivative in ω of the penalised function."""
            g = step.inner_at(at, batch_at(batches.inner_grad, t)).grad_omega
            u = axpy(rho, g, state.nu)
            product = step.inner_at(at, batch_at(batches.hvp, t)).hvp(u)
            return g, u, axpy(1.0, product, step.outer_at(at, batches.outer_grad_omega[0]).grad_omega)

        for t in range(self.inner_steps):
            at = Point(state.lam.value, omega.value)
            omega = updates.inner(omega, scale(self.rho / rho, gradients(at, t)[2]), rates.inner_lr)
        at = Point(state.lam.value, omega.value)
        g, u, by_omega = gradients(at, self.inner_steps - 1)
        by_lam = step.outer_at(at, batches.outer_grad_lam[0]).grad_lam
        d = dense(axpy(1.0, step.inner_at(at, batches.mixed_hvp[0]).mixed_hvp(u), by_lam))
        small = torch.hypot(norm(d), norm(by_omega)) < state.bound
        return evolve(
            state,
            lam=updates.outer(state.lam, d, rates.outer_lr),
            omega=omega,
            direction=d,
            nu=axpy(torch.where(small, rho, 0.0), g, state.nu),
            rho=torch.where(small, self.grow * rho, rho),
            bound=torch.where(small, self.shrink * state.bound, state.bound),
        )


@register("penalty")
def penalty(
    step_sizes: Sizes,
    *,
    inner_steps: int = 10,
    rho: float = 1.0,
    grow: float = 1.1,
    bound: float = 1.0,
    shrink: float = 0.9,
    projection: Projection | None = None,
) -> Penalty:
    """Return the penalty method: ∂_ω G = 0 as a constraint with a multiplier.

    Cost of a step: T + 1 each of ∂_ω G, ∂_ω F and HVPs, one mixed product.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        inner_steps: T, moves of ω in a step.
        rho: first penalty.
        grow: factor by which the penalty grows.
        bound: first tolerance, below which both derivatives count as small.
        shrink: factor by which the tolerance falls.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Penalty`.

    Examples:
        >>> minimize(fsla.algorithms.penalty(constant(0.1, 0.3, 0.0), inner_steps=5))
        1.0
    """
    return Penalty(
        step_sizes=step_sizes,
        inner_steps=inner_steps,
        rho=rho,
        grow=grow,
        bound=bound,
        shrink=shrink,
        projection=projection,
    )
