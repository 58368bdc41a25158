"""What an algorithm may ask: losses, batches, products of second derivatives, and wrappers around a problem.

The examples of this room go on from this problem:

    >>> import torch
    >>> import fsla
    >>> h = torch.tensor([1.0, 4.0])
    >>> def inner_loss(lam, omega, batch):
    ...     return (h * (omega["w"] - lam["x"]) ** 2).sum() / 2
    >>> def outer_loss(lam, omega, batch):
    ...     return ((omega["w"] - 2) ** 2).sum() / 2
    >>> problem = fsla.Problem(inner_loss, outer_loss)
    >>> at = fsla.Point({"x": torch.zeros(2)}, {"w": torch.ones(2)})
    >>> batch = fsla.Batch(None)
    >>> v = {"w": torch.tensor([1.0, 0.0])}
    >>> problem.inner_at(at, batch).hvp(v)
    {'w': tensor([1., 0.])}
"""

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
