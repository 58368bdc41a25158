"""Problems around problems: Counted counts oracle calls, Shared builds one graph for each point and batch.

`curved` changes what an estimator takes for H v: the Gauss-Newton product, or damping.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from fsla.checks import pick
from fsla.problem import Batch, Inner, Oracles, Outer, Point
from fsla.tree import Tree, axpy

T = TypeVar("T")


@dataclass
class Counts:
    """Oracle calls. `joint` tells how many times one pass gave both an HVP and a cross product."""

    grad: int = 0
    hvp: int = 0
    cross: int = 0
    joint: int = 0
    cross_t: int = 0
    gnvp: int = 0
    d_lam: int = 0
    d_omega: int = 0
    inner_graphs: int = 0
    outer_graphs: int = 0

    def plus(self, n: int, other: Counts) -> Counts:
        """Returns self + n other."""
        return Counts(*(a + n * b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class Counted:
    """A problem that counts what is asked of it: calls in `calls`, calls times batch size in `samples`.

    A view's gradients count once however often they are read, since they are computed once.
    """

    def __init__(self, problem: Oracles, size: Callable[[Batch], int] = lambda batch: 1) -> None:
        self._problem, self._size = problem, size
        self.calls, self.samples = Counts(), Counts()

    def inner_at(self, at: Point, batch: Batch) -> Inner:
        self._count(batch, "inner_graphs")
        return cast(Inner, _CountedView(self._problem.inner_at(at, batch), batch, self._count))

    def outer_at(self, at: Point, batch: Batch) -> Outer:
        self._count(batch, "outer_graphs")
        return cast(Outer, _CountedView(self._problem.outer_at(at, batch), batch, self._count))

    def aside(self, f: Callable[[], T]) -> tuple[T, Counts, Counts]:
        """Calls f; returns its result and what it asked for, and leaves the counts as they were."""
        calls, samples = self.calls, self.samples
        self.calls, self.samples = Counts(), Counts()
        try:
            return f(), self.calls, self.samples
        finally:
            self.calls, self.samples = calls, samples

    def add(self, n: int, calls: Counts, samples: Counts) -> None:
        """Counts what was asked for n times."""
        self.calls, self.samples = self.calls.plus(n, calls), self.samples.plus(n, samples)

    def _count(self, batch: Batch, *names: str) -> None:
        for name in names:
            setattr(self.calls, name, getattr(self.calls, name) + 1)
            setattr(self.samples, name, getattr(self.samples, name) + self._size(batch))


class _CountedView:
    def __init__(self, view: Inner | Outer, batch: Batch, count: Callable[..., None]) -> None:
        self._view, self._batch, self._count = view, batch, count
        self._seen = {"value"}

    def __getattr__(self, name: str) -> Any:  # an oracle: a gradient, or a product to be called
        answer = getattr(self._view, name)
        if callable(answer):
            return partial(self._product, name, answer)
        if name not in self._seen:
            self._seen.add(name)
            self._count(self._batch, name)
        return answer

    def _product(self, name: str, product: Callable[[Tree], Any], v: Tree) -> Any:
        self._count(self._batch, *(("hvp", "cross", "joint") if name == "hvp_cross" else (name,)))
        return product(v)


CURVATURES = {"hessian": "hvp", "gauss-newton": "gnvp"}


def known_curvature(kind: str, damping: float) -> None:
    pick(kind, CURVATURES, "curvature")
    if not (isinstance(damping, int | float) and 0 <= damping < math.inf):
        raise ValueError(f"The damping must be a finite number, at least 0. Got {damping!r} instead.")


def curved(view: Inner, kind: str, damping: float) -> Inner:
    """The view with B v + damping · v in the place of H v, where B is the Hessian or the Gauss-Newton matrix of G."""
    if kind == "hessian" and not damping:
        return view
    product = getattr(view, CURVATURES[kind], None)
    if product is None:
        raise TypeError(
            "Gauss-Newton products need a problem that knows its network's outputs. "
            "Use fsla.WeightedProblem(..., outputs=...), or curvature='hessian'."
        )
    return cast(Inner, _Curved(view, product, damping))


class _Curved:
    def __init__(self, view: Inner, product: Callable[[Tree], Tree], damping: float) -> None:
        self._view, self._product, self._damping = view, product, damping

    def hvp(self, v: Tree) -> Tree:
        return axpy(self._damping, v, self._product(v)) if self._damping else self._product(v)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


class Shared:
    """A problem that builds one graph for each point and batch. Trees never change in place, so identity is the key.

    `keep`: how many views of each level are held, the oldest given up first; None holds all.
    """

    def __init__(self, problem: Oracles, keep: int | None = None) -> None:
        self._problem, self._keep = problem, keep
        self._views: dict[str, dict[tuple[int, int, int], tuple[Any, Point, Batch]]] = {"inner_at": {}, "outer_at": {}}

    def inner_at(self, at: Point, batch: Batch) -> Inner:
        return cast(Inner, self._once("inner_at", at, batch))

    def outer_at(self, at: Point, batch: Batch) -> Outer:
        return cast(Outer, self._once("outer_at", at, batch))

    def _once(self, kind: str, at: Point, batch: Batch) -> Any:
        views, key = self._views[kind], (id(at.lam), id(at.omega), id(batch))
        if key not in views:  # the point and the batch are kept, so that their ids stay theirs
            if self._keep is not None and len(views) >= self._keep:
                del views[next(iter(views))]
            views[key] = getattr(self._problem, kind)(at, batch), at, batch
        return views[key][0]
