"""The paper's baselines: BP, NS and CG, which compute the hypergradient afresh at every hyper-iteration.

T inner steps: by default warm for T = 1 and restarted from the first ω for T > 1, as in section 6.2. All take the same
direction as FSLA, STORM by default, so that what differs is the estimator alone.
"""

from __future__ import annotations

from typing import Literal

from fsla._checks import whole_number
from fsla.algorithms._orders import Alternating
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import AUTOMATIC, Sizes
from fsla.hypergradients._estimators import HypergradientEstimator, ReverseUnroll, Solved
from fsla.hypergradients._linear_solvers import ConjugateGradient, Neumann
from fsla.steps._momentum import by_name
from fsla.steps._updates import Projection

MomentumName = Literal["storm", "average", "none"]


@register("bp")
def bp(
    step_sizes: Sizes,
    *,
    inner_steps: int = 1,
    unroll_length: int | None = None,
    restart: bool | None = None,
    momentum: MomentumName = "storm",
    projection: Projection | None = None,
) -> Alternating:
    """Return BP: differentiation in reverse through the T inner steps.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        inner_steps: T, moves of ω in a step.
        unroll_length: how many of the last inner steps are differentiated; None for all.
        restart: whether ω restarts from its first value in every step. By default it does if `inner_steps` > 1.
        momentum: of λ's direction: "storm", "average" or "none".
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.bp(constant(0.2, 0.5, 0.0), inner_steps=5, momentum="none"))
        1.03
    """
    return _baseline(ReverseUnroll(unroll_length), step_sizes, inner_steps, restart, momentum, projection)


@register("ns")
def ns(
    step_sizes: Sizes,
    *,
    inner_steps: int = 1,
    num_terms: int = 10,
    adjoint_lr: float = 0.1,
    restart: bool | None = None,
    momentum: MomentumName = "storm",
    projection: Projection | None = None,
) -> Alternating:
    """Return NS: v by K terms of the Neumann series, for each hypergradient anew.

    A hypergradient costs K - 1 HVPs.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        inner_steps: T, moves of ω in a step.
        num_terms: K, terms of the Neumann series.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        restart: whether ω restarts from its first value in every step. By default it does if `inner_steps` > 1.
        momentum: of λ's direction: "storm", "average" or "none".
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.ns(constant(0.2, 0.5, 0.0), num_terms=5, adjoint_lr=0.5, momentum="none"))
        1.0
    """
    return _baseline(Solved(Neumann(num_terms, adjoint_lr)), step_sizes, inner_steps, restart, momentum, projection)


@register("cg")
def cg(
    step_sizes: Sizes = AUTOMATIC,
    *,
    inner_steps: int = 1,
    hvp_steps: int = 10,
    restart: bool | None = None,
    momentum: MomentumName = "storm",
    projection: Projection | None = None,
) -> Alternating:
    """Return CG: v by conjugate gradients from zero, for each hypergradient anew.

    Args:
        step_sizes: step sizes of λ, ω and v: automatic by default, or a schedule.
        inner_steps: T, moves of ω in a step.
        hvp_steps: Q, products of H in a step.
        restart: whether ω restarts from its first value in every step. By default it does if `inner_steps` > 1.
        momentum: of λ's direction: "storm", "average" or "none".
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.cg(constant(0.2, 0.5, 0.0), hvp_steps=1, momentum="none"))
        1.0
    """
    return _baseline(Solved(ConjugateGradient(hvp_steps)), step_sizes, inner_steps, restart, momentum, projection)


def _baseline(
    estimator: HypergradientEstimator,
    step_sizes: Sizes,
    inner_steps: int,
    restart: bool | None,
    momentum: str,
    projection: Projection | None,
) -> Alternating:
    whole_number(inner_steps, "inner_steps", "the algorithm")
    return Alternating(
        step_sizes=step_sizes,
        estimator=estimator,
        momentum=by_name(momentum),
        inner_steps=inner_steps,
        restart=inner_steps > 1 if restart is None else restart,
        projection=projection,
    )
