"""SOBA (Dagréou et al. 2022) and MA-SOBA (Chen, Xiao & Balasubramanian 2023).

SOBA      λ ← λ - α D_λ                             D_λ = ∂_λ F - J v
MA-SOBA   λ ← λ - α d,   d ← (1-η) d + η D_λ        ω ← ω - τ ∂_ω G,   v ← v - β (H v - ∂_ω F)
"""

from __future__ import annotations

from collections.abc import Callable

from fsla.direction import Average
from fsla.jacobi import Jacobi
from fsla.rates import Rates
from fsla.update import Projection, onto


def soba(rates: Callable[[int], Rates], *, project: Projection | None = None) -> Jacobi:
    """SOBA. Per step: 1 ∂_ω G, 1 ∂_ω F, 1 ∂_λ F, and an HVP and a cross product in one pass."""
    return Jacobi(rates, lam_update=onto(project))


def ma_soba(rates: Callable[[int], Rates], *, project: Projection | None = None) -> Jacobi:
    """MA-SOBA: the cost of SOBA. A good choice where STORM's independent batches are not available."""
    return Jacobi(rates, lam_filter=Average(), lam_update=onto(project), delayed=True)
