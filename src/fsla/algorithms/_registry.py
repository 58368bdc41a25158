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
    """Give an algorithm a name: a class derived from `Algorithm`, or a function of ``step_sizes`` that returns one.

    The name is what ``fsla.BilevelOptimizer(algorithm=name)`` takes, its row of the conformance tests and its card in
    the docs.

    Example:
        >>> from dataclasses import dataclass, field
        >>> import fsla
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
    """Return what makes the algorithm of a name; it takes step sizes and the algorithm's own options."""
    return pick(name, _FACTORIES, "algorithm")


def list_algorithms() -> list[str]:
    """Return the names of all registered algorithms."""
    return list(_FACTORIES)
