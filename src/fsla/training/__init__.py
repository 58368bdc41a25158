"""Running an algorithm for many steps: clock, records, checkpoints, budget, divergence."""

from fsla.training.checkpoint import load_checkpoint, save_checkpoint
from fsla.training.engine import EngineWarning, make_engine
from fsla.training.loop import Diverged, Record, Run, train

__all__ = [
    "Diverged",
    "EngineWarning",
    "Record",
    "Run",
    "load_checkpoint",
    "make_engine",
    "save_checkpoint",
    "train",
]
