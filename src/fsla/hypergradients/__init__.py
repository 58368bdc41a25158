"""Estimates of the hypergradient, the linear solvers behind them, and checks against the exact one."""

from fsla.hypergradients._check import (
    ConvergenceWarning,
    HypergradientCheck,
    HypergradientResult,
    check_hypergradient,
    hypergradient,
)
from fsla.hypergradients._estimators import (
    Exact,
    ForwardSensitivity,
    ForwardUnroll,
    HypergradientEstimator,
    OneStep,
    ReverseUnroll,
    Solved,
    Tracked,
    WarmStartCG,
)
from fsla.hypergradients._linear_solvers import (
    ConjugateGradient,
    Identity,
    Neumann,
    RandomNeumann,
    largest_eigenvalue,
)

__all__ = [
    "ConjugateGradient",
    "ConvergenceWarning",
    "Exact",
    "ForwardSensitivity",
    "ForwardUnroll",
    "HypergradientCheck",
    "HypergradientEstimator",
    "HypergradientResult",
    "Identity",
    "Neumann",
    "OneStep",
    "RandomNeumann",
    "ReverseUnroll",
    "Solved",
    "Tracked",
    "WarmStartCG",
    "check_hypergradient",
    "hypergradient",
    "largest_eigenvalue",
]
