"""How a direction d is made from stochastic gradients g (Algorithm 1, line 9).

    NoMomentum    d = g
    EMA           d = (1-η) d + η g
    STORM         d = g + (1-η) (d - g_old), where g_old is the gradient at the old position on the same batches
    SPIDER        STORM with η = 1 at every q-th step, on a large batch, and 0 between (`PeriodicRefresh`)

η is `new_grad_weight` of the step sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from fsla._checks import pick
from fsla._state_tree import saved
from fsla._tree import Leaves, Scalar, Tree, axpy, clone, dense, scale
from fsla.problems._views import Point


@saved
class Position(NamedTuple):
    """Where a hypergradient is taken: (λ, ω), and the memory of the estimator, which is v where it tracks one."""

    at: Point
    adjoint: Tree

    def clone(self) -> Position:
        """Return a copy that stays where it is when the variables move in place; a trajectory is one already."""
        lam, omega, adjoint = (clone(x) for x in (self.at.lam, self.at.omega, self.adjoint))
        return Position(Point(lam, omega, self.at.trajectory), adjoint)


class Direction(ABC):
    """How the gradient of a step and what is remembered give the direction of a variable."""

    looks_back = False
    """Whether it reads the gradient at the old position."""
    remembers = True
    """Whether it reads the direction of the step before."""

    def asks_back(self, new_grad_weight: Scalar) -> bool:
        """Return whether it reads the gradient at the old position in a step of this weight."""
        return self.looks_back

    @abstractmethod
    def __call__(self, g: Leaves, g_old: Leaves, d: Tree, new_grad_weight: Scalar) -> Tree: ...


@dataclass(frozen=True)
class NoMomentum(Direction):
    remembers = False

    def __call__(self, g: Leaves, g_old: Leaves, d: Tree, new_grad_weight: Scalar) -> Tree:
        return dense(g)


@dataclass(frozen=True)
class EMA(Direction):
    def __call__(self, g: Leaves, g_old: Leaves, d: Tree, new_grad_weight: Scalar) -> Tree:
        return axpy(1.0 - new_grad_weight, d, scale(new_grad_weight, g))


@dataclass(frozen=True)
class STORM(Direction):
    looks_back = True

    def __call__(self, g: Leaves, g_old: Leaves, d: Tree, new_grad_weight: Scalar) -> Tree:
        keep = 1.0 - new_grad_weight
        return axpy(keep, d, axpy(-keep, g_old, g))


@dataclass(frozen=True)
class SPIDER(STORM):
    """Where η is the number 1, the old position is not asked."""

    def asks_back(self, new_grad_weight: Scalar) -> bool:
        return not (isinstance(new_grad_weight, float) and new_grad_weight == 1.0)

    def __call__(self, g: Leaves, g_old: Leaves, d: Tree, new_grad_weight: Scalar) -> Tree:
        if not self.asks_back(new_grad_weight):
            return dense(g)
        return super().__call__(g, g_old, d, new_grad_weight)


MOMENTA: dict[str, Direction] = {"storm": STORM(), "average": EMA(), "none": NoMomentum()}


def by_name(name: str) -> Direction:
    """Return a direction by the name that users type."""
    return pick(name, MOMENTA, "momentum")
