r"""EM for labels by several groups: who confuses what, and what the true label is.

Classes: $q_i(c) \propto p_i(c) \prod_{\text{votes } (g, y)} T_g[c, y]$, where $p_i$ is a model that has not seen
row i, and $T_g$ is the confusion matrix of group g, shrunk to the pooled one. Numbers:
$y = a_g + b_g t + \mathcal N(0, s_g^2)$ with $t \sim \mathcal N(f(x), v_0)$.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from scipy.sparse import csr_matrix

from fsla.data._dataset import Array, TrainingData
from fsla.data._learners import fit_logistic, fit_ridge
from fsla.data._predictors import find_temperature, softmax

SHRINKAGE = 5.0
"""Votes that the pooled confusion is worth in a group's own."""
CHECKED_COUNT = 30.0
"""Votes on checked rows count this often, because their true label is known."""
CHECKED_ROW_WEIGHT = 3.0
"""Weight of a checked row in the models inside EM."""
_ROUNDS, _STEPS = 3, 5
_FLOOR = 1e-6


def checked_accuracy(data: TrainingData, checked: Array, shrinkage: float = 3.0) -> Array:
    """Return the accuracy of each group on its votes on checked rows, shrunk to the pooled one."""
    truth = np.full(len(data.features), -1.0)
    truth[data.checked_rows[checked]] = data.checked_labels[checked]
    use = truth[data.votes.row] >= 0
    group, row = data.votes.group[use], data.votes.row[use]
    right = (data.votes.label[use] == truth[row]).astype(float)
    hits = np.bincount(group, right, minlength=data.num_groups)
    count = np.bincount(group, minlength=data.num_groups)
    pooled = (right.sum() + 1) / (len(right) + 2)
    return np.asarray((hits + shrinkage * pooled) / (count + shrinkage))


def one_coin(accuracy: Array, num_classes: int) -> Array:
    """Return groups x classes x classes: the accuracy on the diagonal, errors spread evenly."""
    accuracy = np.clip(accuracy, 0.02, 0.98)
    error = (1 - accuracy) / max(1, num_classes - 1)
    return np.asarray(error[:, None, None] + (accuracy - error)[:, None, None] * np.eye(num_classes))


def vote_matrix(data: TrainingData) -> csr_matrix:
    """Return rows x (groups x classes): how often a group gave a label to a row."""
    column = data.votes.group * data.num_classes + data.votes.label.astype(np.intp)
    shape = (len(data.features), data.num_groups * data.num_classes)
    return csr_matrix((np.ones(len(column)), (data.votes.row, column)), shape)


def count_confusions(votes: csr_matrix, posterior: Array, weight: Array | None = None) -> Array:
    """Return groups x true x given: expected counts."""
    q = posterior if weight is None else posterior * weight[:, None]
    classes = posterior.shape[1]
    return np.asarray((votes.T @ q).reshape(-1, classes, classes).transpose(0, 2, 1))


def shrink_confusions(counts: Array) -> tuple[Array, Array]:
    """Return confusions of groups shrunk to the pooled one, and the pooled one. Rows sum to 1."""
    classes = counts.shape[1]
    pooled = counts.sum(0) + 0.2 + 2 * np.eye(classes)
    pooled /= pooled.sum(1, keepdims=True)
    confusion = counts + SHRINKAGE * pooled
    return confusion / confusion.sum(2, keepdims=True), pooled


def vote_log_likelihood(votes: csr_matrix, confusion: Array) -> Array:
    """Return rows x classes: log P(votes | true label)."""
    classes = confusion.shape[1]
    return np.asarray(votes @ np.log(confusion + _FLOOR).transpose(0, 2, 1).reshape(-1, classes))


@dataclass(frozen=True, eq=False)
class CrowdFit:
    """Posterior of true labels (rows x classes) and confusions (groups x true x given)."""

    posterior: Array
    confusion: Array


_cache: WeakKeyDictionary[TrainingData, dict[bytes, CrowdFit]] = WeakKeyDictionary()


def fit_crowd(data: TrainingData, checked: Array) -> CrowdFit:
    """Return the EM fit with a confusion matrix a group. Strategies that need it of the same rows share it."""
    fits = _cache.setdefault(data, {})
    key = checked.tobytes()
    if key not in fits:
        fits[key] = run_em(data, checked)
    return fits[key]


def run_em(data: TrainingData, checked: Array, accuracy: Array | None = None) -> CrowdFit:
    """Alternate between cross-fitted models, confusions and posteriors.

    The first posterior is the share of each label among the votes of a row. Where there are scores of networks that
    did not see the votes, it is what these say, calibrated on checked rows: one vote a row that is taken for true
    says that the votes are right.

    Args:
        data: Rows and votes.
        checked: Positions of checked rows whose label is known; votes on other checked rows are not used.
        accuracy: One a group: confusions are then fixed to one-coin matrices.
    """
    n, classes = len(data.features), data.num_classes
    visible = ~data.is_checked
    rows = data.checked_rows[checked]
    visible[rows] = True
    votes = vote_matrix(data)
    if not visible.all():
        votes = csr_matrix(votes.multiply(visible[:, None]))
    voted = np.diff(votes.indptr) > 0
    known = np.eye(classes)[data.checked_labels[checked].astype(np.intp)]
    count = np.ones(n)
    count[rows] = CHECKED_COUNT
    fixed = None if accuracy is None else one_coin(accuracy, classes)
    if data.features.scores is not None:
        scores = data.features.scores.copy()
        scores[:, :classes] /= find_temperature(softmax(scores[rows, :classes]), data.checked_labels[checked])
        data = replace(data, features=replace(data.features, scores=scores))
        q = softmax(scores[:, :classes])
    elif fixed is None:
        plain = np.asarray(votes.sum(1)).ravel()
        by_class = votes @ np.tile(np.eye(classes), (data.num_groups, 1))
        q = (by_class + 0.3 / classes) / (plain + 0.3)[:, None]
    else:
        q = softmax(vote_log_likelihood(votes, fixed))
    q[rows] = known
    train = voted & ~data.is_checked
    confusion = fixed
    for round_ in range(_ROUNDS):
        mass = q * train[:, None]
        mass[rows] = CHECKED_ROW_WEIGHT * known
        log_prior = np.log(cross_fit(data, mass, voted | data.is_checked, seed=round_) + 1e-4)
        for _ in range(1 if fixed is not None else _STEPS):
            if fixed is None:
                confusion, _ = shrink_confusions(count_confusions(votes, q, count))
            assert confusion is not None
            q = softmax(log_prior + vote_log_likelihood(votes, confusion))
            q[rows] = known
    assert confusion is not None
    return CrowdFit(q, confusion)


def cross_fit(data: TrainingData, mass: Array, needed: Array, *, penalty: float = 1e-3, seed: int = 0) -> Array:
    """Return predictions for the rows that are needed, by linear models that were trained on the other half.

    Args:
        data: Gives the features.
        mass: Rows x classes, or rows x 2 in regression.
        needed: True for rows to predict; others get a flat prediction.
        penalty: Of the models.
        seed: Of the halves.
    """
    n, classification = len(mass), data.task == "classification"
    half = np.random.default_rng(seed).permutation(n) % 2
    z = data.features.dense if data.features.scores is None else data.features.scores
    result = np.full(mass.shape, 1 / mass.shape[1]) if classification else np.zeros((n, 1))
    for part in range(2):
        train = mass * (half != part)[:, None]
        rows = (half == part) & needed
        if classification:
            result[rows] = softmax(z[rows] @ fit_logistic(z, train, penalty, max_iter=30))
        else:
            result[rows] = z[rows] @ fit_ridge(z, train, penalty)
    return result if classification else result[:, 0]


@dataclass(frozen=True, eq=False)
class ScoreFit:
    """What EM for numbers says of groups and rows.

    Attributes:
        bias: Of each group.
        slope: Of each group.
        variance: Of each group's noise.
        vote_mean: The true number of each row as its votes alone say.
        vote_precision: And how precise that is, against the variance of the model's error.
    """

    bias: Array
    slope: Array
    variance: Array
    vote_mean: Array
    vote_precision: Array


def fit_scores(data: TrainingData, checked: Array) -> ScoreFit:
    """Return the EM fit of bias, slope and variance of each group.

    Bias is shrunk to the pooled bias, slope to 1 and variance to the pooled variance. The variance has a floor of a
    tenth of the model's, without which it collapses where rows have one vote.
    """
    n, groups = len(data.features), data.num_groups
    rows = data.checked_rows[checked]
    truth = data.checked_labels[checked]
    visible = ~data.is_checked
    visible[rows] = True
    use = visible[data.votes.row]
    row, group, label = data.votes.row[use], data.votes.group[use], data.votes.label[use]
    voted = np.bincount(row, minlength=n) > 0
    train = voted & ~data.is_checked
    count = np.ones(n)
    count[rows] = 3.0
    weight = count[row]
    by_group = np.bincount(group, weight, minlength=groups)
    mean = np.bincount(row, label, minlength=n) / np.maximum(np.bincount(row, minlength=n), 1)
    mean[rows] = truth
    spread = np.zeros(n)
    bias, slope = np.zeros(groups), np.ones(groups)
    variance = np.full(groups, np.var(label) / 2 + 1e-3)
    model_variance = max(float(np.var(truth)), 1e-3)
    for round_ in range(_ROUNDS + 1):
        mass = np.zeros((n, 2))
        row_weight = 1 / (spread[train] + 0.3 * model_variance)
        mass[train, 0] = row_weight / row_weight.mean()
        mass[train, 1] = mass[train, 0] * mean[train]
        mass[rows, 0], mass[rows, 1] = CHECKED_ROW_WEIGHT, CHECKED_ROW_WEIGHT * truth
        prior = cross_fit(data, mass, voted | data.is_checked, penalty=3e-3, seed=round_)
        model_variance = max(float(np.mean((prior[rows] - truth) ** 2)), 1e-3)
        for _ in range(_STEPS):
            t, t_variance = mean[row], spread[row]
            pooled = float(weight @ (label - t)) / weight.sum()
            error = np.bincount(group, weight * (label - slope[group] * t), minlength=groups)
            bias = (error + SHRINKAGE * pooled) / (by_group + SHRINKAGE)
            pull = 2 * SHRINKAGE * np.var(t)
            moment = np.bincount(group, weight * (label - bias[group]) * t, minlength=groups)
            square = np.bincount(group, weight * (t**2 + t_variance), minlength=groups)
            slope = np.clip((moment + pull) / np.maximum(square + pull, 1e-12), 0.0, 2.0)
            squared = (label - bias[group] - slope[group] * t) ** 2 + slope[group] ** 2 * t_variance
            total = np.bincount(group, weight * squared, minlength=groups)
            variance = (total + SHRINKAGE * (weight @ squared) / weight.sum()) / (by_group + SHRINKAGE)
            variance = np.maximum(variance, 0.1 * model_variance + 1e-4)
            precision = np.bincount(row, (slope**2 / variance)[group], minlength=n)
            moment = np.bincount(row, (slope / variance)[group] * (label - bias[group]), minlength=n)
            total_precision = precision + 1 / model_variance
            mean = (moment + prior / model_variance) / total_precision
            spread = 1 / total_precision
            mean[rows], spread[rows] = truth, 0.0
    vote_mean = np.where(precision > 0, moment / np.maximum(precision, 1e-9), 0.0)
    return ScoreFit(bias, slope, variance, vote_mean, precision * model_variance)
