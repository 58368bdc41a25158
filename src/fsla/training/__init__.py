"""Running an algorithm for many steps: clock, records, checkpoints, budget, divergence."""

from fsla.training.checkpoint import load_checkpoint, save_checkpoint
from fsla.training.loop import Diverged, Record, Run, train

__all__ = ["Diverged", "Record", "Run", "load_checkpoint", "save_checkpoint", "train"]
