"""Weighted sums of sample losses, whose structure makes the cross product cheap.

    G(λ, ω) = mean_j w_j(λ) l_j(ω) + r(ω)        J v = ∂_λ mean_j w_j(λ) <∂_ω l_j, v>

The directional derivatives <∂_ω l_j, v> of all samples are one forward-mode pass, about as cheap as a gradient, where
the general path takes a reverse pass over a reverse pass. All other oracles are those of `fsla.Problem`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from fsla.autodiff import Loss, Problem, _filled, _leaves, _Linearised, _reached
from fsla.problem import Batch, Inner, Point
from fsla.tree import Tree, row

Losses = Callable[[Tree, Batch], Tensor]

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
        direct: as in `fsla.Problem`.
    """

    def __init__(
        self,
        sample_losses: Losses,
        sample_weights: Losses,
        outer_loss: Loss,
        *,
        regulariser: Callable[[Tree], Tensor] | None = None,
        direct: bool | None = None,
    ) -> None:
        def inner_loss(lam: Tree, omega: Tree, batch: Batch) -> Tensor:
            each, weights = sample_losses(omega, batch), sample_weights(lam, batch)
            if each.ndim != 1 or each.shape != weights.shape:
                raise ValueError(
                    "sample_losses and sample_weights must return one number for each sample, as vectors of one "
                    f"length. Got shapes {tuple(each.shape)} and {tuple(weights.shape)}. Use reduction='none'."
                )
            loss = (weights * each).mean()
            return loss if regulariser is None else loss + regulariser(omega)

        super().__init__(inner_loss, outer_loss, direct=direct)
        self.sample_losses, self.sample_weights = sample_losses, sample_weights

    def inner_at(self, at: Point, batch: Batch) -> Inner:
        return _Weighted(self, at, batch)


class _Weighted(_Linearised):
    def __init__(self, problem: WeightedProblem, at: Point, batch: Batch) -> None:
        super().__init__(problem, at, batch)
        self._problem = problem

    def cross(self, v: Tree) -> Tree:
        if "_grad" in self.__dict__:  # the graph is there: one more pass over it is cheaper still
            return super().cross(v)
        slopes = self._slopes(v)
        lam = _leaves(self._lam)
        with torch.enable_grad():
            value = (self._problem.sample_weights(lam, self._batch) * slopes).mean()
        wrt = list(lam.values())
        grads = torch.autograd.grad(value, wrt, allow_unused=True) if value.requires_grad else [None] * len(wrt)
        return _filled(_reached(grads), lam)

    def _slopes(self, v: Tree) -> Tensor:
        """<∂_ω l_j, v> for each sample j of the batch."""
        directions = row(v, self._omega)
        with torch.no_grad(), forward.dual_level():
            pairs = zip(self._omega.items(), directions, strict=True)
            omega = {name: forward.make_dual(t.detach(), u) for (name, t), u in pairs}  # type: ignore[no-untyped-call]
            each = self._problem.sample_losses(omega, self._batch)
            slopes = forward.unpack_dual(each).tangent  # type: ignore[no-untyped-call]
        return torch.zeros_like(each) if slopes is None else slopes
