"""Arrays from a file: each must have the dtype and the number of dimensions that fsla writes, and finite numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from fsla.data._dataset import Array


def stored_array(
    arrays: Mapping[str, Array], name: str, ndim: int, dtype: Any = np.float64, *, infinite: bool = False
) -> Array:
    """Return an array of a file, in which numbers may be infinite only where `infinite` says so.

    Raises:
        ValueError: if it is missing, of another dtype or number of dimensions, or not finite.
    """
    if name not in arrays:
        raise ValueError(f"it lacks the array {name!r}")
    array = arrays[name]
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(
            f"the array {name!r} is {array.dtype} with {array.ndim} dimensions, not {np.dtype(dtype)} with {ndim}"
        )
    if array.dtype.kind == "f" and (np.isnan(array) if infinite else ~np.isfinite(array)).any():
        raise ValueError(f"the array {name!r} has numbers that are not finite")
    return array


def check_names(arrays: Mapping[str, Array], names: Collection[str]) -> None:
    """Raise a ValueError unless arrays have exactly these names."""
    if arrays.keys() != set(names):
        raise ValueError(f"it lacks or adds the arrays {', '.join(sorted(arrays.keys() ^ set(names)))}")
