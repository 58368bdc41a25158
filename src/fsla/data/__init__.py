"""Which data to trust: wrong labels, bad groups, and a model that is not hurt by either."""

from fsla.data._clean import clean
from fsla.data._estimators import GroupWeigher, LabelCleaner
from fsla.data._model_file import DataModel, load_model
from fsla.data._result import CleaningResult, Comparison, Correction, Estimate
from fsla.data._streaming import weigh_groups

__all__ = [
    "CleaningResult",
    "Comparison",
    "Correction",
    "DataModel",
    "Estimate",
    "GroupWeigher",
    "LabelCleaner",
    "clean",
    "load_model",
    "weigh_groups",
]
