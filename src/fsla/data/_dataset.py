"""What strategies and learners see: features, votes of groups, and checked labels, all as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Task = Literal["classification", "regression"]


@dataclass(frozen=True, eq=False)
class Features:
    """The rows of a data set, in each form that some learner takes.

    Args:
        dense: rows x columns for linear learners; see the attribute.
        numeric: rows x columns for trees.
        images: rows x height x width x channels for networks.
        raw: the rows as the user gave them.
        index: positions in the training data.
        scores: rows x columns for label correction, where it needs others than `dense`.

    Examples:
        >>> features = result.model.builder.transform(table)
        >>> len(features), len(features.take(np.arange(5)))
        (300, 5)
    """

    dense: Array
    """Rows x columns, float64, mean square norm of a row about 1, the last column constant: for linear learners."""
    numeric: Array | None = None
    """Rows x columns with NaN where a cell is missing: for trees. None for text and images."""
    images: Array | None = None
    """Rows x height x width x channels, uint8: for networks on images."""
    raw: Any = None
    """The rows as the user gave them: for learners of the user's own."""
    index: Array | None = None
    """Position of each row in the training data, None for new rows: for predictions that were computed elsewhere."""
    scores: Array | None = None
    """Rows x columns, on images: scores of networks that did not see the row's votes. They replace `dense` in EM, which
    a network that has learned wrong labels by heart would mislead. None for new rows."""

    def __len__(self) -> int:
        return len(self.dense)

    def take(self, rows: Array) -> Features:
        """Return some rows."""
        raw = self.raw
        if raw is not None:
            raw = raw.iloc[rows] if hasattr(raw, "iloc") else raw[rows]
        return Features(
            self.dense[rows],
            None if self.numeric is None else self.numeric[rows],
            None if self.images is None else self.images[rows],
            raw,
            None if self.index is None else self.index[rows],
            None if self.scores is None else self.scores[rows],
        )


@dataclass(frozen=True, eq=False)
class Votes:
    """Labels that groups gave to rows: a row may have none, one or several.

    Args:
        row: position of the row, one entry a vote.
        group: position of the group in `TrainingData.group_names`.
        label: index of a class, or a number in regression.

    Examples:
        >>> votes = fsla.data.Votes(row=np.array([0, 0, 1]), group=np.array([0, 1, 0]), label=np.array([1, 0, 1]))
        >>> len(votes)
        3
    """

    row: Array
    group: Array
    label: Array
    """The index of a class, or a number in regression."""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Rows with features, votes and some checked labels.

    A checked row may carry votes too: they say how good a group is, and never train a model.

    Args:
        task: "classification" or "regression".
        features: the rows.
        votes: their labels.
        group_names: one name a group; without groups there is one.
        checked_rows: indices of rows whose true label is known, each once.
        checked_labels: their labels, coded as the votes are.
        classes: names of the classes, sorted; None in regression.
        random_rows: True for checked rows that are a random sample; None where all are.

    Examples:
        >>> votes = fsla.data.Votes(np.arange(300), np.zeros(300, dtype=int), (true == "yes").astype(int))
        >>> data = fsla.data.TrainingData(
        ...     task="classification",
        ...     features=result.model.builder.transform(table),
        ...     votes=votes,
        ...     group_names=np.array(["all"]),
        ...     checked_rows=np.arange(60),
        ...     checked_labels=votes.label[:60],
        ...     classes=np.array(["no", "yes"]),
        ... )
        >>> data.num_groups, data.has_several_votes
        (1, False)
    """

    task: Task
    features: Features
    votes: Votes
    group_names: Array
    """One name a group. Without groups there is one."""
    checked_rows: Array
    """Indices of rows whose true label is known, each once."""
    checked_labels: Array
    """Their labels, coded as the votes are."""
    classes: Array | None = None
    """Names of the classes, sorted; None in regression."""
    random_rows: Array | None = None
    """True for checked rows that are a random sample, as long as `checked_rows`; None where all are."""

    @property
    def num_classes(self) -> int:
        """Return the number of classes, 0 in regression."""
        return 0 if self.classes is None else len(self.classes)

    @property
    def num_groups(self) -> int:
        """Return the number of groups, at least 1."""
        return len(self.group_names)

    @cached_property
    def is_checked(self) -> Array:
        """Return a mask of the rows whose true label is known."""
        mask = np.zeros(len(self.features), dtype=bool)
        mask[self.checked_rows] = True
        return mask

    @cached_property
    def has_several_votes(self) -> bool:
        """Return whether some row has votes of more than one group."""
        return len(np.unique(self.votes.row)) < len(self.votes)

    @cached_property
    def has_checked_votes(self) -> bool:
        """Return whether checked rows carry votes: then they show how good each group is."""
        return bool(self.is_checked[self.votes.row].any())
