"""The five oracles from two losses, by automatic differentiation. Which mode computes a product is decided here.

    reverse   ∂_ω G is taken with its graph; H v and J v are then one more reverse pass each over <∂_ω G, v>, or one
              pass for both
    forward   H v is the derivative of ∂_ω G along v: one pass gives both and keeps no graph

Reverse is the cheaper one on a CPU (2.4 SGD steps for ∂_ω G and H v on a small convolutional network, against 2.7; on
tiny problems 1.8 against 5.6), forward on a GPU (2.6 against 3.9: cuDNN is slow at second derivatives of convolutions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, TypeVar

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from fsla.checks import pick
from fsla.problem import Batch, Inner, Outer, Point
from fsla.tree import Tree, detach, row, zeros_like

Loss = Callable[[Tree, Tree, Batch], Tensor]
Mode = Literal["auto", "forward", "reverse"]
T = TypeVar("T")


class Problem:
    """A bilevel problem from its two losses.

    Args:
        inner_loss: G(λ, ω; batch), called as ``inner_loss(lam, omega, batch)``; returns a 0-d tensor.
        outer_loss: F(λ, ω; batch), of the same form.
        direct: whether F itself reads λ. By default this is found out when ∂_λ F is first asked for and then kept:
            where F does not read λ, as in data cleaning, ∂_λ F costs nothing. Say True if F reads λ on some batches
            only.
        mode: how H v is computed, "forward" or "reverse" (see the module); "auto" chooses by the device of ω. Where
            PyTorch has no forward mode for an operation, "auto" uses reverse mode from then on.

    Both losses must be functions of their arguments alone: no randomness inside, no statistics that move.
    """

    def __init__(self, inner_loss: Loss, outer_loss: Loss, *, direct: bool | None = None, mode: Mode = "auto") -> None:
        for name, loss in (("inner_loss", inner_loss), ("outer_loss", outer_loss)):
            if not callable(loss):
                raise TypeError(f"{name} must be callable as (lam, omega, batch). Got {type(loss).__name__} instead.")
        self.inner_loss = inner_loss
        self.outer_loss = outer_loss
        self.direct = direct
        self.several = False
        """Whether several products are asked for at one point: found out, then kept. Graphs are held only if so."""
        self.mode = pick(mode, dict[str, Mode](auto="auto", forward="forward", reverse="reverse"), "mode")

    def inner_at(self, at: Point, batch: Batch) -> Inner:
        return _Linearised(self, at, batch)

    def outer_at(self, at: Point, batch: Batch) -> Outer:
        return _Evaluated(self, at, batch)


class _Linearised:
    """∂_ω G at one point on one batch: in reverse mode one graph, as many products as wanted."""

    def __init__(self, problem: Problem, at: Point, batch: Batch) -> None:
        self._problem, self._batch = problem, batch
        self._lam, self._omega = _leaves(at.lam), _leaves(at.omega)
        self._used = False

    def _loss(self, lam: Tree, omega: Tree) -> Tensor:
        return _evaluate(self._problem.inner_loss, lam, omega, self._batch, "inner loss G")

    @cached_property
    def _value(self) -> Tensor:
        return self._loss(self._lam, self._omega)

    @cached_property
    def _grad(self) -> Tree:
        return _first(self._value, self._omega, "inner loss G", create_graph=True)

    @cached_property
    def value(self) -> Tensor:
        return self._value.detach()

    @cached_property
    def grad(self) -> Tree:
        return detach(self._grad)

    def hvp(self, v: Tree) -> Tree:
        found = self._in_forward_mode(self._on_gpu, lambda: self._forward(v))
        return _filled(self._pull(v, list(self._omega.values())), self._omega) if found is None else found

    def cross(self, v: Tree) -> Tree:
        return self._of_lam(self._pull(v, list(self._lam.values())))

    def hvp_cross(self, v: Tree) -> tuple[Tree, Tree]:
        both = self._pull(v, [*self._omega.values(), *self._lam.values()])
        n = len(self._omega)
        return _filled(both[:n], self._omega), self._of_lam(both[n:])

    def cross_t(self, u: Tree) -> Tree:
        lam = list(self._lam.values())
        by_lam = _reached(torch.autograd.grad(self._value, lam, create_graph=True, allow_unused=True))
        return _filled(_vjp(by_lam, row(u, self._lam), list(self._omega.values())), self._omega)

    def _of_lam(self, grads: Sequence[Tensor | None]) -> Tree:
        return _filled(_reached(grads), self._lam)

    def _pull(self, v: Tree, wrt: list[Tensor]) -> Sequence[Tensor | None]:
        """The derivative of <∂_ω G, v>. Gives up the graph, piece by piece, unless more products may follow."""
        seeds, grads = row(v, self._omega), self._grad
        self._problem.several |= self._used
        self._used, keep = True, self._problem.several
        if not keep:
            self.value, self.grad = self._value.detach(), detach(grads)
            del self._value, self._grad
        return _vjp(list(grads.values()), seeds, wrt, retain_graph=keep)

    @property
    def _on_gpu(self) -> bool:
        return next(iter(self._omega.values())).device.type == "cuda"

    def _in_forward_mode(self, by_itself: bool, compute: Callable[[], T]) -> T | None:
        """A product in forward mode, or None: where reverse mode is asked for, cheaper (its graph may be there already)
        or, PyTorch having no forward mode for an operation, the only one."""
        mode = self._problem.mode
        if self._used or "_grad" in self.__dict__ or not (mode == "forward" or (mode == "auto" and by_itself)):
            return None
        try:
            return compute()
        except NotImplementedError:
            if mode == "forward":
                raise
            self._problem.mode = "reverse"
            return None

    def _forward(self, v: Tree) -> Tree:
        """H v; leaves the gradient."""
        with forward.dual_level(), torch.enable_grad():
            omega = _duals(self._omega, v)
            grads = _first(self._loss(detach(self._lam), omega), omega, "inner loss G")
            parts = {name: forward.unpack_dual(g) for name, g in grads.items()}  # type: ignore[no-untyped-call]
            self.grad = {name: primal.detach() for name, (primal, _) in parts.items()}
            return _filled([None if t is None else t.detach() for _, t in parts.values()], self._omega)


class _Evaluated:
    """F at one point on one batch."""

    def __init__(self, problem: Problem, at: Point, batch: Batch) -> None:
        self._problem, self._batch = problem, batch
        self._lam, self._omega = _leaves(at.lam), _leaves(at.omega)

    @cached_property
    def _value(self) -> Tensor:
        return _evaluate(self._problem.outer_loss, self._lam, self._omega, self._batch, "outer loss F")

    @property
    def value(self) -> Tensor:
        return self._value.detach()

    @cached_property
    def d_omega(self) -> Tree:
        last = self._problem.direct is False  # nothing else will be asked of the graph
        grads = detach(_first(self._value, self._omega, "outer loss F", retain_graph=not last))
        if last:
            self._value = self._value.detach()
        return grads

    @cached_property
    def d_lam(self) -> Tree:
        if self._problem.direct is False:
            return zeros_like(self._lam)
        if not self._value.requires_grad:
            raise ValueError("The outer loss F must depend on omega, but no tensor of omega reaches it.")
        lam = list(self._lam.values())
        grads = torch.autograd.grad(self._value, lam, retain_graph=True, allow_unused=True)
        if self._problem.direct is None:
            self._problem.direct = any(g is not None for g in grads)
        return _filled(grads, self._lam)


def _leaves(x: Tree) -> Tree:
    return {name: t.detach().requires_grad_() for name, t in x.items()}


def _duals(omega: Tree, v: Tree) -> Tree:
    """ω with the tangent v; call it within a dual level."""
    pairs = zip(omega.items(), row(v, omega), strict=True)
    return {name: forward.make_dual(t, u) for (name, t), u in pairs}  # type: ignore[no-untyped-call]


def _evaluate(loss: Loss, lam: Tree, omega: Tree, batch: Batch, name: str) -> Tensor:
    try:
        with torch.enable_grad():
            value: object = loss(lam, omega, batch)
    except Exception as error:
        error.add_note(f"(raised while the {name} was called with lam {sorted(lam)} and omega {sorted(omega)})")
        raise
    if not isinstance(value, Tensor):
        raise TypeError(f"The {name} must return a 0-d tensor. Got {type(value).__name__} instead.")
    if value.ndim != 0 or not value.dtype.is_floating_point:
        raise ValueError(
            f"The {name} must return a real 0-d tensor. Got shape {tuple(value.shape)}, {value.dtype} instead. "
            "Reduce it with .mean() or .sum()."
        )
    return value


def _first(value: Tensor, wrt: Tree, name: str, *, create_graph: bool = False, retain_graph: bool = False) -> Tree:
    """The gradient of a loss with respect to ω."""
    grads: Sequence[Tensor | None] = [None]
    if value.requires_grad:
        grads = torch.autograd.grad(
            value,
            list(wrt.values()),
            create_graph=create_graph,
            retain_graph=create_graph or retain_graph,
            allow_unused=True,
        )
    if all(g is None for g in grads):
        raise ValueError(
            f"The {name} must depend on omega, but no tensor of omega reaches it. It must use the omega that it is "
            "given (not a module's own parameters), without .detach(), .item() or torch.no_grad()."
        )
    return _filled(grads, wrt)


def _vjp(
    outputs: Sequence[Tensor | None], seeds: list[Tensor], wrt: list[Tensor], *, retain_graph: bool = True
) -> Sequence[Tensor | None]:
    live = [(out, seed) for out, seed in zip(outputs, seeds, strict=True) if out is not None and out.requires_grad]
    if not live:
        return [None] * len(wrt)
    outs, grads = zip(*live, strict=True)
    return torch.autograd.grad(outs, wrt, grads, retain_graph=retain_graph, allow_unused=True)


def _reached(grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Derivatives by λ, of which at least one must exist."""
    if all(g is None for g in grads):
        raise ValueError(
            "The inner loss G must depend on lam, but its gradient in omega does not: with J = 0 the outer problem "
            "cannot act through omega. It must use the lam that it is given, in a term that also holds omega."
        )
    return grads


def _filled(grads: Sequence[Tensor | None], like: Tree) -> Tree:
    """A tree from gradients; a tensor that the loss does not reach has the gradient zero."""
    pairs = zip(like.items(), grads, strict=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in pairs}
