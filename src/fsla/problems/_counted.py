"""Counted, a problem that counts oracle calls and samples: the currency in which the papers compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self, TypeVar

from torch import Tensor

from fsla._tree import Leaves, Tree
from fsla.problems._batches import Batch
from fsla.problems._differences import DifferencesInner
from fsla.problems._problem import FirstOrder, Inner, Oracles, Outer, Point, outer_products_at
from fsla.problems._wrappers import gauss_newton_product

T = TypeVar("T")


@dataclass
class Counts:
    """Oracle calls. `joint` tells how many times one pass gave both an HVP and a cross product.

    `forward` counts passes for ∂_λ G alone, in which nothing but λ requires a gradient. Products by differences count
    as the gradients and forward passes that they are made of.
    """

    grad: int = 0
    hvp: int = 0
    cross: int = 0
    joint: int = 0
    cross_t: int = 0
    forward: int = 0
    d_lam: int = 0
    d_omega: int = 0
    inner_views: int = 0
    outer_views: int = 0

    def plus(self, n: int, other: Counts) -> Counts:
        """Returns self + n other."""
        return Counts(*(getattr(self, f.name) + n * getattr(other, f.name) for f in fields(self)))


class Counted:
    """A problem that counts what is asked of it: calls in `calls`, calls times batch size in `samples`.

    A view's gradients count once however often they are read, since they are computed once.
    """

    def __init__(self, problem: Oracles, size: Callable[[Batch], int] = lambda batch: 1) -> None:
        self._problem = problem
        self._size = size
        self.calls = Counts()
        self.samples = Counts()

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        view = self._problem.inner_at(at, batch, seed)
        self.count(batch, "inner_views")
        if isinstance(view, DifferencesInner):
            return view.through(lambda one: CountedFirstOrder(one, batch, self))
        return CountedInner(view, batch, self)

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        self.count(batch, "outer_views")
        return CountedOuter(self._problem.outer_at(at, batch, seed), batch, self)

    def outer_products_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        """F in the role of G: its gradients and products count as those of G do."""
        return CountedInner(outer_products_at(self._problem, at, batch, seed), batch, self)

    def count(self, batch: Batch, *names: str) -> None:
        size = self._size(batch)
        for name in names:
            setattr(self.calls, name, getattr(self.calls, name) + 1)
            setattr(self.samples, name, getattr(self.samples, name) + size)

    def counting(self, f: Callable[[], T]) -> tuple[T, Counts, Counts]:
        """Calls f; returns its result and what it asked for, and leaves the counts as they were."""
        calls = self.calls
        samples = self.samples
        self.calls = Counts()
        self.samples = Counts()
        try:
            return f(), self.calls, self.samples
        finally:
            self.calls = calls
            self.samples = samples

    def add(self, n: int, calls: Counts, samples: Counts) -> None:
        """Counts what was asked for n times."""
        self.calls = self.calls.plus(n, calls)
        self.samples = self.samples.plus(n, samples)


class CountedFirstOrder:
    """A view whose gradients are counted."""

    def __init__(self, view: FirstOrder, batch: Batch, counter: Counted) -> None:
        self._first = view
        self._batch = batch
        self._counter = counter
        self._read_grad = False

    @property
    def unit(self) -> float:
        return self._first.unit

    @property
    def value(self) -> Tensor:
        return self._first.value

    @property
    def grad(self) -> Tree:
        self._count_grad()
        return self._first.grad

    @property
    def d_lam(self) -> Leaves:
        self._count("forward")
        return self._first.d_lam

    def gradients(self) -> tuple[Tree, Leaves]:
        self._count_grad()
        return self._first.gradients()

    def _count(self, *names: str) -> None:
        self._counter.count(self._batch, *names)

    def _count_grad(self) -> None:
        if not self._read_grad:
            self._count("grad")
        self._read_grad = True


class CountedInner(CountedFirstOrder):
    """A view whose gradients and products are counted."""

    def __init__(self, view: Inner, batch: Batch, counter: Counted) -> None:
        super().__init__(view, batch, counter)
        self._view = view

    def hvp(self, v: Tree) -> Tree:
        self._count("hvp")
        return self._view.hvp(v)

    def cross(self, v: Tree) -> Leaves:
        self._count("cross")
        return self._view.cross(v)

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        self._count("hvp", "cross", "joint")
        return self._view.hvp_cross(v)

    def cross_t(self, u: Tree) -> Tree:
        self._count("cross_t")
        return self._view.cross_t(u)

    def gnvp(self, v: Tree) -> Tree:
        self._count("hvp")
        return gauss_newton_product(self._view, v)

    def linearised(self) -> Self:
        self._view.linearised()
        return self


class CountedOuter:
    def __init__(self, view: Outer, batch: Batch, counter: Counted) -> None:
        self._view = view
        self._batch = batch
        self._counter = counter
        self._read: set[str] = set()

    @property
    def value(self) -> Tensor:
        return self._view.value

    @property
    def d_omega(self) -> Tree:
        self._count("d_omega")
        return self._view.d_omega

    @property
    def d_lam(self) -> Leaves:
        self._count("d_lam")
        return self._view.d_lam

    def _count(self, name: str) -> None:
        if name not in self._read:
            self._counter.count(self._batch, name)
        self._read.add(name)
