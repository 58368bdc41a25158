"""Small data sets with groups, votes and checked labels, for tests of the data room."""

import numpy as np

from fsla.data._dataset import Features, TrainingData, Votes
from fsla.data._features import FeatureBuilder


def blobs(n, seed=0, classes=3, columns=6, spread=1.0):
    """Return rows and their true classes."""
    rng = np.random.default_rng(seed)
    centres = 1.5 * np.random.default_rng(99).standard_normal((classes, columns))
    y = rng.integers(classes, size=n)
    return centres[y] + spread * rng.standard_normal((n, columns)), y


def features_of(x, *, table=False):
    """Return dense features, and columns for trees if it is a table."""
    features = FeatureBuilder().fit(x).transform(x)
    return Features(features.dense, features.numeric if table else None, raw=x)


def sources(n=400, checked=60, classes=3, rates=(0.0, 0.0, 0.4, 1.0), seed=0, *, table=False, pairs=True):
    """Return data of sources with shares of wrong labels, and the true labels.

    Args:
        n: Number of rows.
        checked: The first so many are checked.
        classes: Number of classes.
        rates: Share of wrong labels of each source. A wrong label is the next class.
        seed: Of everything.
        table: With columns for trees.
        pairs: Checked rows keep their given label.
    """
    x, y = blobs(n, seed, classes)
    rng = np.random.default_rng(seed + 1)
    group = np.arange(n) % len(rates)
    wrong = rng.random(n) < np.array(rates)[group]
    label = np.where(wrong, (y + 1) % classes, y)
    rows = np.arange(n) if pairs else np.arange(checked, n)
    names = np.array([f"source{g}" for g in range(len(rates))])
    votes = Votes(rows, group[rows], label[rows])
    known = np.arange(checked)
    data = TrainingData(
        "classification", features_of(x, table=table), votes, names, known, y[known], np.arange(classes)
    )
    return data, y


def annotators(n=500, checked=60, accuracies=(0.95, 0.85, 0.7, 0.55, 0.34), votes_a_row=3, classes=3, seed=0):
    """Return data with several votes a row, and the true labels. Errors are spread evenly."""
    x, y = blobs(n, seed, classes)
    rng = np.random.default_rng(seed + 1)
    chosen = rng.permuted(np.tile(np.arange(len(accuracies)), (n, 1)), axis=1)[:, :votes_a_row]
    row, group = np.repeat(np.arange(n), votes_a_row), chosen.ravel()
    wrong = rng.random(len(row)) > np.array(accuracies)[group]
    label = np.where(wrong, (y[row] + rng.integers(1, classes, len(row))) % classes, y[row])
    known = np.arange(checked)
    names = np.arange(len(accuracies))
    votes = Votes(row, group, label)
    data = TrainingData("classification", features_of(x), votes, names, known, y[known], np.arange(classes))
    return data, y


def scores(n=400, checked=60, biases=(0.0, 0.0, 1.5), noises=(0.1, 0.3, 0.3), votes_a_row=2, seed=0):
    """Return a regression with several annotators, and the true numbers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 4))
    y = x @ np.array([1.0, -0.5, 0.5, 0.0]) + 0.3 * rng.standard_normal(n)
    chosen = rng.permuted(np.tile(np.arange(len(biases)), (n, 1)), axis=1)[:, :votes_a_row]
    row, group = np.repeat(np.arange(n), votes_a_row), chosen.ravel()
    label = y[row] + np.array(biases)[group] + np.array(noises)[group] * rng.standard_normal(len(row))
    known = np.arange(checked)
    data = TrainingData("regression", features_of(x), Votes(row, group, label), np.arange(len(biases)), known, y[known])
    return data, y
