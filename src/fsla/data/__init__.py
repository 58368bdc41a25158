"""Data sets, label noise, and the splits of the cleaning task."""

from fsla.data.idx import DataError
from fsla.data.noise import KINDS, Noise, corrupt, long_tail
from fsla.data.samplers import Sampler, cycle
from fsla.data.sets import NAMES, Images, fingerprint, load
from fsla.data.task import CleaningTask, TaskSpec, make_task

__all__ = [
    "KINDS",
    "NAMES",
    "CleaningTask",
    "DataError",
    "Images",
    "Noise",
    "Sampler",
    "TaskSpec",
    "corrupt",
    "cycle",
    "fingerprint",
    "load",
    "long_tail",
    "make_task",
]
