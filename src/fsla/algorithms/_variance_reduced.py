"""Momentum or variance reduction on ω and λ, with v afresh at every point it is needed at.

    SUSTAIN       Khanduri et al. 2021       STORM on ω and λ, a random Neumann series
    MRBO          Yang, Ji & Liang 2021      STORM on ω and λ, a Neumann series
    BiAdam        Huang, Li & Huang 2021     averages, and steps scaled by each coordinate of λ and by ‖D_ω‖
    VR-BiAdam     Huang, Li & Huang 2021     STORM in the place of averages
    AccBO         Gong, Hao & Liu 2024       Nesterov's steps on ω, STORM and steps of fixed length on λ

All read five batches; SUSTAIN, both BiAdams and AccBO need batches with a seed, which draws the length of the series.
One η serves all momenta of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsla._checks import positive, whole_number
from fsla._state_tree import evolve, saved
from fsla._tree import Tree, axpy, dense, scale, sub
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._orders import Simultaneous
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes
from fsla.hypergradients._estimators import Solved
from fsla.hypergradients._linear_solvers import Neumann, RandomNeumann
from fsla.problems._batches import BatchSpec
from fsla.problems._views import Point
from fsla.steps._context import StepContext
from fsla.steps._momentum import EMA, STORM, Direction, Position
from fsla.steps._updates import Adaptive, Normalized, Projection


@register("sustain")
def sustain(
    step_sizes: Sizes, *, num_terms: int = 10, adjoint_lr: float = 0.1, projection: Projection | None = None
) -> Simultaneous:
    """Return SUSTAIN: STORM on ω and λ, and a random Neumann series.

    Cost of a step: 2 ∂_ω G, 2 of each derivative of F, at most 2 (K - 1) HVPs, 2 mixed products.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        num_terms: K, terms of the Neumann series.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.sustain(constant(0.2, 0.5, 0.0, 0.5), num_terms=2))
        0.97
    """
    return _both(step_sizes, STORM(), Solved(RandomNeumann(num_terms, adjoint_lr)), projection)


@register("mrbo")
def mrbo(
    step_sizes: Sizes, *, hvp_steps: int = 10, adjoint_lr: float = 0.1, projection: Projection | None = None
) -> Simultaneous:
    """Return MRBO: SUSTAIN with a Neumann series of Q products at both points.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        hvp_steps: Q, products of H at each of the two points.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.mrbo(constant(0.2, 0.5, 0.0, 0.5), adjoint_lr=0.5))
        1.0
    """
    whole_number(hvp_steps, "hvp_steps", "the algorithm")
    return _both(step_sizes, STORM(), Solved(Neumann(hvp_steps + 1, adjoint_lr)), projection)


def _both(step_sizes: Sizes, momentum: Direction, estimator: Solved, projection: Projection | None) -> Simultaneous:
    return Simultaneous(
        step_sizes=step_sizes,
        inner_momentum=momentum,
        outer_momentum=momentum,
        estimator=estimator,
        projection=projection,
    )


@register("biadam")
def biadam(
    step_sizes: Sizes,
    *,
    num_terms: int = 10,
    adjoint_lr: float = 0.1,
    decay: float = 0.9,
    eps: float = 1e-3,
    projection: Projection | None = None,
) -> Simultaneous:
    """Return BiAdam: averages of both directions, and adaptive steps.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        num_terms: K, terms of the Neumann series.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        decay: decay of the running means that scale the steps.
        eps: added to what divides the steps.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.biadam(constant(0.02, 0.1, 0.0, 0.5), num_terms=2))
        1.0
    """
    algorithm = _both(step_sizes, EMA(), Solved(RandomNeumann(num_terms, adjoint_lr)), projection)
    return replace(algorithm, inner_update=Adaptive(decay, eps, whole=True), outer_update=Adaptive(decay, eps))


@register("vr_biadam")
def vr_biadam(
    step_sizes: Sizes,
    *,
    num_terms: int = 10,
    adjoint_lr: float = 0.1,
    decay: float = 0.9,
    eps: float = 1e-3,
    projection: Projection | None = None,
) -> Simultaneous:
    """Return VR-BiAdam: BiAdam with STORM, at twice the cost.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        num_terms: K, terms of the Neumann series.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        decay: decay of the running means that scale the steps.
        eps: added to what divides the steps.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.vr_biadam(constant(0.02, 0.1, 0.0, 0.5), num_terms=2))
        0.99
    """
    algorithm = biadam(
        step_sizes, num_terms=num_terms, adjoint_lr=adjoint_lr, decay=decay, eps=eps, projection=projection
    )
    return replace(algorithm, inner_momentum=STORM(), outer_momentum=STORM())


@saved
@dataclass(frozen=True)
class AcceleratedState(State):
    """State of `AccBo`.

    Args:
        y, y_before: the last two iterates of Nesterov's method, of which ω is the moving average.
    """

    y: Tree
    y_before: Tree


@dataclass(frozen=True, kw_only=True)
class AccBo(Algorithm[AcceleratedState]):
    """λ by d; one accelerated step of y, and ω ← (1 - average) ω + average y; d by STORM."""

    estimator: Solved
    gamma: float = 0.9
    average: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self.gamma, "gamma", "AccBo")
        positive(self.average, "average", "AccBo")

    @property
    def batches(self) -> BatchSpec:
        return BatchSpec(hvp=self.estimator.hvp_batches(1))

    @property
    def capturable(self) -> bool:
        return super().capturable and self.estimator.capturable

    def start(self, state: State, step: StepContext) -> AcceleratedState:
        d = dense(self.estimator.gradient(step, Position(state.point, {})))
        y = {name: t.clone() for name, t in state.omega.value.items()}
        return AcceleratedState(0, state.lam, state.omega, d, state.measured, y, y)

    def move(self, state: AcceleratedState, step: StepContext) -> AcceleratedState:
        rates, updates = step.rates, step.updates
        old = self.keep(Position(state.point, {}))
        lam = updates.outer(state.lam, state.direction, rates.outer_lr)
        ahead = axpy(self.gamma, sub(state.y, state.y_before), state.y)
        g = step.inner_at(Point(lam.value, ahead), step.batches.inner_grad[0]).grad_omega
        y = axpy(-updates.inner.step_size(rates.inner_lr), g, ahead)
        omega = updates.inner.set(state.omega, axpy(self.average, y, scale(1 - self.average, state.omega.value)))
        new = Position(Point(lam.value, omega.value), {})
        d_new, d_old = self.estimator.gradient(step, new), self.estimator.gradient(step, old)
        d = STORM()(d_new, d_old, state.direction, rates.new_grad_weight)
        return evolve(state, lam=lam, omega=omega, direction=d, y=y, y_before=state.y)


@register("accbo")
def accbo(
    step_sizes: Sizes,
    *,
    gamma: float = 0.9,
    average: float = 0.5,
    num_terms: int = 10,
    adjoint_lr: float = 0.1,
    projection: Projection | None = None,
) -> AccBo:
    """Return AccBO: Nesterov's steps of ω, and λ by steps of fixed length.

    ω is the moving average of Nesterov's iterates. λ moves along the normalised STORM direction.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        gamma: how far Nesterov's method looks ahead.
        average: weight of the new iterate in ω.
        num_terms: K, terms of the Neumann series.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `AccBo`.

    Examples:
        >>> minimize(fsla.algorithms.accbo(constant(0.02, 0.3, 0.0, 0.5), gamma=0.5, num_terms=2))
        0.98
    """
    return AccBo(
        step_sizes=step_sizes,
        estimator=Solved(RandomNeumann(num_terms, adjoint_lr)),
        gamma=gamma,
        average=average,
        outer_update=Normalized(),
        projection=projection,
    )
