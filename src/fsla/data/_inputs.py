"""What the user gives, as tensors: features or images scaled, labels as numbers, groups as numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
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

    if isinstance(y, str):
        raise ValueError(f"{name} must have one value for each of the {count} samples. Got {y!r}.")
    array: Array = column_or_1d(y, warn=True)
    if np.issubdtype(array.dtype, np.number):
        check_array(array, ensure_2d=False, ensure_min_samples=0, dtype=None, input_name=name)
    if len(array) != count:
        raise ValueError(f"{name} must have one value for each of the {count} samples. Got {len(array)} values.")
    return array


def column_names(x: Any) -> list[str] | None:
    """Of a data frame."""
    return [str(name) for name in x.columns] if hasattr(x, "columns") else None


def check_column_names(x: Any, name: str, known: list[str] | None) -> None:
    """Raises where both have names and these differ, or come in another order."""
    names = column_names(x)
    if names is not None and known is not None and names != known:
        raise ValueError(
            f"The feature names should match those that were passed during fit, in the same order. {name} has "
            f"{listed(names)}; it should have {listed(known)}."
        )


def listed(names: Any, most: int = 12) -> str:
    """Names with commas, the first of many."""
    shown = [str(name) for name in list(names)[:most]]
    return ", ".join(shown) + (", …" if len(list(names)) > most else "")


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


MANY = 20
"""More different whole numbers than that are not classes."""


def are_numbers(y: Any) -> bool:
    """Whether targets are numbers rather than classes."""
    from sklearn.utils.multiclass import type_of_target

    values = np.unique(np.asarray(y))
    return bool(type_of_target(y).startswith("continuous") or (values.dtype.kind in "iuf" and len(values) > MANY))


def classes(given: Array, true: Array) -> Coded:
    """The labels of all samples, the trusted ones last, as numbers of their classes."""
    from sklearn.utils.multiclass import check_classification_targets, type_of_target

    for name, labels in (("y", given), ("the trusted labels", true)):
        if type_of_target(labels).startswith("continuous"):
            raise ValueError(
                f"Unknown label type: continuous. Labels must be classes, but {name} are numbers: for these take "
                "fsla.DataWeigher, or `fsla weigh`."
            )
        check_classification_targets(labels)
    both = coded(np.concatenate([given, true]))
    if len(both.names) < 2:
        raise ValueError(f"There must be at least two classes. Got 1 class: {both.names[0]!r}.")
    if not torch.isin(both.numbers[: len(given)], both.numbers[len(given) :]).any():
        raise ValueError(
            "Trusted samples must have labels that the others have too, written alike. Here the labels are "
            f"{listed(np.unique(given), 5)}, and the trusted ones {listed(np.unique(true), 5)}."
        )
    if both.names.dtype.kind == "U":
        ours, theirs = torch.tensor_split(both.numbers, [len(given)])
        check_spelling(both.names[torch.unique(theirs).numpy()], both.names[torch.unique(ours).numpy()], "labels")
    return both


def check_spelling(trusted: Collection[str], others: Collection[str], what: str) -> None:
    """Raises where the trusted samples have a text that the others lack, but for its spelling."""
    known = {_folded(text): text for text in others}
    for text in trusted:
        same = known.get(_folded(text), text)
        if same != text and text not in others:
            raise ValueError(
                f"The {what} must be written alike in both. The trusted samples have {str(text)!r}, the others "
                f"{str(same)!r}. Write them in one way."
            )


def _folded(text: str) -> str:
    """Without what is easily written in two ways: capitals, spaces around it, and the point of a whole number."""
    folded = " ".join(str(text).split()).casefold()
    return folded[:-2] if folded.endswith(".0") and folded[:-2].lstrip("-").isdigit() else folded


def digest(array: Array) -> str:
    """What is in an array, in short."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
