"""Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse, one product a step.

problem = fsla.Problem(inner_loss, outer_loss)
h = fsla.hypergradient(problem, fsla.Point(lam, omega), inner_batch, outer_batch, method="cg")
solver = fsla.algorithms.fsla(fsla.rates.paper(delta=1.0, c_tau=1.0, c_beta=1.0, c_eta=0.9))
state = solver.init(problem, fsla.Point(lam, omega), xi)
state = solver.step(problem, state, xi)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsla import projection, rates, tree, update
from fsla._extras import install_hint
from fsla.autodiff import DifferenceWarning, Problem
from fsla.checkpoint import CheckpointError
from fsla.differences import Differences
from fsla.front import FSLA, MASOBA, SOBA, DivergenceError, History, MicroBatches, RescueWarning, fit
from fsla.module import functional
from fsla.problem import Point
from fsla.sample import Batches, Needs, Numbered, Sample, Share
from fsla.solver import Solver, State
from fsla.weights import GroupWeights, ProductWeights, SampleWeights
from fsla.wrap import Damped, GaussNewton, Shared

if TYPE_CHECKING:
    from fsla import algorithms, shard_files
    from fsla.cleaning import DataWeigher, HyperCleaner
    from fsla.counted import Counted, Counts
    from fsla.evaluate import DivergenceWarning, Hypergradient, check_hypergradient, hypergradient
    from fsla.fixed_point import FixedPoint
    from fsla.lazy import LazyRows
    from fsla.reduced import Reduced
    from fsla.shards import Shard, ShardSampler
    from fsla.weighted import WeightedProblem

# A program that trains a network with `fit` needs none of these, and does not wait for them to load.
_LATER = {
    "algorithms": "algorithms",
    "shard_files": "shard_files",
    "DataWeigher": "cleaning",
    "HyperCleaner": "cleaning",
    "Counted": "counted",
    "Counts": "counted",
    "DivergenceWarning": "evaluate",
    "Hypergradient": "evaluate",
    "check_hypergradient": "evaluate",
    "hypergradient": "evaluate",
    "FixedPoint": "fixed_point",
    "LazyRows": "lazy",
    "Reduced": "reduced",
    "Shard": "shards",
    "ShardSampler": "shards",
    "WeightedProblem": "weighted",
}

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
    """Load a public name when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module 'fsla' has no attribute {name!r}")
    try:
        module = import_module(f"fsla.{_LATER[name]}")
    except ModuleNotFoundError as error:
        raise ImportError(f"Cannot load fsla.{name}. {install_hint(error)}") from error
    return module if name == _LATER[name] else getattr(module, name)


def __dir__() -> list[str]:
    """List the names that are not loaded yet, too."""
    return sorted({*globals(), *__all__})
