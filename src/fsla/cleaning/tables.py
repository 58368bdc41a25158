"""What was found, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, bincount, ones

from fsla.cleaning.choice import Choice
from fsla.cleaning.inputs import Array

if TYPE_CHECKING:
    import pandas as pd

KEEP = 0.3
"""The weight from which a group is kept."""


def candidates(choice: Choice) -> pd.DataFrame:
    import pandas as pd

    rows = [
        {
            "way": candidate.name,
            "log_likelihood": candidate.score,
            "error": float(np.mean(candidate.errors)),
            "folds": len(candidate.held),
            "chosen": candidate is choice.chosen,
        }
        for candidate in choice.candidates
    ]
    return pd.DataFrame(rows).sort_values("log_likelihood", ascending=False, ignore_index=True)


def weights(names: Array, numbers: Tensor, choice: Choice) -> pd.DataFrame:
    import pandas as pd

    counts = bincount(numbers, minlength=len(names)).tolist()
    found = ones(1, len(names)) if choice.group_weights is None else choice.group_weights.cpu()
    table = pd.DataFrame(
        {
            "group": names,
            "samples": counts,
            "weight": found.mean(0).tolist(),
            "low": found.min(0).values.tolist(),
            "high": found.max(0).values.tolist(),
        }
    )
    table["verdict"] = np.where(table["low"] >= KEEP, "keep", np.where(table["high"] < KEEP, "drop", "unsure"))
    return table.sort_values("weight", ascending=False, kind="stable", ignore_index=True)


def interval(rate: float, rates: list[float], quality: Array) -> tuple[float, float]:
    """From the lowest to the highest of the folds, and twice the standard error of a count beyond."""
    error = 2 * float(np.sqrt((quality * (1 - quality)).sum())) / len(quality)
    low = min([rate, *rates]) - error
    high = max([rate, *rates]) + error
    return max(0.0, low), min(1.0, high)
