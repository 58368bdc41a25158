"""VRBO (Yang, Ji & Liang 2021): SPIDER on ω and λ, with several steps of ω for each of λ.

    every q steps      D_ω, D_λ on a large batch at (λ, ω)
    λ' = λ - α D_λ
    m + 1 times        D_ω += ∂_ω G(new) - ∂_ω G(old),  D_λ += h(new) - h(old),  ω ← ω - τ D_ω

where old is the point that D_ω and D_λ were last taken at, so that the first difference goes over the last move of ω
and that of λ at once, and h is the hypergradient by a Neumann series.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsla._checks import whole_number
from fsla._state_tree import evolve, saved
from fsla._tree import Leaves, Tree, axpy, dense, sub
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._registry import register
from fsla.hypergradients._estimators import Solved
from fsla.hypergradients._linear_solvers import Neumann
from fsla.problems._batches import BatchSpec, StepBatches, batch_at
from fsla.problems._views import Point
from fsla.steps._context import StepContext
from fsla.steps._momentum import Position
from fsla.steps._schedules import PeriodicRefresh, Scheduled
from fsla.steps._updates import Projection


@saved
@dataclass(frozen=True)
class VrboState(State):
    """State of `Vrbo`.

    Args:
        omega_direction: D_ω.
        before: the point that the directions were last taken at.
    """

    omega_direction: Tree
    before: Position


@dataclass(frozen=True, kw_only=True)
class Vrbo(Algorithm[VrboState]):
    """Of several batches the first of each kind is the large one, the others are those of the m + 1 inner steps."""

    estimator: Solved
    inner_steps: int = 3

    capturable = False

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_steps, "inner_steps", "Vrbo", least=0)

    @property
    def batches(self) -> BatchSpec:
        return BatchSpec(*[self.inner_steps + 2] * 5)

    def start(self, state: State, step: StepContext) -> VrboState:
        d_omega, d = self._gradients(step, state.point, 0)
        before = self.keep(Position(state.point, {}))
        return VrboState(0, state.lam, state.omega, dense(d), state.measured, d_omega, before)

    def move(self, state: VrboState, step: StepContext) -> VrboState:
        rates, updates = step.rates, step.updates
        old, d_omega, d = state.before, state.omega_direction, state.direction
        if rates.new_grad_weight == 1.0:
            old = self.keep(Position(state.point, {}))
            d_omega, refreshed = self._gradients(step, state.point, 0)
            d = dense(refreshed)
        lam, omega = updates.outer(state.lam, d, rates.outer_lr), state.omega
        for t in range(self.inner_steps + 1):
            at = Point(lam.value, omega.value)
            new_omega, new_lam = self._gradients(step, at, t + 1)
            old_omega, old_lam = self._gradients(step, old.at, t + 1)
            d_omega = axpy(1.0, sub(new_omega, old_omega), d_omega)
            d = axpy(1.0, sub(new_lam, old_lam), d)
            old = self.keep(Position(at, {}))
            omega = updates.inner(omega, d_omega, rates.inner_lr)
        return evolve(state, lam=lam, omega=omega, direction=d, omega_direction=d_omega, before=old)

    def _gradients(self, step: StepContext, at: Point, t: int) -> tuple[Tree, Leaves]:
        """∂_ω G and the hypergradient at a point, on batches t."""
        inner, outer, hvp, outer_lam, mixed = ((batch_at(slot, t),) for slot in step.batches.slots)
        there = step.reading(StepBatches(inner, outer, hvp, outer_lam, mixed, step.batches.seed))
        g = there.inner_at(at, there.batches.inner_grad[0]).grad_omega
        return g, self.estimator.gradient(there, Position(at, {}))


@register("vrbo")
def vrbo(
    step_sizes: Scheduled,
    *,
    inner_steps: int = 3,
    hvp_steps: int = 10,
    adjoint_lr: float = 0.1,
    refresh_period: int = 10,
    projection: Projection | None = None,
) -> Vrbo:
    """Return VRBO: SPIDER on ω and λ, with several moves of ω for each of λ.

    Cost of a step: 2 (m + 1) of ∂_ω G and of the hypergradient, each of Q HVPs. Every `refresh_period`-th step
    takes one more of both.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        inner_steps: m, of which a step takes m + 1 moves of ω.
        hvp_steps: Q, products of H in a step.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        refresh_period: steps between two large batches.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Vrbo`.

    Examples:
        >>> minimize(fsla.algorithms.vrbo(constant(0.2, 0.3, 0.0), inner_steps=1, hvp_steps=4, adjoint_lr=0.5))
        1.0
    """
    whole_number(hvp_steps, "hvp_steps", "vrbo")
    return Vrbo(
        step_sizes=PeriodicRefresh(step_sizes, refresh_period),
        estimator=Solved(Neumann(hvp_steps + 1, adjoint_lr)),
        inner_steps=inner_steps,
        projection=projection,
    )
