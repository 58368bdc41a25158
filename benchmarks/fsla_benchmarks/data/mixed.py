"""Sets with errors made on purpose, from data that scikit-learn brings along or from a formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fsla.data._dataset import Features, Votes
from fsla_benchmarks.data.problem import Array, Problem, centre_pixels, from_sources, make_problem

SWAPPED = (0, 7, 2, 5, 9, 3, 6, 1, 8, 4)
"""What each digit is called by a source that swaps look-alikes."""
NEIGHBOUR = (6, 3, 2, 3, 2, 5, 0, 9, 8, 9)
"""What each digit may be called where pairs of classes are confused; five classes never are."""
DIGIT_TEST_ROWS = 500
DIGIT_ROWS = 600
NOISE = 0.4
"""Share of wrong labels in the sets of digits with one source."""


@cache
def bundled(name: str) -> tuple[Array, Array]:
    """Return the columns and labels of a bundled data set."""
    from sklearn import datasets

    options: dict[str, Any] = {"scaled": False} if name == "diabetes" else {}
    bunch = getattr(datasets, f"load_{name}")(**options)
    return bunch.data.astype(np.float64), bunch.target


def permute(labels: Array, chosen: Array) -> None:
    """Give each chosen row the label of another chosen row, in place."""
    rows = np.flatnonzero(chosen)
    labels[rows] = labels[np.roll(rows, 1)]


def draw_diabetes(name: str, checked: int, seed: int) -> Problem:
    """Return a regression with five sources: two right, one shifted, one with other units, one permuted."""
    columns, target = bundled("diabetes")
    target = (target - 152) / 77
    rng = np.random.default_rng(1000 + seed)
    order = rng.permutation(len(columns))
    test, pool = order[:140], order[140:]
    rows = pool[checked:]
    source = np.arange(len(rows)) % 5
    cells, labels = columns[pool].copy(), target[rows].copy()
    labels[source == 2] += 1.2
    units = checked + np.flatnonzero(source == 3)
    cells[units, 2] *= 2.2
    cells[units, 3] *= 0.133
    shuffled = np.flatnonzero(source == 4)
    labels[shuffled] = labels[rng.permutation(shuffled)]
    quality = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    return from_sources(
        name, "regression", cells, target[pool], checked, labels, source, columns[test], target[test], quality
    )


def draw_breast_cancer(name: str, checked: int, seed: int) -> Problem:
    """Return six sources: three right, one careless, one with other units, one permuted."""
    columns, target = bundled("breast_cancer")
    rng = np.random.default_rng(1000 + seed)
    order = rng.permutation(len(columns))
    test, pool = order[:170], order[170:]
    rows = pool[checked:]
    source = np.arange(len(rows)) % 6
    cells, labels = columns[pool].copy(), target[rows].copy()
    careless = (source == 3) & (rng.random(len(rows)) < NOISE)
    labels[careless] = 1 - labels[careless]
    cells[np.ix_(checked + np.flatnonzero(source == 4), np.array([0, 2, 3, 20, 22, 23]))] *= 0.1
    permute(labels, source == 5)
    quality = np.array([1.0, 1.0, 1.0, 0.6, 0.8, 0.5])
    return from_sources(
        name, "classification", cells, target[pool], checked, labels, source, columns[test], target[test], quality
    )


def draw_wine(name: str, checked: int, seed: int) -> Problem:
    """Return three sources: one right, one half random, one with other units."""
    columns, target = bundled("wine")
    rng = np.random.default_rng(1000 + seed)
    order = rng.permutation(len(columns))
    test, pool = order[:58], order[58:]
    rows = pool[checked:]
    source = np.arange(len(rows)) % 3
    cells, labels = columns[pool].copy(), target[rows].copy()
    careless = (source == 1) & (rng.random(len(rows)) < 0.5)
    labels[careless] = rng.integers(0, 3, careless.sum())
    cells[np.ix_(checked + np.flatnonzero(source == 2), np.array([4, 12]))] *= 0.1
    quality = np.array([1.0, 0.6, 0.8])
    return from_sources(
        name, "classification", cells, target[pool], checked, labels, source, columns[test], target[test], quality
    )


def draw_digit_sources(name: str, checked: int, seed: int) -> Problem:
    """Return ten sources of digits: three right, four with wrong labels, two with changed pixels, one permuted."""
    columns, target = bundled("digits")
    rng = np.random.default_rng(1000 + seed)
    order = rng.permutation(len(columns))
    test, pool = order[:DIGIT_TEST_ROWS], order[DIGIT_TEST_ROWS : DIGIT_TEST_ROWS + checked + 950]
    rows = pool[checked:]
    source = np.arange(len(rows)) % 10
    cells, labels = columns[pool].copy(), target[rows].copy()
    for careless_source in (3, 4):
        careless = (source == careless_source) & (rng.random(len(rows)) < 0.6)
        labels[careless] = rng.integers(0, 10, careless.sum())
    labels[source == 5] = (labels[source == 5] + 1) % 10
    labels[source == 6] = np.array(SWAPPED)[labels[source == 6]]
    shuffled, reversed_pixels = checked + np.flatnonzero(source == 7), checked + np.flatnonzero(source == 8)
    cells[shuffled] = cells[shuffled][:, rng.permutation(64)]
    cells[reversed_pixels] = cells[reversed_pixels][:, ::-1]
    permute(labels, source == 9)
    quality = np.array([1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.4, 0.1, 0.3, 0.1])
    return from_sources(
        name, "classification", cells, target[pool], checked, labels, source, columns[test], target[test], quality,
        pixels=True,
    )  # fmt: skip


def draw_digit_annotators(name: str, checked: int, seed: int) -> Problem:
    """Return digits with two votes each, of eight annotators; one always says 1, two are copies of each other."""
    columns, target = bundled("digits")
    rng = np.random.default_rng(1000 + seed)
    order = rng.permutation(len(columns))
    test, pool = order[:DIGIT_TEST_ROWS], order[DIGIT_TEST_ROWS:]
    gold = target[pool]
    accuracy = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
    labels = np.zeros((8, len(pool)), dtype=np.int64)
    for annotator, level in enumerate(accuracy):
        wrong = rng.random(len(pool)) > level
        habit = (gold + rng.integers(1, 10, 10)[gold]) % 10
        error = np.where(rng.random(len(pool)) < 0.5, habit, rng.integers(0, 10, len(pool)))
        labels[annotator] = np.where(wrong, error, gold)
    labels[6] = 1
    labels[7] = labels[5]
    often = [0.1] * 4 + [0.15] * 4
    group = np.concatenate([rng.choice(8, 2, replace=False, p=often) for _ in pool])
    row = np.repeat(np.arange(len(pool)), 2)
    dense, dense_test = centre_pixels(columns[pool], columns[test])
    return make_problem(
        name,
        "classification",
        Features(dense, numeric=columns[pool]),
        Features(dense_test, numeric=columns[test]),
        Votes(row, group, labels[group, row]),
        gold,
        np.arange(checked),
        target[test],
        8,
        num_classes=10,
        group_quality=np.array([*accuracy, 0.1, 0.5]),
    )


def flip_uniform(gold: Array, columns: Array, rng: np.random.Generator) -> Array:
    """Replace a share of the labels by any other one."""
    return np.where(rng.random(len(gold)) < NOISE, (gold + rng.integers(1, 10, len(gold))) % 10, gold)


def flip_pairs(gold: Array, columns: Array, rng: np.random.Generator) -> Array:
    """Call a share of each of five classes by the name of a class that looks alike."""
    return np.where(rng.random(len(gold)) < NOISE, np.array(NEIGHBOUR)[gold], gold)


def flip_by_row(gold: Array, columns: Array, rng: np.random.Generator) -> Array:
    """Replace labels by the second choice of a weak linear model, more often where it is unsure."""
    from sklearn.linear_model import LogisticRegression

    all_columns, all_labels = bundled("digits")
    rows = rng.permutation(len(all_labels))[:300]
    weak = LogisticRegression(C=1e-4, max_iter=200).fit(all_columns[rows], all_labels[rows])
    chance = weak.predict_proba(columns)
    chance[np.arange(len(gold)), gold] = 0
    unsure = chance.sum(1)
    flip = rng.random(len(gold)) < np.minimum(unsure / unsure.mean() * NOISE, 0.95)
    return np.where(flip, chance.argmax(1), gold)


Flip = Callable[[Array, Array, np.random.Generator], Array]


def draw_flipped_digits(name: str, checked: int, seed: int, flip: Flip, *, long_tail: bool = False) -> Problem:
    """Return digits of one source with wrong labels; with `long_tail`, class sizes fall to a twentieth."""
    columns, target = bundled("digits")
    rng = np.random.default_rng(1000 + seed)
    order = rng.permutation(len(columns))
    test, rest = order[:DIGIT_TEST_ROWS], order[DIGIT_TEST_ROWS:]
    checked_rows, rest = rest[:checked], rest[checked:]
    if long_tail:
        rest = rest[20.0 ** (-target[rest] / 9) > rng.random(len(rest))]
    rows = rest[:DIGIT_ROWS]
    pool = np.concatenate([checked_rows, rows])
    labels = flip(target[rows], columns[rows], rng)
    source = np.zeros(len(rows), dtype=np.int64)
    return from_sources(
        name, "classification", columns[pool], target[pool], checked, labels, source, columns[test], target[test],
        None, pixels=True,
    )  # fmt: skip


def smooth(columns: Array) -> Array:
    """Return Friedman's first function, with mean 0 and spread 1 or so; five of ten columns do not matter."""
    waves = 10 * np.sin(np.pi * columns[:, 0] * columns[:, 1]) + 20 * (columns[:, 2] - 0.5) ** 2
    return np.asarray((waves + 10 * columns[:, 3] + 5 * columns[:, 4] - 14.4) / 4.9)


def draw_friedman(name: str, checked: int, seed: int) -> Problem:
    """Return ten sources of a smooth function: careless ones, a shift, swapped columns, another function."""
    rng = np.random.default_rng(1000 + seed)
    rows, tests = 600, 1000
    columns = rng.random((checked + rows + tests, 10))
    target = smooth(columns) + 0.1 * rng.standard_normal(len(columns))
    source = np.arange(rows) % 10
    cells = columns[: checked + rows].copy()
    rows_of_sources, labels = cells[checked:], target[checked : checked + rows].copy()
    careless = np.isin(source, (2, 3)) & (rng.random(rows) < 0.6)
    labels[careless] = labels[rng.integers(0, rows, careless.sum())]
    labels[source == 4] += 1
    labels[source == 5] = smooth(rows_of_sources[source == 5][:, [3, 4, 2, 0, 1, 5, 6, 7, 8, 9]])
    foreign = np.isin(source, (6, 7))
    labels[foreign] = rows_of_sources[foreign] @ np.linspace(-1, 1, 10) / 2
    rows_of_sources[source == 8] = 1 - rows_of_sources[source == 8]
    quality = np.array([1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    end = checked + rows
    return from_sources(
        name, "regression", cells, target[:end], checked, labels, source, columns[end:], target[end:], quality
    )


def draw_linear(name: str, checked: int, seed: int) -> Problem:
    """Return five sources of a linear function: three right, one shifted, one with another slope."""
    rng = np.random.default_rng(1000 + seed)
    rows, tests = 500, 1000
    columns = rng.standard_normal((checked + rows + tests, 10))
    slope = rng.standard_normal(10) / np.sqrt(10)
    target = columns @ slope + 0.24 * rng.standard_normal(len(columns))
    end = checked + rows
    source = np.arange(rows) % 5
    labels = target[checked:end].copy()
    labels[source == 3] += 1
    labels[source == 4] = -labels[source == 4]
    quality = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
    return from_sources(
        name, "regression", columns[:end], target[:end], checked, labels, source, columns[end:], target[end:], quality
    )
