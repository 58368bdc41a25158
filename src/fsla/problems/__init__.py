"""What an algorithm may ask: losses, batches, products of second derivatives, and wrappers around a problem."""

from fsla.problems._autograd import DifferenceWarning, Problem
from fsla.problems._batches import Batches, Needs, Numbered, Sample, Share
from fsla.problems._counted import Counted, Counts
from fsla.problems._differences import Differences
from fsla.problems._fixed_point import FixedPoint
from fsla.problems._functional import functional
from fsla.problems._problem import FirstOrder, Inner, Oracles, Outer, OuterProducts, Point
from fsla.problems._reduced import Reduced
from fsla.problems._samplers import Sampler, cycle
from fsla.problems._shards import Shard, ShardSampler
from fsla.problems._weighted import WeightedProblem
from fsla.problems._wrappers import Damped, GaussNewton, Seeded, Shared

__all__ = [
    "Batches",
    "Counted",
    "Counts",
    "Damped",
    "DifferenceWarning",
    "Differences",
    "FirstOrder",
    "FixedPoint",
    "GaussNewton",
    "Inner",
    "Needs",
    "Numbered",
    "Oracles",
    "Outer",
    "OuterProducts",
    "Point",
    "Problem",
    "Reduced",
    "Sample",
    "Sampler",
    "Seeded",
    "Shard",
    "ShardSampler",
    "Share",
    "Shared",
    "WeightedProblem",
    "cycle",
    "functional",
]
