"""Nests of states as a checkpoint holds them: optimisers have mappings from numbers, NumPy has arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy
import torch

_PAIRS = "fsla.pairs"
_ARRAY = "fsla.array"


def encode(x: Any) -> Any:
    """A nest of states with what a checkpoint holds."""
    if isinstance(x, numpy.ndarray):
        return (_ARRAY, str(x.dtype), torch.from_numpy(x.astype(numpy.int64)))
    if isinstance(x, numpy.generic):
        return x.item()
    if isinstance(x, Counter) or (isinstance(x, Mapping) and not all(isinstance(key, str) for key in x)):
        kind = "counter" if isinstance(x, Counter) else "dict"
        return (_PAIRS, kind, [(key, encode(value)) for key, value in x.items()])
    if isinstance(x, Mapping):
        return {key: encode(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(encode(value) for value in x)
    if isinstance(x, list):
        return [encode(value) for value in x]
    return x


def decode(x: Any) -> Any:
    if isinstance(x, tuple) and len(x) == 3 and x[0] == _ARRAY:
        return x[2].numpy().astype(x[1])
    if isinstance(x, tuple) and len(x) == 3 and x[0] == _PAIRS:
        pairs = {key: decode(value) for key, value in x[2]}
        return Counter(pairs) if x[1] == "counter" else pairs
    if isinstance(x, dict):
        return {key: decode(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(decode(value) for value in x)
    if isinstance(x, list):
        return [decode(value) for value in x]
    return x
