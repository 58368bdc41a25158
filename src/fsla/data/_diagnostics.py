"""What the fitted average says of rows and groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fsla.data._crowd import (
    CHECKED_COUNT,
    SHRINKAGE,
    count_confusions,
    shrink_confusions,
    vote_log_likelihood,
    vote_matrix,
)
from fsla.data._data_fit import GroupFit
from fsla.data._dataset import Array, TrainingData
from fsla.data._group_weights import (
    GroupStatistics,
    bootstrap_group_weights,
    compress,
    encode_targets,
    fit_group_weights,
    statistics_of_votes,
)
from fsla.data._intervals import Z95, paired_difference
from fsla.data._noise_rate import prediction_factor, prediction_powered_share
from fsla.data._predictors import softmax
from fsla.data._result import Estimate
from fsla.data._strategies import prior_logits, sum_votes

POSTERIOR_STEPS = 2
"""EM steps on top of the average's predictions. More let correlated groups outvote the model."""
CHECKED_VOTES = 10.0
"""A group's quality counts a vote on a checked row this often."""
MIN_CHECKED_VOTES = 20
"""Checked votes a group from which a confusion matrix of its own is shown for rows of one vote."""
MAX_COMPARED = 100
"""Most groups for which the gain without them is computed."""


def label_posterior(data: TrainingData, out_of_fold: Array, fold: Array) -> tuple[Array, Array]:
    """Return P(true label) given features and votes, and the confusions of groups.

    The confusions that judge a fold's rows come from the rows of the other folds. The true label of a checked row
    enters only the confusions that judge other folds.

    Returns:
        Rows x classes, and groups x true x given of all rows.
    """
    votes = vote_matrix(data)
    log_prior = np.log(np.clip(out_of_fold, 1e-4, 1))
    known = np.eye(data.num_classes)[data.checked_labels.astype(np.intp)]
    count = np.where(data.is_checked, CHECKED_COUNT, 1.0)

    def confusions(rows: Array) -> Array:
        q = softmax(log_prior)
        q[data.checked_rows] = known
        weight = count * rows
        confusion, _ = shrink_confusions(count_confusions(votes, q, weight))
        for _ in range(POSTERIOR_STEPS):
            q = softmax(log_prior + vote_log_likelihood(votes, confusion))
            q[data.checked_rows] = known
            confusion, _ = shrink_confusions(count_confusions(votes, q, weight))
        return confusion

    posterior = np.zeros_like(out_of_fold)
    for part in np.unique(fold):
        inside = fold == part
        confusion = confusions(~inside)
        posterior[inside] = softmax(log_prior[inside] + vote_log_likelihood(votes[inside], confusion))
    return posterior, confusions(np.ones(len(fold)))


def score_posterior(data: TrainingData, out_of_fold: Array, variance: Array, model_variance: float) -> Array:
    """Return the mean of true numbers given features and votes.

    Args:
        data: Rows and votes.
        out_of_fold: Predictions of all rows.
        variance: Of each group's error.
        model_variance: Of the predictions' error.
    """
    precision = 1 / np.maximum(variance, 0.1 * model_variance + 1e-9)[data.votes.group]
    n = len(out_of_fold)
    total = np.bincount(data.votes.row, precision, minlength=n) + 1 / model_variance
    moment = np.bincount(data.votes.row, precision * data.votes.label, minlength=n) + out_of_fold / model_variance
    return np.asarray(moment / total)


def error_variances(data: TrainingData, out_of_fold: Array) -> tuple[Array, float]:
    """Return the mean squared error of each group's numbers, shrunk to the pooled one, and that of the model.

    On checked rows the error is known. Elsewhere it is the distance from the prediction, less the model's own error.
    """
    rows = data.checked_rows
    model = float(np.mean((out_of_fold[rows] - data.checked_labels) ** 2)) if len(rows) else float(np.var(out_of_fold))
    model = max(model, 1e-6)
    truth = out_of_fold.copy()
    truth[rows] = data.checked_labels
    checked = data.is_checked[data.votes.row]
    squared = (data.votes.label - truth[data.votes.row]) ** 2
    squared = np.where(checked, squared, squared - model)
    weight = np.where(checked, CHECKED_VOTES, 1.0)
    total = np.bincount(data.votes.group, weight * squared, minlength=data.num_groups)
    count = np.bincount(data.votes.group, weight, minlength=data.num_groups)
    pooled = total.sum() / max(count.sum(), 1e-12)
    return np.maximum((total + SHRINKAGE * pooled) / (count + SHRINKAGE), 0.0), model


def label_quality(data: TrainingData, out_of_fold: Array) -> Array:
    """Return the mean probability of each group's labels: a second look, by models that did not see them."""
    if data.task == "regression":
        variance, _ = error_variances(data, out_of_fold)
        truth = data.checked_labels if len(data.checked_labels) > 1 else data.votes.label
        return np.asarray(np.maximum(0.0, 1 - variance / max(float(np.var(truth)), 1e-12)))
    votes = data.votes
    label = votes.label.astype(np.intp)
    checked = data.is_checked[votes.row]
    probability = np.where(checked, true_labels(data)[votes.row] == label, out_of_fold[votes.row, label])
    weight = np.where(checked, CHECKED_VOTES, 1.0)
    hits = np.bincount(votes.group, weight * probability, minlength=data.num_groups)
    count = np.bincount(votes.group, weight, minlength=data.num_groups)
    pooled = hits.sum() / max(count.sum(), 1e-12)
    return np.asarray((hits + SHRINKAGE * pooled) / (count + SHRINKAGE))


def true_labels(data: TrainingData) -> Array:
    """Return the class of each checked row, -1 elsewhere."""
    truth = np.full(len(data.features), -1)
    truth[data.checked_rows] = data.checked_labels
    return truth


def random_checked_rows(data: TrainingData) -> Array:
    """Return a mask of the checked rows that are a random sample."""
    mask = data.is_checked.copy()
    if data.random_rows is not None:
        mask[data.checked_rows[~data.random_rows]] = False
    return mask


def noise_rate(data: TrainingData, posterior: Array, rows: Array, labels: Array) -> Estimate | None:
    """Return the share of wrong labels among rows with one label each; None without checked rows among them.

    Args:
        data: Says which rows are checked.
        posterior: Rows x classes, from which the checked labels of the same fold are left out.
        rows: Rows that have a given label.
        labels: Those labels.
    """
    parts = _wrong_labels(data, posterior, rows, labels)
    return prediction_powered_share(*parts) if len(parts[0]) else None


def group_noise_rates(data: TrainingData, posterior: Array) -> tuple[Estimate | None, ...]:
    """Return the share of wrong labels of each group; how far predictions are trusted is found on all groups."""
    votes = data.votes
    order = np.argsort(votes.group, kind="stable")
    rows, labels = votes.row[order], votes.label[order]
    e, f, other = _wrong_labels(data, posterior, rows, labels)
    trust = prediction_factor(e, f, len(other))
    bounds = np.searchsorted(votes.group[order], np.arange(data.num_groups + 1))
    rates: list[Estimate | None] = []
    for start, stop in pairwise(bounds):
        parts = _wrong_labels(data, posterior, rows[start:stop], labels[start:stop])
        rates.append(prediction_powered_share(*parts, trust=trust) if len(parts[0]) else None)
    return tuple(rates)


def _wrong_labels(data: TrainingData, posterior: Array, rows: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Return whether checked labels are wrong, P(wrong) of them, and P(wrong) of labels of rows not checked."""
    labels = labels.astype(np.intp)
    predicted = 1 - posterior[rows, labels]
    sample = random_checked_rows(data)[rows]
    return true_labels(data)[rows[sample]] != labels[sample], predicted[sample], predicted[~data.is_checked[rows]]


def describe_groups(data: TrainingData, out_of_fold: Array, posterior: Array, seed: int) -> GroupFit:
    """Return weights, quality and noise rates of the groups.

    Args:
        data: Standardised in regression.
        out_of_fold: Predictions of all rows.
        posterior: The same with votes.
        seed: Of the bootstrap.
    """
    z = compress(data.features.dense, data.num_groups)
    statistics = statistics_of_votes(data, z)
    rows, target = z[data.checked_rows], encode_targets(data.checked_labels, data.num_classes)
    checked = np.arange(len(data.checked_rows))
    groups = data.num_groups
    if len(checked):
        prior = prior_logits(data, checked)
        fit = fit_group_weights(statistics, rows, target, prior_mean=prior)
        draws = bootstrap_group_weights(statistics, rows, target, fit, prior_mean=prior, seed=seed)
        low, high = np.quantile(draws, [0.025, 0.975], axis=0)
        weight = fit.weight
        low, high = np.minimum(low, weight), np.maximum(high, weight)
        largest = weight.max()
        weight, low, high = weight / largest, low / largest, np.minimum(high / largest, 1.0)
        gains = gains_without(data, z, statistics, np.argsort(weight, kind="stable")[:MAX_COMPARED])
    else:
        weight = low = high = np.ones(groups)
        gains = (None,) * groups
    no_rates: tuple[Estimate | None, ...] = (None,) * groups
    return GroupFit(
        weight=weight,
        weight_low=low,
        weight_high=high,
        quality=label_quality(data, out_of_fold),
        noise_rate=no_rates if data.task == "regression" else group_noise_rates(data, posterior),
        gain_without=gains,
        num_checked_votes=np.bincount(data.votes.group[data.is_checked[data.votes.row]], minlength=groups),
    )


def gains_without(
    data: TrainingData, features: Array, statistics: GroupStatistics, groups: Array, folds: int = 5
) -> tuple[Estimate | None, ...]:
    """Return what dropping each group gains on checked rows, by a ridge on all other rows.

    Every label counts once, as in plain training: checked rows that are weighted up hide what a group does.

    Args:
        data: Says which rows are checked.
        features: Of all rows.
        statistics: Of the groups.
        groups: Those to drop, one at a time.
        folds: Parts of the checked rows, each of which judges what the others train.
    """
    n, d = len(data.checked_rows), features.shape[1]
    target = encode_targets(data.checked_labels, data.num_classes)
    rows = features[data.checked_rows]
    pooled = statistics.pooled()
    part = np.random.default_rng(0).permutation(n) % folds

    def held_out(gram: Array, mass: Array, count: float) -> Array:
        result = np.zeros_like(target)
        for fold in range(folds):
            z, y = rows[part != fold], target[part != fold]
            matrix = gram + z.T @ z + 1e-3 * (count + len(z)) * np.eye(d)
            result[part == fold] = rows[part == fold] @ np.linalg.solve(matrix, mass + z.T @ y)
        return result

    def right(prediction: Array) -> Array:
        return np.asarray(prediction.argmax(1) == target.argmax(1))

    everything = held_out(pooled.gram[0], pooled.target[0], pooled.count[0])
    gains: list[Estimate | None] = [None] * statistics.num_groups
    for g in groups:
        if statistics.count[g] == 0:
            continue
        without = held_out(
            pooled.gram[0] - statistics.gram[g],
            pooled.target[0] - statistics.target[g],
            pooled.count[0] - statistics.count[g],
        )
        if data.task == "classification":
            gains[g] = paired_difference(right(everything), right(without))
        else:
            difference = ((everything - target) ** 2 - (without - target) ** 2)[:, 0]
            mean, half = float(difference.mean()), Z95 * float(difference.std(ddof=1)) / np.sqrt(n)
            gains[g] = Estimate(mean, mean - half, mean + half)
    return tuple(gains)


def overall_confusion(data: TrainingData, posterior: Array, rows: Array, labels: Array) -> Array:
    """Return true x given: P(given label | true label) of rows with one label each."""
    q = posterior[rows].copy()
    position = np.full(len(posterior), -1)
    position[rows] = np.arange(len(rows))
    at = position[data.checked_rows]
    labelled = at >= 0
    q[at[labelled]] = np.eye(data.num_classes)[data.checked_labels[labelled].astype(np.intp)]
    counts = q.T @ np.eye(data.num_classes)[labels.astype(np.intp)] + 1e-3
    return np.asarray(counts / counts.sum(1, keepdims=True))


def shows_group_confusions(data: TrainingData) -> bool:
    """Return whether confusions of single groups can be estimated."""
    if data.num_groups < 2 or data.task == "regression":
        return False
    count = np.bincount(data.votes.group[data.is_checked[data.votes.row]], minlength=data.num_groups)
    return data.has_several_votes or bool(count.min() >= MIN_CHECKED_VOTES)


def consensus(data: TrainingData) -> tuple[Array, Array]:
    """Return the rows that have votes, and the label with most votes (the mean in regression)."""
    row = data.votes.row
    mass = sum_votes(data, 1 / np.bincount(row, minlength=len(data.features))[row])
    rows = np.unique(row)
    return rows, mass[rows].argmax(1) if data.task == "classification" else mass[rows, 1]


class Diagnosis(NamedTuple):
    """What the average says of rows and groups."""

    posterior: Array
    groups: GroupFit | None
    confusion: Array | None
    group_confusion: Array | None
    noise_rate: Estimate | None


def diagnose(data: TrainingData, out_of_fold: Array, fold: Array, seed: int, scale: float) -> Diagnosis:
    """Return what predictions of all rows by models that did not see them say of rows and groups.

    Args:
        data: Standardised in regression.
        out_of_fold: Predictions of all rows.
        fold: Of each row.
        seed: Of bootstraps.
        scale: Unit of the standardised numbers.
    """
    confusion = group_confusion = share = groups = None
    if data.task == "regression":
        posterior = score_posterior(data, out_of_fold, *error_variances(data, out_of_fold))
    else:
        posterior, group_confusion = label_posterior(data, out_of_fold, fold)
        rows, labels = consensus(data)
        if len(rows):
            confusion = overall_confusion(data, posterior, rows, labels)
            share = noise_rate(data, posterior, rows, labels)
    if data.num_groups > 1 and len(data.votes):
        groups = describe_groups(data, out_of_fold, posterior, seed)
        if data.task == "regression":
            gains = [g and Estimate(*(scale**2 * value for value in g)) for g in groups.gain_without]
            groups = replace(groups, gain_without=tuple(gains))
    if not shows_group_confusions(data):
        group_confusion = None
    return Diagnosis(posterior, groups, confusion, group_confusion, share)
