"""min over λ of F(λ, ω_λ), where ω_λ = Φ(λ, ω_λ): equilibrium models, proximal maps, any contraction Φ.

With the oracles

    ∂_ω G := ω - Φ(λ, ω)        H v := v - (∂Φ/∂ω)ᵀ v        J v := -(∂Φ/∂λ)ᵀ v

an inner step of size 1 is ω ← Φ(λ, ω), K terms of the Neumann series with step 1 are the fixed-point iteration of
v = (∂Φ/∂ω)ᵀ v + ∂_ω F, and ∂_λ F - J v is the hypergradient. For Φ = ω - η ∂_ω G these are η times those of G.

There is no loss G, and H need not be symmetric. So all that tracks v, solves for it by a Neumann series or unrolls
works (FSLA, SOBA, AmIGO, AID-FP, ITD-BiO …); conjugate gradients only where H is symmetric; what compares values of G,
or carries dω/dλ forwards, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, Self

from torch import Tensor

from fsla._tree import Leaves, Tree, aligned, detach, dot, scale, sub
from fsla.problems import _passes as passes
from fsla.problems._autograd import Problem
from fsla.problems._batches import Batch
from fsla.problems._passes import Loss, Setting
from fsla.problems._problem import Inner, Outer, Point

Map = Callable[[Tree, Tree, Batch], Tree]


class FixedPoint:
    """A problem from a map and an outer loss.

    Args:
        phi: Φ(λ, ω; batch), called as ``phi(lam, omega, batch)``; returns the next ω, a mapping of the same form. Its
            iterates must converge.
        outer_loss: F(λ, ω; batch), as in `fsla.Problem`.
        direct: whether F itself reads λ.
    """

    def __init__(self, phi: Map, outer_loss: Loss, *, direct: bool = True) -> None:
        if not callable(phi):
            raise TypeError(f"phi must be callable as (lam, omega, batch). Got {type(phi).__name__} instead.")
        self.phi = phi
        self._outer = Problem(outer_loss, outer_loss, direct=direct)

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        return _MapView(self.phi, at, batch, Setting(seed))

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        return self._outer.outer_at(at, batch, seed)


class _Graph(NamedTuple):
    lam: Tree
    omega: Tree
    image: Tree


class _MapView:
    """Φ at one point on one batch, in the role of G."""

    def __init__(self, phi: Map, at: Point, batch: Batch, how: Setting) -> None:
        self._phi = phi
        self._at = Point(detach(at.lam), detach(at.omega))
        self._batch = batch
        self._how = how
        self._graph: _Graph | None = None

    def _linear(self) -> _Graph:
        if self._graph is None:
            lam = passes.leaves(self._at.lam)
            omega = passes.leaves(self._at.omega)
            image = passes.run(self._phi, lam, omega, self._batch, "map phi", self._how)
            if not isinstance(image, Mapping):
                raise TypeError(f"phi must return a mapping of the form of omega. Got {type(image).__name__} instead.")
            self._graph = _Graph(lam, omega, dict(zip(omega, aligned(image, omega), strict=True)))
        return self._graph

    def _pulled(self, v: Tree, wrt: list[Tensor]) -> list[Tensor | None]:
        image = self._linear().image
        return list(passes.vjp(list(image.values()), aligned(v, image), wrt))

    @property
    def unit(self) -> float:
        return passes.rounding_unit(self._at.omega, None)

    @property
    def value(self) -> Tensor:
        """½ ‖ω - Φ‖², which is zero where ω = ω_λ; not a loss whose gradient is `grad`."""
        return dot(self.grad, self.grad) / 2

    @property
    def grad(self) -> Tree:
        return sub(self._at.omega, detach(self._linear().image))

    def hvp(self, v: Tree) -> Tree:
        omega = self._linear().omega
        return sub(v, passes.filled(self._pulled(v, list(omega.values())), omega))

    def cross(self, v: Tree) -> Leaves:
        lam = self._linear().lam
        return scale(-1.0, passes.filled(passes.reached(self._pulled(v, list(lam.values()))), lam))

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        lam, omega, _ = self._linear()
        found = self._pulled(v, [*omega.values(), *lam.values()])
        n = len(omega)
        by_lam = passes.filled(passes.reached(found[n:]), lam)
        return sub(v, passes.filled(found[:n], omega)), scale(-1.0, by_lam)

    def linearised(self) -> Self:
        return self

    @property
    def d_lam(self) -> Leaves:
        self._has_no("∂_λ G", "first-order methods such as F2SA and BOME")

    def gradients(self) -> tuple[Tree, Leaves]:
        self._has_no("∂_λ G", "first-order methods and products by differences")

    def cross_t(self, u: Tree) -> Tree:
        self._has_no("Jᵀ u", "the forward recursion and RTHO")

    def _has_no(self, what: str, who: str) -> NoReturn:
        raise NotImplementedError(
            f"A fixed-point problem has no {what}, which {who} need. Use a method that tracks v, solves for it by a "
            "Neumann series, or unrolls the steps backwards."
        )
