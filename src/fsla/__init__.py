"""Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse, one product a step.

problem = fsla.Problem(inner_loss, outer_loss)
at = fsla.Point(lam, omega)
result = fsla.hypergradient(problem, at, inner_batch, outer_batch, method="cg")
algorithm = fsla.algorithms.fsla(fsla.steps.inverse_sqrt(delta=1.0, c_tau=1.0, c_beta=1.0, c_eta=0.9))
state = algorithm.init(problem, at, batches)
state = algorithm.step(problem, state, batches)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsla import algorithms, contrib, distributed, hypergradients, problems, steps, train
from fsla._extras import install_hint
from fsla._version import __version__ as __version__
from fsla.algorithms import Algorithm, Alternating, Simultaneous, State
from fsla.contrib import LazyRowOptimizer
from fsla.hypergradients import (
    ConvergenceWarning,
    HypergradientCheck,
    HypergradientResult,
    check_hypergradient,
    hypergradient,
)
from fsla.problems import (
    Batch,
    BatchSpec,
    CountedProblem,
    DampedProblem,
    FiniteDifferenceProblem,
    FiniteDifferenceWarning,
    FixedPointProblem,
    GaussNewtonProblem,
    MicroBatches,
    OracleCounts,
    Point,
    Problem,
    StepBatches,
    WeightedLossProblem,
    make_functional,
)
from fsla.train import (
    FSLA,
    MASOBA,
    SOBA,
    BilevelOptimizer,
    CheckpointError,
    DivergenceError,
    FitResult,
    GroupWeights,
    ProductWeights,
    RollbackWarning,
    SampleWeights,
    StepInfo,
    fit,
)

if TYPE_CHECKING:
    from fsla import data
    from fsla.data import DataWeigher, HyperCleaner


__all__ = [
    "FSLA",
    "MASOBA",
    "SOBA",
    "Algorithm",
    "Alternating",
    "Batch",
    "BatchSpec",
    "BilevelOptimizer",
    "CheckpointError",
    "ConvergenceWarning",
    "CountedProblem",
    "DampedProblem",
    "DataWeigher",
    "DivergenceError",
    "FiniteDifferenceProblem",
    "FiniteDifferenceWarning",
    "FitResult",
    "FixedPointProblem",
    "GaussNewtonProblem",
    "GroupWeights",
    "HyperCleaner",
    "HypergradientCheck",
    "HypergradientResult",
    "LazyRowOptimizer",
    "MicroBatches",
    "OracleCounts",
    "Point",
    "Problem",
    "ProductWeights",
    "RollbackWarning",
    "SampleWeights",
    "Simultaneous",
    "State",
    "StepBatches",
    "StepInfo",
    "WeightedLossProblem",
    "algorithms",
    "check_hypergradient",
    "contrib",
    "data",
    "distributed",
    "fit",
    "hypergradient",
    "hypergradients",
    "make_functional",
    "problems",
    "steps",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load `fsla.data`, and scikit-learn with it, when it is first used."""
    if name not in ("DataWeigher", "HyperCleaner", "data"):
        raise AttributeError(f"module 'fsla' has no attribute {name!r}")
    try:
        data = import_module("fsla.data")
    except ModuleNotFoundError as error:
        raise ImportError(f"Cannot load fsla.{name}. {install_hint(error)}") from error
    return data if name == "data" else getattr(data, name)


def __dir__() -> list[str]:
    """List the names that are not loaded yet, too."""
    return sorted({*globals(), *__all__})
