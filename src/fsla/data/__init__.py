"""Which data to trust: wrong labels, bad groups, and a model that is not hurt by either.

The examples of this room go on from a table with two sources, one of them bad, of which a fifth is checked:

    >>> import pathlib
    >>> import numpy as np
    >>> import pandas as pd
    >>> import fsla
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((300, 3))
    >>> true = np.where(X[:, 0] > 0, "yes", "no")
    >>> table = pd.DataFrame(X, columns=["a", "b", "c"])
    >>> table["source"] = np.tile(["shop", "forum"], 150)
    >>> wrong = (table["source"] == "forum") & (rng.random(300) < 0.8)
    >>> table["label"] = np.where(wrong, np.where(true == "yes", "no", "yes"), true)
    >>> table["checked"] = np.where(np.arange(300) < 60, true, "")
    >>> result = fsla.data.clean(table, checked="checked", group="source")
    >>> dict(zip(result.groups["group"], result.groups["decision"]))
    {'forum': 'drop', 'shop': 'keep'}
"""

from fsla.data._clean import clean
from fsla.data._data_fit import Predictor
from fsla.data._dataset import Features, TrainingData, Votes
from fsla.data._estimators import GroupWeigher, LabelCleaner
from fsla.data._learners import Learner
from fsla.data._model_file import DataModel, load_model
from fsla.data._result import CleaningResult, Comparison, Correction, Estimate
from fsla.data._strategies import Belief, Strategy
from fsla.data._streaming import weigh_groups

__all__ = [
    "Belief",
    "CleaningResult",
    "Comparison",
    "Correction",
    "DataModel",
    "Estimate",
    "Features",
    "GroupWeigher",
    "LabelCleaner",
    "Learner",
    "Predictor",
    "Strategy",
    "TrainingData",
    "Votes",
    "clean",
    "load_model",
    "weigh_groups",
]
