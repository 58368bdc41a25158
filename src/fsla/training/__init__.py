"""Running an algorithm for many steps: clock, records, checkpoints, budgets, divergence."""

from fsla.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from fsla.training.engine import EngineWarning, make_engine
from fsla.training.loop import health, train
from fsla.training.records import Record, Status, work
from fsla.training.run import Run

__all__ = [
    "CheckpointError",
    "EngineWarning",
    "Record",
    "Run",
    "Status",
    "health",
    "load_checkpoint",
    "make_engine",
    "save_checkpoint",
    "train",
    "work",
]
