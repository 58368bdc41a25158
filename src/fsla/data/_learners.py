"""Learners: what is trained on a belief. Each returns one model for each value of its penalty."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.linalg import solve
from scipy.optimize import minimize

from fsla.data._data_fit import Predictor
from fsla.data._dataset import Array, Features, Task, TrainingData
from fsla.data._predictors import ConstantPredictor, LinearPredictor

PENALTIES = (1e-2, 1e-3, 1e-4, 1e-5)
"""Ridge penalties of a joint fit, a unit of weight, on rows of mean square norm 1."""
DISTANCE_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3)
"""Penalties on the distance from the first fit when a model is fine-tuned on checked rows."""
MIN_MASS = 0.03
"""Labels with less than this part of the largest mass are not worth a row of their own."""


Progress = Callable[[str, int, int], None]


class Fold(NamedTuple):
    """What a learner is trained on without one fold: the arguments of `Learner.path`."""

    features: Features
    mass: Array
    checked_mass: Array


class Learner(ABC):
    """One kind of model. Subclass it to add your own.

    An estimator of scikit-learn or a module of PyTorch needs no subclass: pass it in ``learners=``.

    Examples:
        >>> from sklearn.naive_bayes import GaussianNB
        >>> cleaner = fsla.data.LabelCleaner(learners=["linear", GaussianNB()], random_state=0)
        >>> cleaner = cleaner.fit(X, table["label"], y_checked=table["checked"].replace("", None))
        >>> sorted(cleaner.strategy_results_["learner"].unique())
        ['GaussianNB', 'linear']
    """

    name: str
    """As the report shows it."""
    is_linear: ClassVar[bool] = False
    fine_tunes: ClassVar[bool] = False
    """Whether it is first trained on the belief, then on checked rows: it needs both."""
    predicts_new_rows: ClassVar[bool] = True
    """False for predictions of the training rows that were computed elsewhere."""
    reads_images: ClassVar[bool] = False
    """Whether it takes images as they are, not the features that a trunk makes of them."""
    corrected_only: bool = False
    """Whether it is tried on corrected labels alone, because its training takes minutes."""

    def supports(self, data: TrainingData) -> bool:
        """Return whether the learner can use this data."""
        return True

    @abstractmethod
    def path(self, features: Features, mass: Array, checked_mass: Array, task: Task, seed: int) -> list[Predictor]:
        """Return trained models, one for each value of the penalty.

        Args:
            features: All rows. Rows without mass must not influence the model.
            mass: Rows x classes, or rows x 2 in regression (weight, weight x target): the belief.
            checked_mass: The same for checked rows with their true labels. No row has both.
            task: "classification" or "regression".
            seed: Of everything random.
        """

    def paths(
        self, folds: Sequence[Fold], task: Task, seed: int, progress: Progress | None = None
    ) -> list[list[Predictor]]:
        """Return the path of each fold. Override it to train several at a time.

        Args:
            folds: What to train on without each fold.
            task: "classification" or "regression".
            seed: Of everything random.
            progress: Called with a text, the number of steps that are done, and their number.
        """
        return [self.path(*fold, task, seed) for fold in folds]


def row_weights(mass: Array, task: Task) -> Array:
    """Return the weight of each row."""
    return np.asarray(mass.sum(1) if task == "classification" else mass[:, 0])


def logistic_loss(
    coef: Array, features: Array, mass: Array, penalty: float, toward: Array | None = None
) -> tuple[float, Array]:
    """Return the cross-entropy of a mass plus penalty/2 x squared distance, and the gradient in `coef`.

    Args:
        coef: Columns x classes.
        features: Rows x columns.
        mass: Classes x rows: sums over the few classes are faster along the first axis.
        penalty: Of half the squared distance.
        toward: Coefficients from which the distance is measured. Default: 0.
    """
    weight = mass.sum(0)
    scores = coef.T.astype(features.dtype) @ features.T
    scores -= scores.max(0)
    e = np.exp(scores)
    normaliser = e.sum(0)
    loss = float(weight @ np.log(normaliser)) - float(np.vdot(mass, scores))
    e *= weight / normaliser
    e -= mass
    slope = features.T @ e.T
    distance = coef if toward is None else coef - toward
    total = loss + penalty / 2 * float(np.vdot(distance, distance))
    return total, slope.astype(np.float64) + penalty * distance


def fit_logistic(
    features: Array,
    mass: Array,
    penalty: float,
    *,
    start: Array | None = None,
    toward: Array | None = None,
    max_iter: int = 60,
) -> Array:
    """Return coefficients that minimise the cross-entropy of the mass, a unit of weight, plus the ridge penalty.

    Args:
        features: Rows x columns.
        mass: Rows x classes.
        penalty: Of half the squared distance.
        start: Coefficients to begin with.
        toward: Coefficients from which the distance is measured. Default: 0.
        max_iter: Iterations of L-BFGS, which run in single precision.
    """
    shape = (features.shape[1], mass.shape[1])
    weight = mass.sum(1)
    use = weight > 0
    if not use.any():
        return np.zeros(shape) if toward is None else toward
    z = features[use].astype(np.float32)
    m = np.ascontiguousarray((mass[use] / weight.sum()).T.astype(np.float32))
    if start is None:
        start = np.zeros(shape) if toward is None else toward

    def loss(x: Array) -> tuple[float, Array]:
        value, gradient = logistic_loss(x.reshape(shape), z, m, penalty, toward)
        return value, gradient.ravel()

    options = {"maxiter": max_iter, "maxcor": 10, "ftol": 1e-7, "gtol": 1e-6}
    result = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    return np.asarray(result.x.reshape(shape))


def fit_ridge(features: Array, mass: Array, penalty: float, *, toward: Array | None = None) -> Array:
    """Return coefficients (columns x 1) that minimise the weighted squared error plus the ridge penalty.

    Args:
        features: Rows x columns.
        mass: Rows x 2: weight, weight x target.
        penalty: A unit of weight, of the squared distance.
        toward: Coefficients from which the distance is measured. Default: 0.
    """
    use = mass[:, 0] > 0
    if not use.any():
        return np.zeros((features.shape[1], 1)) if toward is None else toward
    z, (weight, moment) = features[use], mass[use].T
    total = weight.sum()
    gram = (z * weight[:, None]).T @ z
    gram.flat[:: len(gram) + 1] += penalty * total
    target = (z.T @ moment)[:, None]
    if toward is not None:
        target = target + penalty * total * toward
    return np.asarray(solve(gram, target, assume_a="pos"))


class LinearLearner(Learner):
    """Logistic regression, or ridge regression, with a path of penalties."""

    name = "linear"
    is_linear = True

    def path(self, features: Features, mass: Array, checked_mass: Array, task: Task, seed: int) -> list[Predictor]:
        """Return one model for each penalty, from strong to weak, each starting from the one before."""
        z, both = features.dense, mass + checked_mass
        if task == "regression":
            return [LinearPredictor(fit_ridge(z, both, 0.3 * penalty), task) for penalty in PENALTIES]
        models: list[Predictor] = []
        coef = None
        for penalty in PENALTIES:
            coef = fit_logistic(z, both, penalty, start=coef)
            models.append(LinearPredictor(coef, task))
        return models


class FineTunedLinearLearner(Learner):
    """A linear model trained on the belief, then on checked rows with a penalty on the distance."""

    name = "linear_fine_tuned"
    is_linear = True
    fine_tunes = True

    def path(self, features: Features, mass: Array, checked_mass: Array, task: Task, seed: int) -> list[Predictor]:
        """Return one model for each penalty on the distance."""
        z, first_penalty = features.dense, 1e-3
        if task == "regression":
            first = fit_ridge(z, mass, first_penalty)
            return [
                LinearPredictor(fit_ridge(z, checked_mass, penalty, toward=first), task)
                for penalty in DISTANCE_PENALTIES
            ]
        first = fit_logistic(z, mass, first_penalty)
        coef, models = first, list[Predictor]()
        for penalty in DISTANCE_PENALTIES:
            coef = fit_logistic(z, checked_mass, penalty, start=coef, toward=first, max_iter=40)
            models.append(LinearPredictor(coef, task))
        return models


class EstimatorLearner(Learner):
    """A scikit-learn estimator or pipeline whose `fit` takes `sample_weight`.

    Args:
        estimator: Unfitted; it is cloned for every fit and takes the rows as the user gave them.
        name: As the report shows it. Default: the name of its class.
    """

    def __init__(self, estimator: Any, name: str | None = None) -> None:
        self.estimator = estimator
        self.name = name or type(estimator).__name__

    def path(self, features: Features, mass: Array, checked_mass: Array, task: Task, seed: int) -> list[Predictor]:
        """Return one model. A row whose mass is on several labels is repeated, once for each."""
        both = mass + checked_mass
        rows, labels, weight = expand_mass(both, task)
        if len(rows) == 0 or len(np.unique(labels)) < 2:
            return [constant_prediction(both, task)]
        from sklearn.base import clone

        model = clone(self.estimator)
        x = features.take(rows)
        model.fit(x.dense if x.raw is None else x.raw, labels, **{self._weight_argument(): weight})
        return [EstimatorPredictor(model, both.shape[1], task)]

    def _weight_argument(self) -> str:
        steps = getattr(self.estimator, "steps", None)
        return f"{steps[-1][0]}__sample_weight" if steps else "sample_weight"


@dataclass(frozen=True, eq=False)
class EstimatorPredictor:
    """A fitted estimator of the user's own."""

    model: Any
    num_classes: int
    task: Task

    def predict(self, features: Features) -> Array:
        """Return probabilities, or numbers in regression."""
        x = features.dense if features.raw is None else features.raw
        if self.task == "regression":
            return np.asarray(self.model.predict(x), dtype=np.float64)
        result = np.full((len(features), self.num_classes), 1e-3)
        if hasattr(self.model, "predict_proba"):
            result[:, self.model.classes_] += self.model.predict_proba(x)
        else:
            result[np.arange(len(features)), self.model.predict(x)] += 1
        return np.asarray(result / result.sum(1, keepdims=True))

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Raise ValueError."""
        raise ValueError(
            f"Cannot save {type(self.model).__name__}: it is an estimator of your own, and nothing is pickled. "
            "Save it yourself, or leave it out of learners=."
        )


class PredictedProbabilities(Learner):
    """Out-of-fold predictions that were computed elsewhere, one row for each row of the training data.

    Args:
        predictions: Rows x classes, or numbers in regression.
    """

    name = "pred_probs"
    is_linear = True
    predicts_new_rows = False

    def __init__(self, predictions: Array) -> None:
        self.predictions = predictions

    def path(self, features: Features, mass: Array, checked_mass: Array, task: Task, seed: int) -> list[Predictor]:
        """Return the predictions; nothing is trained."""
        return [IndexedPredictor(self.predictions)]


@dataclass(frozen=True, eq=False)
class IndexedPredictor:
    """Looks up the prediction of a training row."""

    predictions: Array

    def predict(self, features: Features) -> Array:
        """Return the predictions of rows of the training data."""
        if features.index is None:
            raise ValueError("pred_probs has no predictions for new rows. Use another learner as well.")
        return np.asarray(self.predictions[features.index])

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Raise ValueError."""
        raise ValueError("Cannot save pred_probs: they hold no model.")


def expand_mass(mass: Array, task: Task) -> tuple[Array, Array, Array]:
    """Return rows, labels and weights (mean 1) of a mass: a row of several labels is repeated."""
    if task == "regression":
        rows = np.nonzero(mass[:, 0] > 1e-6 * mass[:, 0].max(initial=1e-12))[0]
        weight = mass[rows, 0]
        return rows, mass[rows, 1] / weight, weight / max(weight.mean(), 1e-12) if len(rows) else weight
    rows, labels = np.nonzero(mass > MIN_MASS * mass.max(initial=1e-12))
    weight = mass[rows, labels]
    return rows, labels, weight / max(weight.mean(), 1e-12) if len(rows) else weight


def constant_prediction(mass: Array, task: Task) -> ConstantPredictor:
    """Return the mean of a mass as a prediction."""
    weight = row_weights(mass, task).sum()
    if task == "regression":
        return ConstantPredictor(np.array([mass[:, 1].sum() / max(weight, 1e-12)]), task)
    prior = mass.sum(0) + 0.02
    return ConstantPredictor(prior / prior.sum(), task)


LARGE_TABLE = 2000
"""From so many rows on, boosting takes the place of the forest, which costs four times as much there."""
FEW_CLASSES = 3
"""Up to so many classes, smaller tables have both. With more, boosting costs more than all other learners."""


def default_learners(data: TrainingData, device: str = "auto") -> tuple[Learner, ...]:
    """Return the learners that are tried for this data.

    Args:
        data: Rows and votes.
        device: Where networks are trained: "auto", "cpu" or "cuda".
    """
    from fsla.data._network_learners import MLP, ImageNetwork, has_enough_images
    from fsla.data._trees import BoostingLearner, ForestLearner

    trees: tuple[Learner, ...] = (ForestLearner(), BoostingLearner())
    if len(data.features) >= LARGE_TABLE:
        trees = trees[1:]
    elif data.num_classes > FEW_CLASSES:
        trees = trees[:1]
    learners: tuple[Learner, ...] = (LinearLearner(), FineTunedLinearLearner(), *trees, MLP())
    if has_enough_images(data):
        learners += (ImageNetwork(device=device, corrected_only=True),)
    return tuple(learner for learner in learners if learner.supports(data))
