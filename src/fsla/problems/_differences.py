"""Products from first-order gradients alone, for networks that have no second derivative.

Fused attention, compiled modules and most custom kernels can be differentiated once and not twice. With ω± = ω ± εv,
on one batch and with one dropout mask,

    ∂_ω G(ω) ≈ (g₊ + g₋) / 2      H v ≈ (g₊ - g₋) / 2ε      J v ≈ (∂_λ G(ω₊) - ∂_λ G(ω₋)) / 2ε      all to O(ε²)

where g± = ∂_ω G(λ, ω±), and ∂_λ G comes from the same backward pass. So the inner gradient, H v and J v together cost
two gradients; J v alone costs two forward passes, since nothing but λ requires a gradient.

The step is relative, ε = r max(‖ω‖, 1) / ‖v‖. The truncation error falls as r², rounding errors grow as 1/r: by default
r is 1e-5 in float64, 1e-4 in float32 and 1e-3 where TF32 or bfloat16 is computed in. `check_step` compares r and r/2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from fsla._checks import positive
from fsla._tree import Leaves, Tree, axpy, norm, scale, sub
from fsla.problems._batches import Batch
from fsla.problems._problem import FirstOrder, Inner, Oracles, Outer, Point, outer_products_at

ViewAt = Callable[[Point, Batch, int | None], FirstOrder]


class StepCheck(NamedTuple):
    """How much the products change when the step is halved; the error at r is about four thirds of it."""

    relative_step: float
    hvp: float
    cross: float

    def __str__(self) -> str:
        return (
            f"products by differences, relative step {self.relative_step:.0e} against half of it: "
            f"H v changes by {self.hvp:.1e}, J v by {self.cross:.1e}"
        )


@runtime_checkable
class Differencing(Protocol):
    """A problem that may take its products by differences, and can tell how good they are."""

    def check_step(self, at: Point, batch: Batch, v: Tree, seed: int | None = None) -> StepCheck | None: ...


class Differences:
    """A problem whose products are differences of another one's gradients.

    Args:
        problem: any problem; its `grad`, `d_lam` and `gradients` are all that is asked of it.
        relative_step: r; by default chosen by the precision that the problem computes in.
    """

    def __init__(self, problem: Oracles, relative_step: float | None = None) -> None:
        positive(relative_step, "relative_step", "Differences", optional=True)
        self.problem = problem
        self.relative_step = relative_step

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return DifferencesInner(self.problem.inner_at, at, batch, seed, self.relative_step)

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        return self.problem.outer_at(at, batch, seed)

    def outer_products_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        """F in the role of G, with products by differences too."""

        def view_at(at: Point, batch: Batch, seed: int | None) -> FirstOrder:
            return outer_products_at(self.problem, at, batch, seed)

        return DifferencesInner(view_at, at, batch, seed, self.relative_step)

    def check_step(self, at: Point, batch: Batch, v: Tree, seed: int | None = None) -> StepCheck:
        return compare_steps(self.problem.inner_at, at, batch, v, seed, self.relative_step)


def compare_steps(view_at: ViewAt, at: Point, batch: Batch, v: Tree, seed: int | None, step: float | None) -> StepCheck:
    """The products along v at r and at r/2."""
    whole = DifferencesInner(view_at, at, batch, seed, step)
    half = DifferencesInner(view_at, at, batch, seed, whole.relative_step / 2)
    (h, j), (h_half, j_half) = whole.hvp_cross(v), half.hvp_cross(v)
    return StepCheck(whole.relative_step, _apart(h, h_half), _apart(j, j_half))


def _apart(x: Leaves, y: Leaves) -> float:
    size = float(norm(y))
    return float(norm(sub(x, y))) / size if size else float(norm(x))


def default_step(unit: float) -> float:
    """r by the rounding unit of the arithmetic."""
    return 1e-5 if unit < 1e-12 else 1e-4 if unit < 1e-6 else 1e-3


class DifferencesInner:
    """G at one point on one batch, seen through views at the points around it."""

    def __init__(
        self, view_at: ViewAt, at: Point, batch: Batch, seed: int | None, relative_step: float | None = None
    ) -> None:
        self._view_at = view_at
        self._at = at
        self._batch = batch
        self._seed = seed
        self._here = view_at(at, batch, seed)
        self._gradient: Tree | None = None
        self._values: tuple[Tensor, Tensor] | None = None
        self.relative_step = default_step(self._here.unit) if relative_step is None else relative_step

    def through(self, watched: Callable[[FirstOrder], FirstOrder]) -> DifferencesInner:
        """The same view, with what it asks for passing through `watched`."""

        def view_at(at: Point, batch: Batch, seed: int | None) -> FirstOrder:
            return watched(self._view_at(at, batch, seed))

        return DifferencesInner(view_at, self._at, self._batch, self._seed, self.relative_step)

    @property
    def unit(self) -> float:
        return self._here.unit

    @property
    def value(self) -> Tensor:
        """G at ω; where a product has been asked for before, the mean of G at ω ± εv, which costs nothing more."""
        return self._here.value if self._values is None else (self._values[0] + self._values[1]) / 2

    @property
    def grad(self) -> Tree:
        """The mean of the gradients at ω ± εv where a product has been asked for before, else the gradient at ω."""
        if self._gradient is None:
            self._gradient = self._here.grad
        return self._gradient

    @property
    def d_lam(self) -> Leaves:
        return self._here.d_lam

    def gradients(self) -> tuple[Tree, Leaves]:
        return self._here.gradients()

    def hvp(self, v: Tree) -> Tree:
        epsilon, half_inverse = self._step(v, self._at.omega)
        ahead = self._moved(epsilon, v)
        plus = ahead.grad
        value = ahead.value
        del ahead  # and with it ω + εv
        behind = self._moved(-epsilon, v)
        minus = behind.grad
        self._keep_mean(plus, minus, (value, behind.value))
        return scale(half_inverse, sub(plus, minus))

    def cross(self, v: Tree) -> Leaves:
        epsilon, half_inverse = self._step(v, self._at.omega)
        plus = self._moved(epsilon, v).d_lam
        minus = self._moved(-epsilon, v).d_lam
        return scale(half_inverse, sub(plus, minus))

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        epsilon, half_inverse = self._step(v, self._at.omega)
        ahead = self._moved(epsilon, v)
        plus, plus_lam = ahead.gradients()
        value = ahead.value
        del ahead  # and with it ω + εv
        behind = self._moved(-epsilon, v)
        minus, minus_lam = behind.gradients()
        self._keep_mean(plus, minus, (value, behind.value))
        return scale(half_inverse, sub(plus, minus)), scale(half_inverse, sub(plus_lam, minus_lam))

    def cross_t(self, u: Tree) -> Tree:
        """Jᵀ u, the derivative of ∂_ω G along u in λ."""
        epsilon, half_inverse = self._step(u, self._at.lam)
        ends = [
            self._view_at(Point(axpy(sign * epsilon, u, self._at.lam), self._at.omega), self._batch, self._seed).grad
            for sign in (1, -1)
        ]
        return scale(half_inverse, sub(*ends))

    def linearised(self) -> Self:
        return self

    def _step(self, v: Tree, x: Tree) -> tuple[Tensor, Tensor]:
        """(ε, 1/2ε), both 0 where v = 0, so that the host need not ask."""
        length = norm(v)
        moves = length > 0
        epsilon = self.relative_step * norm(x).clamp(min=1.0) / torch.where(moves, length, 1)
        return torch.where(moves, epsilon, 0), torch.where(moves, 0.5 / epsilon, 0)

    def _moved(self, epsilon: Tensor, v: Tree) -> FirstOrder:
        """G at ω + εv."""
        return self._view_at(Point(self._at.lam, axpy(epsilon, v, self._at.omega)), self._batch, self._seed)

    def _keep_mean(self, plus: Tree, minus: Tree, values: tuple[Tensor, Tensor]) -> None:
        if self._gradient is None:
            self._gradient = scale(0.5, axpy(1.0, plus, minus))
            self._values = values
