"""Data sets, label noise, and the splits of the cleaning task."""

from fsla_reproduction.datasets.idx import DataError
from fsla_reproduction.datasets.noise import KINDS, Noise, corrupt, long_tail
from fsla_reproduction.datasets.sets import NAMES, Images, fingerprint, load
from fsla_reproduction.datasets.task import CleaningTask, TaskSpec, make_task

__all__ = [
    "KINDS",
    "NAMES",
    "CleaningTask",
    "DataError",
    "Images",
    "Noise",
    "TaskSpec",
    "corrupt",
    "fingerprint",
    "load",
    "long_tail",
    "make_task",
]
