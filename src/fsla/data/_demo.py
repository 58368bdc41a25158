"""scikit-learn's digits as data of mixed quality: six sources, three of them bad, and a few wrong labels in all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fsla.data._inputs import Array
from fsla.data._job import Job
from fsla.data._reading import Given

TRUSTED = 100
TEST = 400
SOURCES = ("north office", "south office", "west office", "careless typist", "shifted column", "guessing trainee")


class Demo(NamedTuple):
    """The job, and what it is judged by."""

    job: Job
    wrong: Array
    """Which labels are wrong."""
    test_x: Array
    test_y: Array


def make(seed: int = 0) -> Demo:
    from sklearn.datasets import load_digits

    x, true = load_digits(return_X_y=True)
    random = np.random.default_rng(seed)
    order = random.permutation(len(true))
    x = (x[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    true = true[order]
    count = len(true) - TRUSTED - TEST
    source = np.arange(count) % len(SOURCES)
    y = true[:count].copy()
    chance = np.array([0.03, 0.03, 0.03, 0.5, 0.0, 0.9])[source]
    typo = random.random(count) < chance
    y[typo] = (y[typo] + random.integers(1, 10, size=int(typo.sum()))) % 10
    y[source == 4] = (y[source == 4] + 1) % 10
    ids = np.array([f"digit-{i:04d}" for i in range(count)])
    given = Given(x[:count], y, ids, np.array(SOURCES)[source])
    held = slice(count, count + TRUSTED)
    clean = Given(x[held], true[held], np.arange(TRUSTED))
    origin = (
        f"scikit-learn's digits, with errors made on purpose: {count} samples of six sources, {TRUSTED} trusted ones."
    )
    return Demo(Job(given, clean, origin), y != true[:count], x[count + TRUSTED :], true[count + TRUSTED :])
