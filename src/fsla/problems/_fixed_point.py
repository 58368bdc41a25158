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
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from fsla._tree import Leaves, Tree, aligned, detach, dot, scale, sub
from fsla.distributed._reducer import Part
from fsla.problems import _passes as passes
from fsla.problems._autograd import Problem
from fsla.problems._batches import Batch
from fsla.problems._passes import Loss
from fsla.problems._views import Oracles, Point, Unmoved, View

Map = Callable[[Tree, Tree, Any], Tree]


class FixedPointProblem(Oracles):
    """A bilevel problem from a map Φ and an outer loss: ω_λ = Φ(λ, ω_λ).

    Args:
        fixed_point_map: Φ(λ, ω; batch), called as ``fixed_point_map(lam, omega, batch)``; returns the next ω, a
            mapping of the same form. Its iterates must converge.
        outer_loss: F(λ, ω; batch), as in `fsla.Problem`.
        outer_uses_lam: whether F itself reads λ, as in `fsla.Problem`.

    Raises:
        TypeError: if `fixed_point_map` is not callable.

    Examples:
        >>> equilibrium = fsla.FixedPointProblem(lambda lam, omega, batch: {"w": omega["w"] / 2 + lam["x"]}, outer_loss)
        >>> equilibrium.inner_at(at, batch).grad_omega  # ω - Φ(λ, ω)
        {'w': tensor([0.5000, 0.5000])}
    """

    def __init__(self, fixed_point_map: Map, outer_loss: Loss, *, outer_uses_lam: bool | None = None) -> None:
        if not callable(fixed_point_map):
            kind = type(fixed_point_map).__name__
            raise TypeError(f"fixed_point_map must be callable as (lam, omega, batch). Got {kind} instead.")
        self.fixed_point_map = fixed_point_map
        self._outer = Problem(outer_loss, outer_loss, outer_uses_lam=outer_uses_lam)

    def inner_at(self, at: Point, batch: Batch, *, update_buffers: bool = False) -> View:
        return _MapView(self.fixed_point_map, at, batch)

    def outer_at(self, at: Point, batch: Batch) -> View:
        return self._outer.outer_at(at, batch)


class _Graph(NamedTuple):
    lam: Tree
    omega: Tree
    image: Tree


class _MapView(View):
    """Φ at one point on one batch, in the role of G."""

    def __init__(self, fixed_point_map: Map, at: Point, batch: Batch) -> None:
        self._map = fixed_point_map
        self._at = Point(detach(at.lam), detach(at.omega))
        self._unmoved = Unmoved(self._at)
        self._part = Part(batch.data, batch.seed)
        self._graph: _Graph | None = None

    def _linear(self) -> _Graph:
        self._unmoved.check()
        if self._graph is None:
            lam = passes.leaves(self._at.lam)
            omega = passes.leaves(self._at.omega)
            image = passes.run(self._map, lam, omega, self._part, "fixed_point_map")
            if not isinstance(image, Mapping):
                kind = type(image).__name__
                raise TypeError(f"fixed_point_map must return a mapping of the form of omega. Got {kind} instead.")
            self._graph = _Graph(lam, omega, dict(zip(omega, aligned(image, omega), strict=True)))
        return self._graph

    @property
    def eps(self) -> float:
        return passes.rounding_unit(self._at.omega, None)

    @property
    def value(self) -> Tensor:
        """½ ‖ω - Φ‖², which is zero where ω = ω_λ; not a loss whose gradient is `grad_omega`."""
        return dot(self.grad_omega, self.grad_omega) / 2

    def gradients(self, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        if lam:
            self._has_no("∂_λ G", "first-order methods such as F2SA and BOME, and products by differences,")
        return sub(self._at.omega, detach(self._linear().image)) if omega else {}, {}

    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        graph = self._linear()
        wrt = [*(graph.omega.values() if omega else ()), *(graph.lam.values() if lam else ())]
        pulled: list[Tensor | None] = list(passes.vjp(list(graph.image.values()), aligned(v, graph.image), wrt))
        count = len(graph.omega) if omega else 0
        hv = sub(v, passes.zeros_for_none(pulled[:count], graph.omega)) if omega else {}
        if not lam:
            return hv, {}
        passes.check_any_gradient(pulled[count:])
        return hv, scale(-1.0, passes.zeros_for_none(pulled[count:], graph.lam))

    def mixed_hvp_transpose(self, u: Tree) -> Tree:
        self._has_no("Jᵀ u", "the forward recursion and RTHO")

    def _has_no(self, what: str, who: str) -> NoReturn:
        raise NotImplementedError(
            f"A fixed-point problem has no {what}, which {who} need. Use a method that tracks v, solves for it by a "
            "Neumann series, or unrolls the steps backwards."
        )
