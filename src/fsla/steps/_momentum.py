"""How a direction d follows from stochastic gradients g (Algorithm 1, line 9).

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
    """Where a hypergradient is taken.

    Args:
        at: (λ, ω).
        adjoint: memory of the estimator, which is v where it tracks one.

    Examples:
        >>> position = fsla.steps.Position(fsla.Point({"x": torch.zeros(1)}, x), {})
        >>> position.at.omega["w"]
        tensor([1., 2.])
    """

    at: Point
    adjoint: Tree

    def clone(self) -> Position:
        """Return a copy that stays where it is when the variables move in place; a trajectory is one already."""
        lam, omega, adjoint = (clone(x) for x in (self.at.lam, self.at.omega, self.adjoint))
        return Position(Point(lam, omega, self.at.trajectory), adjoint)


class Direction(ABC):
    """Base class of rules that make a direction d from stochastic gradients.

    Call it with the gradient, the gradient at the old position, the last d and η.

    Attributes:
        looks_back: whether it reads the gradient at the old position.
        remembers: whether it reads the last direction.

    Examples:
        >>> fsla.steps.EMA().looks_back, fsla.steps.STORM().looks_back
        (False, True)
    """

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
    """Direction without memory: d = g.

    Examples:
        >>> fsla.steps.NoMomentum()(g, {}, x, 0.1)["w"]
        tensor([ 1., -4.])
    """

    remembers = False

    def __call__(self, g: Leaves, g_old: Leaves, d: Tree, new_grad_weight: Scalar) -> Tree:
        return dense(g)


@dataclass(frozen=True)
class EMA(Direction):
    """Moving average: d ← (1-η) d + η g.

    Examples:
        >>> fsla.steps.EMA()(g, {}, x, 0.5)["w"]
        tensor([ 1., -1.])
    """

    def __call__(self, g: Leaves, g_old: Leaves, d: Tree, new_grad_weight: Scalar) -> Tree:
        return axpy(1.0 - new_grad_weight, d, scale(new_grad_weight, g))


@dataclass(frozen=True)
class STORM(Direction):
    """Variance-reduced direction: d ← g + (1-η) (d - g_old).

    g_old is the gradient at the old position, on the batches of g.

    Examples:
        >>> g_old = {"w": torch.tensor([2.0, -2.0])}
        >>> fsla.steps.STORM()(g, g_old, x, 0.5)["w"]
        tensor([ 0.5000, -2.0000])
    """

    looks_back = True

    def __call__(self, g: Leaves, g_old: Leaves, d: Tree, new_grad_weight: Scalar) -> Tree:
        keep = 1.0 - new_grad_weight
        return axpy(keep, d, axpy(-keep, g_old, g))


@dataclass(frozen=True)
class SPIDER(STORM):
    """STORM for steps with η = 1 now and then and 0 between (`PeriodicRefresh`).

    Where η is the number 1, it does not ask for the old position.

    Examples:
        >>> fsla.steps.SPIDER().asks_back(1.0), fsla.steps.SPIDER().asks_back(0.0)
        (False, True)
    """

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
