"""Estimates of the hypergradient, the linear solvers behind them, and checks against the exact one.

The examples of this room go on from this problem. At λ = 0 its hypergradient is -2 in both coordinates:

    >>> import torch
    >>> import fsla
    >>> h = torch.tensor([1.0, 4.0])
    >>> problem = fsla.Problem(
    ...     inner_loss=lambda lam, omega, batch: (h * (omega["w"] - lam["x"]) ** 2).sum() / 2,
    ...     outer_loss=lambda lam, omega, batch: ((omega["w"] - 2) ** 2).sum() / 2,
    ... )
    >>> at = fsla.Point({"x": torch.zeros(2)}, {"w": torch.ones(2)})
    >>> batches = fsla.StepBatches.shared(None, None, seed=0)
    >>> def estimate(estimator, **options):  # after 40 steps of ω at a fixed λ
    ...     sizes = fsla.steps.constant(outer_lr=0.0, inner_lr=0.2, adjoint_lr=0.2)
    ...     algorithm = fsla.Alternating(step_sizes=sizes, estimator=estimator, **options)
    ...     state = algorithm.init(problem, at, batches)
    ...     for _ in range(40):
    ...         state = algorithm.step(problem, state, batches)
    ...     return state.direction["x"].round(decimals=2)
    >>> estimate(fsla.hypergradients.Tracked())
    tensor([-2., -2.])
"""

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
