"""What an algorithm may ask: losses, batches, products of second derivatives, and wrappers around a problem."""

from fsla.problems._autograd import FiniteDifferenceWarning, LossProblem, Problem
from fsla.problems._batches import Batch, BatchSpec, MicroBatches, StepBatches
from fsla.problems._fixed_point import FixedPointProblem
from fsla.problems._functional import make_functional
from fsla.problems._module import ModuleProblem
from fsla.problems._samplers import Sampler, cycle
from fsla.problems._views import FiniteDifferenceCheck, Oracles, Point, View
from fsla.problems._weighted import WeightedLossProblem
from fsla.problems._wrappers import (
    CountedProblem,
    DampedProblem,
    FiniteDifferenceProblem,
    ForwardingProblem,
    ForwardingView,
    GaussNewtonProblem,
    OracleCounts,
)

__all__ = [
    "Batch",
    "BatchSpec",
    "CountedProblem",
    "DampedProblem",
    "FiniteDifferenceCheck",
    "FiniteDifferenceProblem",
    "FiniteDifferenceWarning",
    "FixedPointProblem",
    "ForwardingProblem",
    "ForwardingView",
    "GaussNewtonProblem",
    "LossProblem",
    "MicroBatches",
    "ModuleProblem",
    "OracleCounts",
    "Oracles",
    "Point",
    "Problem",
    "Sampler",
    "StepBatches",
    "View",
    "WeightedLossProblem",
    "cycle",
    "make_functional",
]
