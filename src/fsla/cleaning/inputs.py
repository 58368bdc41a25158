"""What the user gives, as tensors: features or images scaled, labels as numbers, groups as numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class Scaling(NamedTuple):
    """(x - mean) / spread: of each feature for tables, of all pixels for images."""

    mean: Tensor
    spread: Tensor

    def __call__(self, x: Array, device: torch.device) -> Tensor:
        return ((torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)) - self.mean) / self.spread).to(device)


def scaling(x: Array) -> Scaling:
    axes = 0 if x.ndim == 2 else None
    mean = x.mean(axis=axes, dtype=np.float64)
    spread = x.std(axis=axes, dtype=np.float64)
    spread = np.where(spread > 1e-6 * (1 + np.abs(mean)), spread, 1.0)
    return Scaling(torch.as_tensor(mean, dtype=torch.float32), torch.as_tensor(spread, dtype=torch.float32))


def features(x: Any, name: str, like: tuple[int, ...] | None = None) -> Array:
    """A table (samples, features) or images (samples, channels, height, width) of finite numbers."""
    from sklearn.utils.validation import check_array

    allow = getattr(x, "ndim", 2) > 2
    array: Array = check_array(x, dtype=np.float32, allow_nd=allow, input_name=name)
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim not in (2, 4):
        raise ValueError(
            f"{name} must be a table (samples, features) or images (samples, channels, height, width). "
            f"Got an array of {array.ndim} dimensions."
        )
    if like is not None and array.shape[1:] != like:
        raise ValueError(
            f"{name} has {array.shape[1] if array.ndim == 2 else array.shape[1:]} features, but the data that it goes "
            f"with has {like[0] if len(like) == 1 else like} features."
        )
    return array


def column(y: Any, name: str, count: int) -> Array:
    """One value a sample."""
    from sklearn.utils.validation import check_array, column_or_1d

    array: Array = column_or_1d(y, warn=True)
    if np.issubdtype(array.dtype, np.number):
        check_array(array, ensure_2d=False, ensure_min_samples=0, dtype=None, input_name=name)
    if len(array) != count:
        raise ValueError(f"{name} must have one value for each of the {count} samples. Got {len(array)} values.")
    return array


class Coded(NamedTuple):
    """Names as numbers."""

    names: Array
    numbers: Tensor


def coded(values: Array) -> Coded:
    names, numbers = np.unique(values.astype(str) if values.dtype == object else values, return_inverse=True)
    return Coded(names, torch.from_numpy(numbers.reshape(-1).astype(np.int64)))


def spread(y: Array) -> tuple[float, float]:
    """Mean and standard deviation of the targets of a regression."""
    if not np.issubdtype(y.dtype, np.number) or not np.isfinite(y).all():
        raise ValueError("The targets of a regression must be finite numbers. Got others.")
    return float(y.mean()), float(y.std()) or 1.0
