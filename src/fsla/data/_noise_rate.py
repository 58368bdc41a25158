"""Share of wrong labels: the prediction-powered interval of a random sample of checked rows."""

from __future__ import annotations

import numpy as np

from fsla.data._dataset import Array
from fsla.data._intervals import wilson
from fsla.data._result import Estimate

MAX_GAIN = 20.0
"""Most times that predictions may multiply the number of checked rows."""


def prediction_powered_share(
    wrong: Array, predicted: Array, predicted_elsewhere: Array, *, trust: float | None = None
) -> Estimate:
    """Return the share of wrong labels with its 95 % interval.

    Predictions shift the checked rows' share by what they say of all other rows, times a factor that their
    covariance with the truth on checked rows earns. Useless predictions have the factor 0, and Wilson's interval of
    the checked rows remains. Two pseudo-rows, one right and one wrong, which no prediction explains, keep few rows
    from looking certain.

    Args:
        wrong: For each checked row, whether its given label is wrong.
        predicted: For the same rows, P(wrong) by a model that has not seen their true label.
        predicted_elsewhere: P(wrong) of rows that are not checked, predicted in the same way.
        trust: The factor, if it is known from more rows. Default: from these rows.
    """
    e, f, other = (np.asarray(a, dtype=np.float64) for a in (wrong, predicted, predicted_elsewhere))
    n, rest = len(e), len(other)
    if rest == 0:
        return wilson(float(e.mean()), n)
    factor = prediction_factor(e, f, rest) if trust is None else trust
    share = float(np.clip(factor * other.mean() + (e - factor * f).mean(), 0, 1))
    pseudo = (1 - e.mean()) ** 2 + e.mean() ** 2
    residual = e - factor * f
    direct = (((e - e.mean()) ** 2).sum() + pseudo) / (n + 2)
    powered = (((residual - residual.mean()) ** 2).sum() + pseudo) / (n + 2) + factor**2 * other.var() * n / rest
    return wilson(share, n * float(np.clip(direct / powered, 1, MAX_GAIN)))


def prediction_factor(wrong: Array, predicted: Array, num_elsewhere: int) -> float:
    """Return how far predictions are trusted: the factor of least variance, in [0, 1]."""
    if len(wrong) < 3 or num_elsewhere == 0:
        return 0.0
    covariance = float(np.cov(wrong, predicted)[0, 1])
    variance = float(np.var(predicted)) * (1 + len(wrong) / num_elsewhere)
    return float(np.clip(covariance / max(variance, 1e-9), 0, 1))
