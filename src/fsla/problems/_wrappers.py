"""Problems around problems.

    Shared        one view for each point and batch, so that what one oracle computed serves the next
    Seeded        hands each batch its seed, which fixes what random layers draw
    GaussNewton   the Gauss-Newton product for H v: positive semi-definite, for networks
    Damped        H v + damping · v for H v

`fsla.Differences` (products from first-order gradients) and `fsla.Counted` have files of their own. Wrappers nest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from torch import Tensor

from fsla._tree import Leaves, Tree, axpy
from fsla.problems._batches import Batch, Sample
from fsla.problems._problem import Composed, Inner, Oracles, Outer, Point, outer_products_at

V = TypeVar("V", Inner, Outer)


def gauss_newton_product(view: Inner, v: Tree) -> Tree:
    """The Gauss-Newton product of a view that has one."""
    if not isinstance(view, Composed):
        raise TypeError(
            "Gauss-Newton products need a problem that knows its network's outputs. "
            "Use fsla.WeightedProblem(..., outputs=...), or the problem without fsla.GaussNewton."
        )
    return view.gnvp(v)


class Forwarded:
    """A view of G that hands every oracle on to another view."""

    def __init__(self, view: Inner) -> None:
        self._view = view

    @property
    def unit(self) -> float:
        return self._view.unit

    @property
    def value(self) -> Tensor:
        return self._view.value

    @property
    def grad(self) -> Tree:
        return self._view.grad

    @property
    def d_lam(self) -> Leaves:
        return self._view.d_lam

    def gradients(self) -> tuple[Tree, Leaves]:
        return self._view.gradients()

    def hvp(self, v: Tree) -> Tree:
        return self._view.hvp(v)

    def cross(self, v: Tree) -> Leaves:
        return self._view.cross(v)

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        return self._view.hvp_cross(v)

    def cross_t(self, u: Tree) -> Tree:
        return self._view.cross_t(u)

    def gnvp(self, v: Tree) -> Tree:
        return gauss_newton_product(self._view, v)

    def linearised(self) -> Self:
        self._view.linearised()
        return self


class _Kept(Generic[V]):
    """The last views of one level, by the identity of point and batch."""

    def __init__(self, keep: int | None) -> None:
        self._keep = keep
        self._views: dict[tuple[int, int, int], tuple[V, Point, Batch]] = {}

    def once(self, at: Point, batch: Batch, make: Callable[[], V]) -> V:
        key = (id(at.lam), id(at.omega), id(batch))
        if key not in self._views:  # the point and the batch are kept, so that their ids stay theirs
            if self._keep is not None and len(self._views) >= self._keep:
                del self._views[next(iter(self._views))]
            self._views[key] = make(), at, batch
        return self._views[key][0]


class Shared:
    """A problem that makes one view for each point and batch. Trees never change in place, so identity is the key.

    Args:
        problem: the problem.
        keep: how many views of each level are held, the oldest given up first; None holds all.
        linearised: whether several products may be asked of a view.
    """

    def __init__(self, problem: Oracles, keep: int | None = None, *, linearised: bool = False) -> None:
        self._problem = problem
        self._linearised = linearised
        self._inner = _Kept[Inner](keep)
        self._outer = _Kept[Outer](keep)

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        def make() -> Inner:
            view = self._problem.inner_at(at, batch, seed)
            return view.linearised() if self._linearised else view

        return self._inner.once(at, batch, make)

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        return self._outer.once(at, batch, lambda: self._problem.outer_at(at, batch, seed))

    def outer_products_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return outer_products_at(self._problem, at, batch, seed)


class Seeded:
    """A problem whose views have the seeds of a sample: one for each batch, the same at all points."""

    def __init__(self, problem: Oracles, xi: Sample) -> None:
        self._problem = problem
        self._seeds = xi.seeds()

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return self._problem.inner_at(at, batch, self._seeds.get(id(batch), seed))

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        return self._problem.outer_at(at, batch, self._seeds.get(id(batch), seed))

    def outer_products_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return outer_products_at(self._problem, at, batch, self._seeds.get(id(batch), seed))


@dataclass(frozen=True)
class GaussNewton:
    """A problem with the Gauss-Newton product in the place of H v, along whose directions v cannot run away.

    It drops the curvature of the network itself. The problem must know its network's outputs, as
    `fsla.WeightedProblem(..., outputs=...)` does.
    """

    problem: Oracles

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return _GaussNewtonInner(self.problem.inner_at(at, batch, seed))

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        return self.problem.outer_at(at, batch, seed)

    def outer_products_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return outer_products_at(self.problem, at, batch, seed)


class _GaussNewtonInner(Forwarded):
    def hvp(self, v: Tree) -> Tree:
        return self.gnvp(v)

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        return self.gnvp(v), self._view.cross(v)


@dataclass(frozen=True)
class Damped:
    """A problem with H v + damping · v in the place of H v: then ‖v‖ stays below ‖∂_ω F‖ / damping where H ⪰ 0."""

    problem: Oracles
    damping: float

    def __post_init__(self) -> None:
        if not (isinstance(self.damping, int | float) and 0 <= self.damping < math.inf):
            raise ValueError(f"The damping must be a finite number, at least 0. Got {self.damping!r} instead.")

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return _DampedInner(self.problem.inner_at(at, batch, seed), self.damping)

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        return self.problem.outer_at(at, batch, seed)

    def outer_products_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return outer_products_at(self.problem, at, batch, seed)


class _DampedInner(Forwarded):
    def __init__(self, view: Inner, damping: float) -> None:
        super().__init__(view)
        self._damping = damping

    def hvp(self, v: Tree) -> Tree:
        return axpy(self._damping, v, self._view.hvp(v))

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        product, cross = self._view.hvp_cross(v)
        return axpy(self._damping, v, product), cross
