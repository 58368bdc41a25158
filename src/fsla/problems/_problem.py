"""Section 3, equation 1: min over λ of F(λ, ω_λ), where ω_λ minimises G(λ, ω) over ω.

An algorithm sees a problem through two views, each at one point and on one batch:

    G = problem.inner_at(at, batch)    G.grad = ∂_ω G    G.hvp(v) = H v    G.cross(v) = J v    G.d_lam = ∂_λ G
    F = problem.outer_at(at, batch)    F.d_lam = ∂_λ F   F.d_omega = ∂_ω F

with H = ∂²G/∂ω² (n x n) and J = ∂²G/∂λ∂ω (p x n). These oracles are all that an algorithm may call; the hypergradient
is ∂_λ F - J v with v = H⁻¹ ∂_ω F (Proposition 1, with one sign of v everywhere).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from fsla import _tree as tree
from fsla._tree import Leaves, Scalar, Tree
from fsla.problems._batches import Batch, Sample, batch_of_step


class Point(NamedTuple):
    """(λ, ω); and, for unrolled differentiation, the inner steps that led to ω."""

    lam: Tree
    omega: Tree
    trail: tuple[tuple[Tree, Scalar], ...] = ()
    """(ω̂_k, η_{k+1}) for k = 0 … K-1: the states before each inner step and the step sizes (Lemma 2, BP)."""

    def to(self, to: torch.device | torch.dtype | str) -> Point:
        """The point on another device, or in another floating-point dtype."""
        trail = tuple((tree.to(omega, to), eta) for omega, eta in self.trail)
        return Point(tree.to(self.lam, to), tree.to(self.omega, to), trail)


class FirstOrder(Protocol):
    """First derivatives of G at one point on one batch. Each is computed when it is asked for."""

    @property
    def unit(self) -> float:
        """The rounding unit of the arithmetic that the passes are computed in."""
        ...

    @property
    def value(self) -> Tensor: ...
    @property
    def grad(self) -> Tree: ...
    @property
    def d_lam(self) -> Leaves:
        """∂_λ G, from a pass in which nothing but λ requires a gradient."""
        ...

    def gradients(self) -> tuple[Tree, Leaves]:
        """(∂_ω G, ∂_λ G) in one pass, for about the price of the first."""
        ...


class Inner(FirstOrder, Protocol):
    """G at one point on one batch, with its products.

    A view gives up its graph with the first product that is asked of it, and a further product makes it anew; where
    several are wanted at one point, ask `linearised()` for them.
    """

    def hvp(self, v: Tree) -> Tree: ...
    def cross(self, v: Tree) -> Leaves: ...
    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        """(H v, J v) in one pass, for about the price of one of them."""
        ...

    def cross_t(self, u: Tree) -> Tree:
        """Jᵀ u, the transposed product. Only the matrix recursion, which carries p rows, asks for it."""
        ...

    def linearised(self) -> Self:
        """The view itself, whose graph from now on stays for as many products as are wanted."""
        ...


@runtime_checkable
class Composed(Protocol):
    """A view of a loss that knows its network's outputs, and so has a Gauss-Newton product."""

    def gnvp(self, v: Tree) -> Tree: ...


class Outer(Protocol):
    """F at one point on one batch. Where both derivatives are wanted, ask for `d_omega` first: one pass gives both."""

    @property
    def value(self) -> Tensor: ...
    @property
    def d_omega(self) -> Tree: ...
    @property
    def d_lam(self) -> Leaves: ...


class Oracles(Protocol):
    """What an algorithm knows of a problem. `fsla.Problem` makes one from two losses.

    `seed` fixes what random layers draw in every pass of a view.
    """

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner: ...
    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer: ...


@runtime_checkable
class OuterProducts(Protocol):
    """A problem whose F has second derivatives in ω as well, for methods that move ω along ∂_ω F too."""

    def outer_products_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        """F in the role of G."""
        ...


def outer_products_at(problem: Oracles, at: Point, batch: Batch, seed: int | None = None) -> Inner:
    if not isinstance(problem, OuterProducts):
        raise TypeError(
            f"This method needs products of the outer loss, which {type(problem).__name__} has not. "
            "Use fsla.Problem(inner_loss, outer_loss)."
        )
    return problem.outer_products_at(at, batch, seed)


def checked(problem: Oracles, at: Point, xi: Sample) -> Point:
    """Returns the point, cut off from any graph. Done once, before a run.

    Raises unless it is of the right form, and both losses and their gradients in ω are finite there.
    """
    if not isinstance(at, Point):
        raise TypeError(f"The point must be a fsla.Point(lam, omega). Got {type(at).__name__} instead.")
    tree.check(at.lam, "lam")
    tree.check(at.omega, "omega")
    at = Point(tree.detach(at.lam), tree.detach(at.omega))
    seeds = xi.seeds()
    inner_batch = batch_of_step(xi.inner, 0)
    outer_batch = batch_of_step(xi.outer_omega, 0)
    inner = problem.inner_at(at, inner_batch, seeds.get(id(inner_batch)))
    outer = problem.outer_at(at, outer_batch, seeds.get(id(outer_batch)))
    _check_finite("inner loss G", inner.value, inner.grad)
    _check_finite("outer loss F", outer.value, outer.d_omega)
    return at


def _check_finite(name: str, value: Tensor, gradient: Tree) -> None:
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
