"""What an algorithm may ask of a problem: a loss, its gradients and its products, at one point on one batch.

    G = problem.inner_at(at, batch)    G.grad_omega = ∂_ω G    G.hvp(v) = H v    G.mixed_hvp(v) = J v
    F = problem.outer_at(at, batch)    the same of F

with H = ∂²G/∂ω² (n x n) and J = ∂²G/∂λ∂ω (p x n). The hypergradient is ∂_λ F - J v with v = H⁻¹ ∂_ω F (Proposition 1,
with one sign of v everywhere).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fsla import _tree as tree
from fsla._state_tree import saved
from fsla._torch import versions
from fsla._tree import Leaves, Scalar, Shifted, Tree, axpy, lasting, norm, scale, sub
from fsla.problems._batches import Batch


@saved
@dataclass(frozen=True, eq=False)
class Point:
    """A point (λ, ω), and for unrolled differentiation the inner moves (ω_t, step size) that led to ω.

    A point is its own identity: make a new one after a variable has moved, in place or not.

    Args:
        lam: λ, a mapping from names to tensors.
        omega: ω, a mapping from names to tensors.
        trajectory: the inner moves.

    Examples:
        >>> at = fsla.Point({"x": torch.zeros(2)}, {"w": torch.ones(2)})
        >>> at.to(torch.float64).omega["w"].dtype
        torch.float64
    """

    lam: Tree
    omega: Tree
    trajectory: tuple[tuple[Tree, Scalar], ...] = ()

    def to(self, to: torch.device | torch.dtype | str) -> Point:
        """Return the point on another device, or in another floating-point dtype."""
        trajectory = tuple((tree.to(omega, to), size) for omega, size in self.trajectory)
        return Point(tree.to(self.lam, to), tree.to(self.omega, to), trajectory)


class Unmoved:
    """Raise if the tensors of a point were written to since this guard was created.

    A variable that moves in place takes the tensors of its old points along: derivatives there would be those of
    another point, and nothing would say so.
    """

    def __init__(self, at: Point) -> None:
        self._tensors = (*lasting(at.omega).values(), *at.lam.values())
        self._versions = versions(self._tensors)

    def check(self) -> None:
        if versions(self._tensors) != self._versions:
            raise RuntimeError(
                "A view must be asked before its point moves in place: this one was made at tensors that have been "
                "written to since. Ask for its derivatives first, or make a new Point after the move."
            )


class View(ABC):
    """Base class of views: a loss at one point on one batch.

    A subclass defines `gradients`, `products`, `value` and `eps`.

    Examples:
        >>> view = problem.inner_at(at, batch)
        >>> view.value
        tensor(2.5000)
        >>> view.grad_omega
        {'w': tensor([1., 4.])}
        >>> view.mixed_hvp(v)
        {'x': tensor([-1., -0.])}
    """

    @property
    @abstractmethod
    def value(self) -> Tensor: ...

    @abstractmethod
    def gradients(self, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        """Return (∂_ω, ∂_λ) from one pass, each computed once; {} for what is not wanted."""

    @abstractmethod
    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        """Return (H v, J v) from one pass; {} for what is not wanted. Leaves ∂_ω where the pass has it."""

    @property
    @abstractmethod
    def eps(self) -> float:
        """Rounding unit of the passes."""

    @property
    def known_value(self) -> Tensor | None:
        """The value where a pass has left it."""
        return None

    def linearized(self) -> Self:
        """Return this view; its graph then serves several products, if the problem allows it."""
        return self

    @property
    def grad_omega(self) -> Tree:
        return self.gradients(lam=False)[0]

    @property
    def grad_lam(self) -> Leaves:
        return self.gradients(omega=False)[1]

    def hvp(self, v: Tree) -> Tree:
        """Return H v."""
        return self.products(v, lam=False)[0]

    def mixed_hvp(self, v: Tree) -> Leaves:
        """Return J v."""
        return self.products(v, omega=False)[1]

    def mixed_hvp_transpose(self, u: Tree) -> Tree:
        """Return Jᵀ u. Only methods that carry dω/dλ forwards, with p rows, ask for it."""
        raise TypeError(f"{type(self).__name__} has no transposed mixed product.")

    def gauss_newton(self, v: Tree) -> Tree:
        """Return the Gauss-Newton product in the place of H v."""
        raise TypeError(
            "Gauss-Newton products need a problem that knows its network's outputs. Use "
            "fsla.WeightedLossProblem(..., model_outputs=...), or the problem without fsla.GaussNewtonProblem."
        )


class ProblemAtPoint(ABC):
    """Base class of objects that know a problem and a point, such as an optimiser of a module."""

    @abstractmethod
    def problem_at_point(self) -> tuple[Oracles, Point]:
        """Return the problem and the point."""


class FiniteDifferenceCheck(NamedTuple):
    """How much products by differences change if their step is halved. The error at r is about four thirds of the
    change.

    Args:
        rel_step: relative step r.
        hvp_change: relative change of H v.
        mixed_hvp_change: relative change of J v.

    Examples:
        >>> check = fsla.FiniteDifferenceProblem(problem).check_step(at, batch, v)
        >>> check.hvp_change < 0.01
        True
    """

    rel_step: float
    hvp_change: float
    mixed_hvp_change: float

    def __str__(self) -> str:
        return (
            f"products by differences, relative step {self.rel_step:.0e} against half of it: "
            f"H v changes by {self.hvp_change:.1e}, J v by {self.mixed_hvp_change:.1e}"
        )


class Oracles(ABC):
    """Base class of problems, as an algorithm sees them.

    A subclass defines `inner_at` and `outer_at`, which return a `View` of G and of F at a point on a batch.

    Examples:
        >>> isinstance(problem, fsla.problems.Oracles)
        True
        >>> problem.outer_at(at, batch).grad_omega
        {'w': tensor([-1., -1.])}
    """

    @abstractmethod
    def inner_at(self, at: Point, batch: Batch, *, update_buffers: bool = False) -> View:
        """Return G at a point on a batch. With `update_buffers` the first pass of the view moves a module's buffers."""

    @abstractmethod
    def outer_at(self, at: Point, batch: Batch) -> View:
        """Return F at a point on a batch."""

    def check_step(self, at: Point, batch: Batch, v: Tree) -> FiniteDifferenceCheck | None:
        """Return how much products by differences change with their step; None where products are exact."""
        return None


ViewAt = Callable[[Point, bool], View]
"""The view of a loss on one batch at any point; the flag is `update_buffers`."""


def compare_steps(view_at: ViewAt, at: Point, v: Tree, rel_step: float | None) -> FiniteDifferenceCheck:
    """Compare the products along v at r and at r/2."""
    whole = DifferenceView(view_at, at, rel_step=rel_step)
    half = DifferenceView(view_at, at, rel_step=whole.rel_step / 2)
    pairs = zip(whole.products(v), half.products(v), strict=True)
    hvp, mixed_hvp = (_relative_distance(x, y) for x, y in pairs)
    return FiniteDifferenceCheck(whole.rel_step, hvp, mixed_hvp)


def _relative_distance(x: Leaves, y: Leaves) -> float:
    size = float(norm(y))
    return float(norm(sub(x, y))) / size if size else float(norm(x))


def default_step(eps: float) -> float:
    """Return r by the rounding unit of the arithmetic."""
    return 1e-5 if eps < 1e-12 else 1e-4 if eps < 1e-6 else 1e-3


class DifferenceView(View):
    """Products from first-order gradients at ω ± εv, for networks that have no second derivative.

        ∂_ω ≈ (g₊ + g₋) / 2        H v ≈ (g₊ - g₋) / 2ε        J v ≈ (∂_λ(ω₊) - ∂_λ(ω₋)) / 2ε

    ε = r max(‖ω‖, 1) / ‖v‖. The truncation error falls as r², rounding errors grow as 1/r: by default r is 1e-5 in
    float64, 1e-4 in float32 and 1e-3 where TF32 or bfloat16 is computed in.
    """

    def __init__(
        self, view_at: ViewAt, at: Point, *, rel_step: float | None = None, update_buffers: bool = False
    ) -> None:
        self._view_at = view_at
        self._at = at
        self._unmoved = Unmoved(at)
        self._update_buffers = update_buffers
        self._present = view_at(at, False)
        self.rel_step = default_step(self.eps) if rel_step is None else rel_step
        self._mean_value: Tensor | None = None
        self._gradient: Tree | None = None
        """∂_ω at ω where it was asked for first, else the mean of those at ω ± εv that a product has left."""

    def through(self, watch: Callable[[View], View]) -> DifferenceView:
        """Return the same view, with every view that it asks passed through `watch`."""

        def view_at(at: Point, update_buffers: bool) -> View:
            return watch(self._view_at(at, update_buffers))

        return DifferenceView(view_at, self._at, rel_step=self.rel_step, update_buffers=self._update_buffers)

    @property
    def eps(self) -> float:
        return self._present.eps

    @property
    def value(self) -> Tensor:
        return self._present.value if self._mean_value is None else self._mean_value

    @property
    def known_value(self) -> Tensor | None:
        return self._present.known_value if self._mean_value is None else self._mean_value

    def gradients(self, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        if omega and not lam and self._gradient is not None:
            return self._gradient, {}
        if self._update_buffers:
            self._unmoved.check()
            self._present = self._view(self._at)
        gradients = self._present.gradients(omega=omega, lam=lam)
        if omega:
            self._gradient = gradients[0]
        return gradients

    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        self._unmoved.check()
        epsilon, half_inverse = self._step(v, self._at.omega)
        ahead = self._moved(epsilon, v)
        plus = ahead.gradients(omega=omega, lam=lam)
        value = ahead.value if omega else None
        del ahead  # and with it ω + εv
        behind = self._moved(-epsilon, v)
        minus = behind.gradients(omega=omega, lam=lam)
        if omega and self._gradient is None:
            assert value is not None
            self._mean_value = (value + behind.value) / 2
            self._gradient = scale(0.5, axpy(1.0, plus[0], minus[0]))
        hv = scale(half_inverse, sub(plus[0], minus[0])) if omega else {}
        return hv, scale(half_inverse, sub(plus[1], minus[1])) if lam else {}

    def mixed_hvp_transpose(self, u: Tree) -> Tree:
        """Jᵀ u, the derivative of ∂_ω G along u in λ."""
        self._unmoved.check()
        epsilon, half_inverse = self._step(u, self._at.lam)
        ends = [self._view(Point(axpy(sign * epsilon, u, self._at.lam), self._at.omega)).grad_omega for sign in (1, -1)]
        return scale(half_inverse, sub(*ends))

    def _step(self, v: Tree, x: Tree) -> tuple[Tensor, Tensor]:
        """(ε, 1/2ε), both 0 where v = 0, so that the host need not ask."""
        length = norm(v)
        moves = length > 0
        epsilon = self.rel_step * norm(x).clamp(min=1.0) / torch.where(moves, length, 1)
        return torch.where(moves, epsilon, 0), torch.where(moves, 0.5 / epsilon, 0)

    def _moved(self, epsilon: Tensor, v: Tree) -> View:
        return self._view(Point(self._at.lam, Shifted(epsilon, v, self._at.omega)))

    def _view(self, at: Point) -> View:
        """The view at a point; the first one moves buffers where this view is to."""
        update_buffers, self._update_buffers = self._update_buffers, False
        return self._view_at(at, update_buffers)


def validate_start(problem: Oracles, at: Point, inner_batch: Batch, outer_batch: Batch | None) -> Point:
    """Return the point, cut off from any graph. Done once, before a run.

    Raises unless it is of the right form, and both losses and their gradients in ω are finite there.
    """
    if not isinstance(at, Point):
        raise TypeError(f"The point must be a fsla.Point(lam, omega). Got {type(at).__name__} instead.")
    tree.check(at.lam, "lam")
    tree.check(at.omega, "omega")
    at = Point(tree.detach(at.lam), tree.detach(at.omega))
    _check_finite("inner loss G", problem.inner_at(at, inner_batch))
    if outer_batch is not None:
        _check_finite("outer loss F", problem.outer_at(at, outer_batch))
    return at


def _check_finite(name: str, view: View) -> None:
    gradient = view.grad_omega
    value: Tensor = view.value
    if not bool(value.isfinite()):
        raise ValueError(
            f"The {name} must be finite at the starting point. Got {float(value)} instead. "
            "Check the data for NaN and infinity, and the scale of lam and omega."
        )
    bad = [key for key, t in gradient.items() if not bool(t.isfinite().all())]
    if bad:
        raise ValueError(
            f"The gradient of the {name} in omega must be finite at the starting point, and is not in {bad}. "
            "Check for norms, roots and logarithms at 0."
        )
