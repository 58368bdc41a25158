"""Learners: what is trained on a belief. Each returns one model for each value of its penalty."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from scipy.linalg import solve
from scipy.optimize import minimize

from fsla.data._data_fit import Predictor
from fsla.data._dataset import Array, Features, Task, TrainingData
from fsla.data._predictors import LinearPredictor

PENALTIES = (1e-2, 1e-3, 1e-4, 1e-5)
"""Ridge penalties of a joint fit, a unit of weight, on rows of mean square norm 1."""
DISTANCE_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3)
"""Penalties on the distance from the first fit when a model is fine-tuned on checked rows."""


class Learner(ABC):
    """One kind of model. Subclass it to add your own."""

    name: str
    """As the report shows it."""
    is_linear: ClassVar[bool] = False
    fine_tunes: ClassVar[bool] = False
    """Whether it is first trained on the belief, then on checked rows: it needs both."""

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


def row_weights(mass: Array, task: Task) -> Array:
    """Return the weight of each row."""
    return np.asarray(mass.sum(1) if task == "classification" else mass[:, 0])


def logistic_loss(
    coef: Array, features: Array, mass: Array, penalty: float, toward: Array | None = None
) -> tuple[float, Array]:
    """Return the mean cross-entropy of a mass plus penalty/2 x squared distance, and the gradient in `coef`."""
    weight = mass.sum(1, keepdims=True)
    scores = features @ coef.astype(features.dtype)
    scores -= scores.max(1, keepdims=True)
    e = np.exp(scores)
    normaliser = e.sum(1, keepdims=True)
    loss = float((weight * np.log(normaliser)).sum()) - float((mass * scores).sum())
    slope = features.T @ (weight * e / normaliser - mass)
    distance = coef if toward is None else coef - toward
    total = loss + penalty / 2 * float((distance * distance).sum())
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
    m = (mass[use] / weight.sum()).astype(np.float32)
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

    name = "linear, fine-tuned"
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


def default_learners(data: TrainingData) -> tuple[Learner, ...]:
    """Return the learners that are tried for this data."""
    learners: tuple[Learner, ...] = (LinearLearner(), FineTunedLinearLearner())
    return tuple(learner for learner in learners if learner.supports(data))
