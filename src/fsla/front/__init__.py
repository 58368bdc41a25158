"""The front end: a model, outer modules, two losses and three torch optimisers, and a training loop."""

from fsla.front.algorithms import FSLA, MASOBA, SOBA
from fsla.front.fit import History, fit
from fsla.front.guard import DivergenceError, Info, RescueWarning
from fsla.front.model import ModelProblem
from fsla.front.views import MicroBatches

__all__ = [
    "FSLA",
    "MASOBA",
    "SOBA",
    "DivergenceError",
    "History",
    "Info",
    "MicroBatches",
    "ModelProblem",
    "RescueWarning",
    "fit",
]
