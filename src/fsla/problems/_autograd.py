"""Gradients and products of two losses by automatic differentiation. Which mode computes a product is decided here.

    reverse over reverse    ∂_ω G is taken with its graph; H v and J v are then one more reverse pass over <∂_ω G, v>
    forward over reverse    H v is the derivative of ∂_ω G along v: one pass gives both and keeps no graph
    finite difference       both from gradients at ω ± εv (`DifferenceView`), where there is no second derivative

Of the exact ones reverse is the cheaper on a CPU (2.4 SGD steps for ∂_ω G and H v on a small convolutional network,
against 2.7; on tiny problems 1.8 against 5.6), forward on a GPU (2.6 against 3.9: cuDNN is slow at second derivatives).

`LossView` is the only place where a loss is differentiated. It asks its problem where the graph of a pass begins, for
a forward pass, and for `backward`. `Problem` answers for losses that are functions of (λ, ω), and `ModuleProblem` for
losses of an nn.Module in place.
"""

from __future__ import annotations

import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from fsla._checks import pick
from fsla._tree import Leaves, Tree, aligned, norm, zeros_like
from fsla.distributed._reducer import Derivatives, GraphLeaves, Part, Reducer
from fsla.problems import _passes as passes
from fsla.problems._batches import Batch
from fsla.problems._passes import Gradients, Loss, zeros_for_none
from fsla.problems._views import DifferenceView, FiniteDifferenceCheck, Oracles, Point, Unmoved, View, compare_steps

Level = Literal["inner", "outer"]
HvpMethod = Literal["auto", "autograd", "finite_difference", "forward_over_reverse", "reverse_over_reverse"]
HVP_METHODS: tuple[HvpMethod, ...] = (
    "auto", "autograd", "finite_difference", "forward_over_reverse", "reverse_over_reverse",
)  # fmt: skip
LOSS_NAMES: Mapping[Level, str] = {"inner": "inner loss G", "outer": "outer loss F"}


class FiniteDifferenceWarning(UserWarning):
    """Warning that a network has no second derivative, so that products are taken by differences.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("ignore", fsla.FiniteDifferenceWarning)  # or: hvp_method="finite_difference"
    """


class ExactMode(NamedTuple):
    """How exact products are computed: H v in forward mode or not, the samples' slopes in forward mode or not."""

    hvp_forward: bool
    slopes_forward: bool


REVERSE = ExactMode(hvp_forward=False, slopes_forward=False)
FORWARD = ExactMode(hvp_forward=True, slopes_forward=True)
ProductMode = ExactMode | Literal["finite_difference"]
_FORCED: Mapping[HvpMethod, ProductMode] = {
    "forward_over_reverse": FORWARD,
    "reverse_over_reverse": REVERSE,
    "finite_difference": "finite_difference",
}


class LossProblem(Oracles):
    """Base class of problems whose two losses autograd differentiates.

    A subclass defines where the graph of a pass begins (`leaves`), the forward pass (`forward`) and the backward pass
    (`backward`).

    Args:
        hvp_method: how products are computed. "autograd": exactly, in the mode that is faster on the device.
            "forward_over_reverse" and "reverse_over_reverse": exactly, in that mode. "finite_difference": from
            first-order gradients. "auto": exactly, or by differences if the network has no second derivative, with one
            warning that names the operation. "auto" and "autograd" are decided once, by a product at the first point.
        outer_uses_lam: whether F reads λ; with None the first pass over each batch finds out.
        autocast_dtype: dtype of autocast in every pass.
        reducer: how processes share a batch.

    Raises:
        ValueError: if an option is unknown.

    Examples:
        >>> issubclass(fsla.Problem, fsla.problems.LossProblem)
        True
    """

    def __init__(
        self,
        *,
        hvp_method: HvpMethod,
        outer_uses_lam: bool | None,
        autocast_dtype: torch.dtype | None,
        reducer: Reducer | None,
    ) -> None:
        if autocast_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast_dtype must be torch.bfloat16 or None. Got {autocast_dtype!r} instead: float16 would need a "
                "gradient scaler, whose skipped steps the method does not know."
            )
        self.hvp_method: HvpMethod = pick(hvp_method, dict(zip(HVP_METHODS, HVP_METHODS, strict=True)), "hvp_method")
        self.outer_uses_lam = outer_uses_lam
        self.autocast_dtype = autocast_dtype
        self.reducer = Reducer() if reducer is None else reducer
        self._mode = _FORCED.get(hvp_method)
        """How products are computed; None until a point has been looked at."""
        self.ignores_lam: WeakKeyDictionary[Batch, bool] = WeakKeyDictionary()
        """Whether F was seen not to read λ, by the batch."""

    def inner_at(self, at: Point, batch: Batch, *, update_buffers: bool = False) -> View:
        mode = self.select_mode(at, batch)
        if mode == "finite_difference":
            return DifferenceView(self._first_order("inner", batch), at, update_buffers=update_buffers)
        return self._exact(at, batch, mode, update_buffers=update_buffers)

    def outer_at(self, at: Point, batch: Batch) -> View:
        if self._mode == "finite_difference":
            return DifferenceView(self._first_order("outer", batch), at)
        return LossView(self, "outer", at, batch)

    def check_step(self, at: Point, batch: Batch, v: Tree) -> FiniteDifferenceCheck | None:
        if self.select_mode(at, batch) != "finite_difference":
            return None
        return compare_steps(self._first_order("inner", batch), at, v, None)

    # ------------------------------------------------------------------------------ what differs between the problems

    @abstractmethod
    def leaves(
        self, level: Level, at: Point, data: Sequence[Any], *, omega: bool, lam: bool
    ) -> AbstractContextManager[GraphLeaves]:
        """Return what a loss reads of the variables at a point; those that are wanted require gradients."""

    @abstractmethod
    def forward(
        self, level: Level, leaves: GraphLeaves, part: Part, batch: Batch, *, update_buffers: bool, unwrapped: bool
    ) -> AbstractContextManager[Tensor]:
        """Return the value of a loss with its graph; what differentiates it runs inside.

        Args:
            level: which loss.
            leaves: where the graph begins.
            part: what this process passes.
            batch: the batch that it is part of.
            update_buffers: whether the pass moves a module's buffers.
            unwrapped: whether the pass avoids hooks that know of one derivative alone.
        """

    @abstractmethod
    def backward(self, value: Tensor, leaves: GraphLeaves, *, omega: bool, last: bool) -> None:
        """Accumulate the gradients in `.grad` of the leaves."""

    def reads_rows(self, level: Level) -> bool:
        """Return whether a loss reads the rows of its batch's samples in the place of λ."""
        return False

    def by_lam(self, level: Level, derivatives: Derivatives, data: Sequence[Any], at: Point) -> Leaves:
        """Return derivatives by the leaves as one by λ."""
        return zeros_for_none(list(derivatives.values()), at.lam)

    def no_lam(self, at: Point) -> Leaves:
        """Return ∂_λ F where F does not read λ."""
        return zeros_like(at.lam)

    def keeps_graph(self, at: Point) -> bool:
        """Return whether the graph of a pass at a point may outlive the pass."""
        return True

    # ------------------------------------------------------------------------------------- the choice of a product mode

    def select_mode(self, at: Point, batch: Batch) -> ProductMode:
        """Decide how products are computed, once: by `hvp_method`, or by taking one."""
        if self._mode is None:
            exact = self._candidates(passes.device_of(at.omega))
            modes: tuple[ProductMode, ...] = (*exact, "finite_difference")
            self._mode = modes[self.reducer.most_cautious(lambda: self._probe(at, batch, exact))]
        return self._mode

    def _probe(self, at: Point, batch: Batch, exact: Sequence[ExactMode]) -> int:
        """Return the number of the first exact mode that gives a product, and the right one; else, where differences
        are allowed, how many there are."""
        view_at = self._first_order("inner", batch)
        v = view_at(at, False).grad_omega
        missing = ""
        for number, mode in enumerate(exact):
            try:
                product = self._exact(at, batch, mode).probe(v)
            except RuntimeError as error:  # NotImplementedError is one
                named = missing_derivative(error)
                if named is None:
                    raise
                missing = named
            else:
                if self._confirmed(product, view_at, at, v):
                    return number
                missing = "an operation whose backward pass is cut off from omega"
        if self.hvp_method == "autograd":
            raise NotImplementedError(
                f"Exact products need a second derivative of the inner loss G, and {missing} has none. Use "
                "hvp_method='finite_difference' (products from first-order gradients), or an operation that has one; "
                "for attention, torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
            )
        warnings.warn(
            f"The inner loss G has no second derivative ({missing}): products are taken by differences of first-order "
            "gradients. Say hvp_method='finite_difference' to choose this, or hvp_method='autograd' to have an error "
            "instead.",
            FiniteDifferenceWarning,
            stacklevel=4,
        )
        return len(exact)

    def _confirmed(self, product: Tree, view_at: Callable[[Point, bool], View], at: Point, v: Tree) -> bool:
        """Whether H v is there at all: PyTorch takes the derivative of a backward pass that was cut off, as a custom
        function's may be, for zero, without an error. Differences of the gradient show it."""
        if float(norm(product)) != 0:
            return True
        view = DifferenceView(view_at, at)
        size = float(norm(view.hvp(v)))
        reach = view.rel_step * max(1.0, float(norm(at.omega)))
        rounding = 100 * view.eps * float(norm(v)) ** 2 / reach  # of a difference of gradients; v is one
        return not size > rounding

    def _candidates(self, device: torch.device) -> tuple[ExactMode, ...]:
        """The exact modes to try, the cheapest first."""
        return (FORWARD, REVERSE) if device.type == "cuda" else (REVERSE,)

    def _exact(self, at: Point, batch: Batch, mode: ExactMode, *, update_buffers: bool = False) -> LossView:
        return LossView(self, "inner", at, batch, mode, update_buffers=update_buffers)

    def _first_order(self, level: Level, batch: Batch) -> Callable[[Point, bool], View]:
        def view_at(at: Point, update_buffers: bool) -> View:
            return LossView(self, level, at, batch, update_buffers=update_buffers)

        return view_at


class LossView(View):
    """A loss at one point on one batch: first derivatives by `backward`, products by a second pass.

    A view gives up its graph with the first product that is asked of it, and a further product makes it anew; where
    several are wanted at one point, ask `linearized()` for them.
    """

    def __init__(
        self,
        problem: LossProblem,
        level: Level,
        at: Point,
        batch: Batch,
        mode: ExactMode = REVERSE,
        *,
        update_buffers: bool = False,
    ) -> None:
        self._problem = problem
        self._level: Level = level
        self._at = at
        self._batch = batch
        self._mode = mode
        self._update_buffers = update_buffers
        local_part = problem.reducer.local_part
        self._parts = [local_part(data, seed, number) for number, (data, seed) in enumerate(batch.parts)]
        self._unmoved = Unmoved(at)
        self._value: Tensor | None = None
        self._omega: Tree | None = None
        self._lam: Leaves | None = None
        self.reads_lam: bool | None = None
        """Whether the loss was seen to read λ; None before a pass that looked at the whole batch."""
        self._keep = False
        self._graph: tuple[GraphLeaves, Gradients] | None = None

    @property
    def eps(self) -> float:
        return passes.rounding_unit(self._at.omega, self._problem.autocast_dtype)

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._differentiate(omega=False, lam=False)
        assert self._value is not None
        return self._value

    @property
    def known_value(self) -> Tensor | None:
        return self._value

    def linearized(self) -> Self:
        self._keep = len(self._parts) == 1 and self._problem.keeps_graph(self._at)
        return self

    def probe(self, v: Tree) -> Tree:
        """Take every kind of product that PyTorch may lack; return H v."""
        return self._pulled(v, omega=True, lam=False, check=True)[0] if not self._mode.hvp_forward else self.hvp(v)

    # ------------------------------------------------------------------------------------------------------ gradients

    def gradients(self, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        outer = self._level == "outer"
        ignores = outer and self._ignores_lam
        if lam and ignores and self._lam is None:
            self._lam = self._problem.no_lam(self._at)
        wants_omega = omega and self._omega is None
        wants_lam = lam and self._lam is None
        if wants_omega and outer and not ignores and self._lam is None:
            wants_lam = True  # in the same pass, for next to nothing
        if wants_omega and not wants_lam and self._keep and not self._mode.hvp_forward:
            self._pulled(self._at.omega, omega=False, lam=False)  # leaves ∂_ω, and the graph for the products
        elif wants_omega or wants_lam:
            self._differentiate(omega=wants_omega, lam=wants_lam)
        return (self._omega or {}) if omega else {}, (self._lam or {}) if lam else {}

    @property
    def _ignores_lam(self) -> bool:
        """Whether F is known not to read λ on this batch."""
        problem = self._problem
        return problem.outer_uses_lam is False or (
            problem.outer_uses_lam is None and problem.ignores_lam.get(self._batch, False)
        )

    def _differentiate(self, *, omega: bool, lam: bool) -> None:
        """Pass forward and back over each micro-batch; gradients add up in `.grad`, as in training."""
        problem = self._problem
        values = []
        with problem.leaves(self._level, self._at, self._passed, omega=omega, lam=lam) as leaves:
            for part in self._parts:
                with self._forward(leaves, part) as loss:
                    value = self._scaled(loss, part)
                    if value.requires_grad:
                        problem.backward(value, leaves, omega=omega, last=part is self._parts[-1])
                    values.append(value.detach())
            by_omega: Derivatives = {name: t.grad for name, t in leaves.omega.items()} if omega else {}
            by_lam: Derivatives = {name: t.grad for name, t in leaves.lam.items()} if lam else {}
        self._update_buffers = False
        value = sum(values[1:], values[0])
        (self._value,), (by_omega,), by_lam = self._mean([value], [by_omega], by_lam, leaves, by_backward=True)
        if omega:
            self._omega = self._by_omega(by_omega)
        if lam:
            if not problem.reducer.partial:
                self.reads_lam = any(g is not None for g in by_lam.values())
                if self._level == "outer" and problem.outer_uses_lam is None:
                    problem.ignores_lam[self._batch] = not self.reads_lam
            self._lam = problem.by_lam(self._level, by_lam, self._data, self._at)

    # ------------------------------------------------------------------------------------------------------- products

    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        if omega and not lam and self._mode.hvp_forward and self._graph is None:
            return self._hvp_forward(v), {}
        return self._pulled(v, omega=omega, lam=lam)

    def _pulled(self, v: Tree, *, omega: bool, lam: bool, check: bool = False) -> tuple[Tree, Leaves]:
        """H v and J v by a reverse pass over <∂_ω, v>, which also yields the gradient."""
        direction = aligned(v, self._at.omega)
        if self._graph is not None:
            self._unmoved.check()
            leaves, grads = self._graph
            second = _pull(leaves, grads, direction, omega=omega, lam=lam, retain=True)
            by_omega, by_lam = self._split(second, omega=omega, lam=lam)
            _, (by_omega,), by_lam = self._mean([], [by_omega], by_lam, leaves)
            return self._second(by_omega, by_lam, omega=omega, lam=lam)
        first: list[Tensor | None] = []
        second = []
        values = []
        # A node that is differentiable once is marked as such only where λ, too, requires a gradient.
        wants_lam = lam or check or self._keep
        with self._problem.leaves(self._level, self._at, self._passed, omega=True, lam=wants_lam) as leaves:
            for part in self._parts:
                with self._forward(leaves, part, unwrapped=True) as loss:
                    value = self._scaled(loss, part)
                    grads = passes.with_graph(value, leaves.omega)
                    if check:
                        passes.check_twice_differentiable(grads)
                    if self._keep:
                        self._graph = leaves, grads
                    pulled = _pull(leaves, grads, direction, omega=omega, lam=lam, retain=self._keep)
                    first = _plus(first, [None if g is None else g.detach() for g in grads])
                    second = _plus(second, pulled)
                    values.append(value.detach())
                    del grads
        self._update_buffers = False
        gradient: Derivatives = dict(zip(leaves.omega, first, strict=True))
        if lam and not omega and self._problem.reducer.reduces:
            gradient = {}  # nobody asks for it, and it would travel
        by_omega, by_lam = self._split(second, omega=omega, lam=lam)
        value = sum(values[1:], values[0])
        (self._value,), (gradient, by_omega), by_lam = self._mean([value], [gradient, by_omega], by_lam, leaves)
        if gradient:
            self._omega = self._by_omega(gradient)
        return self._second(by_omega, by_lam, omega=omega, lam=lam)

    def _split(self, second: Gradients, *, omega: bool, lam: bool) -> tuple[Derivatives, Derivatives]:
        """What was pulled back, by ω and by λ."""
        count = len(self._at.omega) if omega else 0
        by_omega = dict(zip(self._at.omega, second[:count], strict=True)) if omega else {}
        return by_omega, dict(zip(self._at.lam, second[count:], strict=True)) if lam else {}

    def _second(self, by_omega: Derivatives, by_lam: Derivatives, *, omega: bool, lam: bool) -> tuple[Tree, Leaves]:
        hv = zeros_for_none(list(by_omega.values()), self._at.omega) if omega else {}
        return hv, self._by_lam(by_lam) if lam else {}

    def _by_lam(self, derivatives: Derivatives) -> Leaves:
        """Second derivatives by λ, of which at least one must exist for the inner loss."""
        if self._level == "inner" and not self._problem.reducer.partial:
            passes.check_any_gradient(derivatives.values())
        return self._problem.by_lam(self._level, derivatives, self._data, self._at)

    def mixed_hvp_transpose(self, u: Tree) -> Tree:
        total: list[Tensor | None] = []
        data = self._passed
        with self._problem.leaves(self._level, self._at, data, omega=True, lam=True) as leaves:
            for part in self._parts:
                with self._forward(leaves, part, unwrapped=True) as loss:
                    by_lam = passes.with_graph(self._scaled(loss, part), leaves.lam)
                    if not self._problem.reducer.partial:
                        passes.check_any_gradient(by_lam)
                    pulled = passes.vjp(by_lam, self._of_leaves(u, leaves, data), list(leaves.omega.values()))
                    total = _plus(total, pulled)
        _, (product,), _ = self._mean([], [dict(zip(leaves.omega, total, strict=True))], {}, leaves)
        return zeros_for_none(list(product.values()), self._at.omega)

    def _of_leaves(self, u: Tree, leaves: GraphLeaves, data: Sequence[Any]) -> list[Tensor]:
        """A tree of the form of λ, for the leaves."""
        return aligned(u, leaves.lam)

    def _hvp_forward(self, v: Tree) -> Tree:
        """H v by forward over reverse; leaves the gradient."""
        (part,) = self._one_part("forward_over_reverse")
        with (
            self._problem.leaves(self._level, self._at, [part.data], omega=True, lam=False) as leaves,
            forward_ad.dual_level(),
            torch.enable_grad(),
        ):
            dual = leaves._replace(omega=passes.duals(leaves.omega, v))
            with self._forward(dual, part) as loss:
                value = self._scaled(loss, part)
                first, second = forward_gradients(value, dual.omega)
                value = passes.primal(value).detach()
        values, by_omega, _ = self._mean([value], [first, second], {}, leaves)
        return self._keep_forward(values, *by_omega)

    def _keep_forward(self, values: list[Tensor], first: Derivatives, second: Derivatives) -> Tree:
        """Keep the value, where there is one, and the gradient of a pass; return its H v."""
        self._update_buffers = False
        if values:
            (self._value,) = values
        self._omega = self._by_omega(first)
        return zeros_for_none(list(second.values()), self._at.omega)

    # ---------------------------------------------------------------------------------------------------------- passes

    def _one_part(self, what: str) -> list[Part]:
        if len(self._parts) > 1:
            raise TypeError(f"{what} takes whole batches. Got {len(self._parts)} micro-batches.")
        return self._parts

    def _mean(
        self,
        values: list[Tensor],
        by_omega: list[Derivatives],
        by_lam: Derivatives,
        leaves: GraphLeaves,
        *,
        by_backward: bool = False,
    ) -> tuple[list[Tensor], list[Derivatives], Derivatives]:
        """Values and derivatives on the whole batch, from those on this process's part."""
        if not self._problem.reducer.reduces:
            return values, by_omega, by_lam
        data = [data for data, _ in self._batch.parts]
        lam_rows = self._problem.reads_rows(self._level)
        return self._problem.reducer.mean(
            data, values, by_omega, by_lam, leaves, lam_rows=lam_rows, by_backward=by_backward
        )

    @property
    def _data(self) -> list[Any]:
        """The data that reduced derivatives are of, in micro-batches."""
        return [self._problem.reducer.whole(data) for data, _ in self._batch.parts]

    @property
    def _passed(self) -> list[Any]:
        """The data that this process passes, in micro-batches."""
        return [part.data for part in self._parts]

    def _forward(self, leaves: GraphLeaves, part: Part, *, unwrapped: bool = False) -> AbstractContextManager[Tensor]:
        """The loss on this process's part of a micro-batch."""
        self._unmoved.check()
        return self._problem.forward(
            self._level, leaves, part, self._batch, update_buffers=self._update_buffers, unwrapped=unwrapped
        )

    def _scaled(self, loss: Tensor, part: Part) -> Tensor:
        """The loss on a part, such that those of all parts add up to that of the batch."""
        weight = part.weight / len(self._parts)
        return loss if weight == 1.0 else loss * weight

    def _by_omega(self, derivatives: Derivatives) -> Tree:
        """Derivatives by ω, of which at least one must exist."""
        if not self._problem.reducer.partial:
            passes.check_depends(derivatives.values(), LOSS_NAMES[self._level])
        return zeros_for_none(list(derivatives.values()), self._at.omega)


def forward_gradients(value: Tensor, omega: Tree) -> tuple[Derivatives, Derivatives]:
    """Return ∂_ω and its derivative along the tangents of ω, from a loss of dual tensors."""
    grads: Gradients = [None] * len(omega)
    if value.requires_grad:
        grads = torch.autograd.grad(value, list(omega.values()), allow_unused=True)
    first = {name: None if g is None else passes.primal(g).detach() for name, g in zip(omega, grads, strict=True)}
    tangents = [None if g is None else passes.tangent(g) for g in grads]
    return first, {name: None if t is None else t.detach() for name, t in zip(omega, tangents, strict=True)}


def _pull(
    leaves: GraphLeaves, grads: Gradients, direction: list[Tensor], *, omega: bool, lam: bool, retain: bool
) -> list[Tensor | None]:
    """The derivative of <∂_ω, direction> by ω, λ, both or neither."""
    if not (omega or lam):
        return []
    wrt = [*(leaves.omega.values() if omega else ()), *(leaves.lam.values() if lam else ())]
    return list(passes.vjp(grads, direction, wrt, retain_graph=retain))


def _plus(total: list[Tensor | None], part: Gradients) -> list[Tensor | None]:
    if not total:
        return list(part)
    return [a if b is None else b if a is None else a + b for a, b in zip(total, part, strict=True)]


class Problem(LossProblem):
    """A bilevel problem from two functions of their arguments alone.

    Random layers, such as dropout, are allowed if the batches have a seed.

    Args:
        inner_loss: G(λ, ω; batch), called as ``inner_loss(lam, omega, batch)``; returns a 0-d tensor.
        outer_loss: F(λ, ω; batch), of the same form.
        outer_uses_lam: whether F itself reads λ. With False, as in data cleaning, ∂_λ F costs nothing. By default each
            batch's first pass finds out.
        hvp_method: how products are computed: "auto", "autograd", "finite_difference", or a mode of autograd,
            "forward_over_reverse" or "reverse_over_reverse".
        autocast_dtype: dtype of autocast in every pass, such as torch.bfloat16; λ, ω, v and d stay as they are.
        reducer: how processes share a batch.

    Raises:
        TypeError: if a loss is not callable.
        ValueError: if an option is unknown.

    Examples:
        >>> problem = fsla.Problem(inner_loss, outer_loss, outer_uses_lam=False)
        >>> problem.inner_at(at, batch).grad_omega
        {'w': tensor([1., 4.])}
        >>> problem.inner_at(at, batch).mixed_hvp(v)
        {'x': tensor([-1., -0.])}
    """

    def __init__(
        self,
        inner_loss: Loss,
        outer_loss: Loss,
        *,
        outer_uses_lam: bool | None = None,
        hvp_method: HvpMethod = "auto",
        autocast_dtype: torch.dtype | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        for name, loss in (("inner_loss", inner_loss), ("outer_loss", outer_loss)):
            if not callable(loss):
                raise TypeError(f"{name} must be callable as (lam, omega, batch). Got {type(loss).__name__} instead.")
        super().__init__(
            hvp_method=hvp_method, outer_uses_lam=outer_uses_lam, autocast_dtype=autocast_dtype, reducer=reducer
        )
        self.inner_loss = inner_loss
        self.outer_loss = outer_loss

    def leaves(
        self, level: Level, at: Point, data: Sequence[Any], *, omega: bool, lam: bool
    ) -> AbstractContextManager[GraphLeaves]:
        read = self.lam_of_batch(at.lam, data) if self.reads_rows(level) else at.lam
        leaves = GraphLeaves(
            {name: t.detach().requires_grad_(omega) for name, t in at.omega.items()},
            {name: t.detach().requires_grad_(lam) for name, t in read.items()},
        )
        return nullcontext(leaves)

    def forward(
        self, level: Level, leaves: GraphLeaves, part: Part, batch: Batch, *, update_buffers: bool, unwrapped: bool
    ) -> AbstractContextManager[Tensor]:
        if part.weight == 0:  # No sample of the batch is this process's.
            return nullcontext(torch.zeros((), device=passes.device_of(leaves.omega)))
        loss = self.outer_loss if level == "outer" else self.batch_loss
        name = LOSS_NAMES[level]
        return nullcontext(passes.evaluate(loss, leaves.lam, leaves.omega, part, name, self.autocast_dtype))

    def backward(self, value: Tensor, leaves: GraphLeaves, *, omega: bool, last: bool) -> None:
        inputs = [t for t in (*leaves.omega.values(), *leaves.lam.values()) if t.requires_grad]
        if inputs:
            torch.autograd.backward(value, inputs=inputs)

    def lam_of_batch(self, lam: Tree, data: Sequence[Any]) -> Tree:
        """Return what the inner loss reads of λ on a batch."""
        return lam

    def batch_loss(self, lam: Tree, omega: Tree, data: Any) -> Tensor:
        """Return G; `lam` is what the batch reads of λ."""
        return self.inner_loss(lam, omega, data)


_MISSING = (
    r"derivative for (\S+) is not implemented",
    r"forward AD with (\S+) that does not support it",
    r"(torch\.compile) with aot_autograd does not currently support double backward",
    r"(backward function was compiled) with non-empty donated buffers",
    r"differentiate twice (a function that was marked with @once_differentiable)",
    r"(.*(?:not implemented|not support).*)",
)


def missing_derivative(error: RuntimeError) -> str | None:
    """Return the operation that has no second derivative, as far as PyTorch names it; None for other errors."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    for pattern in _MISSING:
        match = re.search(pattern, text)
        if match:
            return match[1]
    return text if isinstance(error, NotImplementedError) else None
