"""How good a prediction is, and how well wrong labels and bad groups are told from right and good ones."""

from __future__ import annotations

import numpy as np

from fsla.data._dataset import Task
from fsla_benchmarks.data.problem import Array, Problem

SMALLEST = 1e-4
"""Probabilities below it count as this in logarithms."""


def row_losses(task: Task, predicted: Array, labels: Array) -> Array:
    """Return minus the log-probability of each label, or the squared error."""
    if task == "classification":
        return np.asarray(-np.log(np.maximum(predicted[np.arange(len(labels)), labels], SMALLEST)))
    return np.asarray((predicted - labels) ** 2)


def score(task: Task, predicted: Array, labels: Array) -> float:
    """Return the accuracy, or R2 in regression."""
    if task == "classification":
        return float((predicted.argmax(1) == labels).mean())
    return float(1 - ((predicted - labels) ** 2).mean() / labels.var())


def score_predictions(task: Task, predicted: Array, labels: Array, held_out_loss: float) -> dict[str, float]:
    """Return the score (accuracy, or R2 in regression) and the mean log-likelihood of test rows.

    Args:
        task: What is predicted.
        predicted: Rows x classes, or numbers.
        labels: The true labels.
        held_out_loss: In regression, the squared error on held-out checked rows: the variance of the prediction.
    """
    losses = row_losses(task, predicted, labels)
    if task == "classification":
        return {"score": score(task, predicted, labels), "log_likelihood": float(-losses.mean())}
    variance = max(held_out_loss, 1e-9)
    log_likelihood = -0.5 * (np.log(2 * np.pi * variance) + losses.mean() / variance)
    return {"score": score(task, predicted, labels), "log_likelihood": float(log_likelihood)}


def auroc(suspicion: Array, positive: Array) -> float | None:
    """Return the probability that a positive has more suspicion than a negative; None without both kinds."""
    from scipy.stats import rankdata

    number = int(positive.sum())
    if number in (0, len(positive)):
        return None
    rank_sum = rankdata(suspicion)[positive].sum()
    return float((rank_sum - number * (number + 1) / 2) / (number * (len(positive) - number)))


def rank_correlation(score: Array, quality: Array | None) -> float | None:
    """Return Spearman's correlation over the groups whose quality is known; None where either is constant."""
    from scipy.stats import spearmanr

    if quality is None:
        return None
    known = np.isfinite(quality) & np.isfinite(score)
    if known.sum() < 3 or np.ptp(score[known]) == 0 or np.ptp(quality[known]) == 0:
        return None
    return float(spearmanr(score[known], quality[known])[0])


def suspicion_of_votes(problem: Problem, predicted: Array) -> Array:
    """Return one minus the probability of each vote, or its squared error."""
    votes = problem.data.votes
    if problem.data.task == "classification":
        return np.asarray(1 - predicted[votes.row, votes.label])
    return np.asarray((predicted[votes.row] - votes.label) ** 2)


def judge_votes(problem: Problem, predicted: Array, group_score: Array | None = None) -> dict[str, float | None]:
    """Return how well predictions for the data's own rows rank wrong votes and groups.

    Votes on checked rows do not count. A group is scored by its mean plausibility where no score is passed.
    """
    data = problem.data
    unchecked = ~data.is_checked[data.votes.row]
    suspicion = suspicion_of_votes(problem, predicted)
    wrong = problem.wrong_votes
    area = None if wrong is None else auroc(suspicion[unchecked], wrong[unchecked])
    if group_score is None:
        group = data.votes.group[unchecked]
        counts = np.bincount(group, minlength=data.num_groups)
        sums = np.bincount(group, suspicion[unchecked], minlength=data.num_groups)
        group_score = np.where(counts > 0, -sums / np.maximum(counts, 1), np.nan)
    return {"auroc": area, "group_correlation": rank_correlation(group_score, problem.group_quality)}
