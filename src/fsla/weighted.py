"""Weighted sums of sample losses, whose structure makes products cheap.

    G(λ, ω) = mean_j w_j(λ) l_j(ω) + r(ω)        J v = ∂_λ mean_j w_j(λ) <∂_ω l_j, v>

The directional derivatives <∂_ω l_j, v> of all samples are one forward-mode pass, about as cheap as a gradient, where
the general path takes a reverse pass over a reverse pass; a forward-mode H v has them on its way. Where λ has a row for
each sample (`rows`), J v is the batch's rows alone. With the network's outputs z = z(ω) known (`outputs`), so is the
Gauss-Newton product: Z'ᵀ (∂²_z mean_j w_j l_j(z)) Z' v + ∂²r v with Z' = ∂_ω z, which drops the curvature of the
network itself and is positive semi-definite for losses that are convex in z. All else is as in `fsla.Problem`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from fsla.autodiff import Loss, Mode, Problem, _duals, _evaluate, _Evaluated, _filled, _first, _Linearised, _vjp
from fsla.problem import Batch, Inner, Outer, Point
from fsla.tree import Rows, Tree, axpy, detach, row

with warnings.catch_warnings():  # PyTorch's own forward mode compiles this module when first used, and warns of itself
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp


class WeightedProblem(Problem):
    """A bilevel problem whose inner loss is a weighted mean of sample losses.

    Args:
        sample_losses: l(ω; batch), one loss for each sample of the batch, as a vector.
        sample_weights: w(λ; batch), one weight for each sample of the batch, as a vector.
        outer_loss: F(λ, ω; batch), as in `fsla.Problem`.
        regulariser: r(ω), a 0-d tensor, if there is one.
        rows: the indices of a batch's samples, for a λ whose every tensor has a row for each sample. `sample_weights`
            is then given the batch's rows in the place of λ, and `cross` returns `fsla.tree.Rows`: a step costs what
            the batch costs, but for one sweep over λ and one over d.
        outputs: z(ω; batch), the network's outputs. `sample_losses` is then called with them in the place of ω, must
            be convex in them, and Gauss-Newton products can be had.
        direct, mode: as in `fsla.Problem`. "reverse" holds for J v too.
    """

    def __init__(
        self,
        sample_losses: Callable[[Any, Batch], Tensor],
        sample_weights: Callable[[Tree, Batch], Tensor],
        outer_loss: Loss,
        *,
        regulariser: Callable[[Tree], Tensor] | None = None,
        rows: Callable[[Batch], Tensor] | None = None,
        outputs: Callable[[Tree, Batch], Tensor] | None = None,
        direct: bool | None = None,
        mode: Mode = "auto",
    ) -> None:
        def inner_loss(lam: Tree, omega: Tree, batch: Batch) -> Tensor:
            return self.whole_loss(self.of_batch(lam, batch), self.losses(omega, batch), omega, batch)

        super().__init__(inner_loss, outer_loss, direct=direct, mode=mode)
        self.sample_losses, self.sample_weights, self.outputs = sample_losses, sample_weights, outputs
        self.regulariser, self.rows = regulariser, rows

    def losses(self, omega: Tree, batch: Batch) -> Tensor:
        """l(ω; batch)."""
        return self.sample_losses(omega if self.outputs is None else self.outputs(omega, batch), batch)

    def weighted(self, lam: Tree, each: Tensor, batch: Batch) -> Tensor:
        """mean_j w_j l_j; `lam` is what the batch reads of λ."""
        weights = self.sample_weights(lam, batch)
        if each.ndim != 1 or each.shape != weights.shape:
            raise ValueError(
                "sample_losses and sample_weights must return one number for each sample, as vectors of one "
                f"length. Got shapes {tuple(each.shape)} and {tuple(weights.shape)}. Use reduction='none'."
            )
        return (weights * each).mean()

    def whole_loss(self, lam: Tree, each: Tensor, omega: Tree, batch: Batch) -> Tensor:
        """G from the sample losses."""
        value = self.weighted(lam, each, batch)
        return value if self.regulariser is None else value + self.regulariser(omega)

    def of_batch(self, lam: Tree, batch: Batch) -> Tree:
        """What a batch reads of λ: its rows, or all of it."""
        if self.rows is None:
            return lam
        index = self.rows(batch)
        if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
            kind = f"{tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"rows must return the samples' indices as a vector of whole numbers. Got {kind} instead.")
        if flat := [name for name, t in lam.items() if t.ndim == 0]:
            raise ValueError(f"With rows, every tensor of lam must have a row for each sample. {flat} have none.")
        return {name: t[index] for name, t in lam.items()}

    def inner_at(self, at: Point, batch: Batch) -> Inner:
        return _Weighted(self, at, batch) if self.outputs is None else _Composed(self, at, batch)

    def outer_at(self, at: Point, batch: Batch) -> Outer:
        return super().outer_at(at, batch) if self.rows is None else _NoRows(self, at, batch)


class _Weighted(_Linearised):
    def __init__(self, problem: WeightedProblem, at: Point, batch: Batch) -> None:
        super().__init__(problem, Point(problem.of_batch(at.lam, batch), at.omega), batch)
        self._weighted, self._whole = problem, at.lam
        self._slopes: Tensor | None = None

    def _loss(self, lam: Tree, omega: Tree) -> Tensor:
        def loss(lam: Tree, omega: Tree, batch: Batch) -> Tensor:
            return self._weighted.whole_loss(lam, self._losses(omega), omega, batch)

        return _evaluate(loss, lam, omega, self._batch, "inner loss G")

    def _losses(self, omega: Tree) -> Tensor:
        """l(ω), and where ω has a tangent v, the slopes <∂_ω l_j, v>."""
        each = self._weighted.losses(omega, self._batch)
        self._slopes = forward.unpack_dual(each).tangent  # type: ignore[no-untyped-call]
        return each

    def cross(self, v: Tree) -> Tree:
        def along() -> Tree:
            with torch.no_grad(), forward.dual_level():
                self._losses(_duals(detach(self._omega), v))
            return self._from_slopes()

        found = self._in_forward_mode(True, along)
        return super().cross(v) if found is None else found

    def hvp_cross(self, v: Tree) -> tuple[Tree, Tree]:
        found = self._in_forward_mode(self._on_gpu, lambda: (self._forward(v), self._from_slopes()))
        return super().hvp_cross(v) if found is None else found

    def cross_t(self, u: Tree) -> Tree:
        return super().cross_t(self._weighted.of_batch(u, self._batch))

    def _from_slopes(self) -> Tree:
        """J v from the <∂_ω l_j, v> of the batch's samples."""
        wrt, slopes = list(self._lam.values()), self._slopes
        if slopes is None:
            return self._of_lam([torch.zeros_like(t) for t in wrt])
        with torch.enable_grad():
            value = self._weighted.weighted(self._lam, slopes.detach(), self._batch)
        return self._of_lam(torch.autograd.grad(value, wrt, allow_unused=True) if value.requires_grad else [None])

    def _of_lam(self, grads: Sequence[Tensor | None]) -> Tree:
        of_batch = super()._of_lam(grads)
        if self._weighted.rows is None:
            return of_batch
        index = self._weighted.rows(self._batch)
        return {name: cast(Tensor, Rows(index, g, len(self._whole[name]))) for name, g in of_batch.items()}


class _Composed(_Weighted):
    def gnvp(self, v: Tree) -> Tree:
        """The Gauss-Newton product; leaves the gradient. One forward pass, and a backward pass for each of the two."""
        problem, lam = self._weighted, detach(self._lam)
        assert problem.outputs is not None
        with torch.enable_grad():
            with forward.dual_level():
                dual = problem.outputs(_duals(self._omega, v), self._batch)
                z, dz = forward.unpack_dual(dual)  # type: ignore[no-untyped-call]
            top = z.detach().requires_grad_()
            loss = problem.weighted(lam, problem.sample_losses(top, self._batch), self._batch)
            (slope,) = torch.autograd.grad(loss, top, create_graph=True)
            (curve,) = _vjp([slope], [dz], [top])
        leaves = list(self._omega.values())
        product, grad = (
            _filled(torch.autograd.grad(z, leaves, seed, retain_graph=True, allow_unused=True), self._omega)
            for seed in (curve, slope.detach())
        )
        if problem.regulariser is not None:
            r = _first(problem.regulariser(self._omega), self._omega, "regulariser", create_graph=True)
            bend = _filled(_vjp(list(r.values()), row(v, self._omega), leaves), self._omega)
            product, grad = axpy(1.0, bend, product), axpy(1.0, detach(r), grad)
        self.grad = grad
        return product


class _NoRows(_Evaluated):
    """F that does not read λ: its ∂_λ F has no rows at all."""

    @cached_property
    def d_lam(self) -> Tree:
        if self._problem.direct is not False:
            return super().d_lam
        none = {name: t[:0] for name, t in self._lam.items()}
        index = torch.zeros(0, dtype=torch.long, device=next(iter(none.values())).device)
        return {name: cast(Tensor, Rows(index, t.detach(), len(self._lam[name]))) for name, t in none.items()}
