"""Rows that are worth a person's look: half by disagreement and leverage, half at random."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fsla.data._dataset import Array, TrainingData
from fsla.data._decisions import Decisions

PRIOR = 0.3
"""Added to the Gram matrix of the checked rows."""


class ReviewRows(NamedTuple):
    """Positions of rows to review, random and suspicious ones in turn."""

    rows: Array
    is_random: Array


def select_review(data: TrainingData, decisions: Decisions, rows: int, count: int, seed: int) -> ReviewRows:
    """Choose rows with a label among the first `rows` that nobody has checked.

    The random half is drawn first, from all of them, so that it stays a random sample: the interval of the share of
    wrong labels is valid for that half alone. The two halves take turns, so that a person may stop at any row.
    """
    unchecked = np.nonzero(np.isfinite(decisions.quality[:rows]) & ~data.is_checked[:rows])[0]
    count = min(count, len(unchecked))
    random = np.random.default_rng(seed).permutation(unchecked)[: count // 2]
    score = (1 - decisions.quality) * _leverage(data)
    rest = np.setdiff1d(unchecked, random)
    suspicious = rest[np.argsort(-score[rest], kind="stable")][: count - len(random)]
    order = np.empty(count, dtype=np.int64)
    is_random = np.arange(count) % 2 == 1
    order[is_random], order[~is_random] = random, suspicious
    return ReviewRows(order, is_random)


def _leverage(data: TrainingData) -> Array:
    """Return how far each row lies from what checked rows cover: z (Z'Z + .3 I)^-1 z."""
    dense = np.asarray(data.features.dense, dtype=np.float64)
    checked = dense[data.checked_rows]
    gram = checked.T @ checked + PRIOR * np.eye(dense.shape[1])
    leverage: Array = np.einsum("ij,ij->i", dense, np.linalg.solve(gram, dense.T).T)
    return leverage
