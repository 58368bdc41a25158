"""Problems around problems. Wrappers nest.

FiniteDifferenceProblem   products by differences of the problem's gradients
GaussNewtonProblem        the Gauss-Newton product for H v: positive semi-definite, for networks
DampedProblem             H v + damping · v for H v
RidgeProblem              G + ½ Σ ridge ‖ω‖² for G
CountedProblem            counts what is asked of the problem
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Self, TypeVar

from torch import Tensor

from fsla._checks import instance, positive
from fsla._tree import Leaves, Scalar, Tree, axpy, scale_each
from fsla.problems._batches import Batch
from fsla.problems._views import DifferenceView, FiniteDifferenceCheck, Oracles, Point, View, compare_steps

T = TypeVar("T")


class ForwardingView(View):
    """Base class of views that ask another view. A subclass overrides what it changes.

    Args:
        view: the other view.

    Examples:
        >>> view = problem.inner_at(at, batch)
        >>> fsla.problems.ForwardingView(view).value == view.value
        tensor(True)
    """

    def __init__(self, view: View) -> None:
        self._view = view

    @property
    def value(self) -> Tensor:
        return self._view.value

    @property
    def known_value(self) -> Tensor | None:
        return self._view.known_value

    @property
    def eps(self) -> float:
        return self._view.eps

    def gradients(self, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        return self._view.gradients(omega=omega, lam=lam)

    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        return self._view.products(v, omega=omega, lam=lam)

    def mixed_hvp_transpose(self, u: Tree) -> Tree:
        return self._view.mixed_hvp_transpose(u)

    def gauss_newton(self, v: Tree) -> Tree:
        return self._view.gauss_newton(v)

    def linearized(self) -> Self:
        self._view.linearized()
        return self


class ForwardingProblem(Oracles):
    """Base class of problems that ask another problem, and may wrap the views of its losses.

    Args:
        problem: the other problem.

    Examples:
        >>> fsla.problems.ForwardingProblem(problem).outer_at(at, batch).value
        tensor(1.)
    """

    def __init__(self, problem: Oracles) -> None:
        instance(problem, Oracles, "problem", type(self).__name__, "a problem, such as a fsla.Problem")
        self.problem = problem

    def inner_at(self, at: Point, batch: Batch, *, update_buffers: bool = False) -> View:
        return self._wrap_inner(self.problem.inner_at(at, batch, update_buffers=update_buffers), batch)

    def outer_at(self, at: Point, batch: Batch) -> View:
        return self._wrap_outer(self.problem.outer_at(at, batch), batch)

    def check_step(self, at: Point, batch: Batch, v: Tree) -> FiniteDifferenceCheck | None:
        return self.problem.check_step(at, batch, v)

    def _wrap_inner(self, view: View, batch: Batch) -> View:
        return view

    def _wrap_outer(self, view: View, batch: Batch) -> View:
        return view


class FiniteDifferenceProblem(ForwardingProblem):
    """A problem whose products are differences of another problem's gradients, at both levels.

    Args:
        problem: any problem; this one asks it for gradients alone.
        rel_step: relative step r; by default chosen by the precision that the problem computes in.

    Examples:
        >>> by_differences = fsla.FiniteDifferenceProblem(problem)
        >>> by_differences.inner_at(at, batch).hvp(v)["w"].round(decimals=2)
        tensor([1., 0.])
    """

    def __init__(self, problem: Oracles, rel_step: float | None = None) -> None:
        positive(rel_step, "rel_step", "FiniteDifferenceProblem", optional=True)
        super().__init__(problem)
        self.rel_step = rel_step

    def inner_at(self, at: Point, batch: Batch, *, update_buffers: bool = False) -> View:
        return DifferenceView(self._inner(batch), at, rel_step=self.rel_step, update_buffers=update_buffers)

    def outer_at(self, at: Point, batch: Batch) -> View:
        return DifferenceView(lambda at, _: self.problem.outer_at(at, batch), at, rel_step=self.rel_step)

    def check_step(self, at: Point, batch: Batch, v: Tree) -> FiniteDifferenceCheck:
        return compare_steps(self._inner(batch), at, v, self.rel_step)

    def _inner(self, batch: Batch) -> Callable[[Point, bool], View]:
        return lambda at, update_buffers: self.problem.inner_at(at, batch, update_buffers=update_buffers)


class DampedProblem(ForwardingProblem):
    """A problem with H v + damping · v in the place of H v.

    Then ‖v‖ stays below ‖∂_ω F‖ / damping where H ⪰ 0.

    Args:
        problem: any problem.
        damping: one number, or one for each tensor of ω that has any, as the weight decay of an optimiser.

    Raises:
        ValueError: if a number is negative or not finite.

    Examples:
        >>> fsla.DampedProblem(problem, 0.5).inner_at(at, batch).hvp(v)
        {'w': tensor([1.5000, 0.0000])}
    """

    def __init__(self, problem: Oracles, damping: Scalar | Mapping[str, Scalar]) -> None:
        super().__init__(problem)
        for value in damping.values() if isinstance(damping, Mapping) else (damping,):
            if not isinstance(value, Tensor) and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"The damping must be a finite number, at least 0. Got {value!r} instead.")
        self.damping = damping

    def _wrap_inner(self, view: View, batch: Batch) -> View:
        return _DampedView(view, self.damping)


class _DampedView(ForwardingView):
    def __init__(self, view: View, damping: Scalar | Mapping[str, Scalar]) -> None:
        super().__init__(view)
        self._damping = damping

    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        hv, jv = self._view.products(v, omega=omega, lam=lam)
        if isinstance(self._damping, Mapping):
            return axpy(1.0, scale_each(self._damping, v), hv) if omega else hv, jv
        return axpy(self._damping, v, hv) if omega else hv, jv


class RidgeProblem(ForwardingProblem):
    """A problem with a ridge more in its inner loss, which is what the weight decay of an optimiser makes of it.

    Args:
        problem: any problem.
        ridge: a number for each tensor of ω that has any.
    """

    def __init__(self, problem: Oracles, ridge: Mapping[str, float]) -> None:
        super().__init__(problem)
        self.ridge = ridge

    def inner_at(self, at: Point, batch: Batch, *, update_buffers: bool = False) -> View:
        return _RidgeView(self.problem.inner_at(at, batch, update_buffers=update_buffers), at.omega, self.ridge)


class _RidgeView(_DampedView):
    def __init__(self, view: View, omega: Tree, ridge: Mapping[str, float]) -> None:
        super().__init__(view, ridge)
        self._omega = omega
        self._ridge = ridge

    @property
    def value(self) -> Tensor:
        return self._view.value + sum(r / 2 * self._omega[name].square().sum() for name, r in self._ridge.items())

    @property
    def known_value(self) -> Tensor | None:
        return None if self._view.known_value is None else self.value

    def gradients(self, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        by_omega, by_lam = self._view.gradients(omega=omega, lam=lam)
        return axpy(1.0, scale_each(self._ridge, self._omega), by_omega) if omega else by_omega, by_lam


class GaussNewtonProblem(ForwardingProblem):
    """A problem with the Gauss-Newton product in the place of H v, along which v cannot run away.

    It drops the curvature of the network itself.

    Args:
        problem: a problem that knows its network's outputs, as ``fsla.WeightedLossProblem(..., model_outputs=...)``
            does.

    Examples:
        >>> data = torch.tensor([1.0, 3.0])
        >>> weighted = fsla.WeightedLossProblem(
        ...     per_sample_loss=lambda outputs, batch: (outputs - batch) ** 2 / 2,
        ...     sample_weight=lambda lam, batch: lam["x"].sigmoid(),
        ...     outer_loss=outer_loss,
        ...     model_outputs=lambda omega, batch: omega["w"].prod() * batch,
        ... )
        >>> fsla.GaussNewtonProblem(weighted).inner_at(at, fsla.Batch(data)).hvp(v)
        {'w': tensor([2.5000, 2.5000])}
    """

    def _wrap_inner(self, view: View, batch: Batch) -> View:
        return _GaussNewtonView(view)


class _GaussNewtonView(ForwardingView):
    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        hv = self._view.gauss_newton(v) if omega else {}
        return hv, self._view.mixed_hvp(v) if lam else {}


@dataclass
class OracleCounts:
    """Counts of oracle calls.

    Products by differences count as the gradients and forward passes that they take.

    Args:
        grad: gradients ∂_ω G.
        hvp: products H v.
        mixed_hvp: products J v.
        joint: passes that gave both an HVP and a mixed product.
        mixed_hvp_transpose: products Jᵀ u.
        forward: passes for ∂_λ G alone, in which nothing but λ requires a gradient.
        outer_grad_lam: gradients ∂_λ F.
        outer_grad_omega: gradients ∂_ω F.
        inner_views: views of G.
        outer_views: views of F.

    Examples:
        >>> fsla.OracleCounts(grad=1).plus(2, fsla.OracleCounts(grad=1, hvp=1)).grad
        3
    """

    grad: int = 0
    hvp: int = 0
    mixed_hvp: int = 0
    joint: int = 0
    mixed_hvp_transpose: int = 0
    forward: int = 0
    outer_grad_lam: int = 0
    outer_grad_omega: int = 0
    inner_views: int = 0
    outer_views: int = 0

    def plus(self, n: int, other: OracleCounts) -> OracleCounts:
        """Return self + n other."""
        return OracleCounts(*(getattr(self, f.name) + n * getattr(other, f.name) for f in fields(self)))


class CountedProblem(ForwardingProblem):
    """A problem that counts what is asked of it.

    A view's gradients count once however often they are read, since they are computed once.

    Args:
        problem: any problem.
        size: samples of a batch; by default 1 for each batch.

    Attributes:
        calls: oracle calls.
        samples: oracle calls times batch size.

    Examples:
        >>> counted = fsla.CountedProblem(problem)
        >>> hv = counted.inner_at(at, batch).hvp(v)
        >>> counted.calls.hvp
        1
    """

    def __init__(self, problem: Oracles, size: Callable[[object], int] = lambda data: 1) -> None:
        super().__init__(problem)
        self._size = size
        self.calls = OracleCounts()
        self.samples = OracleCounts()

    def _wrap_inner(self, view: View, batch: Batch) -> View:
        return self._counted(view, batch, "inner_views", _INNER)

    def _wrap_outer(self, view: View, batch: Batch) -> View:
        return self._counted(view, batch, "outer_views", _OUTER)

    def _counted(self, view: View, batch: Batch, kind: str, names: tuple[str, str]) -> View:
        """A view that counts; of one by differences, the views that its products ask."""
        self.count(batch, kind)

        def counted(one: View) -> View:
            return _CountedView(one, batch, self, names)

        return view.through(counted) if isinstance(view, DifferenceView) else counted(view)

    def count(self, batch: Batch, *names: str) -> None:
        """Count a call of each of these oracles on the batch."""
        size = self._size(batch.data)
        for name in names:
            setattr(self.calls, name, getattr(self.calls, name) + 1)
            setattr(self.samples, name, getattr(self.samples, name) + size)

    def counting(self, f: Callable[[], T]) -> tuple[T, OracleCounts, OracleCounts]:
        """Call f; return its result and what it asked for, and leave the counts as they were."""
        calls, samples = self.calls, self.samples
        self.calls, self.samples = OracleCounts(), OracleCounts()
        try:
            return f(), self.calls, self.samples
        finally:
            self.calls, self.samples = calls, samples

    def add(self, n: int, calls: OracleCounts, samples: OracleCounts) -> None:
        """Count what was asked for n times."""
        self.calls = self.calls.plus(n, calls)
        self.samples = self.samples.plus(n, samples)


_INNER = ("grad", "forward")
_OUTER = ("outer_grad_omega", "outer_grad_lam")
"""What the gradients of the two losses by ω and by λ count as."""


class _CountedView(ForwardingView):
    def __init__(self, view: View, batch: Batch, counter: CountedProblem, names: tuple[str, str]) -> None:
        super().__init__(view)
        self._batch = batch
        self._counter = counter
        self._by_omega, self._by_lam = names
        self._read: set[str] = set()

    def gradients(self, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        if omega:
            self._count_once(self._by_omega)
        if lam and not (omega and self._by_lam == "forward"):  # ∂_λ G comes with ∂_ω G
            self._count_once(self._by_lam)
        return self._view.gradients(omega=omega, lam=lam)

    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        names = [name for name, chosen in (("hvp", omega), ("mixed_hvp", lam), ("joint", omega and lam)) if chosen]
        self._counter.count(self._batch, *names)
        return self._view.products(v, omega=omega, lam=lam)

    def mixed_hvp_transpose(self, u: Tree) -> Tree:
        self._counter.count(self._batch, "mixed_hvp_transpose")
        return self._view.mixed_hvp_transpose(u)

    def gauss_newton(self, v: Tree) -> Tree:
        self._counter.count(self._batch, "hvp")
        return self._view.gauss_newton(v)

    def _count_once(self, name: str) -> None:
        if name not in self._read:
            self._counter.count(self._batch, name)
        self._read.add(name)
