"""Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse, one product a step.

problem = fsla.Problem(inner_loss, outer_loss)
h = fsla.hypergradient(problem, fsla.Point(lam, omega), inner_batch, outer_batch, method="cg")
solver = fsla.algorithms.fsla(fsla.rates.paper(delta=1.0, c_tau=1.0, c_beta=1.0, c_eta=0.9))
state = solver.init(problem, fsla.Point(lam, omega), xi)
state = solver.step(problem, state, xi)
"""

from typing import TYPE_CHECKING, Any

from fsla import algorithms, projection, rates, shard_files, tree, update
from fsla._extras import install_hint
from fsla.autodiff import DifferenceWarning, Problem
from fsla.checkpoint import CheckpointError
from fsla.counted import Counted, Counts
from fsla.differences import Differences
from fsla.evaluate import DivergenceWarning, Hypergradient, check_hypergradient, hypergradient
from fsla.fixed_point import FixedPoint
from fsla.front import FSLA, MASOBA, SOBA, DivergenceError, History, MicroBatches, RescueWarning, fit
from fsla.lazy import LazyRows
from fsla.module import functional
from fsla.problem import Point
from fsla.reduced import Reduced
from fsla.sample import Batches, Needs, Numbered, Sample, Share
from fsla.shards import Shard, ShardSampler
from fsla.solver import Solver, State
from fsla.weighted import WeightedProblem
from fsla.weights import GroupWeights, ProductWeights, SampleWeights
from fsla.wrap import Damped, GaussNewton, Shared

if TYPE_CHECKING:
    from fsla.cleaning import DataWeigher, HyperCleaner

__version__ = "0.1.0"

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
    "RescueWarning",
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
    "fit",
    "functional",
    "hypergradient",
    "projection",
    "rates",
    "shard_files",
    "tree",
    "update",
]


def __getattr__(name: str) -> Any:
    """Load the estimators, and scikit-learn with them, when they are first used."""
    if name not in ("DataWeigher", "HyperCleaner"):
        raise AttributeError(f"module 'fsla' has no attribute {name!r}")
    try:
        from fsla import cleaning
    except ModuleNotFoundError as error:
        raise ImportError(f"Cannot load fsla.{name}. {install_hint(error)}") from error
    return getattr(cleaning, name)
