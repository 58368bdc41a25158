"""SOBA and its relatives: ω, v and λ move at once, from one pass.

    SOBA        Dagréou et al. 2022                     plain
    MA-SOBA     Chen, Xiao & Balasubramanian 2023       λ by a moving average of its directions
    SRBA        Dagréou et al. 2023                     SPIDER on all three
    FdeHBO      Yang, Xiao & Ji 2023                    STORM on all three, products by differences, v in a ball
    HJFBiO      Huang 2024                              plain, products by differences, v in a ball
    one step    Liu, Simonyan & Yang 2019 (DARTS)       no v: ∂_ω F itself, scaled, in its place

SABA, which remembers what each batch said, has a file of its own.
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
    """SOBA. Per step: 1 ∂_ω G, 1 ∂_ω F, 1 ∂_λ F, and an HVP and a mixed product in one pass."""
    return Simultaneous(step_sizes=step_sizes, projection=projection)


@register("ma_soba")
def ma_soba(step_sizes: Sizes = AUTOMATIC, *, projection: Projection | None = None) -> Simultaneous:
    """MA-SOBA: the cost of SOBA. A good choice where STORM's independent batches are not available."""
    return Simultaneous(step_sizes=step_sizes, outer_momentum=EMA(), delayed_outer=True, projection=projection)


@register("srba")
def srba(step_sizes: Scheduled, *, refresh_period: int = 10, projection: Projection | None = None) -> Simultaneous:
    """SRBA: directions are taken on a large batch at every `refresh_period`-th step, and corrected between."""
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
    """FdeHBO: no second derivative is taken; ‖v‖ stays under a bound, which should be at least ‖∂_ω F‖ / μ."""
    storm = STORM()
    return replace(
        hjfbio(step_sizes, max_adjoint_norm=max_adjoint_norm, projection=projection),
        inner_momentum=storm,
        adjoint_momentum=storm,
        outer_momentum=storm,
    )


@register("hjfbio")
def hjfbio(step_sizes: Sizes, *, max_adjoint_norm: float, projection: Projection | None = None) -> Simultaneous:
    """HJFBiO: SOBA with products by differences and ‖v‖ under a bound. Give it full batches."""
    return Simultaneous(
        step_sizes=step_sizes,
        adjoint_update=bounded(max_adjoint_norm),
        projection=projection,
        finite_differences=True,
    )


@register("one_step")
def one_step(step_sizes: Sizes | None = None, *, projection: Projection | None = None) -> Simultaneous:
    """The baseline without an adjoint: β ∂_ω F in the place of v. Per step: 1 of each gradient, 1 mixed product.

    By default the step sizes are automatic, and λ moves from the first step on, since no v is to be waited for.
    """
    return Simultaneous(
        step_sizes=Automatic(wait=False) if step_sizes is None else step_sizes,
        estimator=OneStep(),
        projection=projection,
    )
