"""The torch optimisers of ω, v and λ: the user's, or by default plain ones whose rates are set during the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fsla._tree import Tree, axpy

Maker = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)  # 1/L once that is known


def made(
    given: Maker, parameters: Mapping[str, nn.Parameter], name: str, default: Callable[[Any], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """The optimiser of some parameters; raises unless it has them all and no others."""
    maker = default if given is None else given
    made: object = maker
    if callable(maker) and not isinstance(maker, torch.optim.Optimizer):
        made = maker(list(parameters.values()))
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"{name} must be a torch.optim.Optimizer or a function of parameters that makes one. "
            f"Got {type(made).__name__} instead."
        )
    held = {id(p) for group in made.param_groups for p in group["params"]}
    missing = [key for key, p in parameters.items() if id(p) not in held]
    if missing:
        hint = " Give a function that makes it: v's tensors are made here." if name == "adjoint_optimizer" else ""
        raise ValueError(f"{name} must hold every parameter that it is to move, and lacks {missing}.{hint}")
    foreign = len(held - {id(p) for p in parameters.values()})
    if foreign:
        raise ValueError(f"{name} must hold the parameters that it is to move and no others. It has {foreign} more.")
    return made


def descend(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], gradient: Tree) -> None:
    for name, p in parameters.items():
        p.grad = gradient[name]
    optimizer.step()
    for p in parameters.values():
        p.grad = None


def with_decay(hv: Tree, v: Tree, optimizer: torch.optim.Optimizer, omega: Mapping[str, nn.Parameter]) -> Tree:
    """H v with the curvature of the optimiser's weight decay, which is a ridge on ω."""
    names = {id(p): name for name, p in omega.items()}
    out = dict(hv)
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0.0)
        if decay:
            of_group = [names[id(p)] for p in group["params"]]
            own = {name: out[name] for name in of_group}
            out |= axpy(decay, {name: v[name] for name in of_group}, own)
    return out


def warn_of_decay(optimizer: torch.optim.Optimizer) -> None:
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        group.get("decoupled_weight_decay") for group in optimizer.param_groups
    )
    if decoupled and any(group.get("weight_decay", 0.0) for group in optimizer.param_groups):
        warnings.warn(
            "AdamW's decoupled weight decay is part of no loss, so v cannot know its curvature; it is taken for a "
            "ridge. For an exact hypergradient put the penalty into the inner loss and set weight_decay=0.",
            UserWarning,
            stacklevel=4,
        )
