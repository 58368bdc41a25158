"""SOBA and its relatives: ω, v and λ move at once, from one pass.

    SOBA       Dagréou et al. 2022                        plain
    MA-SOBA    Chen, Xiao & Balasubramanian 2023          λ by a moving average of its directions
    SRBA       Dagréou et al. 2023                        SPIDER on all three
    FdeHBO     Yang, Xiao & Ji 2023                       STORM on all three, products by differences, v in a ball
    HJFBiO     Huang 2024                                 plain, products by differences, v in a ball

SOBA      λ ← λ - α D_λ                             D_λ = ∂_λ F - J v
MA-SOBA   λ ← λ - α d,   d ← (1-η) d + η D_λ        ω ← ω - τ ∂_ω G,   v ← v - β (H v - ∂_ω F)

SABA, which remembers what each batch said, has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from fsla.algorithms._around import ByDifferences
from fsla.algorithms._simultaneous import Jacobi
from fsla.steps._momentum import EMA, SPIDER, STORM
from fsla.steps._projections import Ball
from fsla.steps._schedules import Periodic, Rates
from fsla.steps._updates import Projected, Projection, onto


def soba(rates: Callable[[int], Rates], *, project: Projection | None = None) -> Jacobi:
    """SOBA. Per step: 1 ∂_ω G, 1 ∂_ω F, 1 ∂_λ F, and an HVP and a cross product in one pass."""
    return Jacobi(rates, lam_update=onto(project))


def ma_soba(rates: Callable[[int], Rates], *, project: Projection | None = None) -> Jacobi:
    """MA-SOBA: the cost of SOBA. A good choice where STORM's independent batches are not available."""
    return Jacobi(rates, lam_filter=EMA(), lam_update=onto(project), delayed=True)


def srba(rates: Callable[[int], Rates], *, period: int = 10, project: Projection | None = None) -> Jacobi:
    """SRBA: directions are taken on a large batch at every `period`-th step, and corrected by differences between."""
    spider = SPIDER()
    return Jacobi(
        Periodic(rates, period),
        omega_filter=spider,
        v_filter=spider,
        lam_filter=spider,
        lam_update=onto(project),
    )


def fdehbo(rates: Callable[[int], Rates], *, radius: float, project: Projection | None = None) -> ByDifferences:
    """FdeHBO: no second derivative is taken; ‖v‖ ≤ radius, which should be at least ‖∂_ω F‖ / μ."""
    storm = STORM()
    return ByDifferences(
        Jacobi(
            rates,
            omega_filter=storm,
            v_filter=storm,
            lam_filter=storm,
            v_update=Projected(Ball(radius)),
            lam_update=onto(project),
        )
    )


def hjfbio(rates: Callable[[int], Rates], *, radius: float, project: Projection | None = None) -> ByDifferences:
    """HJFBiO: SOBA with products by differences and ‖v‖ ≤ radius. Give it full batches."""
    return ByDifferences(Jacobi(rates, v_update=Projected(Ball(radius)), lam_update=onto(project)))
