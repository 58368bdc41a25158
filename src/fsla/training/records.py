"""What a run says of itself: records that are JSON, how it stands, and what it has asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import numpy
from torch import Tensor

from fsla.counted import Counts
from fsla.training.checkpoint import Plain

Record = dict[str, Any]


class Status(StrEnum):
    """How a run stands. Records hold the values, which are plain strings."""

    RUNNING = "running"
    FINISHED = "finished"
    BUDGET = "budget"
    DIVERGED = "diverged"


OWN = (
    "step", "seconds", "preparation_seconds", "engine", "oracles", "status", "diverged", "diverged_size", "not_finite",
)  # fmt: skip
"""The names in a record that are the loop's own."""


def work(counts: Counts) -> int:
    """What a run has asked for, in passes over a batch: gradients and products, a joint pass once.

    ∂_λ F is not among them: it comes with ∂_ω F, or without a pass.
    """
    products = counts.hvp + counts.cross + counts.cross_t - counts.joint
    return counts.grad + counts.forward + counts.d_omega + products


def measured(metrics: object) -> tuple[Record, list[str]]:
    """What was measured as JSON, with None in the place of numbers that are not finite; and where these were."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"'measure' must return a mapping from names to numbers. Got {type(metrics).__name__} instead. "
            'Write {"loss": loss}.'
        )
    if taken := [name for name in OWN if name in metrics]:
        raise ValueError(
            f"What 'measure' returns must have names of its own. Got {', '.join(map(repr, taken))}, which the loop "
            "itself writes into each record. Choose other names."
        )
    bad: list[str] = []
    return {name: _finite(plain(x, str(name)), str(name), bad) for name, x in _named(metrics, "'measure'")}, bad


def plain(value: object, where: str) -> Plain:
    """The value as JSON has it: numbers of tensors and arrays become numbers and lists, tuples become lists."""
    if isinstance(value, Tensor):
        value = value.detach().tolist()  # a number if it has no dimension
    elif isinstance(value, numpy.ndarray | numpy.generic):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # of a subclass too: a NumPy number, a member of an enumeration
    if isinstance(value, list | tuple):
        return [plain(part, f"{where}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        return {name: plain(part, f"{where}.{name}") for name, part in _named(value, where)}
    raise TypeError(
        f"{where} must be made of numbers, strings, lists, mappings, tensors and arrays, which records hold as JSON. "
        f"Got {type(value).__name__} instead."
    )


def _named(value: Mapping[Any, object], where: str) -> list[tuple[str, object]]:
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"The names in {where} must be strings. Got {name!r} instead.")
    return [(str(name), part) for name, part in value.items()]


def _finite(value: Plain, where: str, bad: list[str]) -> Plain:
    """The value without numbers that are not finite; where these were is added to `bad`."""
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(where)
        return None
    if isinstance(value, list):
        return [_finite(part, f"{where}[{i}]", bad) for i, part in enumerate(value)]
    if isinstance(value, dict):
        return {name: _finite(part, f"{where}.{name}", bad) for name, part in value.items()}
    return value


def differences(there: Plain, wanted: Plain) -> list[str]:
    """Where two values differ: the name of each entry, what is there and what is wanted."""
    found = dict(_entries(there, ""))
    asked = dict(_entries(wanted, ""))
    return [
        f"{name or 'all of it'}: {_said(found, name)} there, {_said(asked, name)} wanted"
        for name in {**found, **asked}
        if name not in found or name not in asked or not _same(found[name], asked[name])
    ]


def _entries(value: Plain, where: str) -> Iterator[tuple[str, Plain]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _entries(part, f"{where}.{name}" if where else name)
    elif isinstance(value, list) and value:
        for i, part in enumerate(value):
            yield from _entries(part, f"{where}[{i}]")
    elif value != {} or where:  # nothing at all has no entry
        yield where, value


def _same(a: Plain, b: Plain) -> bool:
    numbers = isinstance(a, int | float) and isinstance(b, int | float) and isinstance(a, bool) == isinstance(b, bool)
    return a == b if numbers and a == a else repr(a) == repr(b)


def _said(entries: dict[str, Plain], name: str) -> str:
    return repr(entries[name]) if name in entries else "nothing"
