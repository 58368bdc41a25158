"""First-order methods: no product of a second derivative, but gradients of G at several values of ω.

F2SA   Kwon et al. 2023    y minimises F + ϱ G, ω minimises G;  λ along ∂_λ F(y) + ϱ (∂_λ G(y) - ∂_λ G(ω))
BOME   Ye et al. 2022      λ and ω move along ∇F + m ∇q, where q = G(λ, ω) - G(λ, ω after T steps), and m is the
                           least multiplier with which q falls
SAMA   Choe et al. 2023    the derivative of Adam's step in the place of the inverse Hessian, J v by a difference
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsla._checks import whole_number
from fsla._state_tree import evolve, saved
from fsla._tree import axpy, dense, dot, sub
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes
from fsla.hypergradients._estimators import readout
from fsla.problems._batches import BatchSpec, batch_at
from fsla.problems._views import Point
from fsla.steps._context import StepContext, descend
from fsla.steps._updates import Adam, Projection, Variable


@saved
@dataclass(frozen=True)
class F2saState(State):
    """State of `F2sa`.

    Args:
        y: minimises F + ϱ G, where ω minimises G.
    """

    y: Variable


@dataclass(frozen=True, kw_only=True)
class F2sa(Algorithm[F2saState]):
    """ϱ = τ / 2β: with a β that falls faster than τ it grows. y moves by the update of v."""

    inner_steps: int = 1

    moves_adjoint = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_steps, "inner_steps", "F2sa")

    @property
    def batches(self) -> BatchSpec:
        return BatchSpec(inner_grad=self.inner_steps, hvp=self.inner_steps)

    def start(self, state: State, step: StepContext) -> F2saState:
        y = step.updates.adjoint.init({name: t.clone() for name, t in state.omega.value.items()})
        return F2saState(0, state.lam, state.omega, state.direction, state.measured, y)

    def move(self, state: F2saState, step: StepContext) -> F2saState:
        batches, rates, updates = step.batches, step.rates, step.updates
        rho = updates.inner.step_size(rates.inner_lr) / (2 * updates.adjoint.step_size(rates.adjoint_lr))
        lam, omega, y = state.lam, state.omega, state.y
        for t in range(self.inner_steps):
            at_omega, at_y = Point(lam.value, omega.value), Point(lam.value, y.value)
            g = step.inner_at(at_omega, batch_at(batches.inner_grad, t)).grad_omega
            omega = updates.inner(omega, g, rates.inner_lr)
            g = step.inner_at(at_y, batch_at(batches.hvp, t)).grad_omega
            g = axpy(rho, g, step.outer_at(at_y, batches.outer_grad_omega[0]).grad_omega)
            y = updates.adjoint(y, g, rates.adjoint_lr)
        at_y = Point(lam.value, y.value)
        by_y = step.inner_at(at_y, batches.mixed_hvp[0]).grad_lam
        f = step.outer_at(at_y, batches.outer_grad_lam[0]).grad_lam
        by_omega = step.inner_at(Point(lam.value, omega.value), batches.mixed_hvp[0]).grad_lam
        d = dense(axpy(rho, sub(by_y, by_omega), f))
        return evolve(state, lam=updates.outer(lam, d, rates.outer_lr), omega=omega, y=y, direction=d)


@register("f2sa")
def f2sa(step_sizes: Sizes, *, inner_steps: int = 1, projection: Projection | None = None) -> F2sa:
    """Return F2SA: first-order gradients at two values of the inner variable.

    Cost of a step: 2 T ∂_ω G, T ∂_ω F, 1 ∂_λ F and 2 ∂_λ G. The direction has a bias of the order 1 / ϱ.

    Where y lags behind ω, ϱ multiplies the lag. With a large ϱ take α of the order 1 / ϱ, or a large T. Step sizes
    of the paper, with noise at both levels: ``Schedule(..., power=(5/7, 4/7, 5/7, 0))``.

    Args:
        step_sizes: step sizes of λ, ω and y; ϱ is τ / 2β.
        inner_steps: T, moves of ω in a step.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `F2sa`.

    Examples:
        >>> minimize(fsla.algorithms.f2sa(constant(0.2, 0.5, 0.05), inner_steps=3))
        1.0
    """
    return F2sa(step_sizes=step_sizes, inner_steps=inner_steps, projection=projection)


@dataclass(frozen=True, kw_only=True)
class Bome(Algorithm[State]):
    """On full batches: `inner_grad` and `outer_grad_omega` serve all. τ is the step of ω and of the T inner steps; q
    falls at least at the rate η ‖∇q‖²."""

    inner_steps: int = 10

    batches = BatchSpec(hvp=0, outer_grad_lam=0, mixed_hvp=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_steps, "inner_steps", "Bome")

    def start(self, state: State, step: StepContext) -> State:
        return state

    def move(self, state: State, step: StepContext) -> State:
        batch, rates, updates = step.batches.inner_grad[0], step.rates, step.updates
        at = state.point
        grad, by_lam = step.inner_at(at, batch).gradients()
        f_omega, f_lam = step.outer_at(at, step.batches.outer_grad_omega[0]).gradients()
        ahead, g = at, grad
        for t in range(self.inner_steps):
            g = step.inner_at(ahead, batch).grad_omega if t else grad
            ahead = Point(at.lam, axpy(-updates.inner.step_size(rates.inner_lr), g, ahead.omega))
        q_lam = dense(sub(by_lam, step.inner_at(ahead, batch).grad_lam))
        square = dot(q_lam, q_lam) + dot(grad, grad)
        along = dot(f_lam, q_lam) + dot(f_omega, grad)
        short = (rates.new_grad_weight * square - along).clamp(min=0)
        multiplier = torch.where(square > 0, short / torch.where(square > 0, square, 1), 0.0)
        d = dense(axpy(multiplier, q_lam, f_lam))
        omega = updates.inner(state.omega, axpy(multiplier, grad, f_omega), rates.inner_lr)
        return evolve(state, lam=updates.outer(state.lam, d, rates.outer_lr), omega=omega, direction=d)


@register("bome")
def bome(step_sizes: Sizes, *, inner_steps: int = 10, projection: Projection | None = None) -> Bome:
    """Return BOME: λ and ω along a gradient for which the inner gap q falls.

    Cost of a step: T ∂_ω G, 1 of each derivative of F, 2 ∂_λ G. Give it full batches.

    Args:
        step_sizes: step sizes of λ and ω; `new_grad_weight` is η, the rate at which q falls.
        inner_steps: T, steps of ω that measure the gap.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Bome`.

    Examples:
        >>> minimize(fsla.algorithms.bome(constant(0.2, 0.3, 0.0, 0.5), inner_steps=5))
        1.0
    """
    return Bome(step_sizes=step_sizes, inner_steps=inner_steps, projection=projection)


@dataclass(frozen=True, kw_only=True)
class Sama(Algorithm[State]):
    """T moves of ω, then one of λ, along v = D ∂_ω F, where D is the derivative of ω's last move by its gradient.

    With moments m, s before and g the gradient of Adam's last step that derivative is, but for the correction of the
    moments' start, D = τ [(1 - b₁) b₂ s - b₁ (1 - b₂) g m] / (√s' + eps)³. With plain steps D is the step size, and
    the method is T1-T2 by differences.
    """

    inner_steps: int = 1
    finite_differences: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_steps, "inner_steps", "Sama")

    @property
    def batches(self) -> BatchSpec:
        return BatchSpec(inner_grad=self.inner_steps, hvp=0)

    def start(self, state: State, step: StepContext) -> State:
        return state

    def move(self, state: State, step: StepContext) -> State:
        batches, rates, updates = step.batches, step.rates, step.updates
        last = self.inner_steps - 1
        at, omega = descend(step, state.point, state.omega, last)
        g = step.inner_at(at, batch_at(batches.inner_grad, last)).grad_omega
        before = updates.inner.moments(omega)
        omega = updates.inner(omega, g, rates.inner_lr)
        slope = updates.inner.derivative(before, updates.inner.moments(omega), g, rates.inner_lr)
        at = Point(at.lam, omega.value)
        b = step.outer_at(at, batches.outer_grad_omega[0]).grad_omega
        d = dense(readout(step, at, {name: slope[name] * t for name, t in b.items()}))
        return evolve(state, lam=updates.outer(state.lam, d, rates.outer_lr), omega=omega, direction=d)


@register("sama")
def sama(
    step_sizes: Sizes,
    *,
    inner_steps: int = 1,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    projection: Projection | None = None,
) -> Sama:
    """Return SAMA: the derivative of Adam's step in the place of the inverse Hessian.

    Cost of a step: T ∂_ω G, 1 of each derivative of F, 2 ∂_λ G. It is biased unless H is near a multiple of D⁻¹.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        inner_steps: T, moves of ω in a step.
        b1: decay of Adam's first moment.
        b2: decay of Adam's second moment.
        eps: added to the root of the second moment.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Sama`.

    Examples:
        >>> minimize(fsla.algorithms.sama(constant(0.2, 0.1, 0.0)))
        0.98
    """
    return Sama(step_sizes=step_sizes, inner_steps=inner_steps, inner_update=Adam(b1, b2, eps), projection=projection)
