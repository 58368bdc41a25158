"""Strategies: what is believed of the labels, before any learner sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.linalg import solve

from fsla.data._crowd import CHECKED_COUNT, SHRINKAGE, CrowdFit, checked_accuracy, fit_crowd, fit_scores, run_em
from fsla.data._dataset import Array, TrainingData
from fsla.data._group_weights import (
    GroupStatistics,
    compress,
    encode_targets,
    fit_checked_weight,
    fit_group_weights,
    statistics_of_votes,
)

if TYPE_CHECKING:
    from fsla.data._learners import Learner


@dataclass(frozen=True, eq=False)
class Belief:
    """What a strategy believes of the data: a weight for each row and class.

    Attributes:
        mass: Rows x classes, the weight of each label of each row. In regression rows x 2: weight, weight x target.
            Checked rows have no mass: their true label enters apart.
        vote_weight: How much each vote counts, as long as the votes. Default: the mass of its label, at most 1.
        group_weight: How much a row of each group counts, where the strategy says so.
        posterior: Rows x classes, P(true label), where the strategy says so.

    Examples:
        >>> belief = fsla.data.Belief(mass=np.ones((300, 2)) / 2)  # each row may have either label
    """

    mass: Array
    vote_weight: Array | None = None
    group_weight: Array | None = None
    posterior: Array | None = None


class Strategy(ABC):
    """One idea of which labels to trust. Subclass it to add your own.

    Examples:
        >>> class OnlyShop(fsla.data.Strategy):
        ...     name = "only_shop"
        ...
        ...     def belief(self, data, checked):
        ...         from_shop = data.group_names[data.votes.group] == "shop"
        ...         use = from_shop & ~data.is_checked[data.votes.row]
        ...         mass = np.zeros((len(data.features), data.num_classes))
        ...         mass[data.votes.row[use], data.votes.label[use]] = 1
        ...         return fsla.data.Belief(mass)
        >>> result = fsla.data.clean(table, checked="checked", group="source", strategies=[OnlyShop(), "all_data"])
        >>> result.comparison.best_single.split(",")[0]
        'only_shop'
    """

    name: ClassVar[str]
    """As the report shows it."""
    uses_checked_labels: ClassVar[bool] = True
    """Whether learners are also trained on the checked rows with their true labels."""
    linear_only: ClassVar[bool] = False
    """Whether only linear learners are tried, because the weights are found by a linear head."""

    corrects_labels: ClassVar[bool] = False
    """Whether learners that take minutes are trained on this belief."""

    def supports(self, data: TrainingData) -> bool:
        """Return whether the strategy makes sense for this data."""
        return True

    def suits(self, learner: Learner) -> bool:
        """Return whether the learner is worth trying on this belief."""
        if learner.corrected_only and not self.corrects_labels:
            return False
        return learner.is_linear or not self.linear_only

    @abstractmethod
    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return what to train on.

        Args:
            data: Rows and votes. Rows that are held out have no votes.
            checked: Positions in `data.checked_rows` of the rows whose true label may be used.
        """


def empty_mass(data: TrainingData) -> Array:
    """Return a mass of zeros."""
    return np.zeros((len(data.features), max(2, data.num_classes)))


def sum_votes(data: TrainingData, weight: Array | float, label: Array | None = None) -> Array:
    """Return the mass of votes as samples, each with a weight."""
    n, votes = len(data.features), data.votes
    w = np.broadcast_to(np.asarray(weight, dtype=np.float64), len(votes))
    if data.task == "classification":
        cell = votes.row * data.num_classes + votes.label.astype(np.intp)
        return np.bincount(cell, w, minlength=n * data.num_classes).reshape(n, -1)
    target = votes.label if label is None else label
    columns = [np.bincount(votes.row, w, minlength=n), np.bincount(votes.row, w * target, minlength=n)]
    return np.stack(columns, 1)


def vote_mass(data: TrainingData, weight: Array | float = 1.0, label: Array | None = None) -> Array:
    """Return the mass of votes as samples, each with a weight. Votes on checked rows do not count."""
    return sum_votes(data, np.where(data.is_checked[data.votes.row], 0.0, weight), label)


def checked_mass(data: TrainingData, checked: Array, weight: float = 1.0) -> Array:
    """Return the mass of checked rows with their true labels."""
    mass = empty_mass(data)
    rows, labels = data.checked_rows[checked], data.checked_labels[checked]
    if data.task == "classification":
        mass[rows, labels.astype(np.intp)] = weight
    else:
        mass[rows, 0], mass[rows, 1] = weight, weight * labels
    return mass


def checked_weight(data: TrainingData, mass: Array, checked: Array) -> float:
    """Return the weight of a checked row beside a belief, by the closed form."""
    row_weight = mass.sum(1) if data.task == "classification" else mass[:, 0]
    rows = np.nonzero(row_weight > 0)[0]
    if len(rows) == 0 or len(checked) < 2:
        return 1.0
    z = compress(data.features.dense, 1)
    target = mass[rows] - row_weight[rows, None] / data.num_classes if data.num_classes else mass[rows, 1:]
    weighted = z[rows] * row_weight[rows, None]
    statistics = GroupStatistics(
        (weighted.T @ z[rows])[None], (z[rows].T @ target)[None], np.array([row_weight[rows].sum()])
    )
    labels = encode_targets(data.checked_labels[checked], data.num_classes)
    return fit_checked_weight(statistics, z[data.checked_rows[checked]], labels)


class Nothing(Strategy):
    """Train on everything as it is: each row once, with the mean of its votes. The baseline of every comparison."""

    name = "nothing"
    uses_checked_labels = False

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return the votes of each row, divided by their number. Checked rows keep the label that they came with."""
        row = data.votes.row
        return Belief(sum_votes(data, 1 / np.bincount(row, minlength=len(data.features))[row]))


class TrustedOnly(Strategy):
    """Train on checked rows alone."""

    name = "trusted_only"

    def supports(self, data: TrainingData) -> bool:
        """Return whether there are checked rows."""
        return len(data.checked_rows) > 0

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return no mass."""
        return Belief(empty_mass(data), np.zeros(len(data.votes)))


class AllData(Strategy):
    """Train on every vote, with checked rows weighted up."""

    name = "all_data"

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return every vote with weight 1."""
        return Belief(vote_mass(data), np.ones(len(data.votes)))


class DropGroups(Strategy):
    """Drop groups that score badly on checked rows.

    A group's score is the accuracy of its votes on checked rows over chance, its precision by EM for several numbers
    a row, else the skill on checked rows of a ridge trained on the group alone. Half of the best score is enough.
    """

    name = "drop_groups"
    keep_from: ClassVar[float] = 0.5

    def supports(self, data: TrainingData) -> bool:
        """Return whether there are several groups."""
        return data.num_groups > 1

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return the votes of the groups that score at least half as well as the best."""
        if data.task == "regression" and data.has_several_votes:
            score = 1 / fit_scores(data, checked).variance
        elif data.has_several_votes and data.has_checked_votes:
            score = checked_accuracy(data, checked) - 1 / data.num_classes
        else:
            score = self.ridge_skill(data, checked)
        weight = (score >= self.keep_from * max(score.max(), 1e-9)).astype(float)
        return Belief(vote_mass(data, weight[data.votes.group]), weight[data.votes.group], weight)

    @staticmethod
    def ridge_skill(data: TrainingData, checked: Array) -> Array:
        """Return the share of the checked targets' variance that a ridge on each group alone explains."""
        z = compress(data.features.dense, data.num_groups)
        s = statistics_of_votes(data, z)
        target = encode_targets(data.checked_labels[checked], data.num_classes)
        rows = z[data.checked_rows[checked]]
        baseline = max(float(((target - target.mean(0)) ** 2).sum()), 1e-12)
        skill = np.zeros(data.num_groups)
        for g in np.nonzero(s.count > 0)[0]:
            gram = s.gram[g] + (0.01 * s.count[g] + 0.3) * np.eye(z.shape[1])
            coef = solve(gram, s.target[g], assume_a="pos")
            skill[g] = 1 - float(((rows @ coef - target) ** 2).sum()) / baseline
        return skill


def prior_logits(data: TrainingData, checked: Array) -> Array:
    """Return prior means of the logit weights of groups, centred at their median.

    They are log-odds of the accuracy over chance: on checked rows where several votes are on each, else by EM. In
    regression they are logarithms of the precision by EM.
    """
    if data.task == "regression":
        fit = fit_scores(data, checked)
        logit = np.log(np.clip(fit.slope, 0.05, None) ** 2 / fit.variance)
        logit = np.clip(logit - logit.mean(), -3, 3)
        return np.asarray(logit - np.median(logit))
    direct = data.has_several_votes and data.has_checked_votes
    accuracy = checked_accuracy(data, checked) if direct else crowd_accuracy(data, checked)
    accuracy = np.clip(accuracy, 0.02, 0.98)
    logit = np.log(accuracy / (1 - accuracy) * max(1, data.num_classes - 1))
    logit = 2 * np.clip(logit, -4, 4) if direct else np.clip(logit, -3, 3)
    return np.asarray(logit - np.median(logit))


def crowd_accuracy(data: TrainingData, checked: Array) -> Array:
    """Return the expected accuracy of each group's votes under the posterior of EM, shrunk to the pooled one."""
    q, votes = fit_crowd(data, checked).posterior, data.votes
    weight = np.where(data.is_checked[votes.row], CHECKED_COUNT, 1.0)
    hits = np.bincount(votes.group, weight * q[votes.row, votes.label.astype(np.intp)], minlength=data.num_groups)
    count = np.bincount(votes.group, weight, minlength=data.num_groups)
    pooled = hits.sum() / max(count.sum(), 1e-12)
    return np.asarray((hits + SHRINKAGE * pooled) / (count + SHRINKAGE))


class GroupWeighting(Strategy):
    """Weigh groups in closed form: a ridge inside, held-out checked rows outside."""

    name = "group_weights"
    linear_only = True

    def supports(self, data: TrainingData) -> bool:
        """Return whether there are several groups."""
        return data.num_groups > 1

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return every vote with the weight of its group."""
        z = compress(data.features.dense, data.num_groups)
        target = encode_targets(data.checked_labels[checked], data.num_classes)
        rows = z[data.checked_rows[checked]]
        prior = prior_logits(data, checked)
        weight = fit_group_weights(statistics_of_votes(data, z), rows, target, prior_mean=prior).weight
        return Belief(vote_mass(data, weight[data.votes.group]), weight[data.votes.group], weight)


class LabelCorrection(Strategy):
    """Correct labels by EM with a confusion matrix for each group and a model of the features."""

    name = "label_correction"
    corrects_labels = True

    def supports(self, data: TrainingData) -> bool:
        """Return whether labels are classes."""
        return data.task == "classification"

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return posteriors of rows with votes, sharpened: unsure rows count less."""
        return corrected_belief(data, fit_crowd(data, checked))


def corrected_belief(data: TrainingData, fit: CrowdFit) -> Belief:
    """Return the posterior times the square of its maximum, for rows with votes that are not checked."""
    q = fit.posterior
    train = (np.bincount(data.votes.row, minlength=len(q)) > 0) & ~data.is_checked
    return Belief(q * q.max(1, keepdims=True) ** 2 * train[:, None], posterior=q)


class CheckedAccuracies(Strategy):
    """Correct labels by EM with the groups' accuracies fixed to those on checked rows."""

    name = "label_correction_fixed_accuracies"
    linear_only = True

    def supports(self, data: TrainingData) -> bool:
        """Return whether rows have several votes, and checked rows too."""
        return data.task == "classification" and data.has_several_votes and data.has_checked_votes

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return posteriors of rows with votes, sharpened."""
        return corrected_belief(data, run_em(data, checked, checked_accuracy(data, checked)))


class ScoreCorrection(Strategy):
    """Correct numbers by EM with bias, slope and variance of each group."""

    name = "score_correction"
    corrects_labels = True

    def supports(self, data: TrainingData) -> bool:
        """Return whether labels are numbers."""
        return data.task == "regression"

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return rows with the mean that their votes say, weighted by its precision."""
        fit = fit_scores(data, checked)
        weight = np.where(data.is_checked, 0.0, fit.vote_precision / (1 + fit.vote_precision))
        weight = weight / max(weight.sum() / max((weight > 0).sum(), 1), 1e-12)
        return Belief(np.stack([weight, weight * fit.vote_mean], 1))


class CorrectedGroupWeighting(Strategy):
    """Correct labels by EM, then weigh groups in closed form. For one label a row."""

    name = "group_weights+label_correction"
    linear_only = True

    def supports(self, data: TrainingData) -> bool:
        """Return whether there are several groups and one label a row."""
        return data.num_groups > 1 and not data.has_several_votes

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return corrected labels with the weight of the row's group."""
        z = compress(data.features.dense, data.num_groups)
        votes = data.votes
        use = ~data.is_checked[votes.row]
        corrected: Belief | None = None
        if data.task == "classification":
            corrected = corrected_belief(data, fit_crowd(data, checked))
            assert corrected.posterior is not None
            target = corrected.posterior[votes.row[use]] - 1 / data.num_classes
        else:
            fit = fit_scores(data, checked)
            label = (votes.label - fit.bias[votes.group]) / np.clip(fit.slope[votes.group], 0.3, 2)
            target = label[use, None]
        s = GroupStatistics.from_rows(z[votes.row[use]], target, votes.group[use], data.num_groups)
        outer = encode_targets(data.checked_labels[checked], data.num_classes)
        weight = fit_group_weights(s, z[data.checked_rows[checked]], outer).weight[votes.group]
        if corrected is None:
            return Belief(vote_mass(data, weight, label), weight)
        row_weight = np.zeros(len(data.features))
        row_weight[votes.row] = weight
        return Belief(corrected.mass * row_weight[:, None], posterior=corrected.posterior)


def default_strategies(data: TrainingData) -> tuple[Strategy, ...]:
    """Return the strategies that are tried for this data."""
    strategies: tuple[Strategy, ...] = (
        TrustedOnly(),
        AllData(),
        GroupWeighting(),
        LabelCorrection(),
        ScoreCorrection(),
        DropGroups(),
        CheckedAccuracies(),
        CorrectedGroupWeighting(),
    )
    return tuple(s for s in strategies if s.supports(data))
