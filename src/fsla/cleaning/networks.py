"""The networks that the cleaner trains, by the form of the data; or the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsla.checks import pick

Maker = Callable[[], nn.Module]
EMBEDDED = 256
"""From so many features on they are taken for embeddings, for which a linear head is enough."""
HIDDEN = 128


def linear(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(_size(shape), outputs))


def dense(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(_size(shape), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))


def cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two convolutions and two dense layers, for images of any size from 8 x 8 on."""
    channels, height, width = shape
    side = 7 if min(height, width) >= 28 else 2
    flat = nn.Identity() if (height, width) == (28, 28) else nn.AdaptiveAvgPool2d(side)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        flat, nn.Flatten(), nn.Linear(64 * side * side, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs),
    )  # fmt: skip


KINDS = {"linear": linear, "dense": dense, "cnn": cnn}
RATES = {"linear": 1e-2, "dense": 3e-3}
"""Adam's, and of all others:"""
USUAL_RATE = 1e-3


def named(model: Any, shape: tuple[int, ...]) -> Any:
    """What "auto" means for samples of a shape; any other model as it is."""
    if not isinstance(model, str) or model != "auto":
        return model
    return "cnn" if len(shape) == 3 else "linear" if _size(shape) >= EMBEDDED else "dense"


def maker(model: Any, shape: tuple[int, ...], outputs: int) -> Maker:
    """A function that makes a new network: of a named kind, or a copy of the user's with its weights drawn anew."""
    if isinstance(model, nn.Module):
        return lambda: _drawn_anew(model)
    if callable(model):
        return model  # type: ignore[no-any-return]
    kind = pick(named(model, shape), KINDS, "model")
    if kind is cnn and (len(shape) != 3 or min(shape[1:]) < 8):
        raise ValueError(f"A cnn needs images of at least 8 x 8 pixels. Got samples of shape {shape}.")
    return lambda: kind(shape, outputs)


def rate(model: Any, shape: tuple[int, ...]) -> float:
    kind = named(model, shape)
    return RATES.get(kind, USUAL_RATE) if isinstance(kind, str) else USUAL_RATE


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _drawn_anew(model: nn.Module) -> nn.Module:
    """A copy with new weights, wherever its layers know how to draw them."""
    made = copy.deepcopy(model)
    for layer in made.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()
    return made
