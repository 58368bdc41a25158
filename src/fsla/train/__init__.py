"""Training a model in place: the optimisers, the loop, records, checkpoints and weight modules."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsla.train._algorithms import FSLA, MASOBA, SOBA
from fsla.train._bilevel import BilevelOptimizer
from fsla.train._checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from fsla.train._fit import History, fit
from fsla.train._guard import DivergenceError, RollbackWarning, StepInfo
from fsla.train._module import ModelProblem
from fsla.train._module_views import MicroBatches
from fsla.train._weights import GroupWeights, ProductWeights, SampleWeights

if TYPE_CHECKING:
    from fsla.train._engine import EngineWarning, make_engine
    from fsla.train._loop import health, train
    from fsla.train._run import Run
    from fsla.train._run_records import Record, Status, work

__all__ = [
    "FSLA",
    "MASOBA",
    "SOBA",
    "BilevelOptimizer",
    "CheckpointError",
    "DivergenceError",
    "EngineWarning",
    "GroupWeights",
    "History",
    "MicroBatches",
    "ModelProblem",
    "ProductWeights",
    "Record",
    "RollbackWarning",
    "Run",
    "SampleWeights",
    "Status",
    "StepInfo",
    "fit",
    "health",
    "load_checkpoint",
    "make_engine",
    "save_checkpoint",
    "train",
    "work",
]

_LAZY = {
    "EngineWarning": "_engine",
    "Record": "_run_records",
    "Run": "_run",
    "Status": "_run_records",
    "health": "_loop",
    "make_engine": "_engine",
    "train": "_loop",
    "work": "_run_records",
}


def __getattr__(name: str) -> Any:
    """Load what most programs do not need when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'fsla.train' has no attribute {name!r}")
    return getattr(import_module(f"fsla.train.{_LAZY[name]}"), name)
