"""Training: the optimisers, the loop, records, checkpoints and weight modules.

The examples of this room go on from a model and a weight for each source of its data. Source "b" has wrong labels:

    >>> import torch
    >>> import fsla
    >>> generator = torch.manual_seed(0)
    >>> x, source = torch.randn(32, 2), ["a", "b"] * 16
    >>> true = x.sum(1, keepdim=True)
    >>> train = (x, torch.where(torch.arange(32)[:, None] % 2 == 0, true, -true), source)
    >>> trusted = (x[:8], true[:8])
    >>> model = torch.nn.Linear(2, 1)
    >>> weights = fsla.GroupWeights(["a", "b"])
    >>> def inner_loss(model, weights, batch):
    ...     x, y, source = batch
    ...     return (weights(source) * (model(x) - y).square().squeeze(1)).mean()
    >>> def outer_loss(model, weights, batch):
    ...     x, y = batch
    ...     return (model(x) - y).square().mean()
    >>> bilevel = fsla.SOBA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss)
    >>> info = bilevel.step(train, trusted)
    >>> info.step
    0
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsla.train._bilevel import FSLA, MASOBA, SOBA, BilevelOptimizer
from fsla.train._checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from fsla.train._fit import OverfittingWarning, fit
from fsla.train._guard import DivergenceError, RisingLossWarning, RollbackWarning, StepInfo
from fsla.train._loop import FitResult
from fsla.train._weights import GroupWeights, ProductWeights, SampleWeights

if TYPE_CHECKING:
    from fsla.train._engine import CaptureError, EngineWarning, make_engine
    from fsla.train._records import Record

__all__ = [
    "FSLA",
    "MASOBA",
    "SOBA",
    "BilevelOptimizer",
    "CaptureError",
    "CheckpointError",
    "DivergenceError",
    "EngineWarning",
    "FitResult",
    "GroupWeights",
    "OverfittingWarning",
    "ProductWeights",
    "Record",
    "RisingLossWarning",
    "RollbackWarning",
    "SampleWeights",
    "StepInfo",
    "fit",
    "load_checkpoint",
    "make_engine",
    "save_checkpoint",
]

_LAZY = {
    "CaptureError": "_engine",
    "EngineWarning": "_engine",
    "Record": "_records",
    "make_engine": "_engine",
}


def __getattr__(name: str) -> Any:
    """Load what most programs do not need when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'fsla.train' has no attribute {name!r}")
    return getattr(import_module(f"fsla.train.{_LAZY[name]}"), name)
