"""What a user would do without the library: each alternative says how much each row counts for each class.

A mass matrix has a row for each row of the data: its weight for each class, or in regression its weight and its weight
times its target. Votes of checked rows never enter it, because the checked label replaces them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve

from fsla.data._dataset import Features, TrainingData
from fsla.data._learners import Learner
from fsla_benchmarks.data.problem import Array

SHRINKAGE = 3.0
"""Pooled votes that are added to each group's own where its accuracy is estimated."""
SOURCE_PENALTY = 0.01
GOOD_ENOUGH = 0.5
"""A source is used if its score is at least this part of the best one."""
USED_RESIDUALS = 0.7
"""Part of the rows, those with the smallest residuals, that a filter leaves in regression."""
CHECKED_WEIGHTS = (1.0, 3.0, 10.0, 30.0)
PENALTIES = (1e-2, 1e-3, 1e-4)
FOLDS = 5
CLEANLAB_FOLDS = 3
EM_STEPS = 30


class Choice(NamedTuple):
    """What an alternative makes of the data."""

    mass: Array
    group_score: Array | None = None
    """Its own view of how good each group is."""


class Alternative(NamedTuple):
    """Something that a user would do, with any learner."""

    name: str
    choose: Callable[[TrainingData, Array, Learner], Choice]
    """Takes the data, positions in `checked_rows` that may be used, and a learner for what needs a first model."""
    suits: Callable[[TrainingData], bool] = lambda data: True
    checked_weight: float | None = None
    """How much a checked row counts. None: chosen by cross-validation."""
    source_feature: bool = False


def one_hot(labels: Array, num_classes: int) -> Array:
    """Return rows x classes."""
    return np.eye(num_classes)[labels]


def vote_mass(data: TrainingData, weight: Array | float = 1.0) -> Array:
    """Return the mass of all votes of unchecked rows."""
    votes, used = data.votes, ~data.is_checked[data.votes.row]
    row, label = votes.row[used], votes.label[used]
    weights = np.broadcast_to(weight, len(votes))[used]
    mass = np.zeros((len(data.features), data.num_classes or 2))
    if data.task == "classification":
        np.add.at(mass, (row, label), weights)
    else:
        mass[:, 0] = np.bincount(row, weights, minlength=len(mass))
        mass[:, 1] = np.bincount(row, weights * label, minlength=len(mass))
    return mass


def row_weight(data: TrainingData, mass: Array) -> Array:
    """Return how much each row counts."""
    return mass.sum(1) if data.task == "classification" else mass[:, 0]


def checked_mass(data: TrainingData, checked: Array, weight: float) -> Array:
    """Return the mass of checked rows."""
    mass = np.zeros((len(data.features), data.num_classes or 2))
    rows, labels = data.checked_rows[checked], data.checked_labels[checked]
    if data.task == "classification":
        mass[rows, labels] = weight
    else:
        mass[rows, 0], mass[rows, 1] = weight, weight * labels
    return mass


def one_vote_per_row(data: TrainingData, mass: Array) -> Array:
    """Return the mean vote of each row, with weight 1."""
    weight = row_weight(data, mass)[:, None]
    return np.asarray(np.divide(mass, weight, out=np.zeros_like(mass), where=weight > 0))


def targets(data: TrainingData, labels: Array) -> Array:
    """Return what a ridge regression is fitted to: centred classes, or the numbers themselves."""
    if data.task == "regression":
        return labels[:, None]
    return one_hot(labels, data.num_classes) - 1 / data.num_classes


def choose_checked_weight(data: TrainingData, mass: Array, checked: Array) -> float:
    """Return the weight of a checked row with which ridge regression does best on held-out checked rows."""
    dense, rows = data.features.dense, data.checked_rows[checked]
    weight = row_weight(data, mass)
    response = mass - weight[:, None] / data.num_classes if data.num_classes else mass[:, 1:]
    gram = (dense * weight[:, None]).T @ dense
    moment = dense.T @ response
    columns, truth = dense[rows], targets(data, data.checked_labels[checked])
    fold = np.arange(len(rows)) % FOLDS
    identity = np.eye(dense.shape[1])
    error: dict[tuple[float, float], float] = {}
    for each in CHECKED_WEIGHTS:
        for penalty in PENALTIES:
            total = 0.0
            for number in range(FOLDS):
                a, b = fold != number, fold == number
                ridge = penalty * (weight.sum() + each * a.sum())
                matrix = gram + each * columns[a].T @ columns[a] + ridge * identity
                head = solve(matrix, moment + each * columns[a].T @ truth[a], assume_a="pos")
                total += float(((columns[b] @ head - truth[b]) ** 2).sum())
            error[each, penalty] = total
    return min(error, key=lambda pair: error[pair])[0]


def nothing(data: TrainingData, checked: Array, learner: Learner) -> Choice:
    """Take every row by its mean vote; checked rows are not used."""
    return Choice(one_vote_per_row(data, vote_mass(data)))


def trusted_only(data: TrainingData, checked: Array, learner: Learner) -> Choice:
    """Use checked rows alone."""
    return Choice(np.zeros((len(data.features), data.num_classes or 2)))


def all_votes(data: TrainingData, checked: Array, learner: Learner) -> Choice:
    """Take every vote as a row of its own."""
    return Choice(vote_mass(data))


def majority(data: TrainingData, checked: Array, learner: Learner) -> Choice:
    """Take each row by its majority vote, or in regression by its mean vote."""
    mass = vote_mass(data)
    if data.task == "regression":
        return Choice(one_vote_per_row(data, mass))
    return Choice(one_hot(mass.argmax(1), data.num_classes) * (mass.sum(1) > 0)[:, None])


def checked_votes(data: TrainingData, checked: Array) -> tuple[Array, Array, Array]:
    """Return group, label and true label of the votes on checked rows that may be used."""
    true = np.full(len(data.features), -1.0)
    usable = np.zeros(len(data.features), dtype=bool)
    rows = data.checked_rows[checked]
    true[rows], usable[rows] = data.checked_labels[checked], True
    used = usable[data.votes.row]
    return data.votes.group[used], data.votes.label[used], true[data.votes.row[used]]


def score_on_checked_votes(data: TrainingData, checked: Array) -> Array:
    """Return the score of each group on checked rows, shrunk to the pooled one.

    The score is accuracy above chance, or the explained part of the variance in regression.
    """
    group, label, true = checked_votes(data, checked)
    counts = np.bincount(group, minlength=data.num_groups)
    if data.task == "classification":
        value = (label == true).astype(np.float64)
        pooled = (value.sum() + 1) / (len(value) + 2)
    else:
        value = (label - true) ** 2
        pooled = value.mean()
    mean = (np.bincount(group, value, minlength=data.num_groups) + SHRINKAGE * pooled) / (counts + SHRINKAGE)
    if data.task == "classification":
        return np.asarray(mean - 1 / data.num_classes)
    return np.asarray(1 - mean / np.var(data.votes.label))


def score_by_model(data: TrainingData, checked: Array) -> Array:
    """Return how well a ridge regression on each group alone predicts the checked rows."""
    dense, votes = data.features.dense, data.votes
    rows = data.checked_rows[checked]
    truth = targets(data, data.checked_labels[checked])
    spread = ((truth - truth.mean(0)) ** 2).sum()
    score = np.zeros(data.num_groups)
    for group in range(data.num_groups):
        used = (votes.group == group) & ~data.is_checked[votes.row]
        if used.any():
            columns = dense[votes.row[used]]
            ridge = SOURCE_PENALTY * used.sum() + 0.3
            matrix = columns.T @ columns + ridge * np.eye(dense.shape[1])
            head = solve(matrix, columns.T @ targets(data, votes.label[used]), assume_a="pos")
            score[group] = 1 - ((dense[rows] @ head - truth) ** 2).sum() / spread
    return score


def good_sources(data: TrainingData, checked: Array, learner: Learner) -> Choice:
    """Use the sources whose score on checked rows is at least half of the best."""
    by_votes = data.has_several_votes and data.has_checked_votes
    score = (score_on_checked_votes if by_votes else score_by_model)(data, checked)
    used = score >= GOOD_ENOUGH * max(score.max(), 1e-9)
    return Choice(vote_mass(data, used[data.votes.group].astype(np.float64)), score)


def agreeing_rows(data: TrainingData, checked: Array, learner: Learner) -> Choice:
    """Use the votes that a model of the checked rows agrees with."""
    mass = np.zeros((len(data.features), data.num_classes or 2))
    path = learner.path(data.features, mass, checked_mass(data, checked, 1.0), data.task, 0)
    predicted = path[len(path) // 2].predict(data.features)[data.votes.row]
    if data.task == "classification":
        used = predicted.argmax(1) == data.votes.label
    else:
        residual = np.abs(predicted - data.votes.label)
        used = residual <= np.quantile(residual, USED_RESIDUALS)
    return Choice(vote_mass(data, used.astype(np.float64)))


def dawid_skene(data: TrainingData, checked: Array, learner: Learner, *, one_coin: bool = False) -> Choice:
    """Return posteriors of labels by EM with a confusion matrix for each group, or with one accuracy for each.

    Checked labels are known. Matrices are shrunk to the pooled one, as groups may have few votes.
    """
    votes, num_rows, num_classes = data.votes, len(data.features), data.num_classes
    rows, labels = data.checked_rows[checked], data.checked_labels[checked]
    hidden = data.is_checked.copy()
    hidden[rows] = False
    used = ~hidden[votes.row]
    row, group, label = votes.row[used], votes.group[used], votes.label[used]
    posterior = np.full((num_rows, num_classes), 0.3 / num_classes)
    np.add.at(posterior, (row, label), 1.0)
    posterior /= posterior.sum(1, keepdims=True)
    posterior[rows] = one_hot(labels, num_classes)
    prior = np.bincount(labels, minlength=num_classes) + 6 / num_classes
    log_prior = np.log(prior / prior.sum())
    counts = np.bincount(group, minlength=data.num_groups)
    for _ in range(EM_STEPS):
        evidence = np.zeros((num_rows, num_classes))
        if one_coin:
            hits = np.bincount(group, posterior[row, label], minlength=data.num_groups)
            pooled = (hits.sum() + 2) / (counts.sum() + 3)
            accuracy = np.clip((hits + 5 * pooled) / (counts + 5), 0.02, 0.98)
            np.add.at(evidence, (row, label), np.log(accuracy / (1 - accuracy) * (num_classes - 1))[group])
        else:
            confusion = np.zeros((data.num_groups, num_classes, num_classes))
            np.add.at(confusion.transpose(0, 2, 1), (group, label), posterior[row])
            pooled = confusion.sum(0) + 0.2 + 2 * np.eye(num_classes)
            confusion += 5 * pooled / pooled.sum(1, keepdims=True)
            confusion /= confusion.sum(2, keepdims=True)
            accuracy = np.einsum("gcc->gc", confusion).mean(1)
            np.add.at(evidence, row, np.log(confusion[group, :, label]))
        logits = log_prior + evidence
        posterior = np.exp(logits - logits.max(1, keepdims=True))
        posterior /= posterior.sum(1, keepdims=True)
        posterior[rows] = one_hot(labels, num_classes)
    has_votes = np.bincount(votes.row, minlength=num_rows) > 0
    return Choice(posterior * (has_votes & ~data.is_checked)[:, None], accuracy)


def one_coin_dawid_skene(data: TrainingData, checked: Array, learner: Learner) -> Choice:
    """Return posteriors of labels by EM with one accuracy for each group."""
    return dawid_skene(data, checked, learner, one_coin=True)


def confident_issues(labels: Array, probability: Array) -> Array:
    """Return a mask of label issues by confident learning (Northcutt et al. 2021), pruned by noise rate.

    A class has a threshold, the mean probability of its own rows. A row counts as the most probable class among those
    whose threshold it reaches. The counts, scaled to the sizes of the given classes, say how many labels of each class
    are removed for each other class: those with the largest margin.
    """
    num_classes = probability.shape[1]
    sizes = np.bincount(labels, minlength=num_classes)
    sums = np.bincount(labels, probability[np.arange(len(labels)), labels], minlength=num_classes)
    threshold = np.where(sizes > 0, sums / np.maximum(sizes, 1), np.inf)
    above = np.where(probability >= threshold - 1e-6, probability, -1.0)
    confident = above.max(1) >= 0
    joint = np.zeros((num_classes, num_classes))
    np.add.at(joint, (labels[confident], above.argmax(1)[confident]), 1)
    rows = joint.sum(1)
    joint[rows == 0, rows == 0] = 1
    joint *= (sizes / joint.sum(1))[:, None]
    issue = np.zeros(len(labels), dtype=bool)
    for label in range(num_classes):
        members = np.flatnonzero(labels == label)
        for other in range(num_classes):
            number = min(round(joint[label, other]), len(members))
            if other != label and number:
                margin = probability[members, other] - probability[members, label]
                issue[members[np.argsort(-margin, kind="stable")[:number]]] = True
    return np.asarray(issue & (probability.argmax(1) != labels))


def confident_learning(data: TrainingData, checked: Array, learner: Learner) -> Choice:
    """Leave out the majority votes that confident learning takes for label issues."""
    mass = majority(data, checked, learner).mass
    rows = np.flatnonzero(mass.sum(1) > 0)
    labels = mass[rows].argmax(1)
    sure = checked_mass(data, checked, 3.0)
    fold = np.random.default_rng(0).permutation(len(rows)) % CLEANLAB_FOLDS
    probability: list[Array] = []
    for part in range(CLEANLAB_FOLDS):
        train = mass.copy()
        train[rows[fold == part]] = 0
        path = learner.path(data.features, train, sure, data.task, 0)
        features = data.features.take(rows[fold == part])
        for number, predictor in enumerate(path):
            if part == 0:
                probability.append(np.zeros((len(rows), data.num_classes)))
            probability[number][fold == part] = predictor.predict(features)
    loss = [-np.log(np.maximum(each[np.arange(len(rows)), labels], 1e-4)).mean() for each in probability]
    issue = confident_issues(labels, probability[int(np.argmin(loss))])
    mass[rows[issue]] = 0
    return Choice(mass)


def add_source(features: Features, group: Array, num_groups: int) -> Features:
    """Return features with the source of each row as a further column; `num_groups` stands for no source."""
    dense = np.column_stack([features.dense, 0.5 * one_hot(group, num_groups + 1)])
    numeric = None if features.numeric is None else np.column_stack([features.numeric, group])
    return Features(dense, numeric)


def source_of_rows(data: TrainingData) -> Array:
    """Return the group of each row with a vote, and the number of groups where there is none."""
    source = np.full(len(data.features), data.num_groups)
    source[data.votes.row] = data.votes.group
    source[data.checked_rows] = data.num_groups
    return source


def _has_classes(data: TrainingData) -> bool:
    return data.task == "classification"


def _has_groups(data: TrainingData) -> bool:
    return data.num_groups > 1


ALTERNATIVES = (
    Alternative("nothing", nothing, checked_weight=0.0),
    Alternative("trusted alone", trusted_only, checked_weight=1.0),
    Alternative("all + trusted", all_votes),
    Alternative("majority + trusted", majority, lambda data: data.has_several_votes),
    Alternative("Dawid-Skene", dawid_skene, lambda data: _has_classes(data) and data.has_several_votes),
    Alternative("one-coin DS", one_coin_dawid_skene, lambda data: _has_classes(data) and data.has_several_votes),
    Alternative("confident learning", confident_learning, _has_classes),
    Alternative("agreeing rows", agreeing_rows),
    Alternative("good sources", good_sources, _has_groups),
    Alternative(
        "source as feature",
        all_votes,
        lambda data: _has_groups(data) and not data.has_several_votes,
        source_feature=True,
    ),
)
