"""The paper's baselines: BP, NS and CG, which compute the hypergradient afresh at every hyper-iteration.

T inner steps: by default warm for T = 1 and restarted from the first ω for T > 1, as in section 6.2. All take the same
direction as FSLA, STORM by default, so that what differs is the estimator alone.
"""

from __future__ import annotations

from typing import Literal

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
    """Unrolled differentiation through the T inner steps, or through the last `unroll_length` of them."""
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
    """K terms of the Neumann series with step `adjoint_lr`: K - 1 HVPs for each hypergradient."""
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
    """K conjugate-gradient steps: K HVPs for each hypergradient."""
    return _baseline(Solved(ConjugateGradient(hvp_steps)), step_sizes, inner_steps, restart, momentum, projection)


def _baseline(
    estimator: HypergradientEstimator,
    step_sizes: Sizes,
    inner_steps: int,
    restart: bool | None,
    momentum: str,
    projection: Projection | None,
) -> Alternating:
    return Alternating(
        step_sizes=step_sizes,
        estimator=estimator,
        momentum=by_name(momentum),
        inner_steps=inner_steps,
        restart=inner_steps > 1 if restart is None else restart,
        projection=projection,
    )
