"""Section 3, equation 1: min over λ of F(λ, ω_λ), where ω_λ minimises G(λ, ω) over ω.

An algorithm sees a problem through two views, each at one point and on one batch:

    G = problem.inner_at(at, batch)    G.grad = ∂_ω G    G.hvp(v) = H v    G.cross(v) = J v
    F = problem.outer_at(at, batch)    F.d_lam = ∂_λ F   F.d_omega = ∂_ω F

with H = ∂²G/∂ω² (n x n) and J = ∂²G/∂λ∂ω (p x n). These five oracles are all that an algorithm may call; the
hypergradient is ∂_λ F - J v with v = H⁻¹ ∂_ω F (Proposition 1, with one sign of v everywhere).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fsla import tree
from fsla.tree import Scalar, Tree

Batch = Any


class Point(NamedTuple):
    """(λ, ω); and, for unrolled differentiation, the inner steps that led to ω."""

    lam: Tree
    omega: Tree
    trail: tuple[tuple[Tree, Scalar], ...] = ()
    """(ω̂_k, η_{k+1}) for k = 0 … K-1: the states before each inner step and the step sizes (Lemma 2, BP)."""


class Batches(tuple[Batch, ...]):
    """A batch for each of several inner steps, in the place of one batch that serves them all."""


def batch_of_step(batch: Batch, k: int) -> Batch:
    """Returns the batch of inner step k = 0, 1, …"""
    if not isinstance(batch, Batches):
        return batch
    if k >= len(batch):
        raise ValueError(f"Batches must hold one batch for each inner step. Got {len(batch)}; step {k + 1} has none.")
    return batch[k]


Mode = Literal["independent", "grouped", "shared"]


class Sample(NamedTuple):
    """ξ_{k,1} … ξ_{k,5} of Algorithm 1, line 5.

    Batches are compared by identity: where two oracles are asked at one point on the same batch object, they share one
    graph. Algorithm 1 with STORM needs `outer_lam` and `cross` drawn independently of the other three.
    """

    inner: Batch
    outer_omega: Batch
    hvp: Batch
    outer_lam: Batch
    cross: Batch

    @classmethod
    def full(cls, inner: Batch, outer: Batch) -> Sample:
        """One inner and one outer batch for everything: full-batch methods, or mode "shared"."""
        return cls(inner, outer, inner, outer, inner)

    @classmethod
    def draw(cls, mode: Mode, inner: Callable[[], Batch], outer: Callable[[], Batch]) -> Sample:
        """Draws a sample from two sources of batches.

        "independent": five draws, as Algorithm 1 has it. "grouped": {ξ1, ξ2, ξ3} and {ξ4, ξ5}, two inner and two outer
        draws, the fewest that leave STORM unbiased. "shared": one draw of each; right for momentum "none" or
        "average", but under STORM a bias of the order c_β / c_η stays for ever.
        """
        for name, source in (("inner", inner), ("outer", outer)):
            if not callable(source):
                raise TypeError(
                    f"The {name} source of Sample.draw must be a function without arguments that returns a batch. "
                    f"Got {type(source).__name__} instead."
                )
        if mode == "independent":
            return cls(inner(), outer(), inner(), outer(), inner())
        if mode == "grouped":
            first, second = (inner(), outer()), (inner(), outer())
            return cls(first[0], first[1], first[0], second[1], second[0])
        if mode == "shared":
            return cls.full(inner(), outer())
        raise ValueError(f"The sampling mode must be 'independent', 'grouped' or 'shared'. Got {mode!r} instead.")

    @property
    def repeats(self) -> bool:
        """Whether any two oracles of one level get the same batch, so that they may share a graph."""
        inner = self.inner is self.hvp or self.inner is self.cross or self.hvp is self.cross
        return inner or self.outer_omega is self.outer_lam


class Inner(Protocol):
    """G at one point on one batch. Each oracle is computed when it is asked for, all from one graph."""

    @property
    def value(self) -> Tensor: ...
    @property
    def grad(self) -> Tree: ...
    def hvp(self, v: Tree) -> Tree: ...
    def cross(self, v: Tree) -> Tree: ...
    def hvp_cross(self, v: Tree) -> tuple[Tree, Tree]:
        """(H v, J v) in one pass, for about the price of one of them."""
        ...

    def cross_t(self, u: Tree) -> Tree:
        """Jᵀ u, the transposed product. Only the matrix recursion, which carries p rows, asks for it."""
        ...


class Outer(Protocol):
    """F at one point on one batch. Each oracle is computed when it is asked for."""

    @property
    def value(self) -> Tensor: ...
    @property
    def d_lam(self) -> Tree: ...
    @property
    def d_omega(self) -> Tree: ...


class Oracles(Protocol):
    """What an algorithm knows of a problem. `fsla.Problem` makes one from two losses."""

    def inner_at(self, at: Point, batch: Batch) -> Inner: ...
    def outer_at(self, at: Point, batch: Batch) -> Outer: ...


def checked(problem: Oracles, at: Point, inner_batch: Batch, outer_batch: Batch) -> Point:
    """Returns the point, cut off from any graph. Done once, before a run.

    Raises unless it is of the right form, and both losses and their gradients in ω are finite there.
    """
    if not isinstance(at, Point):
        raise TypeError(f"The point must be a fsla.Point(lam, omega). Got {type(at).__name__} instead.")
    tree.check(at.lam, "lam")
    tree.check(at.omega, "omega")
    at = Point(tree.detach(at.lam), tree.detach(at.omega))
    inner = problem.inner_at(at, batch_of_step(inner_batch, 0))
    outer = problem.outer_at(at, batch_of_step(outer_batch, 0))
    for name, view in (("inner loss G", inner), ("outer loss F", outer)):
        if not bool(view.value.isfinite()):
            raise ValueError(
                f"The {name} must be finite at the starting point. Got {float(view.value)} instead. "
                "Check the data for NaN and infinity, and the scale of lam and omega."
            )
    for name, grad in (("inner loss G", inner.grad), ("outer loss F", outer.d_omega)):
        bad = [key for key, t in grad.items() if not bool(t.isfinite().all())]
        if bad:
            raise ValueError(
                f"The gradient of the {name} in omega must be finite at the starting point, and is not in {bad}. "
                "Check for norms, roots and logarithms at 0."
            )
    return at
