"""Training data with checked rows, a test set, and the truth that no method sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsla.data._dataset import Features, Task, TrainingData, Votes

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Problem:
    """One data set with some checked rows, as one seed draws it."""

    name: str
    data: TrainingData
    test: Features
    test_labels: Array
    gold: Array
    """True label of each row of the data, coded as the votes are."""
    group_quality: Array | None = None
    """One value a group, larger for better labels; NaN where a group has no vote, None where nobody knows it."""

    @property
    def wrong_votes(self) -> Array | None:
        """Return a mask of the votes that differ from the truth, None in regression."""
        votes = self.data.votes
        return None if self.data.task == "regression" else votes.label != self.gold[votes.row]


def add_constant(columns: Array) -> Array:
    """Return the columns and a constant one."""
    return np.column_stack([columns, np.full(len(columns), 0.5)]).astype(np.float64)


def standardise(pool: Array, test: Array) -> tuple[Array, Array]:
    """Return both with columns of mean 0 and spread 1 on the pool, divided by the root of their number."""
    mean, spread = pool.mean(0), pool.std(0)
    used = spread > 1e-9
    scale = spread[used] * np.sqrt(used.sum())
    limit = 6 / np.sqrt(used.sum())
    both = [np.clip((part[:, used] - mean[used]) / scale, -limit, limit) for part in (pool, test)]
    return add_constant(both[0]), add_constant(both[1])


def centre_pixels(pool: Array, test: Array) -> tuple[Array, Array]:
    """Return both without the pool's mean, divided by one number: pixels share a scale."""
    mean = pool.mean(0)
    scale = np.sqrt(((pool - mean) ** 2).sum(1).mean())
    return add_constant((pool - mean) / scale), add_constant((test - mean) / scale)


def make_problem(
    name: str,
    task: Task,
    features: Features,
    test: Features,
    votes: Votes,
    gold: Array,
    checked_rows: Array,
    test_labels: Array,
    num_groups: int,
    *,
    num_classes: int = 0,
    group_quality: Array | None = None,
) -> Problem:
    """Return a problem whose checked rows are a random sample."""
    data = TrainingData(
        task=task,
        features=features,
        votes=votes,
        group_names=np.array([f"group {number}" for number in range(num_groups)], dtype=object),
        checked_rows=checked_rows,
        checked_labels=gold[checked_rows],
        classes=np.arange(num_classes) if task == "classification" else None,
    )
    return Problem(name, data, test, test_labels, gold, group_quality)


def from_sources(
    name: str,
    task: Task,
    pool: Array,
    gold: Array,
    checked: int,
    given_labels: Array,
    source: Array,
    test: Array,
    test_labels: Array,
    group_quality: Array | None,
    *,
    pixels: bool = False,
) -> Problem:
    """Return a problem of a table: its first rows are checked, each of the others has one label of one source."""
    dense, dense_test = (centre_pixels if pixels else standardise)(pool, test)
    labels = np.concatenate([gold, test_labels])
    return make_problem(
        name,
        task,
        Features(dense, numeric=pool.astype(np.float64)),
        Features(dense_test, numeric=test.astype(np.float64)),
        Votes(np.arange(checked, len(pool)), source, given_labels),
        gold,
        np.arange(checked),
        test_labels,
        int(source.max()) + 1,
        num_classes=int(labels.max()) + 1 if task == "classification" else 0,
        group_quality=group_quality,
    )
