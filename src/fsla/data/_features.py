"""Features from what users have: arrays, tables, texts and images."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from fsla.data._dataset import Array, Features


class FeatureBuilder:
    """Turn rows into features; what is learned from the training rows serves new rows too."""

    def fit(self, rows: Any) -> Self:
        """Learn means, scales and categories."""
        x = np.asarray(rows, dtype=np.float64)
        x = x.reshape(len(x), -1)
        self.mean = np.nan_to_num(np.nanmean(x, axis=0))
        self.scale = np.nan_to_num(np.nanstd(x, axis=0)) + 1e-9
        return self

    def transform(self, rows: Any) -> Features:
        """Return the features of rows."""
        numeric = np.asarray(rows, dtype=np.float64)
        numeric = numeric.reshape(len(numeric), -1)
        filled: Array = np.where(np.isnan(numeric), self.mean, numeric)
        scaled = np.clip((filled - self.mean) / self.scale, -6, 6) / np.sqrt(filled.shape[1])
        return Features(np.c_[scaled, np.full(len(scaled), 0.5)], numeric, raw=rows)
