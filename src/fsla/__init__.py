"""Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse, one product a step.

With a model, its data and a weight for each source of the data:

    >>> import torch
    >>> import fsla
    >>> generator = torch.manual_seed(0)
    >>> x, source = torch.randn(32, 2), ["good", "bad"] * 16
    >>> true = x.sum(1)
    >>> labels = torch.where(torch.arange(32) % 2 == 0, true, -true)
    >>> model = torch.nn.Linear(2, 1)
    >>> weights = fsla.GroupWeights(["good", "bad"])
    >>> def inner_loss(model, weights, batch):
    ...     x, y, source = batch
    ...     return (weights(source) * (model(x).squeeze(1) - y).square()).mean()
    >>> def outer_loss(model, weights, batch):
    ...     x, y = batch
    ...     return (model(x).squeeze(1) - y).square().mean()
    >>> bilevel = fsla.SOBA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss)
    >>> for _ in range(100):
    ...     info = bilevel.step((x, labels, source), (x[:8], true[:8]))
    >>> weights.as_dict()["good"] > weights.as_dict()["bad"]
    True

With two functions of λ and ω:

    >>> problem = fsla.Problem(
    ...     inner_loss=lambda lam, omega, batch: ((omega["w"] - lam["x"]) ** 2).sum() / 2,
    ...     outer_loss=lambda lam, omega, batch: ((omega["w"] - 1) ** 2).sum() / 2,
    ... )
    >>> at = fsla.Point({"x": torch.zeros(1)}, {"w": torch.zeros(1)})
    >>> fsla.hypergradient(problem, at, None, None, method="cg").value
    {'x': tensor([-1.])}
    >>> algorithm = fsla.algorithms.soba(fsla.steps.constant(outer_lr=0.2, inner_lr=0.5, adjoint_lr=0.5))
    >>> batches = fsla.StepBatches.shared(None, None)
    >>> state = algorithm.init(problem, at, batches)
    >>> for _ in range(60):
    ...     state = algorithm.step(problem, state, batches)
    >>> round(state.lam.value["x"].item(), 1)
    1.0
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
    OverfittingWarning,
    ProductWeights,
    RisingLossWarning,
    RollbackWarning,
    SampleWeights,
    StepInfo,
    fit,
)

if TYPE_CHECKING:
    from fsla import data
    from fsla.data import GroupWeigher, LabelCleaner


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
    "DivergenceError",
    "FiniteDifferenceProblem",
    "FiniteDifferenceWarning",
    "FitResult",
    "FixedPointProblem",
    "GaussNewtonProblem",
    "GroupWeigher",
    "GroupWeights",
    "HypergradientCheck",
    "HypergradientResult",
    "LabelCleaner",
    "LazyRowOptimizer",
    "MicroBatches",
    "OracleCounts",
    "OverfittingWarning",
    "Point",
    "Problem",
    "ProductWeights",
    "RisingLossWarning",
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
    if name not in ("GroupWeigher", "LabelCleaner", "data"):
        raise AttributeError(f"module 'fsla' has no attribute {name!r}")
    try:
        data = import_module("fsla.data")
    except ModuleNotFoundError as error:
        raise ImportError(f"Cannot load fsla.{name}. {install_hint(error)}") from error
    return data if name == "data" else getattr(data, name)


def __dir__() -> list[str]:
    """List the names that are not loaded yet, too."""
    return sorted({*globals(), *__all__})
