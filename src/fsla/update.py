"""How a variable moves along a direction: one contract for ω, v and λ, as in optax.

    Plain        x ← x - rate g
    Momentum     m ← decay m + g,  x ← x - rate m
    Adam         moments of g and g², corrected for their start;  x ← x - rate m / (√s + floor)
    Normalised   x ← x - rate g / ‖g‖
    Projected    another update, then Π(x)

`init` gives the start (brought into the set where there is one) and the memory; a call gives the next of both. Updates
are functions of tensors: nothing is written in place, and the host is never asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsla.checks import positive
from fsla.tree import Leaves, Scalar, Tree, axpy, dense, norm, scale, zeros_like

Projection = Callable[[Tree], Tree]


class Update(Protocol):
    def init(self, x: Tree) -> tuple[Tree, Any]: ...
    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: Any) -> tuple[Tree, Any]: ...


@dataclass(frozen=True)
class Plain:
    def init(self, x: Tree) -> tuple[Tree, None]:
        return x, None

    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: None) -> tuple[Tree, None]:
        return axpy(-rate, g, x), None


@dataclass(frozen=True)
class Momentum:
    decay: float = 0.9

    def __post_init__(self) -> None:
        _share(self.decay, "decay", "Momentum")

    def init(self, x: Tree) -> tuple[Tree, Tree]:
        return x, zeros_like(x)

    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: Tree) -> tuple[Tree, Tree]:
        m = axpy(1.0, g, scale(self.decay, memory))
        return axpy(-rate, m, x), m


@dataclass(frozen=True)
class Adam:
    first: float = 0.9
    second: float = 0.999
    floor: float = 1e-8

    def __post_init__(self) -> None:
        _share(self.first, "first", "Adam")
        _share(self.second, "second", "Adam")
        positive(self.floor, "floor", "Adam")

    def init(self, x: Tree) -> tuple[Tree, tuple[Tree, Tree, Tree]]:
        one = next(iter(x.values()))
        left = {"first": torch.ones((), device=one.device), "second": torch.ones((), device=one.device)}
        return x, (zeros_like(x), zeros_like(x), left)

    def __call__(
        self, x: Tree, g: Leaves, rate: Scalar, memory: tuple[Tree, Tree, Tree]
    ) -> tuple[Tree, tuple[Tree, Tree, Tree]]:
        m, s, left = memory
        whole = dense(g)
        square = {name: t * t for name, t in whole.items()}
        m = axpy(1 - self.first, whole, scale(self.first, m))
        s = axpy(1 - self.second, square, scale(self.second, s))
        left = {"first": self.first * left["first"], "second": self.second * left["second"]}
        step = {
            name: (t / (1 - left["first"])) / ((s[name] / (1 - left["second"])).sqrt() + self.floor)
            for name, t in m.items()
        }
        return axpy(-rate, step, x), (m, s, left)


@dataclass(frozen=True)
class Normalised:
    """A step of length `rate`; none where g = 0."""

    def init(self, x: Tree) -> tuple[Tree, None]:
        return x, None

    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: None) -> tuple[Tree, None]:
        length = norm(g)
        return axpy(-rate / torch.where(length > 0, length, 1), g, x), None


@dataclass(frozen=True)
class Projected:
    onto: Projection
    update: Update = field(default_factory=Plain)

    def init(self, x: Tree) -> tuple[Tree, Any]:
        x, memory = self.update.init(x)
        return self.onto(x), memory

    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: Any) -> tuple[Tree, Any]:
        x, memory = self.update(x, g, rate, memory)
        return self.onto(x), memory


def onto(project: Projection | None, update: Update | None = None) -> Update:
    """An update, kept in a set if there is one."""
    update = Plain() if update is None else update
    return update if project is None else Projected(project, update)


def _share(value: float, name: str, owner: str) -> None:
    if not (isinstance(value, int | float) and 0 <= value < 1):
        raise ValueError(f"The {name!r} of {owner} must lie between 0 and 1 (1 excluded). Got {value!r} instead.")
