"""The oracles from two losses, by automatic differentiation. Which mode computes a product is decided here.

    reverse      ∂_ω G is taken with its graph; H v and J v are then one more reverse pass each over <∂_ω G, v>, or one
                 pass for both
    forward      H v is the derivative of ∂_ω G along v: one pass gives both and keeps no graph
    difference   both from gradients at ω ± εv (see `fsla.problems._differences`), where there is no second derivative

Of the exact ones reverse is the cheaper on a CPU (2.4 SGD steps for ∂_ω G and H v on a small convolutional network,
against 2.7; on tiny problems 1.8 against 5.6), forward on a GPU (2.6 against 3.9: cuDNN is slow at second derivatives).
"""

from __future__ import annotations

import re
import warnings
from typing import Literal

import torch
from torch import Tensor

from fsla._checks import pick
from fsla._tree import Leaves, Tree, norm, zeros_like
from fsla.problems import _passes as passes
from fsla.problems._batches import Batch
from fsla.problems._differences import DifferencesInner, StepCheck, compare_steps
from fsla.problems._passes import Loss
from fsla.problems._problem import Inner, Outer, Point
from fsla.problems._views import ExactView, FirstOrderView, OuterView, Ways

Mode = Literal["auto", "exact", "forward", "reverse", "difference"]
MODES: tuple[Mode, ...] = ("auto", "exact", "forward", "reverse", "difference")


class DifferenceWarning(UserWarning):
    """A network has no second derivative, and products are taken by differences."""


class Problem:
    """A bilevel problem from its two losses.

    Args:
        inner_loss: G(λ, ω; batch), called as ``inner_loss(lam, omega, batch)``; returns a 0-d tensor.
        outer_loss: F(λ, ω; batch), of the same form.
        direct: whether F itself reads λ. Say False where it does not, as in data cleaning: ∂_λ F then costs nothing.
        mode: how products are computed. "exact": by automatic differentiation, forward or reverse by the device.
            "forward", "reverse": in that mode. "difference": from first-order gradients alone. "auto": exact, but
            where the network has no second derivative, differences, with one warning that names the operation.
        autocast_dtype: the dtype of autocast in every pass, such as torch.bfloat16; λ, ω, v and d stay as they are.

    Both losses must be functions of their arguments alone. Random layers, such as dropout, are allowed where the
    sample has a seed. "auto" and "exact" are settled once, by a product at the first point that is looked at.
    """

    def __init__(
        self,
        inner_loss: Loss,
        outer_loss: Loss,
        *,
        direct: bool = True,
        mode: Mode = "auto",
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        for name, loss in (("inner_loss", inner_loss), ("outer_loss", outer_loss)):
            if not callable(loss):
                raise TypeError(f"{name} must be callable as (lam, omega, batch). Got {type(loss).__name__} instead.")
        if autocast_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast_dtype must be torch.bfloat16 or None. Got {autocast_dtype!r} instead: {_NO_SCALER}"
            )
        self.inner_loss = inner_loss
        self.outer_loss = outer_loss
        self.direct = direct
        self.mode = pick(mode, dict(zip(MODES, MODES, strict=True)), "mode")
        self.autocast_dtype = autocast_dtype
        forced: dict[str, Ways | Literal["difference"]] = {
            "forward": Ways(hvp_forward=True, slopes_forward=True),
            "reverse": Ways(hvp_forward=False, slopes_forward=False),
            "difference": "difference",
        }
        self._settled = forced.get(mode)
        """How products are computed; None until a point has been looked at."""
        self._exchanged: Problem | None = None
        """The problem with F in the role of G, once it was asked for."""

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        ways = self.settle(at, batch, seed)
        if ways == "difference":
            return DifferencesInner(self._first_order, at, batch, seed)
        return self._exact(at, batch, seed, ways)

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        return OuterView(self, at, batch, seed)

    def outer_products_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        """F in the role of G, with its products."""
        if self._exchanged is None:
            self._exchanged = _Exchanged(
                self.outer_loss, self.inner_loss, mode=self.mode, autocast_dtype=self.autocast_dtype
            )
        return self._exchanged.inner_at(at, batch, seed)

    def check_step(self, at: Point, batch: Batch, v: Tree, seed: int | None = None) -> StepCheck | None:
        """How much products by differences change with their step; None where products are exact."""
        if self.settle(at, batch, seed) != "difference":
            return None
        return compare_steps(self._first_order, at, batch, v, seed, None)

    def settle(self, at: Point, batch: Batch, seed: int | None = None) -> Ways | Literal["difference"]:
        """Decides how products are computed, once: by taking one, unless the mode says it."""
        if self._settled is None:
            self._settled = self._probed(at, batch, seed)
        return self._settled

    def _probed(self, at: Point, batch: Batch, seed: int | None) -> Ways | Literal["difference"]:
        """The first exact way that gives a product, and the right one; else differences, where they are allowed."""
        v = self._first_order(at, batch, seed).grad
        missing = ""
        for ways in self._candidates(passes.device_of(at.omega)):
            try:
                product = self._exact(at, batch, seed, ways).probe(v)
            except RuntimeError as error:  # NotImplementedError is one
                named = missing_derivative(error)
                if named is None:
                    raise
                missing = named
            else:
                if self._confirmed(product, at, batch, seed, v):
                    return ways
                missing = "an operation whose backward pass is cut off from omega"
        if self.mode == "exact":
            raise NotImplementedError(
                f"Exact products need a second derivative of the inner loss G, and {missing} has none. Use "
                "mode='difference' (products from first-order gradients), or an operation that has one; for attention, "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
            )
        warnings.warn(
            f"The inner loss G has no second derivative ({missing}): products are taken by differences of "
            "first-order gradients. Say mode='difference' to choose this, or mode='exact' to have an error instead.",
            DifferenceWarning,
            stacklevel=4,
        )
        return "difference"

    def _confirmed(self, product: Tree, at: Point, batch: Batch, seed: int | None, v: Tree) -> bool:
        """Whether H v is there at all: PyTorch takes the derivative of a backward pass that was cut off, as a custom
        function's may be, for zero, and says nothing. Differences of the gradient tell."""
        if float(norm(product)) != 0:
            return True
        view = DifferencesInner(self._first_order, at, batch, seed)
        size = float(norm(view.hvp(v)))
        reach = view.relative_step * max(1.0, float(norm(at.omega)))
        rounding = 100 * view.unit * float(norm(v)) ** 2 / reach  # of a difference of gradients; v is one
        return not size > rounding

    def _candidates(self, device: torch.device) -> tuple[Ways, ...]:
        """The exact ways to try, the cheapest first."""
        reverse = Ways(hvp_forward=False, slopes_forward=False)
        return (Ways(hvp_forward=True, slopes_forward=True), reverse) if device.type == "cuda" else (reverse,)

    def _exact(self, at: Point, batch: Batch, seed: int | None, ways: Ways) -> ExactView:
        return ExactView(self, at, batch, seed, ways)

    def _first_order(self, at: Point, batch: Batch, seed: int | None) -> FirstOrderView:
        return FirstOrderView(self, at, batch, seed)

    def of_batch(self, lam: Tree, batch: Batch) -> Tree:
        """What a batch reads of λ."""
        return lam

    def batch_loss(self, lam: Tree, omega: Tree, batch: Batch) -> Tensor:
        """G; `lam` is what the batch reads of λ."""
        return self.inner_loss(lam, omega, batch)

    def by_lam(self, of_batch: Tree, batch: Batch, lam: Tree) -> Leaves:
        """A derivative by what the batch reads of λ, as one by λ."""
        return of_batch

    def without_d_lam(self, lam: Tree) -> Leaves:
        """∂_λ F where F does not read λ."""
        return zeros_like(lam)


class _Exchanged(Problem):
    """F in the role of G. It need not read λ."""

    def _exact(self, at: Point, batch: Batch, seed: int | None, ways: Ways) -> ExactView:
        return ExactView(self, at, batch, seed, ways, coupled=False)


_NO_SCALER = "float16 would need a gradient scaler, whose skipped steps the method does not know."
_MISSING = (
    r"derivative for (\S+) is not implemented",
    r"forward AD with (\S+) that does not support it",
    r"(torch\.compile) with aot_autograd does not currently support double backward",
    r"(backward function was compiled) with non-empty donated buffers",
    r"differentiate twice (a function that was marked with @once_differentiable)",
    r"(.*(?:not implemented|not support).*)",
)


def missing_derivative(error: RuntimeError) -> str | None:
    """The operation that has no second derivative, as far as PyTorch names it; None for errors of another kind."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    for pattern in _MISSING:
        found = re.search(pattern, text)
        if found:
            return found[1]
    return text if isinstance(error, NotImplementedError) else None
