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

from fsla.algorithms._alternating import Solver
from fsla.algorithms._simultaneous import Jacobi
from fsla.hypergradients._estimators import Implicit
from fsla.hypergradients._inner import Nesterov
from fsla.hypergradients._linear_solvers import Neumann, RandomNeumann
from fsla.steps._momentum import EMA, STORM, Direction
from fsla.steps._schedules import Rates
from fsla.steps._updates import Adaptive, Normalised, Projection, onto

Schedule = Callable[[int], Rates]


def sustain(rates: Schedule, *, Q: int = 10, step: float = 0.1, project: Projection | None = None) -> Jacobi:
    """SUSTAIN. Per step: 2 ∂_ω G, 2 of each derivative of F, at most 2 (Q - 1) HVPs, 2 cross products."""
    return _both(rates, STORM(), Implicit(RandomNeumann(Q, step)), project)


def mrbo(rates: Schedule, *, Q: int = 10, step: float = 0.1, project: Projection | None = None) -> Jacobi:
    """MRBO: SUSTAIN with a Neumann series of Q products at each of the two points."""
    return _both(rates, STORM(), Implicit(Neumann(Q + 1, step)), project)


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
    return _adaptive(rates, EMA(), Implicit(RandomNeumann(Q, step)), decay, floor, project)


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
    return _adaptive(rates, STORM(), Implicit(RandomNeumann(Q, step)), decay, floor, project)


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
        STORM(),
        outer=onto(project, Normalised()),
    )
