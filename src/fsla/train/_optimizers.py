"""The torch optimisers of ω, v and λ, and what moves a variable that has none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fsla._state_tree import map_tensors
from fsla.steps._automatic import Automatic
from fsla.steps._schedules import StepSizes
from fsla.steps._updates import InPlace, TorchUpdate, Update, WrappedUpdate, with_innermost

OptimizerFactory = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None
NAMES = ("inner_optimizer", "adjoint_optimizer", "outer_optimizer")


def build_optimizer(
    optimizer_or_factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter], name: str
) -> torch.optim.Optimizer | None:
    """Return the optimiser of some parameters; raise unless it has them all and no others."""
    if optimizer_or_factory is None:
        return None
    optimizer: object = optimizer_or_factory
    if callable(optimizer_or_factory) and not isinstance(optimizer_or_factory, torch.optim.Optimizer):
        try:
            optimizer = optimizer_or_factory(list(parameters.values()))
        except TypeError as error:
            raise TypeError(
                f"{name} cannot be made: {error}. Pass a function of parameters, such as "
                "functools.partial(torch.optim.SGD, lr=0.1)."
            ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{name} must be a torch.optim.Optimizer or a function of parameters that makes one. "
            f"Got {type(optimizer).__name__} instead."
        )
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(f"{name} has maximize=True, and would walk uphill. Leave it out; both losses are minimised.")
    members = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [key for key, p in parameters.items() if p not in members]
    if missing:
        hint = " Give a function that makes it: v's tensors are made here." if name == "adjoint_optimizer" else ""
        raise ValueError(f"{name} is missing parameters: {', '.join(missing)}.{hint}")
    foreign = len(members - set(parameters.values()))
    if foreign:
        raise ValueError(f"{name} must hold the parameters that it is to move and no others. It has {foreign} more.")
    return optimizer


def in_place(update: Update, optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]) -> Update:
    """Return an update that writes into parameters: by a torch optimiser where there is one, else by its own rule."""
    if optimizer is None:
        return InPlace(update)
    torch_update = TorchUpdate(optimizer, parameters)
    return with_innermost(update, lambda innermost: torch_update)


def describe_mover(optimizer: torch.optim.Optimizer | None, update: Update, step_sizes: StepSizes[Any]) -> str:
    """Return what moves a variable, in words."""
    if optimizer is not None:
        return f"{type(optimizer).__name__}(lr={float(optimizer.param_groups[0]['lr']):g})"
    while isinstance(update, WrappedUpdate):
        update = update.update
    return type(update).__name__ + (" with automatic step sizes" if isinstance(step_sizes, Automatic) else "")


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of a torch optimiser with strings for the numbers of its parameters."""
    state = optimizer.state_dict()
    return state | {"state": {str(number): entry for number, entry in state["state"].items()}}


def set_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Set what `optimizer_state` returned. Its tensors are copied, since an optimiser moves its own in place."""
    copied = map_tensors(torch.clone, dict(state))
    optimizer.load_state_dict({**copied, "state": {int(number): entry for number, entry in copied["state"].items()}})


def warn_of_decay(optimizer: torch.optim.Optimizer) -> None:
    """Warn where weight decay is decoupled from the loss."""
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        group.get("decoupled_weight_decay") for group in optimizer.param_groups
    )
    if decoupled and any(group.get("weight_decay", 0.0) for group in optimizer.param_groups):
        warnings.warn(
            "AdamW's decoupled weight decay is part of no loss, so v cannot know its curvature; it is taken for a "
            "ridge. For an exact hypergradient put the penalty into the inner loss and set weight_decay=0.",
            UserWarning,
            stacklevel=5,
        )
