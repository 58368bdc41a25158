"""Networks as functions of ω: an nn.Module becomes a tree of parameters and a pure function of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsla.tree import Tree


def functional(model: nn.Module) -> tuple[Tree, Callable[..., Any]]:
    """Splits a network into its parameters and a function of them.

    Returns (omega, net): `omega` holds the trainable parameters by name, detached from the model and so a starting
    point; ``net(omega, *inputs)`` is the network's output with those parameters in the place of its own. A missing or a
    misspelt name is an error, never a silent use of the model's own weight. Frozen parameters and buffers are read
    from the model.

    Networks that change or draw something on each forward pass (running statistics, dropout) are refused: every oracle
    calls the network anew and must see the same function. What their modules do not tell, the first call does.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module. Got {type(model).__name__} instead.")
    trainable = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("model must have at least one parameter that requires a gradient. Got none.")
    moving = [(name or "the model", m) for name, m in model.named_modules() if _moves(m)]
    shapes = {name: t.shape for name, t in trainable.items()}
    tried: set[bool] = set()

    def net(omega: Tree, *inputs: Any, **named: Any) -> Any:
        _refuse(moving)
        for name, t in omega.items():
            if t.shape != shapes.get(name, t.shape):  # it might broadcast
                raise ValueError(
                    f"omega[{name!r}] must have shape {tuple(shapes[name])}. Got {tuple(t.shape)} instead."
                )
        fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        buffers = dict(model.named_buffers())

        def call() -> Any:
            return functional_call(model, {**fixed, **buffers, **omega}, inputs, named, strict=True)

        if model.training in tried:
            return call()
        tried.add(model.training)  # the first call in each mode: does it draw or write anything?
        random, versions = _random_state(), {name: b._version for name, b in buffers.items()}
        out = call()
        if not all(torch.equal(a, b) for a, b in zip(random, _random_state(), strict=True)):
            raise ValueError(f"{_ALONE}, but it draws random numbers on each pass. {_REMEDY}")
        written = [name for name, b in buffers.items() if b._version != versions[name]]
        if written:
            raise ValueError(f"{_ALONE}, but it writes its buffers {written} on each pass. {_REMEDY}")
        return out

    _refuse(moving)
    return trainable, net


_ALONE = "The network must be a function of omega and the batch alone"
_REMEDY = "Call model.eval(), or use GroupNorm or LayerNorm without dropout."


def _random_state() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]  # type: ignore[no-untyped-call]


def _moves(m: nn.Module) -> bool:
    return _has_statistics(m) or (isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0)


def _has_statistics(m: nn.Module) -> bool:
    return getattr(m, "running_mean", None) is not None


def _refuse(moving: list[tuple[str, nn.Module]]) -> None:
    for name, m in moving:
        if m.training:
            why = "moves its running statistics" if _has_statistics(m) else "draws a new mask"
            raise ValueError(
                f"{_ALONE}, but {name!r} ({type(m).__name__}) in training mode {why} on each pass. {_REMEDY}"
            )
