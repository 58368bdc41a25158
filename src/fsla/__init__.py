"""Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse, one product a step.

problem = fsla.Problem(inner_loss, outer_loss)
h = fsla.hypergradient(problem, fsla.Point(lam, omega), inner_batch, outer_batch, method="cg")
solver = fsla.algorithms.fsla(fsla.steps.paper(delta=1.0, c_tau=1.0, c_beta=1.0, c_eta=0.9))
state = solver.init(problem, fsla.Point(lam, omega), xi)
state = solver.step(problem, state, xi)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsla import algorithms, contrib, distributed, hypergradients, problems, steps, train
from fsla._extras import install_hint
from fsla._version import __version__ as __version__
from fsla.algorithms import Solver, State
from fsla.contrib import LazyRows
from fsla.hypergradients import DivergenceWarning, Hypergradient, check_hypergradient, hypergradient
from fsla.problems import (
    Batches,
    Counted,
    Counts,
    Damped,
    Differences,
    DifferenceWarning,
    FixedPoint,
    GaussNewton,
    Needs,
    Numbered,
    Point,
    Problem,
    Reduced,
    Sample,
    Shard,
    ShardSampler,
    Share,
    Shared,
    WeightedProblem,
    functional,
)
from fsla.train import (
    FSLA,
    MASOBA,
    SOBA,
    CheckpointError,
    DivergenceError,
    GroupWeights,
    History,
    MicroBatches,
    ProductWeights,
    RollbackWarning,
    SampleWeights,
    fit,
)

if TYPE_CHECKING:
    from fsla import data
    from fsla.data import DataWeigher, HyperCleaner


__all__ = [
    "FSLA",
    "MASOBA",
    "SOBA",
    "Batches",
    "CheckpointError",
    "Counted",
    "Counts",
    "Damped",
    "DataWeigher",
    "DifferenceWarning",
    "Differences",
    "DivergenceError",
    "DivergenceWarning",
    "FixedPoint",
    "GaussNewton",
    "GroupWeights",
    "History",
    "HyperCleaner",
    "Hypergradient",
    "LazyRows",
    "MicroBatches",
    "Needs",
    "Numbered",
    "Point",
    "Problem",
    "ProductWeights",
    "Reduced",
    "RollbackWarning",
    "Sample",
    "SampleWeights",
    "Shard",
    "ShardSampler",
    "Share",
    "Shared",
    "Solver",
    "State",
    "WeightedProblem",
    "algorithms",
    "check_hypergradient",
    "contrib",
    "data",
    "distributed",
    "fit",
    "functional",
    "hypergradient",
    "hypergradients",
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
