"""How a variable moves: updates, momentum, step sizes and their schedules, projections.

The examples of this room go on from here:

    >>> import torch
    >>> import fsla
    >>> x = {"w": torch.tensor([1.0, 2.0])}
    >>> g = {"w": torch.tensor([1.0, -4.0])}
    >>> def move(update, times=1, lr=0.1):
    ...     variable = update.init(x)
    ...     for _ in range(times):
    ...         variable = update(variable, g, lr)
    ...     return variable.value["w"].round(decimals=3)
    >>> move(fsla.steps.GradientDescent())
    tensor([0.9000, 2.4000])
"""

from fsla.steps._automatic import Automatic
from fsla.steps._context import StepContext, descend
from fsla.steps._momentum import EMA, SPIDER, STORM, Direction, NoMomentum, Position
from fsla.steps._projections import Ball, Box
from fsla.steps._schedules import (
    PeriodicRefresh,
    Rates,
    Schedule,
    Scheduled,
    StepSizes,
    constant,
    constant_over_horizon,
    inverse_sqrt,
)
from fsla.steps._updates import (
    Adam,
    Adaptive,
    Clipped,
    ExponentiatedGradient,
    GradientDescent,
    Momentum,
    Normalized,
    Projected,
    Proximal,
    ScaleFree,
    SoftThreshold,
    TorchUpdate,
    Update,
    Variable,
    WrappedUpdate,
)

__all__ = [
    "EMA",
    "SPIDER",
    "STORM",
    "Adam",
    "Adaptive",
    "Automatic",
    "Ball",
    "Box",
    "Clipped",
    "Direction",
    "ExponentiatedGradient",
    "GradientDescent",
    "Momentum",
    "NoMomentum",
    "Normalized",
    "PeriodicRefresh",
    "Position",
    "Projected",
    "Proximal",
    "Rates",
    "ScaleFree",
    "Schedule",
    "Scheduled",
    "SoftThreshold",
    "StepContext",
    "StepSizes",
    "TorchUpdate",
    "Update",
    "Variable",
    "WrappedUpdate",
    "constant",
    "constant_over_horizon",
    "descend",
    "inverse_sqrt",
]
