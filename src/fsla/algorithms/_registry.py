"""Algorithms by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fsla._checks import pick
from fsla.algorithms._base import Algorithm

Factory = Callable[..., Algorithm[Any]]
F = TypeVar("F", bound=Factory)
_FACTORIES: dict[str, Factory] = {}


def register(name: str) -> Callable[[F], F]:
    """Register an algorithm under a name.

    `fsla.BilevelOptimizer(algorithm=name)`, the conformance tests and the docs take this name.

    Args:
        name: an identifier that no other algorithm has.

    Returns:
        A decorator of a class derived from `Algorithm`, or of a function of ``step_sizes`` that returns one.

    Raises:
        ValueError: if the name is no identifier, or belongs to another algorithm.

    Examples:
        >>> from dataclasses import dataclass, field
        >>> @fsla.algorithms.register("heavy_soba")
        ... @dataclass(frozen=True, kw_only=True)
        ... class HeavySoba(fsla.algorithms.Simultaneous):
        ...     outer_update: fsla.steps.Update = field(default_factory=fsla.steps.Momentum)
        >>> fsla.algorithms.get_algorithm("heavy_soba") is HeavySoba
        True
    """
    if not name.isidentifier():
        raise ValueError(f"The name of an algorithm must be an identifier. Got {name!r} instead.")

    def add(factory: F) -> F:
        known = _FACTORIES.get(name)
        if known is not None and known.__qualname__ != factory.__qualname__:
            raise ValueError(f"The name {name!r} belongs to {known.__qualname__} already. Choose another one.")
        _FACTORIES[name] = factory
        return factory

    return add


def get_algorithm(name: str) -> Factory:
    """Return the class or function that makes the algorithm of a name.

    Args:
        name: a registered name.

    Returns:
        A callable of step sizes and of the algorithm's own options.

    Raises:
        ValueError: if no algorithm has this name; the message names the nearest one.

    Examples:
        >>> make = fsla.algorithms.get_algorithm("soba")
        >>> minimize(make(constant(0.2, 0.5, 0.5)))
        1.0
    """
    return pick(name, _FACTORIES, "algorithm")


def list_algorithms() -> list[str]:
    """Return the names of all registered algorithms.

    Examples:
        >>> names = fsla.algorithms.list_algorithms()
        >>> "soba" in names, "fsla" in names
        (True, True)
    """
    return list(_FACTORIES)
