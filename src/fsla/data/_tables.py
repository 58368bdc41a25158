"""What was found, as tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, bincount, ones

from fsla.data._choice import Choice
from fsla.data._decisions import DROPPED, NOT_COMPARED
from fsla.data._inputs import Array

if TYPE_CHECKING:
    import pandas as pd


def candidates(choice: Choice) -> pd.DataFrame:
    """The model first, then the ways that were tried, the best first."""
    import pandas as pd

    ranked = sorted(choice.candidates, key=lambda candidate: -candidate.score)
    rows = [
        {
            "way": candidate.name,
            "log_likelihood": candidate.score,
            "error": candidate.error,
            "share": candidate.share,
            "folds": len(candidate.held),
        }
        for candidate in [choice.together, *ranked]
    ]
    return pd.DataFrame(rows)


def weights(names: Array, numbers: Tensor, choice: Choice) -> pd.DataFrame:
    """For each group: samples, the share of labels that look wrong, its weight over the folds, and the decision."""
    import pandas as pd

    found = ones(1, len(names)) if choice.group_weights is None else choice.group_weights.cpu()
    table = pd.DataFrame({"group": names, "samples": bincount(numbers, minlength=len(names)).tolist()})
    if choice.labels is not None:
        flagged = choice.labels.flagged.double().cpu()
        table["wrong_labels"] = bincount(numbers, weights=flagged, minlength=len(names)).numpy() / table["samples"]
    table["weight"] = found.mean(0).tolist()
    table["low"] = found.min(0).values.tolist()
    table["high"] = found.max(0).values.tolist()
    table["decision"] = NOT_COMPARED if choice.decisions is None else choice.decisions
    return table.sort_values("weight", ascending=False, kind="stable", ignore_index=True)


def dropped(weights: pd.DataFrame, groups: Array) -> Array:
    """Which samples are of groups that are to be left out."""
    names = weights[weights["decision"] == DROPPED]["group"].astype(str)
    return np.isin(groups.astype(str), names.to_numpy(dtype=str))


def interval(rates: tuple[float, float], samples: int) -> tuple[float, float]:
    """The two rates, and twice the standard error of a count beyond."""
    low, high = rates
    low -= 2 * math.sqrt(low * (1 - low) / samples)
    high += 2 * math.sqrt(high * (1 - high) / samples)
    return max(0.0, low), min(1.0, high)
