"""One loop: v is carried from step to step, and λ, ω and v move in turn.

FSLA           Li, Gu & Huang 2022           one step each of λ, ω and v, momentum by STORM
single loop    the same without momentum, v at the new ω
AmIGO          Arbel & Mairal 2022           T steps of ω, Q of v
SLIP           Hao, Gong & Liu 2024          λ by steps of fixed length along an average
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fsla._checks import positive
from fsla.algorithms._orders import Alternating
from fsla.algorithms._registry import register
from fsla.hypergradients._estimators import HypergradientEstimator, Tracked
from fsla.steps._automatic import Automatic
from fsla.steps._momentum import EMA, NoMomentum, by_name
from fsla.steps._projections import Ball
from fsla.steps._schedules import StepSizes
from fsla.steps._updates import GradientDescent, Normalized, Projection, Update, projected

Sizes = StepSizes[Any]
AUTOMATIC = Automatic()


@register("fsla")
def fsla(
    step_sizes: Sizes = AUTOMATIC,
    *,
    momentum: Literal["storm", "average", "none"] = "storm",
    adjoint_at: Literal["old_params", "new_params"] = "old_params",
    max_adjoint_norm: float | None = None,
    projection: Projection | None = None,
) -> Alternating:
    """Return FSLA, Algorithm 1 of the paper: one step each of λ, ω and v.

    Cost of a step: 2 ∂_ω G, 1 ∂_ω F, 1 HVP, 2 each of ∂_λ F and mixed products.

    Args:
        step_sizes: step sizes of λ, ω and v: automatic by default, or a schedule.
        momentum: of λ's direction: "storm", "average" or "none".
        adjoint_at: whether v moves at the "old_params", as in the paper, or at the "new_params".
        max_adjoint_norm: bound on ‖v‖; the proof has C_{F,ω} / μ.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.fsla(constant(0.2, 0.5, 0.5, 0.5)))
        1.0
    """
    return Alternating(
        step_sizes=step_sizes,
        momentum=by_name(momentum),
        adjoint_at=adjoint_at,
        adjoint_update=bounded(max_adjoint_norm),
        projection=projection,
    )


@register("single_loop")
def single_loop(
    step_sizes: Sizes = AUTOMATIC, *, max_adjoint_norm: float | None = None, projection: Projection | None = None
) -> Alternating:
    """Return one step each of ω, then v, then λ, without momentum.

    Args:
        step_sizes: step sizes of λ, ω and v: automatic by default, or a schedule.
        max_adjoint_norm: bound on ‖v‖.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.single_loop(constant(0.2, 0.5, 0.5)))
        1.0
    """
    return fsla(
        step_sizes,
        momentum="none",
        adjoint_at="new_params",
        max_adjoint_norm=max_adjoint_norm,
        projection=projection,
    )


@register("amigo")
def amigo(
    step_sizes: Sizes = AUTOMATIC, *, inner_steps: int = 10, hvp_steps: int = 10, projection: Projection | None = None
) -> Alternating:
    """Return AmIGO: T moves of ω and Q of v, both warm, then one of λ.

    Args:
        step_sizes: step sizes of λ, ω and v: automatic by default, or a schedule.
        inner_steps: T, moves of ω in a step.
        hvp_steps: Q, moves of v in a step.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.amigo(constant(0.2, 0.5, 0.5), inner_steps=2, hvp_steps=2))
        1.0
    """
    return after_inner(Tracked(hvp_steps), step_sizes, inner_steps, projection)


@register("slip")
def slip(step_sizes: Sizes = AUTOMATIC, *, warm_up_steps: int = 0, projection: Projection | None = None) -> Alternating:
    """Return SLIP: λ moves by a fixed length along an average of its directions.

    It is for outer losses whose curvature grows with the gradient.

    Args:
        step_sizes: step sizes of λ, ω and v: automatic by default, or a schedule.
        warm_up_steps: moves of ω before the first step.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.slip(constant(0.02, 0.5, 0.5, 0.5), warm_up_steps=5))
        0.94
    """
    algorithm = after_inner(Tracked(), step_sizes, 1, projection, Normalized())
    return replace(algorithm, momentum=EMA(), warm_up=warm_up_steps)


def bounded(max_adjoint_norm: float | None) -> Update:
    """Return the update of v, with a bound on ‖v‖ if there is one."""
    positive(max_adjoint_norm, "max_adjoint_norm", "the algorithm", optional=True)
    return projected(GradientDescent(), None if max_adjoint_norm is None else Ball(max_adjoint_norm))


def after_inner(
    estimator: HypergradientEstimator,
    step_sizes: Sizes,
    inner_steps: int,
    projection: Projection | None,
    outer_update: Update | None = None,
) -> Alternating:
    """Return T steps of ω, the estimator at the new ω, then λ."""
    return Alternating(
        step_sizes=step_sizes,
        estimator=estimator,
        momentum=NoMomentum(),
        inner_steps=inner_steps,
        adjoint_at="new_params",
        outer_last=True,
        outer_update=outer_update,
        projection=projection,
    )
