"""Networks as functions of ω: an nn.Module becomes a tree of parameters and a pure function of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.func import functional_call

from fsla.tree import Tree


def functional(model: nn.Module) -> tuple[Tree, Callable[..., Any]]:
    """Splits a network into its parameters and a function of them.

    Returns (omega, net): `omega` holds the trainable parameters by name, detached from the model and so a starting
    point; ``net(omega, *inputs)`` is the network's output with those parameters in the place of its own. A missing or a
    misspelt name is an error, never a silent use of the model's own weight. Frozen parameters and buffers are read
    from the model.

    Modules that change or draw something on each forward pass (running statistics, dropout) are refused in training
    mode: every oracle calls the network anew and must see the same function.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module. Got {type(model).__name__} instead.")
    trainable = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("model must have at least one parameter that requires a gradient. Got none.")
    moving = [(name or "the model", m) for name, m in model.named_modules() if _moves(m)]

    def net(omega: Tree, *inputs: Any) -> Any:
        _refuse(moving)
        fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        return functional_call(model, {**fixed, **dict(model.named_buffers()), **omega}, inputs, strict=True)

    _refuse(moving)
    return trainable, net


def _moves(m: nn.Module) -> bool:
    return _has_statistics(m) or (isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0)


def _has_statistics(m: nn.Module) -> bool:
    return getattr(m, "running_mean", None) is not None


def _refuse(moving: list[tuple[str, nn.Module]]) -> None:
    for name, m in moving:
        if m.training:
            why = "moves its running statistics" if _has_statistics(m) else "draws a new mask"
            raise ValueError(
                f"The network must be a function of omega and the batch alone, but {name!r} ({type(m).__name__}) in "
                f"training mode {why} on each pass. Call model.eval(), or use GroupNorm or LayerNorm without dropout."
            )
