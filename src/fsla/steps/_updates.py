"""How a variable moves along a direction: one contract for ω, v and λ, as in optax.

    GradientDescent        x ← x - rate g
    Momentum     m ← decay m + g,  x ← x - rate m
    Adam         moments of g and g², corrected for their start;  x ← x - rate m / (√s + floor)
    Adaptive     s ← decay s + (1 - decay) g²,  x ← x - rate g / (√s + floor); or one s for all of x, from ‖g‖
    Normalised   x ← x - rate g / ‖g‖
    Mirror       x ← x exp(-rate g), which is the step of the entropy's Bregman distance: x stays positive
    Proximal     another update, then the proximal step of a penalty h: argmin_y rate h(y) + ½ ‖y - x‖²
    Projected    another update, then Π(x)

`init` gives the start (brought into the set where there is one) and the memory; a call gives the next of both. Updates
are functions of tensors: nothing is written in place, and the host is never asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsla._checks import positive
from fsla._tree import Leaves, Scalar, Tree, axpy, dense, norm, scale, zeros_like

Projection = Callable[[Tree], Tree]


class Update(Protocol):
    def init(self, x: Tree) -> tuple[Tree, Any]: ...
    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: Any) -> tuple[Tree, Any]: ...


@dataclass(frozen=True)
class GradientDescent:
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
        dtype = torch.promote_types(one.dtype, torch.float32)
        left = {name: torch.ones((), dtype=dtype, device=one.device) for name in ("first", "second")}
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
class Adaptive:
    """A scale for each coordinate; with `whole`, one for the whole tree, by a moving mean of ‖g‖."""

    decay: float = 0.9
    floor: float = 1e-3
    whole: bool = False

    def __post_init__(self) -> None:
        _share(self.decay, "decay", "Adaptive")
        positive(self.floor, "floor", "Adaptive")

    def init(self, x: Tree) -> tuple[Tree, Tree]:
        one = next(iter(x.values()))
        return x, {"norm": one.new_zeros(())} if self.whole else zeros_like(x)

    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: Tree) -> tuple[Tree, Tree]:
        full = dense(g)
        seen = {"norm": norm(full)} if self.whole else {name: t * t for name, t in full.items()}
        s = axpy(1 - self.decay, seen, scale(self.decay, memory))
        if self.whole:
            return axpy(-rate / (s["norm"] + self.floor), full, x), s
        return axpy(-rate, {name: t / (s[name].sqrt() + self.floor) for name, t in full.items()}, x), s


@dataclass(frozen=True)
class Normalised:
    """A step of length `rate`; none where g = 0."""

    def init(self, x: Tree) -> tuple[Tree, None]:
        return x, None

    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: None) -> tuple[Tree, None]:
        length = norm(g)
        return axpy(-rate / torch.where(length > 0, length, 1), g, x), None


@dataclass(frozen=True)
class Mirror:
    """For a variable whose coordinates are positive."""

    def init(self, x: Tree) -> tuple[Tree, None]:
        if not all(bool((t > 0).all()) for t in x.values()):
            raise ValueError("The start of a variable that moves by Mirror() must be positive in every coordinate.")
        return x, None

    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: None) -> tuple[Tree, None]:
        return {name: x[name] * torch.exp(-rate * t) for name, t in dense(g).items()}, None


@dataclass(frozen=True)
class SoftThreshold:
    """The proximal step of weight · Σ |x_i|."""

    weight: float

    def __post_init__(self) -> None:
        positive(self.weight, "weight", "SoftThreshold")

    def __call__(self, x: Tree, rate: Scalar) -> Tree:
        return {name: t.sign() * (t.abs() - rate * self.weight).clamp(min=0) for name, t in x.items()}


@dataclass(frozen=True)
class Proximal:
    prox: Callable[[Tree, Scalar], Tree]
    update: Update = field(default_factory=GradientDescent)

    def init(self, x: Tree) -> tuple[Tree, Any]:
        return self.update.init(x)

    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: Any) -> tuple[Tree, Any]:
        x, memory = self.update(x, g, rate, memory)
        return self.prox(x, rate), memory


@dataclass(frozen=True)
class Projected:
    onto: Projection
    update: Update = field(default_factory=GradientDescent)

    def init(self, x: Tree) -> tuple[Tree, Any]:
        x, memory = self.update.init(x)
        return self.onto(x), memory

    def __call__(self, x: Tree, g: Leaves, rate: Scalar, memory: Any) -> tuple[Tree, Any]:
        x, memory = self.update(x, g, rate, memory)
        return self.onto(x), memory


def onto(project: Projection | None, update: Update | None = None) -> Update:
    """An update, kept in a set if there is one."""
    update = GradientDescent() if update is None else update
    return update if project is None else Projected(project, update)


def _share(value: float, name: str, owner: str) -> None:
    if not (isinstance(value, int | float) and 0 <= value < 1):
        raise ValueError(f"The {name!r} of {owner} must lie between 0 and 1 (1 excluded). Got {value!r} instead.")
