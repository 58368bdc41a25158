"""The networks that the cleaner trains, by the form of the data; or the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fsla.checks import pick

Maker = Callable[[], nn.Module]
EMBEDDED = 256
"""From so many features on they are taken for embeddings, for which a linear head is enough."""
HIDDEN = 128


class Dense(nn.Sequential):
    """Linear layers with ReLU between them, of some sizes."""

    def __init__(self, *sizes: int) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for number, (inputs, outputs) in enumerate(pairwise(sizes)):
            layers += [nn.ReLU()] if number else []
            layers.append(nn.Linear(inputs, outputs))
        super().__init__(*layers)

    @property
    def linear(self) -> list[nn.Linear]:
        return [layer for layer in self if isinstance(layer, nn.Linear)]


def linear(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Dense(_size(shape), outputs)


def dense(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Dense(_size(shape), HIDDEN, outputs)


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


class Stack(nn.Module):
    """Dense networks of one form, side by side: (networks, batch, ...) in, (networks, batch, outputs) out."""

    def __init__(self, networks: Sequence[Dense]) -> None:
        super().__init__()
        self._originals = tuple(networks)
        layers = list(zip(*(network.linear for network in networks), strict=True))
        self.weights = nn.ParameterList(torch.stack([one.weight.detach() for one in own]) for own in layers)
        self.biases = nn.ParameterList(torch.stack([one.bias.detach() for one in own]) for own in layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias[:, None], x.relu() if number else x, weight.mT)
        return x

    @torch.no_grad()
    def unstack(self) -> None:
        """Writes what was learnt into the networks."""
        for number, network in enumerate(self._originals):
            for layer, weight, bias in zip(network.linear, self.weights, self.biases, strict=True):
                layer.weight.copy_(weight[number])
                layer.bias.copy_(bias[number])


def stacked(networks: Sequence[nn.Module]) -> Stack | None:
    """The networks as one, where they are of `linear` or `dense`."""
    dense = [network for network in networks if isinstance(network, Dense)]
    return Stack(dense) if len(dense) == len(networks) else None


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
