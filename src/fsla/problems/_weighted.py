"""Weighted sums of sample losses, whose structure makes products cheap.

    G(λ, ω) = mean_j w_j(λ) l_j(ω) + r(ω)        J v = ∂_λ mean_j w_j(λ) <∂_ω l_j, v>

The slopes <∂_ω l_j, v> of all samples are one forward-mode pass, about as cheap as a gradient, where the general path
takes a reverse pass over a reverse pass; a forward-mode H v computes them in passing. Where λ has a row for each sample
(`row_index`), J v is the batch's rows alone. With the network's outputs z = z(ω) known (`model_outputs`), so is the
Gauss-Newton product: Z'ᵀ (∂²_z mean_j w_j l_j(z)) Z' v + ∂²r v with Z' = ∂_ω z, which drops the curvature of the
network itself and is positive semi-definite for losses that are convex in z. All else is as in `fsla.Problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Self

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from fsla._checks import function
from fsla._tree import Leaves, RowSparse, Tree, aligned, axpy, detach, scale
from fsla.distributed._reducer import Derivatives, GraphLeaves, Part, Reducer
from fsla.problems import _passes as passes
from fsla.problems._autograd import (
    LOSS_NAMES,
    REVERSE,
    ExactMode,
    HvpMethod,
    Level,
    LossView,
    Problem,
    forward_gradients,
)
from fsla.problems._batches import Batch
from fsla.problems._passes import Loss
from fsla.problems._views import Point

NAME = LOSS_NAMES["inner"]


class WeightedLossProblem(Problem):
    """A bilevel problem whose inner loss is a weighted mean of sample losses, which makes products cheap.

    Args:
        per_sample_loss: l(ω; batch), one loss for each sample of the batch, as a vector.
        sample_weight: w(λ; batch), one weight for each sample of the batch, as a vector.
        outer_loss: F(λ, ω; batch), as in `fsla.Problem`.
        regularizer: r(ω), a 0-d tensor; None for none.
        row_index: the indices of a batch's samples, for a λ with a row for each sample in every tensor.
            `sample_weight` then reads the batch's rows in the place of λ, and derivatives by λ hold these rows
            alone. A step then costs what the batch costs, and one sweep over λ and d.
        model_outputs: z(ω; batch), the network's outputs. `per_sample_loss` is then called with them in the place of ω,
            must be convex in them, and `fsla.GaussNewtonProblem` can be used.
        outer_uses_lam: as in `fsla.Problem`.
        hvp_method: as in `fsla.Problem`; "reverse_over_reverse" then holds for J v too.
        autocast_dtype: as in `fsla.Problem`.
        reducer: as in `fsla.Problem`.

    Examples:
        >>> data = torch.tensor([1.0, 3.0])
        >>> weighted = fsla.WeightedLossProblem(
        ...     per_sample_loss=lambda omega, batch: (omega["w"].sum() - batch) ** 2 / 2,
        ...     sample_weight=lambda lam, batch: lam["x"].sigmoid(),
        ...     outer_loss=outer_loss,
        ... )
        >>> weighted.inner_at(at, fsla.Batch(data)).value
        tensor(0.2500)
    """

    def __init__(
        self,
        per_sample_loss: Callable[[Any, Any], Tensor],
        sample_weight: Callable[[Tree, Any], Tensor],
        outer_loss: Loss,
        *,
        regularizer: Callable[[Tree], Tensor] | None = None,
        row_index: Callable[[Any], Tensor] | None = None,
        model_outputs: Callable[[Tree, Any], Tensor] | None = None,
        outer_uses_lam: bool | None = None,
        hvp_method: HvpMethod = "auto",
        autocast_dtype: torch.dtype | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        super().__init__(
            self._whole_loss,
            outer_loss,
            outer_uses_lam=outer_uses_lam,
            hvp_method=hvp_method,
            autocast_dtype=autocast_dtype,
            reducer=reducer,
        )
        for name, value in (("per_sample_loss", per_sample_loss), ("sample_weight", sample_weight)):
            function(value, name, "WeightedLossProblem")
        optional = {"regularizer": regularizer, "row_index": row_index, "model_outputs": model_outputs}
        for name, part in optional.items():
            function(part, name, "WeightedLossProblem", optional=True)
        self.per_sample_loss = per_sample_loss
        self.sample_weight = sample_weight
        self.model_outputs = model_outputs
        self.regularizer = regularizer
        self.row_index = row_index

    def on_rows(self, row_index: Callable[[Any], Tensor]) -> Self:
        """Return the problem for a λ that holds some rows alone, at the places that `row_index` returns.

        F would see these rows in the place of λ, so it must not read λ: where it does, that is a ValueError.
        """
        outer_loss = self.outer_loss

        def without_lam(lam: Tree, omega: Tree, data: Any) -> Tensor:
            return outer_loss(_ForbiddenLam(), omega, data)

        other = copy(self)
        other.row_index = row_index
        other.inner_loss = other._whole_loss
        other.outer_loss = without_lam
        other.outer_uses_lam = False
        return other

    def _whole_loss(self, lam: Tree, omega: Tree, data: Any) -> Tensor:
        return self.batch_loss(self.lam_of_batch(lam, [data]), omega, data)

    def losses(self, omega: Tree, data: Any) -> Tensor:
        """Return l(ω; batch)."""
        return self.per_sample_loss(omega if self.model_outputs is None else self.model_outputs(omega, data), data)

    def weighted(self, lam: Tree, each: Tensor, data: Any) -> Tensor:
        """Return mean_j w_j l_j; `lam` is what the batch reads of λ."""
        weights = self.sample_weight(lam, data)
        if each.ndim != 1 or each.shape != weights.shape:
            raise ValueError(
                "per_sample_loss and sample_weight must return one number for each sample, as vectors of one "
                f"length. Got shapes {tuple(each.shape)} and {tuple(weights.shape)}. Use reduction='none'."
            )
        return (weights * each).mean()

    def total(self, lam: Tree, each: Tensor, omega: Tree, data: Any) -> Tensor:
        """Return G from the sample losses."""
        value = self.weighted(lam, each, data)
        return value if self.regularizer is None else value + self.regularizer(omega)

    def batch_loss(self, lam: Tree, omega: Tree, data: Any) -> Tensor:
        return self.total(lam, self.losses(omega, data), omega, data)

    def lam_of_batch(self, lam: Tree, data: Sequence[Any]) -> Tree:
        """Return what a batch reads of λ: its rows, or all of it."""
        if self.row_index is None:
            return lam
        index = self._index(data)
        if flat := [name for name, t in lam.items() if t.ndim == 0]:
            raise ValueError(f"With row_index, every tensor of lam must have a row for each sample. {flat} have none.")
        return {name: t[index] for name, t in lam.items()}

    def _index(self, data: Sequence[Any]) -> Tensor:
        assert self.row_index is not None
        if len(data) > 1:
            raise TypeError(f"A problem with row_index takes whole batches. Got {len(data)} micro-batches.")
        index = self.row_index(data[0])
        if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
            kind = f"{tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(
                f"row_index must return the samples' indices as a vector of whole numbers. Got {kind} instead."
            )
        return index

    def reads_rows(self, level: Level) -> bool:
        return level == "inner" and self.row_index is not None

    def by_lam(self, level: Level, derivatives: Derivatives, data: Sequence[Any], at: Point) -> Leaves:
        if not self.reads_rows(level):
            return super().by_lam(level, derivatives, data, at)
        index = self._index(data)
        shapes = {name: (len(index), *t.shape[1:]) for name, t in at.lam.items()}
        values = {name: at.lam[name].new_zeros(shapes[name]) if g is None else g for name, g in derivatives.items()}
        return {name: RowSparse(index, values[name], len(t)) for name, t in at.lam.items()}

    def no_lam(self, at: Point) -> Leaves:
        if self.row_index is None:
            return super().no_lam(at)
        none = torch.zeros(0, dtype=torch.long, device=passes.device_of(at.lam))
        return {name: RowSparse(none, t[:0].detach(), len(t)) for name, t in at.lam.items()}

    def _candidates(self, device: torch.device) -> tuple[ExactMode, ...]:
        return ExactMode(hvp_forward=device.type == "cuda", slopes_forward=True), REVERSE

    def _exact(self, at: Point, batch: Batch, mode: ExactMode, *, update_buffers: bool = False) -> LossView:
        return WeightedView(self, at, batch, mode, update_buffers=update_buffers)


class _ForbiddenLam(Mapping[str, Tensor]):
    """The λ of an outer loss with `outer_uses_lam=False`, which raises if it is read."""

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


class WeightedView(LossView):
    """G with exact products: J v from the samples' slopes along v."""

    def __init__(
        self, problem: WeightedLossProblem, at: Point, batch: Batch, mode: ExactMode, *, update_buffers: bool
    ) -> None:
        super().__init__(problem, "inner", at, batch, mode, update_buffers=update_buffers)
        self._weighted = problem

    def probe(self, v: Tree) -> Tree:
        if self._mode.slopes_forward:
            self.products(v, omega=False)
        return super().probe(v)

    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        cheap = self._mode.slopes_forward and (self._mode.hvp_forward or not omega)
        if not lam or not cheap or self._graph is not None or len(self._parts) > 1:
            return super().products(v, omega=omega, lam=lam)
        (part,) = self._parts
        values: list[Tensor] = []
        by_omega: list[Derivatives] = []
        with (
            self._problem.leaves(self._level, self._at, [part.data], omega=omega, lam=False) as leaves,
            forward_ad.dual_level(),
        ):
            dual = leaves._replace(omega=passes.duals(leaves.omega, v))
            value, slopes = self._value_and_slopes(dual, part, value=omega)
            if value is not None:
                by_omega = list(forward_gradients(value, dual.omega))
                values = [passes.primal(value).detach()]
        by_lam, leaves = self._from_slopes(slopes, leaves, part)
        values, by_omega, by_lam = self._mean(values, by_omega, by_lam, leaves)
        jv = (
            self._by_lam(by_lam)
            if slopes is not None
            else self._problem.by_lam(self._level, by_lam, self._data, self._at)
        )
        return self._keep_forward(values, *by_omega) if omega else {}, jv

    def _run(self, function: Callable[[Tree, Tree, Any], Any], leaves: GraphLeaves, part: Part) -> Any:
        self._unmoved.check()
        return passes.run(function, leaves.lam, leaves.omega, part, NAME, self._problem.autocast_dtype)

    def _value_and_slopes(self, dual: GraphLeaves, part: Part, *, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """G, if it is wanted, and <∂_ω l_j, v> for each sample of the part; None where no loss depends on ω."""

        def slopes_alone(lam: Tree, omega: Tree, data: Any) -> tuple[None, Tensor | None]:
            with torch.no_grad():
                return None, passes.tangent(self._weighted.losses(omega, data))

        def both(lam: Tree, omega: Tree, data: Any) -> tuple[Tensor, Tensor | None]:
            each = self._weighted.losses(omega, data)
            total = passes.scalar(self._weighted.total(lam, each, omega, data), NAME)
            return total * part.weight, passes.tangent(each)

        if part.weight == 0:
            return torch.zeros((), device=passes.device_of(self._at.omega)) if value else None, None
        result: tuple[Tensor | None, Tensor | None] = self._run(both if value else slopes_alone, dual, part)
        return result

    def _from_slopes(self, slopes: Tensor | None, leaves: GraphLeaves, part: Part) -> tuple[Derivatives, GraphLeaves]:
        """J v = ∂_λ mean_j w_j <∂_ω l_j, v> on the part, and the leaves that it is a derivative by."""
        with (
            self._problem.leaves(self._level, self._at, [part.data], omega=False, lam=True) as rows,
            torch.enable_grad(),
        ):
            derivatives: Derivatives = dict.fromkeys(rows.lam)
            if slopes is not None:
                value = self._weighted.weighted(dict(rows.lam), slopes.detach(), part.data) * part.weight
                if value.requires_grad:
                    grads = torch.autograd.grad(value, list(rows.lam.values()), allow_unused=True)
                    derivatives = dict(zip(rows.lam, grads, strict=True))
        return derivatives, leaves._replace(lam=rows.lam)

    def _of_leaves(self, u: Tree, leaves: GraphLeaves, data: Sequence[Any]) -> list[Tensor]:
        return aligned(self._weighted.lam_of_batch(u, data), leaves.lam)

    def gauss_newton(self, v: Tree) -> Tree:
        """The Gauss-Newton product; leaves the gradient. One forward pass, and a backward pass for each of the two."""
        if self._weighted.model_outputs is None:
            return super().gauss_newton(v)
        (part,) = self._one_part("A Gauss-Newton product")
        with self._problem.leaves(self._level, self._at, [part.data], omega=True, lam=False) as leaves:
            pair: tuple[Derivatives, Derivatives] = dict.fromkeys(leaves.omega), dict.fromkeys(leaves.omega)
            if part.weight != 0:
                pair = self._gradient_and_curvature(v, leaves, part)
        _, by_omega, _ = self._mean([], list(pair), {}, leaves)
        return self._keep_forward([], *by_omega)

    def _gradient_and_curvature(self, v: Tree, leaves: GraphLeaves, part: Part) -> tuple[Derivatives, Derivatives]:
        """Gradient and Gauss-Newton product on the part, weighted as its loss is."""
        problem, omega = self._weighted, dict(leaves.omega)
        with forward_ad.dual_level(), torch.enable_grad():
            z, dz = self._run(self._outputs_along, leaves._replace(omega=passes.duals(omega, v)), part)

        def curvature(lam: Tree, omega: Tree, data: Any) -> tuple[Tensor, Tensor | None]:
            """∂_z and ∂²_z dz of the weighted losses of the outputs."""
            top = z.detach().requires_grad_()
            loss = problem.weighted(lam, problem.per_sample_loss(top, data), data)
            (slope,) = torch.autograd.grad(loss, top, create_graph=True)
            (curve,) = passes.vjp([slope], [dz], [top])
            return slope.detach(), curve

        slope, curve = self._run(curvature, leaves, part)
        product = _pulled_back(z, curve, omega)
        gradient = _pulled_back(z, slope, omega)
        if problem.regularizer is not None:
            with torch.enable_grad():
                r = passes.zeros_for_none(passes.with_graph(problem.regularizer(dict(omega)), omega), omega)
            bend = passes.vjp(list(r.values()), aligned(v, omega), list(omega.values()))
            product = axpy(1.0, passes.zeros_for_none(bend, omega), product)
            gradient = axpy(1.0, detach(r), gradient)
        return scale(part.weight, gradient), scale(part.weight, product)

    def _outputs_along(self, lam: Tree, omega: Tree, data: Any) -> tuple[Tensor, Tensor]:
        """z(ω) with its graph, and its derivative along v."""
        assert self._weighted.model_outputs is not None
        dual = self._weighted.model_outputs(omega, data)
        along = passes.tangent(dual)
        z = passes.primal(dual)
        return z, torch.zeros_like(z) if along is None else along


def _pulled_back(z: Tensor, seed: Tensor | None, omega: Tree) -> Tree:
    """Z'ᵀ seed."""
    if seed is None:
        return passes.zeros_for_none([None] * len(omega), omega)
    grads = torch.autograd.grad(z, list(omega.values()), seed, retain_graph=True, allow_unused=True)
    return passes.zeros_for_none(grads, omega)
