"""Momentum or variance reduction on ω and λ, with v afresh at every point it is needed at.

    SUSTAIN       Khanduri et al. 2021       STORM on ω and λ, a random Neumann series
    MRBO          Yang, Ji & Liang 2021      STORM on ω and λ, a Neumann series
    BiAdam        Huang, Li & Huang 2021     averages, and steps scaled by each coordinate of λ and by ‖D_ω‖
    VR-BiAdam     Huang, Li & Huang 2021     STORM in the place of averages
    AccBO         Gong, Hao & Liu 2024       Nesterov's steps on ω, STORM and steps of fixed length on λ

All read five batches; SUSTAIN, both BiAdams and AccBO need samples with a seed, which draws the length of the series.
One η serves all filters of a step.
"""

from __future__ import annotations

from collections.abc import Callable

from fsla.adjoints import Neumann, RandomNeumann
from fsla.direction import Average, Direction, Storm
from fsla.estimators import Implicit
from fsla.inner import Nesterov
from fsla.jacobi import Jacobi
from fsla.rates import Rates
from fsla.solver import Solver
from fsla.update import Adaptive, Normalised, Projection, onto

Schedule = Callable[[int], Rates]


def sustain(rates: Schedule, *, Q: int = 10, step: float = 0.1, project: Projection | None = None) -> Jacobi:
    """SUSTAIN. Per step: 2 ∂_ω G, 2 of each derivative of F, at most 2 (Q - 1) HVPs, 2 cross products."""
    return _both(rates, Storm(), Implicit(RandomNeumann(Q, step)), project)


def mrbo(rates: Schedule, *, Q: int = 10, step: float = 0.1, project: Projection | None = None) -> Jacobi:
    """MRBO: SUSTAIN with a Neumann series of Q products at each of the two points."""
    return _both(rates, Storm(), Implicit(Neumann(Q + 1, step)), project)


def _both(rates: Schedule, momentum: Direction, estimator: Implicit, project: Projection | None) -> Jacobi:
    return Jacobi(rates, omega_filter=momentum, lam_filter=momentum, lam_update=onto(project), estimator=estimator)


def biadam(
    rates: Schedule,
    *,
    Q: int = 10,
    step: float = 0.1,
    decay: float = 0.9,
    floor: float = 1e-3,
    project: Projection | None = None,
) -> Jacobi:
    """BiAdam: one of the first Q terms of the series, averages of both directions, adaptive steps."""
    return _adaptive(rates, Average(), Implicit(RandomNeumann(Q, step)), decay, floor, project)


def vr_biadam(
    rates: Schedule,
    *,
    Q: int = 10,
    step: float = 0.1,
    decay: float = 0.9,
    floor: float = 1e-3,
    project: Projection | None = None,
) -> Jacobi:
    """VR-BiAdam: BiAdam with STORM, at twice the cost."""
    return _adaptive(rates, Storm(), Implicit(RandomNeumann(Q, step)), decay, floor, project)


def _adaptive(
    rates: Schedule,
    momentum: Direction,
    estimator: Implicit,
    decay: float,
    floor: float,
    project: Projection | None,
) -> Jacobi:
    return Jacobi(
        rates,
        omega_filter=momentum,
        lam_filter=momentum,
        omega_update=Adaptive(decay, floor, whole=True),
        lam_update=onto(project, Adaptive(decay, floor)),
        estimator=estimator,
    )


def accbo(
    rates: Schedule,
    *,
    gamma: float = 0.9,
    average: float = 0.5,
    Q: int = 10,
    step: float = 0.1,
    project: Projection | None = None,
) -> Solver:
    """AccBO: ω is the moving average of Nesterov's iterates; λ moves by α along the normalised STORM direction."""
    return Solver(
        Implicit(RandomNeumann(Q, step)),
        rates,
        Nesterov(gamma, average),
        Storm(),
        outer=onto(project, Normalised()),
    )
