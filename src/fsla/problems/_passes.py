"""One pass through a loss, and its derivatives: the parts of every view.

Every call of a loss goes through `run`. There the random state is set from the sample's seed, so that a dropout
mask is the same at all points of a step; there autocast is switched on; and there the loss gets its own copy of each
tree, so that one which rebinds a name changes nothing for anybody else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from fsla._torch import load_forward_mode
from fsla._tree import Tree, aligned, lasting
from fsla.distributed._reducer import Part

T = TypeVar("T")
Loss = Callable[[Tree, Tree, Any], Tensor]
Gradients = Sequence[Tensor | None]


draws_from_seed: ContextVar[bool] = ContextVar("draws_from_seed", default=False)
"""Whether the pass that runs now has its random state from a seed, so that a network may draw in it."""


@contextmanager
def _fixed_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from the seed on the CPU and on the device, then put both random states back."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [g.get_state() for g in generators]
    token = draws_from_seed.set(True)
    try:
        for g in generators:
            g.manual_seed(seed)
        yield
    finally:
        draws_from_seed.reset(token)
        for g, state in zip(generators, before, strict=True):
            g.set_state(state)


def forward_context(
    seed: int | None, autocast_dtype: torch.dtype | None, device: torch.device
) -> AbstractContextManager[object]:
    """Return what a forward pass runs in: its random state, autocast, and gradients on."""
    if seed is None and autocast_dtype is None:
        return torch.enable_grad()
    return _seeded_or_cast(seed, autocast_dtype, device)


@contextmanager
def _seeded_or_cast(seed: int | None, autocast_dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    drawing = nullcontext() if seed is None else _fixed_random_state(seed, device)
    with torch.enable_grad(), drawing, casting(autocast_dtype, device):
        yield


def casting(autocast_dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return autocast to a dtype, where there is one."""
    return nullcontext() if autocast_dtype is None else torch.autocast(device.type, autocast_dtype)


def run(
    function: Callable[[Tree, Tree, Any], T],
    lam: Tree,
    omega: Tree,
    part: Part,
    name: str,
    autocast_dtype: torch.dtype | None = None,
) -> T:
    """Call a function of (λ, ω, batch) with gradients on. All calls of user code go through here."""
    try:
        with forward_context(part.seed, autocast_dtype, device_of(omega)):
            return function(dict(lam), dict(omega), part.data)
    except Exception as error:
        error.add_note(f"(raised while the {name} was called with lam {sorted(lam)} and omega {sorted(omega)})")
        raise


def evaluate(
    loss: Loss, lam: Tree, omega: Tree, part: Part, name: str, autocast_dtype: torch.dtype | None = None
) -> Tensor:
    """Run a loss; raise unless it returns a real 0-d tensor."""
    return scalar(run(loss, lam, omega, part, name, autocast_dtype), name)


def scalar(value: object, name: str) -> Tensor:
    """A loss as a tensor; raises unless it is a real 0-d one."""
    if not isinstance(value, Tensor):
        raise TypeError(f"The {name} must return a 0-d tensor. Got {type(value).__name__} instead.")
    if value.ndim != 0 or not value.dtype.is_floating_point:
        raise ValueError(
            f"The {name} must return a real 0-d tensor. Got shape {tuple(value.shape)}, {value.dtype} instead. "
            "Reduce it with .mean() or .sum()."
        )
    return value


def rounding_unit(x: Tree, autocast_dtype: torch.dtype | None) -> float:
    """The rounding unit of passes at x."""
    first = next(iter(lasting(x).values()))
    tf32 = torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    if autocast_dtype is not None:
        return torch.finfo(autocast_dtype).eps
    if first.dtype == torch.float32 and first.device.type == "cuda" and tf32:
        return 2.0**-10
    return torch.finfo(first.dtype).eps


def device_of(x: Tree) -> torch.device:
    return next(iter(lasting(x).values())).device


def leaves(x: Tree) -> Tree:
    """x cut off from any graph, ready to be differentiated by."""
    return {name: t.detach().requires_grad_() for name, t in x.items()}


@cache
def _load_forward_mode() -> None:
    """Load PyTorch's forward mode, which compiles a module at its first use, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_forward_mode()


def duals(omega: Tree, v: Tree) -> Tree:
    """ω with the tangent v; call it within a dual level."""
    _load_forward_mode()
    pairs = zip(omega.items(), aligned(v, omega), strict=True)
    return {name: forward.make_dual(t, u) for (name, t), u in pairs}  # type: ignore[no-untyped-call]


def tangent(t: Tensor) -> Tensor | None:
    """The tangent of a dual tensor, or None."""
    result: Tensor | None = forward.unpack_dual(t).tangent  # type: ignore[no-untyped-call]
    return result


def primal(t: Tensor) -> Tensor:
    """The tensor without its tangent."""
    result: Tensor = forward.unpack_dual(t).primal  # type: ignore[no-untyped-call]
    return result


def with_graph(value: Tensor, wrt: Mapping[str, Tensor]) -> Gradients:
    """The gradients of a loss with their graph; None for what it does not reach."""
    if not value.requires_grad:
        return [None] * len(wrt)
    return torch.autograd.grad(value, list(wrt.values()), create_graph=True, allow_unused=True)


def check_depends(gradients: Iterable[Tensor | None], name: str) -> None:
    """Raise unless at least one derivative by ω exists."""
    if all(g is None for g in gradients):
        raise ValueError(
            f"The {name} must depend on omega, but no tensor of omega reaches it. It must use the omega or the model "
            "that it is given, without .detach(), .item() or torch.no_grad()."
        )


def vjp(
    outputs: Sequence[Tensor | None], seeds: Sequence[Tensor], wrt: list[Tensor], *, retain_graph: bool = True
) -> Sequence[Tensor | None]:
    """The derivative of <outputs, seeds>; None for what is not reached."""
    live = [(out, seed) for out, seed in zip(outputs, seeds, strict=True) if out is not None and out.requires_grad]
    if not live:
        return [None] * len(wrt)
    outs, grads = zip(*live, strict=True)
    return torch.autograd.grad(outs, wrt, grads, retain_graph=retain_graph, allow_unused=True)


def check_twice_differentiable(grads: Iterable[Tensor | None]) -> None:
    """Raise if gradients came through a function that is differentiable once.

    PyTorch leaves a node that raises in their graph, but does not reach it from ω. A second derivative would silently
    lack the part of that function.
    """
    nodes = [g.grad_fn for g in grads if g is not None and g.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:
        if node.name().endswith("autograd::Error"):
            raise NotImplementedError(
                "trying to differentiate twice a function that was marked with @once_differentiable"
            )
        new = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= new
        nodes += new


def check_any_gradient(gradients: Iterable[Tensor | None]) -> None:
    """Raise unless at least one second derivative of G by λ exists."""
    if all(g is None for g in gradients):
        raise ValueError(
            "The inner loss G must depend on lam, but its gradient in omega does not: with J = 0 the outer problem "
            "cannot act through omega. It must use the lam or the outer modules that it is given, in a term that also "
            "holds omega."
        )


def zeros_for_none(grads: Gradients, like: Tree) -> Tree:
    """A tree from gradients; a tensor that the loss does not reach has the gradient zero."""
    pairs = zip(lasting(like).items(), grads, strict=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in pairs}
