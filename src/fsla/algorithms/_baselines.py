"""The paper's baselines: BP, NS and CG, which compute the hypergradient afresh at every hyper-iteration.

T inner steps: by default warm for T = 1 and restarted from the first ω for T > 1, as in section 6.2. K hypergradient
steps. All take the same direction as FSLA, STORM by default, so that what differs is the estimator alone.
"""

from __future__ import annotations

from collections.abc import Callable

from fsla.algorithms._alternating import Solver
from fsla.hypergradients._estimators import ConjugateGradient, Estimator, Implicit, Neumann, Unrolled
from fsla.hypergradients._inner import Descent
from fsla.steps._momentum import by_name
from fsla.steps._schedules import Rates
from fsla.steps._updates import Projection, onto

Schedule = Callable[[int], Rates]


def bp(
    rates: Schedule,
    *,
    T: int = 1,
    truncate: int | None = None,
    restart: bool | None = None,
    momentum: str = "storm",
    project: Projection | None = None,
) -> Solver:
    """Unrolled differentiation through the T inner steps, or through the last `truncate` of them."""
    return _baseline(Unrolled(truncate), rates, T, restart, momentum, project)


def ns(
    rates: Schedule,
    *,
    T: int = 1,
    K: int = 10,
    beta: float = 0.1,
    restart: bool | None = None,
    momentum: str = "storm",
    project: Projection | None = None,
) -> Solver:
    """K terms of the Neumann series with step `beta` (not that of `rates`): K - 1 HVPs for each hypergradient."""
    return _baseline(Implicit(Neumann(K, beta)), rates, T, restart, momentum, project)


def cg(
    rates: Schedule,
    *,
    T: int = 1,
    K: int = 10,
    restart: bool | None = None,
    momentum: str = "storm",
    project: Projection | None = None,
) -> Solver:
    """K conjugate-gradient steps: K HVPs for each hypergradient."""
    return _baseline(Implicit(ConjugateGradient(K)), rates, T, restart, momentum, project)


def _baseline(
    estimator: Estimator, rates: Schedule, T: int, restart: bool | None, momentum: str, project: Projection | None
) -> Solver:
    inner = Descent(T, restart=T > 1 if restart is None else restart, trail=isinstance(estimator, Unrolled))
    return Solver(estimator, rates, inner, by_name(momentum), outer=onto(project))
