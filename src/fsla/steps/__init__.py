"""How a variable moves: updates, momentum, step sizes and their schedules, projections."""

from fsla.steps._automatic import Curvature, Damping, Gate, ScaleFree
from fsla.steps._momentum import EMA, SPIDER, STORM, Direction, NoMomentum
from fsla.steps._projections import Ball, Box
from fsla.steps._schedules import Periodic, Rates, Schedule, constant, horizon, paper
from fsla.steps._updates import (
    Adam,
    Adaptive,
    GradientDescent,
    Mirror,
    Momentum,
    Normalised,
    Projected,
    Proximal,
    SoftThreshold,
    Update,
)

__all__ = [
    "EMA",
    "SPIDER",
    "STORM",
    "Adam",
    "Adaptive",
    "Ball",
    "Box",
    "Curvature",
    "Damping",
    "Direction",
    "Gate",
    "GradientDescent",
    "Mirror",
    "Momentum",
    "NoMomentum",
    "Normalised",
    "Periodic",
    "Projected",
    "Proximal",
    "Rates",
    "ScaleFree",
    "Schedule",
    "SoftThreshold",
    "Update",
    "constant",
    "horizon",
    "paper",
]
