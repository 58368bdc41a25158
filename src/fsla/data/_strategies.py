"""Strategies: what is believed of the labels, before any learner sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fsla.data._dataset import Array, TrainingData
from fsla.data._group_weights import GroupStatistics, compress, encode_targets, fit_checked_weight

if TYPE_CHECKING:
    from fsla.data._learners import Learner


@dataclass(frozen=True, eq=False)
class Belief:
    """What a strategy believes of the data.

    Attributes:
        mass: Rows x classes, the weight of each label of each row. In regression rows x 2: weight, weight x target.
            Checked rows have no mass: their true label enters apart.
        vote_weight: How much each vote counts, as long as the votes. Default: the mass of its label, at most 1.
        group_weight: How much a row of each group counts, where the strategy says so.
        posterior: Rows x classes, P(true label), where the strategy says so.
    """

    mass: Array
    vote_weight: Array | None = None
    group_weight: Array | None = None
    posterior: Array | None = None


class Strategy(ABC):
    """One idea of which labels to trust. Subclass it to add your own."""

    name: ClassVar[str]
    """As the report shows it."""
    uses_checked_labels: ClassVar[bool] = True
    """Whether learners are also trained on the checked rows with their true labels."""
    linear_only: ClassVar[bool] = False
    """Whether only linear learners are tried, because the weights are found by a linear head."""

    def supports(self, data: TrainingData) -> bool:
        """Return whether the strategy makes sense for this data."""
        return True

    def suits(self, learner: Learner) -> bool:
        """Return whether the learner is worth trying on this belief."""
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


def vote_mass(data: TrainingData, weight: Array | float = 1.0, label: Array | None = None) -> Array:
    """Return the mass of votes as samples, each with a weight. Votes on checked rows do not count."""
    mass = empty_mass(data)
    weight = np.where(data.is_checked[data.votes.row], 0.0, weight)
    if data.task == "classification":
        np.add.at(mass, (data.votes.row, data.votes.label.astype(np.intp)), weight)
    else:
        target = data.votes.label if label is None else label
        np.add.at(mass, (data.votes.row, 0), weight)
        np.add.at(mass, (data.votes.row, 1), weight * target)
    return mass


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
        mass, votes = empty_mass(data), data.votes
        weight = 1 / np.bincount(votes.row, minlength=len(mass))[votes.row]
        if data.task == "classification":
            np.add.at(mass, (votes.row, votes.label.astype(np.intp)), weight)
        else:
            np.add.at(mass, (votes.row, 0), weight)
            np.add.at(mass, (votes.row, 1), weight * votes.label)
        return Belief(mass)


class TrustedOnly(Strategy):
    """Train on checked rows alone."""

    name = "trusted only"

    def supports(self, data: TrainingData) -> bool:
        """Return whether there are checked rows."""
        return len(data.checked_rows) > 0

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return no mass."""
        return Belief(empty_mass(data), np.zeros(len(data.votes)))


class AllData(Strategy):
    """Train on every vote, with checked rows weighted up."""

    name = "all data"

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return every vote with weight 1."""
        return Belief(vote_mass(data), np.ones(len(data.votes)))


def default_strategies(data: TrainingData) -> tuple[Strategy, ...]:
    """Return the strategies that are tried for this data."""
    strategies: tuple[Strategy, ...] = (TrustedOnly(), AllData())
    return tuple(s for s in strategies if s.supports(data))
