"""Implicit differentiation: T steps on ω, then v afresh (or improved) at the new ω, then λ.

BSA                Ghadimi & Wang 2018           a growing number of steps, a random Neumann series
TTSA               Hong et al. 2020              one step, a random Neumann series, two time scales
AID-BiO            Ji, Yang & Liang 2021         conjugate gradients from the last v
stocBiO            Ji, Yang & Liang 2021         a Neumann series, with a batch for each factor
SBiO-BreD          Huang et al. 2021             the same, with a Bregman step of λ
implicit Neumann   Lorraine et al. 2020          a Neumann series on one batch, any optimiser for λ
T1-T2              Luketina et al. 2016          the identity in the place of the inverse
AID-FP, AID-CG     Grazzi et al. 2020            a fixed-point iteration or conjugate gradients, from zero
"""

from __future__ import annotations

from collections.abc import Callable

from fsla.algorithms._alternating import Solver
from fsla.algorithms._around import Growing
from fsla.hypergradients._estimators import Estimator, Implicit, Warm
from fsla.hypergradients._inner import Descent
from fsla.hypergradients._linear_solvers import ConjugateGradient, Identity, Neumann, RandomNeumann
from fsla.steps._momentum import NoMomentum
from fsla.steps._schedules import Rates
from fsla.steps._updates import Mirror, Projection, Update, onto

Schedule = Callable[[int], Rates]


def _solver(
    estimator: Estimator, rates: Schedule, T: int, project: Projection | None, outer: Update | None = None
) -> Solver:
    return Solver(estimator, rates, Descent(T), NoMomentum(), v_at="new", outer=onto(project, outer), lam_last=True)


def bsa(
    rates: Schedule,
    *,
    T: int = 1,
    growth: float = 0.5,
    Q: int = 10,
    step: float = 0.1,
    project: Projection | None = None,
) -> Growing:
    """BSA: ⌈T (k+1)^growth⌉ steps on ω; one of the first Q terms of the series, drawn by the sample's seed."""
    return Growing(
        Implicit(RandomNeumann(Q, step)),
        rates,
        Descent(T),
        NoMomentum(),
        v_at="new",
        outer=onto(project),
        lam_last=True,
        growth=growth,
    )


def ttsa(rates: Schedule, *, Q: int = 10, step: float = 0.1, project: Projection | None = None) -> Solver:
    """TTSA: one step on ω. Its rates have two powers, such as Schedule(..., power=(3/5, 2/5, 0, 0))."""
    return _solver(Implicit(RandomNeumann(Q, step)), rates, 1, project)


def aid_bio(rates: Schedule, *, T: int = 10, Q: int = 10, project: Projection | None = None) -> Solver:
    """AID-BiO: T steps on ω; v by Q products of conjugate gradients from the last v, one of them for the residual."""
    return _solver(Warm(Q), rates, T, project)


def stocbio(
    rates: Schedule, *, T: int = 10, Q: int = 10, step: float = 0.1, project: Projection | None = None
) -> Solver:
    """stocBiO: T steps on ω; Q products of a Neumann series, each of its own batch where `Batches` are given."""
    return _solver(Implicit(Neumann(Q + 1, step)), rates, T, project)


def sbio_bred(
    rates: Schedule,
    *,
    T: int = 10,
    Q: int = 10,
    step: float = 0.1,
    outer: Update | None = None,
    project: Projection | None = None,
) -> Solver:
    """SBiO-BreD: stocBiO with a Bregman step of λ: `Mirror()` unless told otherwise, for which λ must be positive."""
    return _solver(Implicit(Neumann(Q + 1, step)), rates, T, project, Mirror() if outer is None else outer)


def implicit_neumann(
    rates: Schedule,
    *,
    T: int = 1,
    Q: int = 10,
    step: float = 0.1,
    outer: Update | None = None,
    project: Projection | None = None,
) -> Solver:
    """Implicit differentiation with Q products of a Neumann series, and any update of λ, such as `update.Adam()`."""
    return _solver(Implicit(Neumann(Q + 1, step)), rates, T, project, outer)


def t1_t2(
    rates: Schedule, *, T: int = 1, step: float = 0.1, outer: Update | None = None, project: Projection | None = None
) -> Solver:
    """T1-T2: v = step · ∂_ω F. Cheap, and biased unless H is near a multiple of the identity."""
    return _solver(Implicit(Identity(step)), rates, T, project, outer)


def aid_fp(
    rates: Schedule, *, T: int = 10, K: int = 10, step: float = 0.1, project: Projection | None = None
) -> Solver:
    """AID-FP: v ← v + step (∂_ω F - H v), K times from zero. On `fsla.FixedPoint` with step = 1 for any map."""
    return _solver(Implicit(Neumann(K, step)), rates, T, project)


def aid_cg(rates: Schedule, *, T: int = 10, K: int = 10, project: Projection | None = None) -> Solver:
    """AID-CG: K conjugate-gradient steps from zero."""
    return _solver(Implicit(ConjugateGradient(K)), rates, T, project)
