"""Weighted sums of sample losses, whose structure makes products cheap.

    G(λ, ω) = mean_j w_j(λ) l_j(ω) + r(ω)        J v = ∂_λ mean_j w_j(λ) <∂_ω l_j, v>

The slopes <∂_ω l_j, v> of all samples are one forward-mode pass, about as cheap as a gradient, where the general path
takes a reverse pass over a reverse pass; a forward-mode H v has them on its way. Where λ has a row for each sample
(`rows`), J v is the batch's rows alone. With the network's outputs z = z(ω) known (`outputs`), so is the Gauss-Newton
product: Z'ᵀ (∂²_z mean_j w_j l_j(z)) Z' v + ∂²r v with Z' = ∂_ω z, which drops the curvature of the network itself and
is positive semi-definite for losses that are convex in z. All else is as in `fsla.Problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, Self

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from fsla._tree import Leaves, Rows, Tree, aligned, axpy, detach
from fsla.problems import _passes as passes
from fsla.problems._autograd import Mode, Problem
from fsla.problems._batches import Batch
from fsla.problems._passes import Loss
from fsla.problems._problem import Point
from fsla.problems._views import INNER, ExactView, Ways


class WeightedProblem(Problem):
    """A bilevel problem whose inner loss is a weighted mean of sample losses.

    Args:
        sample_losses: l(ω; batch), one loss for each sample of the batch, as a vector.
        sample_weights: w(λ; batch), one weight for each sample of the batch, as a vector.
        outer_loss: F(λ, ω; batch), as in `fsla.Problem`.
        regulariser: r(ω), a 0-d tensor, if there is one.
        rows: the indices of a batch's samples, for a λ whose every tensor has a row for each sample. `sample_weights`
            is then given the batch's rows in the place of λ, and `cross` returns `fsla._tree.Rows`: a step costs what
            the batch costs, but for one sweep over λ and one over d.
        outputs: z(ω; batch), the network's outputs. `sample_losses` is then called with them in the place of ω, must
            be convex in them, and `fsla.GaussNewton` can be used.
        direct, mode, autocast: as in `fsla.Problem`. "reverse" holds for J v too.
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
        direct: bool = True,
        mode: Mode = "auto",
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(self._whole_loss, outer_loss, direct=direct, mode=mode, autocast_dtype=autocast_dtype)
        self.sample_losses = sample_losses
        self.sample_weights = sample_weights
        self.outputs = outputs
        self.regulariser = regulariser
        self.rows = rows

    def on_rows(self, rows: Callable[[Batch], Tensor]) -> Self:
        """The same problem for a λ that holds some rows alone; `rows` says where those of a batch stand in it.

        F would see these rows in the place of λ, so it must not read λ: where it does, that is a ValueError.
        """
        outer_loss = self.outer_loss

        def without_lam(lam: Tree, omega: Tree, batch: Batch) -> Tensor:
            return outer_loss(_Unread(), omega, batch)

        other = copy(self)
        other.rows = rows
        other.inner_loss = other._whole_loss
        other.outer_loss = without_lam
        other._exchanged = None
        return other

    def _whole_loss(self, lam: Tree, omega: Tree, batch: Batch) -> Tensor:
        return self.batch_loss(self.of_batch(lam, batch), omega, batch)

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

    def total(self, lam: Tree, each: Tensor, omega: Tree, batch: Batch) -> Tensor:
        """G from the sample losses."""
        value = self.weighted(lam, each, batch)
        return value if self.regulariser is None else value + self.regulariser(omega)

    def batch_loss(self, lam: Tree, omega: Tree, batch: Batch) -> Tensor:
        """G; `lam` is what the batch reads of λ."""
        return self.total(lam, self.losses(omega, batch), omega, batch)

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

    def by_lam(self, of_batch: Tree, batch: Batch, lam: Tree) -> Leaves:
        """A derivative by what the batch reads of λ, as one by λ."""
        if self.rows is None:
            return of_batch
        index = self.rows(batch)
        return {name: Rows(index, g, len(lam[name])) for name, g in of_batch.items()}

    def without_d_lam(self, lam: Tree) -> Leaves:
        """∂_λ F where F does not read λ: with rows, no rows at all."""
        if self.rows is None:
            return super().without_d_lam(lam)
        none = torch.zeros(0, dtype=torch.long, device=passes.device_of(lam))
        return {name: Rows(none, t[:0].detach(), len(t)) for name, t in lam.items()}

    def _candidates(self, device: torch.device) -> tuple[Ways, ...]:
        forward_slopes = Ways(hvp_forward=device.type == "cuda", slopes_forward=True)
        return (forward_slopes, Ways(hvp_forward=False, slopes_forward=False))

    def _exact(self, at: Point, batch: Batch, seed: int | None, ways: Ways) -> ExactView:
        return (WeightedView if self.outputs is None else ComposedView)(self, at, batch, seed, ways)


class _Unread(Mapping[str, Tensor]):
    """The λ of an outer loss that has said that it does not read it."""

    def __getitem__(self, name: str) -> Tensor:
        raise ValueError(_READ)

    def __iter__(self) -> Iterator[str]:
        raise ValueError(_READ)

    def __len__(self) -> int:
        raise ValueError(_READ)


_READ = (
    "Where a step holds the rows of its batch alone, the outer loss F must not read λ. It has read it. Write F without "
    "λ, or step the algorithm itself on the whole of λ."
)


class WeightedView(ExactView):
    """G with exact products: J v from the samples' slopes along v."""

    def __init__(self, problem: WeightedProblem, at: Point, batch: Batch, seed: int | None, ways: Ways) -> None:
        super().__init__(problem, at, batch, seed, ways)
        self._weighted = problem

    def probe(self, v: Tree) -> Tree:
        if self._ways.slopes_forward:
            self._slopes(v)
        return super().probe(v)

    def cross(self, v: Tree) -> Leaves:
        if not self._ways.slopes_forward or self._graph is not None:
            return super().cross(v)
        return self._from_slopes(self._slopes(v))

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        if not self._ways.hvp_forward or self._graph is not None:
            return super().hvp_cross(v)
        slopes: list[Tensor | None] = []

        def loss(lam: Tree, omega: Tree, batch: Batch) -> Tensor:
            each = self._weighted.losses(omega, batch)
            slopes.append(passes.tangent(each))
            return self._weighted.total(lam, each, omega, batch)

        with forward.dual_level(), torch.enable_grad():
            omega = passes.duals(passes.leaves(self._omega), v)
            value = passes.evaluate(loss, self._lam, omega, self._batch, INNER, self._how)
            product = self._take_forward(value, omega)
        return product, self._from_slopes(slopes[0])

    def cross_t(self, u: Tree) -> Tree:
        return super().cross_t(self._weighted.of_batch(u, self._batch))

    def _slopes(self, v: Tree) -> Tensor | None:
        """<∂_ω l_j, v> for each sample of the batch, in one forward-mode pass; None where no loss depends on ω."""

        def along(lam: Tree, omega: Tree, batch: Batch) -> Tensor | None:
            return passes.tangent(self._weighted.losses(omega, batch))

        with forward.dual_level():
            omega = passes.duals(self._omega, v)
            return passes.run(along, self._lam, omega, self._batch, INNER, self._how)

    def _from_slopes(self, slopes: Tensor | None) -> Leaves:
        """J v = ∂_λ mean_j w_j <∂_ω l_j, v>."""
        lam = passes.leaves(self._lam)
        if slopes is None:
            return self._by_lam(passes.filled([None] * len(lam), lam))
        with torch.enable_grad():
            value = self._weighted.weighted(lam, slopes.detach(), self._batch)
        found = torch.autograd.grad(value, list(lam.values()), allow_unused=True) if value.requires_grad else [None]
        return self._by_lam(passes.filled(passes.reached(found), lam))


class ComposedView(WeightedView):
    """The same for a network whose outputs are known."""

    def gnvp(self, v: Tree) -> Tree:
        """The Gauss-Newton product; leaves the gradient. One forward pass, and a backward pass for each of the two."""
        problem = self._weighted
        omega = passes.leaves(self._omega)
        z, dz = self._outputs_along(omega, v)

        def curvature(lam: Tree, omega: Tree, batch: Batch) -> tuple[Tensor, Tensor | None]:
            """∂_z and ∂²_z dz of the weighted losses of the outputs."""
            top = z.detach().requires_grad_()
            loss = problem.weighted(lam, problem.sample_losses(top, batch), batch)
            (slope,) = torch.autograd.grad(loss, top, create_graph=True)
            (curve,) = passes.vjp([slope], [dz], [top])
            return slope.detach(), curve

        slope, curve = passes.run(curvature, self._lam, omega, self._batch, INNER, self._how)
        product = self._pulled_back(z, curve, omega)
        grad = self._pulled_back(z, slope, omega)
        if problem.regulariser is not None:
            r = passes.gradient(problem.regulariser(omega), omega, "regulariser", create_graph=True)
            bend = passes.vjp(list(r.values()), aligned(v, omega), list(omega.values()))
            product = axpy(1.0, passes.filled(bend, omega), product)
            grad = axpy(1.0, detach(r), grad)
        self._gradient = grad
        return product

    def _outputs_along(self, omega: Tree, v: Tree) -> tuple[Tensor, Tensor]:
        """z(ω) with its graph, and its derivative along v."""
        outputs = self._weighted.outputs
        assert outputs is not None

        def both(lam: Tree, omega: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
            dual = outputs(omega, batch)
            along = passes.tangent(dual)
            z = passes.primal(dual)
            return z, torch.zeros_like(z) if along is None else along

        with torch.enable_grad(), forward.dual_level():
            return passes.run(both, self._lam, passes.duals(omega, v), self._batch, INNER, self._how)

    @staticmethod
    def _pulled_back(z: Tensor, seed: Tensor | None, omega: Tree) -> Tree:
        """Z'ᵀ seed."""
        if seed is None:
            return passes.filled([None] * len(omega), omega)
        found = torch.autograd.grad(z, list(omega.values()), seed, retain_graph=True, allow_unused=True)
        return passes.filled(found, omega)
