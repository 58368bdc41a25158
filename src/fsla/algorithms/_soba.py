"""SOBA and its relatives: ω, v and λ move at once, from one pass.

    SOBA        Dagréou et al. 2022                     plain
    MA-SOBA     Chen, Xiao & Balasubramanian 2023       λ by a moving average of its directions
    SRBA        Dagréou et al. 2023                     SPIDER on all three
    FdeHBO      Yang, Xiao & Ji 2023                    STORM on all three, products by differences, v in a ball
    HJFBiO      Huang 2024                              plain, products by differences, v in a ball
    one step    Liu, Simonyan & Yang 2019 (DARTS)       no v: ∂_ω F itself, scaled, in its place

SABA, which remembers the derivatives on each batch, is in `_saba.py`.
"""

from __future__ import annotations

from dataclasses import replace

from fsla.algorithms._orders import Simultaneous
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import AUTOMATIC, Sizes, bounded
from fsla.hypergradients._estimators import OneStep
from fsla.steps._automatic import Automatic
from fsla.steps._momentum import EMA, SPIDER, STORM
from fsla.steps._schedules import PeriodicRefresh, Scheduled
from fsla.steps._updates import Projection


@register("soba")
def soba(step_sizes: Sizes = AUTOMATIC, *, projection: Projection | None = None) -> Simultaneous:
    """Return SOBA: ω, v and λ move at once, from one point.

    Cost of a step: 1 ∂_ω G, 1 ∂_ω F, 1 ∂_λ F, and an HVP and a mixed product in one pass.

    Args:
        step_sizes: step sizes of λ, ω and v: automatic by default, or a schedule.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.soba(constant(0.2, 0.5, 0.5)))
        1.0
    """
    return Simultaneous(step_sizes=step_sizes, projection=projection)


@register("ma_soba")
def ma_soba(step_sizes: Sizes = AUTOMATIC, *, projection: Projection | None = None) -> Simultaneous:
    """Return MA-SOBA: SOBA whose λ moves along an average of its directions.

    It costs what SOBA costs. It suits noisy gradients where STORM's independent batches are not available.

    Args:
        step_sizes: step sizes of λ, ω and v: automatic by default, or a schedule.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.ma_soba(constant(0.2, 0.5, 0.5, 0.5)))
        0.92
    """
    return Simultaneous(step_sizes=step_sizes, outer_momentum=EMA(), delayed_outer=True, projection=projection)


@register("srba")
def srba(step_sizes: Scheduled, *, refresh_period: int = 10, projection: Projection | None = None) -> Simultaneous:
    """Return SRBA: SOBA with SPIDER on ω, v and λ.

    Every `refresh_period`-th step takes its directions anew, on a large batch. The steps between correct them.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        refresh_period: steps between two large batches.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.srba(constant(0.2, 0.5, 0.5), refresh_period=5))
        1.0
    """
    spider = SPIDER()
    return Simultaneous(
        step_sizes=PeriodicRefresh(step_sizes, refresh_period),
        inner_momentum=spider,
        adjoint_momentum=spider,
        outer_momentum=spider,
        projection=projection,
    )


@register("fdehbo")
def fdehbo(step_sizes: Sizes, *, max_adjoint_norm: float, projection: Projection | None = None) -> Simultaneous:
    """Return FdeHBO: STORM on ω, v and λ, without second derivatives.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        max_adjoint_norm: bound on ‖v‖; at least ‖∂_ω F‖ / μ.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.fdehbo(constant(0.2, 0.5, 0.5), max_adjoint_norm=10.0))
        1.0
    """
    storm = STORM()
    return replace(
        hjfbio(step_sizes, max_adjoint_norm=max_adjoint_norm, projection=projection),
        inner_momentum=storm,
        adjoint_momentum=storm,
        outer_momentum=storm,
    )


@register("hjfbio")
def hjfbio(step_sizes: Sizes, *, max_adjoint_norm: float, projection: Projection | None = None) -> Simultaneous:
    """Return HJFBiO: SOBA with products by differences and a bound on ‖v‖.

    Give it full batches.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        max_adjoint_norm: bound on ‖v‖.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.hjfbio(constant(0.2, 0.5, 0.5), max_adjoint_norm=10.0))
        1.0
    """
    return Simultaneous(
        step_sizes=step_sizes,
        adjoint_update=bounded(max_adjoint_norm),
        projection=projection,
        finite_differences=True,
    )


@register("one_step")
def one_step(step_sizes: Sizes | None = None, *, projection: Projection | None = None) -> Simultaneous:
    """Return the baseline without an adjoint: β ∂_ω F takes the place of v.

    Cost of a step: 1 of each gradient, 1 mixed product.

    Args:
        step_sizes: step sizes of λ and ω, and β: automatic by default, or a schedule.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Simultaneous`.

    Examples:
        >>> minimize(fsla.algorithms.one_step(constant(0.2, 0.5, 0.5)))
        1.0
    """
    return Simultaneous(
        step_sizes=Automatic(wait=False) if step_sizes is None else step_sizes,
        estimator=OneStep(),
        projection=projection,
    )
