"""Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse, one product a step.

problem = fsla.Problem(inner_loss, outer_loss)
h = fsla.hypergradient(problem, fsla.Point(lam, omega), inner_batch, outer_batch, method="cg")
solver = fsla.algorithms.fsla(fsla.rates.paper(delta=1.0, c_tau=1.0, c_beta=1.0, c_eta=0.9))
state = solver.init(problem, fsla.Point(lam, omega), xi)
state = solver.step(problem, state, xi)
"""

from fsla import algorithms, projection, rates, theory, tree, update
from fsla.autodiff import DifferenceWarning, Problem
from fsla.checkpoint import CheckpointError
from fsla.counted import Counted, Counts
from fsla.differences import Differences
from fsla.evaluate import DivergenceWarning, Hypergradient, check_hypergradient, hypergradient
from fsla.front import FSLA, MASOBA, SOBA, DivergenceError, History, MicroBatches, RescueWarning, fit
from fsla.module import functional
from fsla.problem import Point
from fsla.sample import Batches, Needs, Sample
from fsla.solver import Solver, State
from fsla.weighted import WeightedProblem
from fsla.wrap import Damped, GaussNewton, Shared

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
    "DifferenceWarning",
    "Differences",
    "DivergenceError",
    "DivergenceWarning",
    "GaussNewton",
    "History",
    "Hypergradient",
    "MicroBatches",
    "Needs",
    "Point",
    "Problem",
    "RescueWarning",
    "Sample",
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
    "theory",
    "tree",
    "update",
]
