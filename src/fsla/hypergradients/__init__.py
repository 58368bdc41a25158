"""Estimates of the hypergradient, the linear solvers behind them, and checks against the exact one."""

from fsla.hypergradients._check import (
    DivergenceWarning,
    Hypergradient,
    HypergradientCheck,
    check_hypergradient,
    hypergradient,
)
from fsla.hypergradients._estimators import Carried, Estimator, Exact, Implicit, Tangent, Tracked, Unrolled, Warm
from fsla.hypergradients._inner import Descent, Nesterov
from fsla.hypergradients._linear_solvers import ConjugateGradient, Identity, Neumann, RandomNeumann
from fsla.hypergradients._linsolve import largest_eigenvalue

__all__ = [
    "Carried",
    "ConjugateGradient",
    "Descent",
    "DivergenceWarning",
    "Estimator",
    "Exact",
    "Hypergradient",
    "HypergradientCheck",
    "Identity",
    "Implicit",
    "Nesterov",
    "Neumann",
    "RandomNeumann",
    "Tangent",
    "Tracked",
    "Unrolled",
    "Warm",
    "check_hypergradient",
    "hypergradient",
    "largest_eigenvalue",
]
