"""Plain values: what JSON holds, what becomes of other values there, and where two of them differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
from torch import Tensor

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""What JSON holds."""


Rule = Callable[[Any], bool]
"""What JSON from a file must be. Rules are declared once, and checked before the JSON is used."""


def text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def mapping(value: Any) -> bool:
    """Return whether a value is an object."""
    return isinstance(value, dict)


def number(kind: type[int] | type[float], low: float = -math.inf, high: float = math.inf) -> Rule:
    """Return the rule of numbers of one kind in a closed range."""
    return lambda value: type(value) is kind and low <= value <= high


def among(*values: object) -> Rule:
    """Return the rule of values that are one of these."""
    return lambda value: value in values


def either(*rules: Rule) -> Rule:
    """Return the rule of values that fit one of these rules."""
    return lambda value: any(rule(value) for rule in rules)


def items(rule: Rule) -> Rule:
    """Return the rule of lists of any length."""
    return lambda value: isinstance(value, list) and all(map(rule, value))


def row(*rules: Rule) -> Rule:
    """Return the rule of lists with a rule for each place."""
    return lambda value: (
        isinstance(value, list) and len(value) == len(rules) and all(r(x) for r, x in zip(rules, value, strict=True))
    )


def each(rule: Rule, name: Rule = text) -> Rule:
    """Return the rule of objects with any names that fit a rule, and one rule for all values."""
    return lambda value: mapping(value) and all(map(name, value)) and all(map(rule, value.values()))


def record(**rules: Rule) -> Rule:
    """Return the rule of objects with exactly these names."""
    return lambda value: (
        isinstance(value, dict) and value.keys() == rules.keys() and all(rules[name](value[name]) for name in rules)
    )


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
        return {name: plain(part, f"{where}.{name}") for name, part in named(value, where)}
    raise TypeError(
        f"{where} must be made of numbers, strings, lists, mappings, tensors and arrays, which records hold as JSON. "
        f"Got {type(value).__name__} instead."
    )


def named(value: Mapping[Any, object], where: str) -> list[tuple[str, object]]:
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"The names in {where} must be strings. Got {name!r} instead.")
    return [(str(name), part) for name, part in value.items()]


def finite(value: Plain, where: str, bad: list[str]) -> Plain:
    """The value without numbers that are not finite; where these were is added to `bad`."""
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(where)
        return None
    if isinstance(value, list):
        return [finite(part, f"{where}[{i}]", bad) for i, part in enumerate(value)]
    if isinstance(value, dict):
        return {name: finite(part, f"{where}.{name}", bad) for name, part in value.items()}
    return value


def differences(there: Plain, expected: Plain) -> list[str]:
    """Where two values differ: the name of each entry, what is there and what is wanted."""
    entries = dict(_entries(there, ""))
    wanted_entries = dict(_entries(expected, ""))
    return [
        f"{name or 'all of it'}: {_shown(entries, name)} there, {_shown(wanted_entries, name)} wanted"
        for name in {**entries, **wanted_entries}
        if name not in entries or name not in wanted_entries or not _same(entries[name], wanted_entries[name])
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


def _shown(entries: dict[str, Plain], name: str) -> str:
    return repr(entries[name]) if name in entries else "nothing"
