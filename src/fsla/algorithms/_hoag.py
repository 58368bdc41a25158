"""HOAG (Pedregosa 2016): inner problem and linear system solved to a tolerance that falls with k, on full batches.

The step of λ finds itself: it grows by 1 / `down` after a step that did not raise F by more than the tolerance, and
falls by 1 / `up` after one that did. How many gradients and products a step takes depends on the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsla._checks import number, positive, whole_number
from fsla._state_tree import evolve, saved
from fsla._tree import Tree, axpy, dense, norm, scalar, sub, zeros_like
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes
from fsla.hypergradients._estimators import readout
from fsla.hypergradients._linear_solvers import Matvec, cg
from fsla.problems._views import Point
from fsla.steps._context import StepContext
from fsla.steps._updates import Projection, Variable


@saved
@dataclass(frozen=True)
class HoagState(State):
    """State of `Hoag`.

    Args:
        adjoint: v.
        outer_lr: the present step of λ.
        outer_loss: F at the step before.
    """

    adjoint: Tree
    outer_lr: Tensor
    outer_loss: Tensor

    @property
    def v(self) -> Tree:
        return self.adjoint


@dataclass(frozen=True, kw_only=True)
class Hoag(Algorithm[HoagState]):
    """The tolerance of step k is tolerance · decay^k; no solve takes more than `max_iter` steps."""

    tolerance: float = 0.1
    decay: float = 0.9
    max_iter: int = 100
    up: float = 2.0
    down: float = 0.9

    capturable = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tolerance", "decay", "up", "down"):
            positive(getattr(self, name), name, "Hoag")
        number(self.decay, "decay", "Hoag", low=0.0, high=1.0)
        whole_number(self.max_iter, "max_iter", "Hoag")

    def start(self, state: State, step: StepContext) -> HoagState:
        lam = state.lam.value
        adjoint = zeros_like(state.omega.value)
        outer_lr, outer_loss = scalar(float(step.rates.outer_lr), lam), scalar(torch.inf, lam)
        return HoagState(0, state.lam, state.omega, state.direction, state.measured, adjoint, outer_lr, outer_loss)

    def move(self, state: HoagState, step: StepContext) -> HoagState:
        batches, updates = step.batches, step.updates
        tolerance = self.tolerance * self.decay**step.step_count
        omega = self._descend(step, state, tolerance)
        at = Point(state.lam.value, omega.value)
        outer_view = step.outer_at(at, batches.outer_grad_omega[0])
        matvec = step.inner_at(at, batches.hvp[0]).linearized().hvp
        adjoint = self._solve(matvec, outer_view.grad_omega, state.adjoint, tolerance)
        d = dense(readout(step, at, adjoint))
        value = outer_view.value
        outer_lr = state.outer_lr
        if step.step_count:
            fell = value <= state.outer_loss + tolerance
            outer_lr = torch.where(fell, outer_lr / self.down, outer_lr / self.up)
        lam = updates.outer(state.lam, d, outer_lr)
        return evolve(
            state,
            lam=lam,
            omega=omega,
            direction=d,
            adjoint=adjoint,
            outer_lr=outer_lr,
            outer_loss=value.detach().to(outer_lr.dtype),
        )

    def _descend(self, step: StepContext, state: HoagState, tolerance: float) -> Variable:
        omega = state.omega
        for _ in range(self.max_iter):
            at = Point(state.lam.value, omega.value)
            g = step.inner_at(at, step.batches.inner_grad[0]).grad_omega
            if float(norm(g)) <= tolerance:
                break
            omega = step.updates.inner(omega, g, step.rates.inner_lr)
        return omega

    def _solve(self, matvec: Matvec, b: Tree, v: Tree, tolerance: float) -> Tree:
        residual = sub(b, matvec(v))
        size = float(norm(residual))
        if size <= tolerance:
            return v
        return axpy(1.0, cg(matvec, residual, steps=self.max_iter, tol=tolerance / size, stop_early=True), v)


@register("hoag")
def hoag(
    step_sizes: Sizes,
    *,
    tolerance: float = 0.1,
    decay: float = 0.9,
    max_iter: int = 100,
    projection: Projection | None = None,
) -> Hoag:
    """Return HOAG: inner problem and linear system solved to a falling tolerance.

    Args:
        step_sizes: τ of the inner steps, and α, the first step of λ.
        tolerance: tolerance of the first step.
        decay: factor by which the tolerance falls in each step.
        max_iter: most iterations of a solve.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Hoag`.

    Examples:
        >>> minimize(fsla.algorithms.hoag(constant(0.2, 0.5, 0.0)))
        0.99
    """
    return Hoag(step_sizes=step_sizes, tolerance=tolerance, decay=decay, max_iter=max_iter, projection=projection)
