"""Projections of λ on a convex set Λ, for λ ← Π_Λ(λ - α d)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fsla._checks import positive
from fsla._tree import Tree, norm, scale


@dataclass(frozen=True)
class Box:
    """Projection onto a box: low ≤ λ_i ≤ high in every coordinate.

    Args:
        low: smallest value.
        high: largest value.

    Raises:
        ValueError: if low exceeds high.

    Examples:
        >>> fsla.steps.Box(0, 1)({"x": torch.tensor([-0.5, 0.5, 1.5])})["x"]
        tensor([0.0000, 0.5000, 1.0000])
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise TypeError(f"The {name!r} of Box must be a number. Got {value!r} instead.")
        if not self.low <= self.high:
            raise ValueError(f"A Box must have low ≤ high. Got low={self.low}, high={self.high} instead.")

    def __call__(self, lam: Tree) -> Tree:
        return {name: t.clamp(self.low, self.high) for name, t in lam.items()}


@dataclass(frozen=True)
class Ball:
    """Projection onto a ball: ‖λ‖ ≤ radius.

    Args:
        radius: the largest norm.

    Examples:
        >>> fsla.steps.Ball(1.0)({"x": torch.tensor([3.0, 4.0])})["x"]
        tensor([0.6000, 0.8000])
    """

    radius: float

    def __post_init__(self) -> None:
        positive(self.radius, "radius", "Ball")

    def __call__(self, lam: Tree) -> Tree:
        return scale(torch.clamp(self.radius / norm(lam), max=1.0), lam)
