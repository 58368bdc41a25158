"""G and F at one point on one batch, by automatic differentiation: what `fsla.Problem` hands out.

FirstOrderView   ∂_ω G and ∂_λ G
ExactView        the same, with H v and J v
OuterView        ∂_ω F and ∂_λ F
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from fsla._tree import Leaves, Tree, aligned, detach
from fsla.problems import _passes as passes
from fsla.problems._batches import Batch
from fsla.problems._passes import Setting
from fsla.problems._problem import Point

INNER = "inner loss G"
OUTER = "outer loss F"


class Losses(Protocol):
    """What a view reads of a problem."""

    @property
    def direct(self) -> bool:
        """Whether F reads λ."""
        ...

    @property
    def autocast_dtype(self) -> torch.dtype | None: ...
    def batch_loss(self, lam: Tree, omega: Tree, batch: Batch) -> Tensor:
        """G; `lam` is what the batch reads of λ."""
        ...

    def outer_loss(self, lam: Tree, omega: Tree, batch: Batch) -> Tensor:
        """F."""
        ...

    def of_batch(self, lam: Tree, batch: Batch) -> Tree:
        """What a batch reads of λ."""
        ...

    def by_lam(self, of_batch: Tree, batch: Batch, lam: Tree) -> Leaves:
        """A derivative by what the batch reads of λ, as one by λ."""
        ...

    def without_d_lam(self, lam: Tree) -> Leaves:
        """∂_λ F where F does not read λ."""
        ...


class Ways(NamedTuple):
    """How a view computes its products: H v in forward mode or not, the samples' slopes in forward mode or not."""

    hvp_forward: bool
    slopes_forward: bool


class FirstOrderView:
    """∂_ω G and ∂_λ G at one point on one batch. Nothing is differentiated twice, and no graph is kept."""

    def __init__(self, problem: Losses, at: Point, batch: Batch, seed: int | None) -> None:
        self._problem = problem
        self._batch = batch
        self._how = Setting(seed, problem.autocast_dtype)
        self._whole_lam = at.lam
        self._lam = detach(problem.of_batch(at.lam, batch))
        self._omega = detach(at.omega)
        self._value: Tensor | None = None
        self._gradient: Tree | None = None

    def _loss(self, lam: Tree, omega: Tree) -> Tensor:
        return passes.evaluate(self._problem.batch_loss, lam, omega, self._batch, INNER, self._how)

    def _by_lam(self, of_batch: Tree) -> Leaves:
        return self._problem.by_lam(of_batch, self._batch, self._whole_lam)

    @property
    def unit(self) -> float:
        """The rounding unit of the passes."""
        return passes.rounding_unit(self._omega, self._how.autocast_dtype)

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._value = self._loss(self._lam, self._omega).detach()
        return self._value

    @property
    def grad(self) -> Tree:
        if self._gradient is None:
            omega = passes.leaves(self._omega)
            value = self._loss(self._lam, omega)
            self._gradient = passes.gradient(value, omega, INNER)
            self._value = value.detach()
        return self._gradient

    @property
    def d_lam(self) -> Leaves:
        lam = passes.leaves(self._lam)
        return self._by_lam(passes.derivative_by_lam(self._loss(lam, self._omega), lam))

    def gradients(self) -> tuple[Tree, Leaves]:
        lam = passes.leaves(self._lam)
        omega = passes.leaves(self._omega)
        value = self._loss(lam, omega)
        self._gradient, by_lam = passes.gradients(value, omega, lam, INNER)
        self._value = value.detach()
        return self._gradient, self._by_lam(by_lam)


class Graph(NamedTuple):
    """∂_ω G with the graph that led to it."""

    lam: Tree
    omega: Tree
    value: Tensor
    grad: Tree


class ExactView(FirstOrderView):
    """G at one point on one batch, with exact products. Unless it is `coupled`, J may be zero."""

    def __init__(
        self, problem: Losses, at: Point, batch: Batch, seed: int | None, ways: Ways, *, coupled: bool = True
    ) -> None:
        super().__init__(problem, at, batch, seed)
        self._ways = ways
        self._reached = passes.reached if coupled else list[Tensor | None]
        self._keeps = False
        self._graph: Graph | None = None

    def probe(self, v: Tree) -> Tree:
        """Takes every kind of product that PyTorch may lack; returns H v."""
        if not self._ways.hvp_forward:
            passes.check_twice_differentiable(self._linear().grad.values())
        return self.hvp(v)

    def linearised(self) -> Self:
        self._keeps = True
        return self

    @property
    def grad(self) -> Tree:
        if self._gradient is None:
            self._gradient = detach(self._linear().grad)
        return self._gradient

    def hvp(self, v: Tree) -> Tree:
        if self._ways.hvp_forward and self._graph is None:
            return self._forward(v)
        return passes.filled(self._pull(v, to_omega=True, to_lam=False), self._omega)

    def cross(self, v: Tree) -> Leaves:
        found = self._pull(v, to_omega=False, to_lam=True)
        return self._by_lam(passes.filled(self._reached(found), self._lam))

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        found = self._pull(v, to_omega=True, to_lam=True)
        n = len(self._omega)
        by_lam = passes.filled(self._reached(found[n:]), self._lam)
        return passes.filled(found[:n], self._omega), self._by_lam(by_lam)

    def cross_t(self, u: Tree) -> Tree:
        lam = passes.leaves(self._lam)
        omega = passes.leaves(self._omega)
        wrt = list(lam.values())
        value = self._loss(lam, omega)
        by_lam = self._reached(torch.autograd.grad(value, wrt, create_graph=True, allow_unused=True))
        return passes.filled(passes.vjp(by_lam, aligned(u, lam), list(omega.values())), omega)

    def _linear(self) -> Graph:
        """The graph; made when it is first needed, or needed again."""
        if self._graph is None:
            lam = passes.leaves(self._lam)
            omega = passes.leaves(self._omega)
            value = self._loss(lam, omega)
            self._graph = Graph(lam, omega, value, passes.gradient(value, omega, INNER, create_graph=True))
            self._value = value.detach()
        return self._graph

    def _pull(self, v: Tree, *, to_omega: bool, to_lam: bool) -> list[Tensor | None]:
        """The derivative of <∂_ω G, v>. Gives up the graph, piece by piece, unless more products are to follow."""
        seeds = aligned(v, self._omega)
        graph = self._linear()
        wrt = [*(graph.omega.values() if to_omega else ()), *(graph.lam.values() if to_lam else ())]
        outputs = list(graph.grad.values())
        if not self._keeps:
            self._gradient = detach(graph.grad)
            self._graph = None
            del graph
        return list(passes.vjp(outputs, seeds, wrt, retain_graph=self._keeps))

    def _forward(self, v: Tree) -> Tree:
        """H v by forward over reverse; leaves the gradient."""
        with forward.dual_level(), torch.enable_grad():
            omega = passes.duals(passes.leaves(self._omega), v)
            return self._take_forward(self._loss(self._lam, omega), omega)

    def _take_forward(self, value: Tensor, omega: Tree) -> Tree:
        """H v from a loss of dual ω; leaves the gradient."""
        grads = passes.gradient(value, omega, INNER)
        self._gradient = {name: passes.primal(g).detach() for name, g in grads.items()}
        tangents = [passes.tangent(g) for g in grads.values()]
        return passes.filled([None if t is None else t.detach() for t in tangents], self._omega)


class OuterView:
    """F at one point on one batch."""

    def __init__(self, problem: Losses, at: Point, batch: Batch, seed: int | None) -> None:
        self._problem = problem
        self._batch = batch
        self._how = Setting(seed, problem.autocast_dtype)
        self._lam = detach(at.lam)
        self._omega = detach(at.omega)
        self._value: Tensor | None = None
        self._d_omega: Tree | None = None
        self._d_lam: Leaves | None = None

    def _loss(self, lam: Tree, omega: Tree) -> Tensor:
        value = passes.evaluate(self._problem.outer_loss, lam, omega, self._batch, OUTER, self._how)
        self._value = value.detach()
        return value

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._loss(self._lam, self._omega)
        assert self._value is not None
        return self._value

    @property
    def d_omega(self) -> Tree:
        """∂_ω F; where F reads λ, ∂_λ F comes from the same pass."""
        if self._d_omega is None:
            omega = passes.leaves(self._omega)
            if self._problem.direct:
                lam = passes.leaves(self._lam)
                self._d_omega, self._d_lam = passes.gradients(self._loss(lam, omega), omega, lam, OUTER)
            else:
                self._d_omega = passes.gradient(self._loss(self._lam, omega), omega, OUTER)
        return self._d_omega

    @property
    def d_lam(self) -> Leaves:
        if self._d_lam is None and self._problem.direct:
            lam = passes.leaves(self._lam)
            self._d_lam = passes.derivative_by_lam(self._loss(lam, self._omega), lam)
        return self._problem.without_d_lam(self._lam) if self._d_lam is None else self._d_lam
