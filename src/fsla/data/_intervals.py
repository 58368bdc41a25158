"""95 % intervals of shares, differences and errors on some hundred rows."""

from __future__ import annotations

import numpy as np

from fsla.data._dataset import Array
from fsla.data._result import Estimate

Z95 = 1.959964
_DRAWS = 1000


def wilson(share: float, n: float) -> Estimate:
    """Return Wilson's interval of a share of n rows; n need not be whole."""
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 * np.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
    return Estimate(float(share), float(max(0.0, centre - half)), float(min(1.0, centre + half)))


def paired_difference(before: Array, after: Array) -> Estimate:
    """Return the difference of two accuracies on the same rows, with Agresti and Min's interval.

    Args:
        before: True where the first is right.
        after: True where the second is right.
    """
    gains, losses, n = float((after & ~before).sum()), float((before & ~after).sum()), len(before)
    b, c, m = gains + 0.5, losses + 0.5, n + 2
    centre = (b - c) / m
    half = Z95 * np.sqrt(b + c - (b - c) ** 2 / m) / m
    return Estimate((gains - losses) / n, float(max(-1.0, centre - half)), float(min(1.0, centre + half)))


def bootstrap(values: Array, statistic: object, seed: int = 0) -> Estimate:
    """Return a statistic of the mean of rows, with its percentile interval over Bayesian-bootstrap draws.

    Args:
        values: Rows x columns; the statistic takes the means of the columns (draws x columns).
        statistic: Function of an array draws x columns that returns one number a draw.
        seed: Of the draws.
    """
    assert callable(statistic)
    weight = np.random.default_rng(seed).dirichlet(np.ones(len(values)), _DRAWS)
    low, high = np.quantile(statistic(weight @ values), [0.025, 0.975])
    return Estimate(float(statistic(values.mean(0)[None])[0]), float(low), float(high))
